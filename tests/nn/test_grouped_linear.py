"""``GroupedLinear``: values, inputs of any rank, splits in every form, initialisation, state dicts."""

import math

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import tgl
from tgl.nn._inputs import offsets_on

G, K, N = 3, 4, 5
SPLITS = torch.tensor([2, 0, 3])


def loop(layer, x, splits):
    """Return ``torch.nn.functional.linear`` per group, zeros in the tail."""
    parts, start = [], 0
    for g, size in enumerate(splits.tolist()):
        bias = layer.bias[g] if layer.bias is not None else None
        parts.append(nn.functional.linear(x[start : start + size], layer.weight[g], bias))
        start += size
    return torch.cat([*parts, x.new_zeros(x.shape[0] - start, layer.out_features)])


@pytest.mark.parametrize("bias", [False, True])
def test_values_and_gradients(bias):
    layer = tgl.GroupedLinear(G, K, N, bias=bias, params_dtype=torch.float64)
    x = torch.randn(6, K, dtype=torch.float64, requires_grad=True)
    leaves = [x, *layer.parameters()]
    y, expected = layer(x, SPLITS), loop(layer, x, SPLITS)
    dy = torch.randn_like(y)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(torch.autograd.grad(y, leaves, dy), torch.autograd.grad(expected, leaves, dy))


@pytest.mark.parametrize("shape", [(6, K), (2, 3, K), (3, 1, 2, K), (5, K), (1, 5, K)], ids=str)
def test_leading_dimensions(shape):
    layer, x = tgl.GroupedLinear(G, K, N), torch.randn(shape)
    y = layer(x, SPLITS)
    assert y.shape == (*shape[:-1], N)
    torch.testing.assert_close(y.reshape(-1, N), loop(layer, x.reshape(-1, K), SPLITS))
    permuted = torch.randn(K, 2, 3).permute(1, 2, 0)
    torch.testing.assert_close(layer(permuted, SPLITS), layer(permuted.contiguous(), SPLITS))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_splits_of_any_integer_dtype(dtype):
    layer, x = tgl.GroupedLinear(G, K, N), torch.randn(6, K)
    assert torch.equal(layer(x, SPLITS.to(dtype)), layer(x, SPLITS))


@pytest.mark.parametrize("splits", [[2, 0, 3], (2, 0, 3)])
@pytest.mark.parametrize("make", [lambda: tgl.GroupedLinear(G, K, N), lambda: tgl.GroupedMLP(G, K, N)])
@pytest.mark.filterwarnings("error")
def test_a_list_is_taken_without_a_warning(splits, make):
    layer, x = make(), torch.randn(6, K)
    assert torch.equal(layer(x, splits), layer(x, SPLITS))


@pytest.mark.parametrize("make, where", [(torch.tensor, "on cpu"), (list, "a list")], ids=["tensor", "list"])
def test_splits_on_the_host_under_capture(make, where, monkeypatch):
    """The copy that they need would block, which capture forbids: said before CUDA says it."""
    device = torch.device("cuda", 0)
    with FakeTensorMode():
        assert offsets_on(make([2, 0, 3]), G, device).device == device
    monkeypatch.setattr(tgl.backends, "capturing", lambda d: d.type == "cuda")
    message = rf"`m_splits` must be a tensor on cuda:0 like `inp` while a CUDA graph is captured, but is {where}: "
    with FakeTensorMode(), pytest.raises(tgl.GraphCaptureError, match=message):
        offsets_on(make([2, 0, 3]), G, device)


@pytest.mark.parametrize(
    "splits, message",
    [
        (torch.tensor([2, 3]), r"`m_splits` must be of shape \[num_gemms\] = \(3,\), but got \(2,\)"),
        (torch.tensor([[2, 0, 3]]), r"`m_splits` must be of shape \[num_gemms\] = \(3,\), but got \(1, 3\)"),
        ([2, 3], "`m_splits` must have num_gemms = 3 entries, but got 2"),
        (None, "`m_splits` must be a tensor or a sequence of num_gemms = 3 integers, but got None"),
    ],
)
def test_wrong_splits(splits, message):
    with pytest.raises(ValueError, match=message):
        tgl.GroupedLinear(G, K, N)(torch.randn(6, K), splits)


