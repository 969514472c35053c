"""Layouts of other codebases: values both ways, which conversions share memory, and loading them."""

import pytest
import torch
from torch import nn

import tgl
from tgl.nn import layouts

G, H, I = 3, 4, 6
SPLITS = torch.tensor([2, 0, 3])


def shares(a, b):
    return a.data_ptr() == b.data_ptr()


# --- tensors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "packed",
    [
        torch.randn(G, 4, 5),
        torch.randn(G, 6),
        torch.randn(1, 4, 5),
        tgl.allocate_wgrad(G, (4, 5), torch.float32).normal_(),
        torch.randn(2 * G, 4, 5)[1::2],
        nn.Parameter(torch.randn(G, 4, 5)),
    ],
    ids=["weight", "bias", "one", "padded slots", "every other", "parameter"],
)
def test_parts_of_one_allocation_are_packed_without_a_copy(packed):
    parts = layouts.unpack(packed)
    assert all(shares(part, row) for part, row in zip(parts, packed))
    again = layouts.pack(parts)
    assert shares(again, packed)
    assert not again.requires_grad
    assert torch.equal(again, packed)


WHOLE = torch.randn(4, 4, 5)


@pytest.mark.parametrize(
    "parts",
    [
        [torch.randn(4, 5) for _ in range(3)],
        [WHOLE[0], WHOLE[1], WHOLE[3]],
        [WHOLE[2], WHOLE[1], WHOLE[0]],
        [WHOLE[0], WHOLE[0]],
        [WHOLE[0, :3], WHOLE[0, 1:]],
        [WHOLE[0, :, :4], WHOLE[1, :, :4].contiguous()],
        [torch.randn(4, 5).t(), torch.randn(5, 4)],
        WHOLE.transpose(1, 2).unbind(),
    ],
    ids=["allocations", "a gap", "backwards", "the same", "overlapping", "strides", "majors", "column-major"],
)
def test_other_parts_are_copied(parts):
    packed = layouts.pack(parts)
    assert torch.equal(packed, torch.stack(list(parts)))
    assert not shares(packed, parts[0])


def test_packing_is_not_differentiable():
    assert not layouts.pack([nn.Parameter(torch.randn(4, 5)) for _ in range(G)]).requires_grad


def test_no_parts():
    with pytest.raises(ValueError, match="`parts` must hold at least one tensor"):
        layouts.pack([])


def test_interleaving():
    rows = torch.randn(G, 2 * I, H)
    alternating = layouts.interleave(rows)
    assert torch.equal(alternating[:, 0::2], rows[:, :I])
    assert torch.equal(alternating[:, 1::2], rows[:, I:])
    assert torch.equal(layouts.deinterleave(alternating), rows)
    bias = torch.randn(G, 2 * I)
    assert torch.equal(layouts.deinterleave(layouts.interleave(bias)), bias)


def test_an_interleaved_module_computes_the_same():
    plain = tgl.GroupedMLP(G, H, I, bias=True)
    other = tgl.GroupedMLP(G, H, I, bias=True, interleaved=True)
    state = plain.state_dict()
    other.load_state_dict({k: layouts.interleave(v) if k.startswith("fc1") else v for k, v in state.items()})
    x = torch.randn(5, H)
    torch.testing.assert_close(other(x, SPLITS), plain(x, SPLITS))


# --- one layer: discrete ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
def test_discrete_both_ways_without_a_copy(bias):
    state = tgl.GroupedLinear(G, H, I, bias=bias).state_dict()
    discrete = layouts.to_discrete(state)
    assert list(discrete) == [f"{name}{i}" for name in state for i in range(G)]
    for name, packed in state.items():
        assert all(shares(discrete[f"{name}{i}"], packed[i]) for i in range(G))
    back = layouts.from_discrete(discrete)
    assert list(back) == list(state)
    for name, packed in state.items():
        assert shares(back[name], packed)
        assert torch.equal(back[name], packed)


def test_discrete_entries_of_a_whole_model():
    model = nn.ModuleDict({"norm": nn.LayerNorm(H), "experts": tgl.GroupedMLP(12, H, I, bias=True)})
    state = model.state_dict()
    names = [f"experts.fc{n}.{p}" for n in (1, 2) for p in ("weight", "bias")]
    discrete = layouts.to_discrete(state, names)
    assert len(discrete) == 2 + 4 * 12
    extra = {f"experts.fc{n}._extra_state{i}": torch.empty(0) for n in (1, 2) for i in ("", 1, 2)}
    back = layouts.from_discrete({**discrete, **extra, "router._extra_state": None})
    assert back.pop("router._extra_state") is None  # not of a discrete layer
    assert set(back) == set(state)
    assert all(torch.equal(back[k], state[k]) for k in state)


def test_a_missing_number():
    with pytest.raises(ValueError, match=r"`state` must have fc1.weight0 to fc1.weight2, but has only \[0, 2\]"):
        layouts.from_discrete({"fc1.weight0": torch.ones(2), "fc1.weight2": torch.ones(2)})


# --- modules of either form -------------------------------------------------------------------------------------------

FORMS = pytest.mark.parametrize("single", [True, False], ids=["packed", "discrete"])