def test_splits_must_be_integers():
    with pytest.raises(TypeError, match="`m_splits` must be an integer tensor"):
        tgl.GroupedLinear(G, K, N)(torch.randn(6, K), SPLITS.float())


def test_wrong_width_names_both_sizes():
    with pytest.raises(ValueError, match=r"`b` must be \[G, K, N\] with K = 7 like `a`, but got shape \(3, 4, 5\)"):
        tgl.GroupedLinear(G, K, N)(torch.randn(6, 7), SPLITS)


def test_initialisation():
    layer = tgl.GroupedLinear(20, 64, 32)
    bound = 1 / math.sqrt(64)
    for parameter in layer.parameters():
        assert parameter.abs().max() <= bound
        assert abs(parameter.std() - bound / math.sqrt(3)) < 0.05 * bound
    constant = tgl.GroupedLinear(G, K, N, init_method=lambda w: nn.init.constant_(w, 2.5))
    assert (constant.weight == 2.5).all()


def test_meta_device_then_reset():
    layer = tgl.GroupedLinear(G, K, N, device="meta", params_dtype=torch.bfloat16)
    assert {p.device.type for p in layer.parameters()} == {"meta"}
    assert {p.dtype for p in layer.parameters()} == {torch.bfloat16}
    layer.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(float("nan"))
    torch.manual_seed(5)
    layer.reset_parameters()
    torch.manual_seed(5)
    for mine, theirs in zip(layer.parameters(), tgl.GroupedLinear(G, K, N, params_dtype=torch.bfloat16).parameters()):
        assert torch.equal(mine, theirs)


def test_repr():
    text = "GroupedLinear(num_gemms=3, in_features=4, out_features=5, bias=True, dtype=torch.float32)"
    assert repr(tgl.GroupedLinear(G, K, N)) == text


# --- state dicts ------------------------------------------------------------------------------------------------------


class Parent(nn.Module):
    def __init__(self, state_dict_format, bias=True):
        super().__init__()
        self.norm = nn.LayerNorm(K)
        self.experts = nn.ModuleList(
            tgl.GroupedLinear(G, K, N, bias=bias, state_dict_format=state_dict_format) for _ in range(2)
        )


@pytest.mark.parametrize("saved_as", ["packed", "discrete"])
@pytest.mark.parametrize("loaded_as", ["packed", "discrete"])
@pytest.mark.parametrize("bias", [False, True])
def test_either_form_loads_in_a_nested_module(saved_as, loaded_as, bias):
    source, target = Parent(saved_as, bias), Parent(loaded_as, bias)
    state = source.state_dict()
    names = {"packed": ["weight"], "discrete": [f"weight{i}" for i in range(G)]}[saved_as]
    names += [n.replace("weight", "bias") for n in names] if bias else []
    assert set(state) == {"norm.weight", "norm.bias"} | {f"experts.{i}.{n}" for i in range(2) for n in names}
    assert str(target.load_state_dict(state)) == "<All keys matched successfully>"
    for mine, theirs in zip(target.parameters(), source.parameters()):
        assert torch.equal(mine, theirs)
    assert set(state) == set(source.state_dict()), "loading must not change the dictionary it is given"


def test_discrete_entries_are_the_weights_of_plain_linears():
    layer = tgl.GroupedLinear(G, K, N, state_dict_format="discrete")
    state = layer.state_dict()
    for i in range(G):
        assert torch.equal(state[f"weight{i}"], layer.weight[i])
        assert state[f"weight{i}"].shape == (N, K)
        assert torch.equal(state[f"bias{i}"], layer.bias[i])


@pytest.mark.parametrize("form", ["packed", "discrete"])
def test_assign_onto_meta(form):
    source = tgl.GroupedLinear(G, K, N, state_dict_format=form)
    target = tgl.GroupedLinear(G, K, N, device="meta")
    target.load_state_dict(source.state_dict(), assign=True)
    assert all(isinstance(p, nn.Parameter) and p.is_leaf and p.requires_grad for p in target.parameters())
    x = torch.randn(6, K)
    assert torch.equal(target(x, SPLITS), source(x, SPLITS))


def test_missing_and_unexpected_keys():
    layer = tgl.GroupedLinear(G, K, N)
    state = tgl.GroupedLinear(G, K, N, state_dict_format="discrete").state_dict()
    del state["weight1"]
    message = r'Missing key\(s\) in state_dict: "weight"(?s:.*)Unexpected key\(s\) in state_dict: "weight0", "weight2"'
    with pytest.raises(RuntimeError, match=message):
        layer.load_state_dict(state)
    more = tgl.GroupedLinear(G + 1, K, N, state_dict_format="discrete").state_dict()
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "weight3", "bias3"'):
        tgl.GroupedLinear(G, K, N, single_grouped_weight=False).load_state_dict(more)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("experts", [G - 1, G + 1])
@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("form", ["packed", "discrete"])
def test_another_number_of_experts(form, single, experts, strict, nested):
    """None is dropped in silence, and nothing is loaded."""
    if form == "discrete" and not single:
        strict = True  # key by key, as any module: what is left over is unexpected, what is not there missing
    source = tgl.GroupedLinear(experts, K, N, state_dict_format=form)
    target = tgl.GroupedLinear(G, K, N, single_grouped_weight=single)
    before = {key: value.clone() for key, value in target.state_dict().items()}
    if nested:
        source, target = nn.Sequential(nn.Linear(2, 2), source), nn.Sequential(nn.Linear(2, 2), target)
    with pytest.raises(RuntimeError) as error:
        target.load_state_dict(source.state_dict(), strict=strict)
    prefix = "1." if nested else ""
    if form == "discrete" and not single:
        kind = "Unexpected" if experts > G else "Missing"
        assert f'{kind} key(s) in state_dict: "{prefix}weight' in str(error.value)
        return
    assert "key(s)" not in str(error.value)
    for name, shape in (("weight", f"{N}, {K}"), ("bias", f"{N}")):
        assert (
            f"size mismatch for {prefix}{name}: copying a param with shape torch.Size([{experts}, {shape}]) from "
            f"checkpoint, the shape in current model is torch.Size([{G}, {shape}])." in str(error.value)
        )
    for key, value in (target[1] if nested else target).state_dict().items():
        assert torch.equal(value, before[key])


def test_experts_of_other_shapes():
    """Each parameter has one message, packed or not."""
    state = tgl.GroupedLinear(G, K, N, bias=False, state_dict_format="discrete").state_dict()
    state["weight1"] = torch.zeros(N, K + 1)
    for single in (True, False):
        with pytest.raises(RuntimeError, match=rf"size mismatch for weight1.*{K + 1}.*{K}\]\)\.$"):
            tgl.GroupedLinear(G, K, N, bias=False, single_grouped_weight=single).load_state_dict(state)


@pytest.mark.parametrize("form", ["packed", "discrete"])
def test_biases_for_a_layer_without_any_are_unexpected(form):
    """They are reported as unexpected keys, in either form."""
    state = tgl.GroupedLinear(G, K, N, state_dict_format=form).state_dict()
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "bias'):
        tgl.GroupedLinear(G, K, N, bias=False).load_state_dict(state)


@pytest.mark.parametrize("form", ["packed", "discrete"])
def test_wrong_shapes(form):
    state = tgl.GroupedLinear(G, K + 1, N, state_dict_format=form).state_dict()
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        tgl.GroupedLinear(G, K, N).load_state_dict(state)


def test_no_groups():
    layer = tgl.GroupedLinear(0, K, N)
    layer.load_state_dict(layer.state_dict())
    assert not layer(torch.randn(6, K), torch.zeros(0, dtype=torch.int64)).any()


def test_unknown_format():
    must = "`state_dict_format` must be 'packed', 'discrete' or 'components', but got 'loose'"
    with pytest.raises(ValueError, match=must):
        tgl.GroupedLinear(G, K, N, state_dict_format="loose")