@FORMS
def test_strict_loading_of_what_transformer_engine_saves(single):
    """Its ``_extra_state`` holds scales of its FP8 recipes; any other stranger is still an error."""
    source = tgl.GroupedLinear(G, H, I, single_grouped_weight=False)
    state = source.state_dict()
    assert set(state) == {f"{name}{i}" for name in ("weight", "bias") for i in range(G)}
    state |= {"_extra_state": torch.empty(0, dtype=torch.uint8), "_extra_state1": None, "_extra_state2": None}
    target = tgl.GroupedLinear(G, H, I, single_grouped_weight=single)
    assert str(target.load_state_dict(state)) == "<All keys matched successfully>"
    x = torch.randn(5, H)
    assert torch.equal(target(x, SPLITS), source(x, SPLITS))
    model = nn.ModuleDict({"experts": target})
    model.load_state_dict({f"experts.{k}": v for k, v in state.items()})
    for stranger in ("_extra_state_", "_extra_states", "extra_state", "weight_extra_state"):
        with pytest.raises(RuntimeError, match=rf'Unexpected key\(s\) in state_dict: "{stranger}"'):
            target.load_state_dict({**state, stranger: None})


@FORMS
@pytest.mark.parametrize("bias", [False, True])
def test_meta_device_then_reset(single, bias):
    """The same values as a module made at once, in one tensor for all groups."""
    options = {"bias": bias, "single_grouped_weight": single, "params_dtype": torch.bfloat16}
    layer = tgl.GroupedMLP(G, H, I, device="meta", **options)
    assert {p.device.type for p in layer.parameters()} == {"meta"}
    layer.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(float("nan"))
    torch.manual_seed(5)
    layer.reset_parameters()
    torch.manual_seed(5)
    at_once = tgl.GroupedMLP(G, H, I, **options)
    for (name, mine), theirs in zip(layer.named_parameters(), at_once.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
    first = layers_parameters(layer.fc1)
    assert shares(layouts.pack(first), first[0])
    x = torch.randn(5, H, dtype=torch.bfloat16)
    assert torch.equal(layer(x, SPLITS), at_once(x, SPLITS))


def layers_parameters(layer):
    return [p for name, p in layer.named_parameters() if name.startswith("weight")]


@FORMS
def test_discrete_entries_assigned_from_one_allocation_stay_there(single):
    """TransformerEngine's names onto a packed module, on the memory they have, if it is one."""
    source = tgl.GroupedLinear(G, H, I).state_dict()
    target = tgl.GroupedLinear(G, H, I, device="meta", single_grouped_weight=single)
    entries = layouts.to_discrete(source)
    target.load_state_dict(entries if not single else layouts.from_discrete(entries), assign=True)
    assert shares(layers_parameters(target)[0], source["weight"])
    assert shares(layers_parameters(target)[-1], source["weight"] if single else source["weight"][-1])


# --- an MLP: transformers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["swiglu", "srelu"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_transformers_both_ways_without_a_copy(activation, bias, transposed):
    gated = activation == "swiglu"
    mlp = tgl.GroupedMLP(G, H, I, activation=activation, bias=bias)
    state = mlp.state_dict()
    theirs = layouts.to_transformers(state, gated=gated, transposed=transposed)
    up, width = ("gate_up_proj", 2 * I) if gated else ("up_proj", I)
    shapes = {
        up: (G, H, width) if transposed else (G, width, H),
        "down_proj": (G, I, H) if transposed else (G, H, I),
        **({f"{up}_bias": (G, width), "down_proj_bias": (G, H)} if bias else {}),
    }
    assert {k: tuple(v.shape) for k, v in theirs.items()} == shapes
    back = layouts.from_transformers(theirs, transposed=transposed)
    assert set(back) == set(state)
    for name, value in back.items():
        assert torch.equal(value, state[name])
        assert shares(value, state[name])


@pytest.mark.parametrize("transposed", [False, True])
def test_a_module_runs_on_the_memory_of_another(transposed):
    source = tgl.GroupedMLP(G, H, I, bias=True)
    theirs = layouts.to_transformers(source.state_dict(), transposed=transposed)
    theirs = {k: v.contiguous() for k, v in theirs.items()}
    target = tgl.GroupedMLP(G, H, I, bias=True, device="meta")
    target.load_state_dict(layouts.from_transformers(theirs, transposed=transposed), assign=True)
    assert shares(target.fc1.weight, theirs["gate_up_proj"])
    assert shares(target.fc2.weight, theirs["down_proj"])
    x = torch.randn(5, H)
    y, expected = target(x, SPLITS), source(x, SPLITS)
    torch.testing.assert_close(y, expected)
    for mine, other in zip(
        torch.autograd.grad(y.sin().sum(), list(target.parameters())),
        torch.autograd.grad(expected.sin().sum(), list(source.parameters())),
    ):
        torch.testing.assert_close(mine, other)


def test_unknown_entries():
    with pytest.raises(ValueError, match=r"`state` must hold only gate_up_proj, .*, but has gate_proj"):
        layouts.from_transformers({"gate_proj": torch.ones(1)})
    with pytest.raises(ValueError, match=r"`state` must hold only fc1.weight, .*, but has fc1.weight0"):
        layouts.to_transformers({"fc1.weight0": torch.ones(1)})
