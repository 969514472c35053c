"""Layers with a recipe: what they compute, how well, what they keep, and the state they carry."""

import copy
import io
import re

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tgl
from tests import scaled_oracle
from tests.memory import same_bytes
from tgl.recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)

G, K, N, T = 4, 256, 192, 330
SIZES = torch.tensor([60, 0, 133, 128])  # and a tail of 9 rows
OFFS = SIZES.cumsum(0).to(torch.int32)
ROUTED = int(SIZES.sum())
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

# What each operand is quantised with, written down again.
QUANTIZED = {
    MXFP8BlockScaling(): ({"format": "mxfp8", "scale_layout": "blocked"}, {}, {}, {}),
    MXFP8BlockScaling(Format.HYBRID, "floor", "compact"): (
        {"format": "mxfp8", "scaling": "floor"},
        {},
        {},
        {"dtype": E5M2},
    ),
    NVFP4BlockScaling(): (
        {"format": "nvfp4", "scale_layout": "blocked"},
        {"rht": True},
        {"block_2d": True},
        {"rht": True, "rng": True},
    ),
    NVFP4BlockScaling(True, True, True, "compact"): ({"format": "nvfp4"}, {}, {}, {}),
    Float8CurrentScaling(): ({"format": "fp8_tensor"}, {}, {}, {"dtype": E5M2}),
    Float8CurrentScaling(Format.E4M3, True, 1e-3): (
        {"format": "fp8_tensor", "power_of_two": True, "eps": 1e-3},
        {},
        {},
        {},
    ),
    Float8BlockScaling(): ({"format": "fp8_block"}, {}, {"block_2d": True}, {}),
    Float8BlockScaling(Format.HYBRID, True): (
        {"format": "fp8_block", "power_of_two": False},
        {},
        {"block_2d": True},
        {"dtype": E5M2},
    ),
}
RECIPES = [r for r in QUANTIZED if r == type(r)()] + [DelayedScaling(amax_history_len=3)]
QUALITY = {  # dB of output, input gradient and weight gradient against float32
    MXFP8BlockScaling: (27, 25, 24),
    Float8CurrentScaling: (25, 24, 23),
    DelayedScaling: (25, 24, 23),
    Float8BlockScaling: (25, 24, 23),
    NVFP4BlockScaling: (15, 14, 12),
}


def ids(recipe):
    return type(recipe).__name__ if recipe == type(recipe)() or isinstance(recipe, DelayedScaling) else repr(recipe)


def tokens(width=K, dtype=torch.float32, seed=0, tail=float("nan")):
    x = torch.randn(T, width, generator=torch.Generator().manual_seed(seed)).to(dtype)
    x[ROUTED:] = tail
    return x


def layers(recipe, make=tgl.GroupedLinear, **options):
    """A layer with the recipe, and one without that has the same parameters."""
    torch.manual_seed(0)
    layer = make(G, K, N, recipe=recipe, **options)
    dense = make(G, K, N, **options)
    with torch.no_grad():
        for p, q in zip(dense.parameters(), layer.parameters(), strict=True):
            p.copy_(q)
    return layer, dense


def run(layer, x, dy=None, *args, **kwargs):
    """Output, and gradients of the input and of the parameters."""
    leaf = x.clone().requires_grad_() if not isinstance(x, tgl.GroupedTensor) else x
    layer.zero_grad(set_to_none=True)
    y = layer(leaf, SIZES, *args, **kwargs)
    y.backward(tokens(y.shape[1], y.dtype, 1) if dy is None else dy)
    return y.detach(), leaf.grad, *(p.grad for p in layer.parameters())


def decibels(got, want):
    got, want = got.double(), want.double()
    return 10 * torch.log10(want.square().sum() / (got - want).square().sum()).item()


def equal(got, want):
    return all(same_bytes(a, b) for a, b in zip(got, want, strict=True))


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", QUANTIZED, ids=ids)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_is_these_ops(recipe, dtype):
    """Every operand goes into its GEMMs in its direction, quantised as the recipe states: bit by bit."""
    layer, _ = layers(recipe, params_dtype=dtype)
    x, dy = tokens(dtype=dtype), tokens(N, dtype, 1)
    rng = layer.gemms.rng_state + torch.tensor([0, 1]) if recipe.operands.grad.stochastic else None
    got = run(layer, x, dy)

    common, of_input, of_weight, of_grad = QUANTIZED[recipe]
    a = tgl.group_quantize(x, OFFS, **common, **of_input)
    w = tgl.group_quantize(layer.weight.detach(), None, **common, **of_weight)
    of_grad = {**of_grad, "rng": rng} if of_grad.get("rng") else of_grad
    g = tgl.group_quantize(dy, OFFS, **common, **of_grad, dbias=True)
    amax = common["format"] == "nvfp4"
    names = {name: common[name] for name in ("format", "scale_layout") if name in common}
    y = tgl.grouped_gemm_scaled(
        a.data,
        a.scale,
        w.data,
        w.scale,
        OFFS,
        a.amax if amax else None,
        w.amax if amax else None,
        layer.bias.detach(),
        **names,
        out_dtype=dtype,
    )
    dx = tgl.grouped_gemm_scaled(
        g.data,
        g.scale,
        w.columnwise_data,
        w.columnwise_scale,
        OFFS,
        g.amax if amax else None,
        w.columnwise_amax if amax else None,
        **names,
        b_direction="columnwise",
        out_dtype=dtype,
    )
    dw = tgl.grouped_gemm_scaled_wgrad(
        g.columnwise_data,
        g.columnwise_scale,
        a.columnwise_data,
        a.columnwise_scale,
        OFFS,
        g.columnwise_amax if amax else None,
        a.columnwise_amax if amax else None,
        **names,
        out_dtype=dtype,
    )
    want = (y, dx, dw, g.dbias.to(dtype))
    assert equal(got, want)
    assert not got[0][ROUTED:].any()
    assert not got[1][ROUTED:].any()
    assert not got[2][1].any()


@pytest.mark.parametrize("recipe", RECIPES, ids=ids)
def test_quality(recipe):
    layer, dense = layers(recipe)
    want = run(dense, tokens())
    got = run(layer, tokens())
    found = [decibels(a, b) for a, b in zip(got[:3], want[:3])]
    assert all(have >= least for have, least in zip(found, QUALITY[type(recipe)])), found
    assert decibels(got[3], want[3]) > 100  # the bias gradient is not quantised


@pytest.mark.parametrize("recipe", RECIPES, ids=ids)
@pytest.mark.parametrize("activation", ["swiglu", "srelu"])
def test_the_mlp_is_its_two_layers(recipe, activation):
    """The activation that is quantised in its own op gives what a separate one gives, forward and backward."""
    mlp, _ = layers(recipe, tgl.GroupedMLP, activation=activation, bias=True)
    apart = copy.deepcopy(mlp)
    x, dy = tokens(), tokens(K, seed=1)
    probs = torch.rand(T, generator=torch.Generator().manual_seed(2))
    inputs = []
    for network in (mlp, apart):
        leaves = x.clone().requires_grad_(), probs.clone().requires_grad_()
        if network is mlp:
            y = mlp(leaves[0], SIZES, leaves[1])
        else:
            hidden = apart.fc1.forward_offsets(leaves[0], OFFS)
            hidden = tgl.grouped_activation(hidden, OFFS, leaves[1], kind=activation)
            y = apart.fc2.forward_offsets(hidden, OFFS, leaves[1])
        y.backward(dy)
        inputs.append((y.detach(), *(leaf.grad for leaf in leaves), *(p.grad for p in network.parameters())))
    assert equal(*inputs)
    assert equal(mlp.buffers(), apart.buffers())


def test_the_mlp_quantises_its_activation_along_the_tokens_if_a_weight_gradient_will_read_it():
    found = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if op is torch.ops.tgl.grouped_gemm_scaled_activation_quantize.default:
                found.append(kwargs.get("columnwise", True))
            return op(*args, **(kwargs or {}))

    def columnwise(**options):
        mlp, _ = layers(MXFP8BlockScaling(), tgl.GroupedMLP, **options)
        with Watch():
            mlp(tokens().requires_grad_(), SIZES)
        return found.pop()

    assert columnwise()
    assert not columnwise(recompute_activation=True)
    assert not columnwise(save_original_input=True)
    with torch.no_grad():
        assert not columnwise()
    mlp, _ = layers(MXFP8BlockScaling(), tgl.GroupedMLP)
    mlp.fc2.weight.requires_grad_(False)
    with Watch():
        mlp(tokens(), SIZES).sum().backward()
    assert found == [False]


@pytest.mark.parametrize("recipe", RECIPES, ids=ids)
def test_same_bits_every_run(recipe):
    one, two = (layers(recipe)[0] for _ in range(2))
    for _ in range(2):
        assert equal(run(one, tokens()), run(two, tokens()))


@pytest.mark.parametrize("recipe", RECIPES, ids=ids)
def test_no_rows_and_gradients_of_any_layout(recipe):
    layer, _ = layers(recipe)
    x = torch.empty(0, K, requires_grad=True)
    y = layer(x, torch.zeros(G, dtype=torch.int64))
    y.sum().backward()
    assert y.shape == (0, N)
    assert x.grad.shape == (0, K)
    assert not layer.weight.grad.any()
    one, two = (layers(recipe)[0] for _ in range(2))
    row = torch.randn(1, N)
    assert equal(run(one, tokens(), row.expand(T, N)), run(two, tokens(), row.repeat(T, 1)))
    assert equal(run(one, tokens(), torch.ones(N, T).t()), run(two, tokens(), torch.ones(T, N)))


def test_leading_dimensions():
    layer, _ = layers(MXFP8BlockScaling())
    x = tokens()
    assert torch.equal(layer(x.view(3, T // 3, K), SIZES).view(T, N), layer(x, SIZES))


@pytest.mark.parametrize("recipe", RECIPES, ids=ids)
def test_recomputed_activations_are_the_same(recipe):
    mlp, _ = layers(recipe, tgl.GroupedMLP)
    again = tgl.GroupedMLP(G, K, N, recipe=recipe, recompute_activation=True)
    again.load_state_dict(mlp.state_dict())
    assert equal(run(again, tokens()), run(mlp, tokens()))


@pytest.mark.parametrize("recipe", RECIPES, ids=ids)
def test_stand_ins_for_the_operands_of_wgrad(recipe):
    gemms = layers(recipe)[0].gemms
    x = gemms.input(tokens(), OFFS, fprop=False, wgrad=True).wgrad
    dy = gemms.grad(tokens(N), OFFS, dgrad=False, wgrad=True, dbias=False)[0].wgrad
    for made, like in zip((x, dy), gemms.wgrad_operands_like(T, G, K, N, torch.float32), strict=True):
        # A blocked scale is a row of 128 columns each.
        assert [(t.shape, t.dtype) for t in made] == [
            ((t.numel(),) if i == 1 and gemms.blocked_scales else t.shape, t.dtype) for i, t in enumerate(like)
        ]
        assert all(t.device.type == "meta" for t in like)


# --- what is kept -----------------------------------------------------------------------------------------------------


def saved_bytes(layer, x):
    """Bytes that autograd keeps for the backward, parameters left out."""
    kept = {}

    def pack(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    x = x.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        layer(x, SIZES)
    parameters = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    return {ptr: size for ptr, size in kept.items() if ptr not in parameters}


@pytest.mark.parametrize("recipe", [MXFP8BlockScaling(), MXFP8BlockScaling(scale_layout="compact")], ids=str)
def test_saved_bytes_of_mxfp8(recipe):
    """Columnwise data and scales of input and weight: one byte and a 32nd per element, against two for bfloat16."""
    layer, _ = layers(recipe, params_dtype=torch.bfloat16, bias=False)
    kept = saved_bytes(layer, tokens(dtype=torch.bfloat16))
    places = 128 * (-(-T // 128) + G - 1)
    blocks = places // 32
    weight_blocks = G * (N // 32) * K
    if recipe.scale_layout == "blocked":
        weight_blocks = G * (-(-K // 128) * 128) * (-(-(N // 32) // 4) * 4)
    assert sum(kept.values()) == T * K + blocks * K + G * N * K + weight_blocks + 4 * G


def test_saved_share_of_bfloat16_for_many_tokens():
    """The share of the activation alone, with groups large enough that their padding does not count."""
    rows, features = 8192, 256
    sizes = torch.tensor([rows // 4] * 4)
    x = torch.randn(rows, features, dtype=torch.bfloat16)
    made = tgl.group_quantize(x, sizes.cumsum(0).to(torch.int32), format="mxfp8", rowwise=False)
    share = (made.columnwise_data.nbytes + made.columnwise_scale.nbytes) / x.nbytes
    assert 0.515 < share < 0.525


@pytest.mark.parametrize("recipe", RECIPES, ids=ids)
def test_no_dense_tensor_is_saved(recipe):
    layer, _ = layers(recipe, params_dtype=torch.bfloat16, bias=False)
    x = tokens(dtype=torch.bfloat16).requires_grad_()
    seen = set()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (t.numel() and seen.add(t.dtype)) or t, lambda t: t):
        layer(x, SIZES)
    assert torch.bfloat16 not in seen
    assert seen & {E4M3, torch.uint8}


@pytest.mark.parametrize("recipe", RECIPES, ids=ids)
def test_save_original_input_gives_the_same_gradients(recipe):
    layer, _ = layers(recipe, params_dtype=torch.bfloat16)
    again = tgl.GroupedLinear(G, K, N, params_dtype=torch.bfloat16, recipe=recipe, save_original_input=True)
    again.load_state_dict(layer.state_dict())
    x = tokens(dtype=torch.bfloat16)
    assert equal(run(again, x), run(layer, x))
    leaf = x.clone().requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        again(leaf, SIZES)
    assert leaf.data_ptr() in saved


def test_a_frozen_weight_needs_no_columnwise_input():
    layer, _ = layers(MXFP8BlockScaling(), bias=False)
    layer.weight.requires_grad_(False)
    kept = saved_bytes(layer, tokens())
    assert sum(kept.values()) == G * N * K + G * 256 * 8 + 4 * G  # of the weight, and the group ends
    y, dx = run(layer, tokens())[:2]
    assert y.any()
    assert dx.any()
    assert layer.weight.grad is None


# --- microbatches -----------------------------------------------------------------------------------------------------


def count_quantizations(monkeypatch):
    """Return how many times a weight is quantised."""
    from tgl.recipes import QuantizeSpec

    calls = []
    inner = QuantizeSpec.quantize

    def counting(self, x, offs, **kwargs):
        calls.append(offs is None)
        return inner(self, x, offs, **kwargs)

    monkeypatch.setattr(QuantizeSpec, "quantize", counting)
    return calls


@pytest.mark.parametrize("recipe", RECIPES, ids=ids)
def test_weights_are_quantised_once_per_step(recipe, monkeypatch):
    layer, _ = layers(recipe)
    fresh = copy.deepcopy(layer)
    calls = count_quantizations(monkeypatch)
    for step in range(2):
        for microbatch in range(3):
            x = tokens(seed=step * 3 + microbatch)
            before = sum(calls)
            got = run(layer, x, None, microbatch == 0)
            assert sum(calls) - before == (microbatch == 0)
            if not isinstance(recipe, DelayedScaling):  # whose scale depends on how often it was used
                assert equal(got, run(fresh, x))
        with torch.no_grad():
            for network in (layer, fresh):
                network.weight.mul_(1.25)
    assert not any(name.startswith("gemms.kept") for name in layer.state_dict())


def test_the_kept_weight_stays_in_its_memory():
    layer, _ = layers(MXFP8BlockScaling())
    run(layer, tokens(), None, True)
    where = [b.data_ptr() for name, b in layer.named_buffers() if "kept" in name]
    with torch.no_grad():
        layer.weight.mul_(2)
    run(layer, tokens(), None, True)
    assert where == [b.data_ptr() for name, b in layer.named_buffers() if "kept" in name]
    assert len(where) == 7


def test_a_flag_on_the_device():
    layer, _ = layers(MXFP8BlockScaling())
    plain = copy.deepcopy(layer)
    yes, no = torch.tensor(True), torch.tensor(False)
    first = run(layer, tokens(), None, yes)
    with torch.no_grad():
        layer.weight.mul_(3)
    assert equal(run(layer, tokens(), None, no)[:3], first[:3])
    assert not torch.equal(run(layer, tokens(), None, yes)[0], first[0])
    assert equal(run(plain, tokens(), None, yes), first)


def test_microbatches_out_of_order_are_named():
    layer, _ = layers(MXFP8BlockScaling())
    with pytest.raises(
        RuntimeError, match="`is_first_microbatch` must be True in the first call, in the first after load_state"
    ):
        layer(tokens(), SIZES, is_first_microbatch=False)
    layer, _ = layers(DelayedScaling())
    with pytest.raises(TypeError, match="`is_first_microbatch` must be True, False or None for DelayedScaling"):
        layer(tokens(), SIZES, is_first_microbatch=torch.tensor(True))


# --- operands that are quantised already ------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [r for r in RECIPES if not isinstance(r, DelayedScaling)], ids=ids)
def test_a_quantised_input_is_taken_as_it_is(recipe, monkeypatch):
    layer, _ = layers(recipe)
    other = copy.deepcopy(layer)
    want = run(layer, tokens())
    leaf = tokens().requires_grad_()
    made = tgl.quantize(leaf, OFFS, **recipe.operands.input.options())
    calls = count_quantizations(monkeypatch)
    y = other(made, SIZES)
    assert calls == [True]  # the weight
    y.backward(tokens(N, seed=1))
    assert equal((y.detach(), leaf.grad, other.weight.grad), want[:3])


@pytest.mark.parametrize("recipe", [r for r in RECIPES if not isinstance(r, DelayedScaling)], ids=ids)
def test_a_weight_held_quantised(recipe, monkeypatch):
    layer, _ = layers(recipe)
    other = copy.deepcopy(layer)
    other.quantize_weight()
    assert isinstance(other.weight, torch.nn.Parameter)
    assert isinstance(other.weight, tgl.GroupedTensor)
    assert [tuple(view.shape) for view in other.weight.unbind()] == [(N, K)] * G
    calls = count_quantizations(monkeypatch)
    assert equal(run(other, tokens()), run(layer, tokens()))
    assert calls.count(True) == 1  # that of the other layer
    file = io.BytesIO()
    torch.save(other.state_dict(), file)
    file.seek(0)
    third = copy.deepcopy(layer)
    third.quantize_weight()
    third.load_state_dict(torch.load(file))
    assert equal(run(third, tokens())[:1], run(layer, tokens())[:1])


def test_layers_that_cannot_hold_a_quantised_weight():
    with pytest.raises(ValueError, match="`recipe` must be given for quantize_weight, but is None"):
        tgl.GroupedLinear(G, K, N).quantize_weight()
    layer = tgl.GroupedLinear(G, K, N, recipe=MXFP8BlockScaling(), single_grouped_weight=False)
    with pytest.raises(ValueError, match="`single_grouped_weight` must be True for quantize_weight"):
        layer.quantize_weight()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"format": "fp8_tensor"}, "format='mxfp8'"),
        ({"format": "mxfp8"}, "scale_layout='blocked'"),
        ({"format": "mxfp8", "scale_layout": "blocked", "columnwise": False}, "columnwise=True"),
    ],
)
def test_an_input_quantised_otherwise_is_named(options, message):
    layer, _ = layers(MXFP8BlockScaling())
    made = tgl.quantize(tokens(), OFFS, **options)
    with pytest.raises(ValueError, match=f"`inp` must be quantised with {re.escape(message)} for MXFP8BlockScaling"):
        layer(made, SIZES)


# --- delayed scaling --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("margin", [0, 2])
def test_delayed_scales_follow_the_history(algo, margin):
    recipe = DelayedScaling(margin=margin, amax_history_len=2, amax_compute_algo=algo)
    layer, _ = layers(recipe)
    history = []
    for step, size in enumerate((1.0, 4.0, 0.5, 0.25)):
        x = tokens(seed=step) * size
        used = layer.gemms.input_scale.clone()
        run(layer, x)
        amax = torch.stack(
            [part.abs().amax() if len(part) else torch.tensor(0.0) for part in x[:ROUTED].split(SIZES.tolist())]
        )
        history.insert(0, amax)
        history = history[:2]
        largest = torch.stack(history).amax(0) if algo == "max" else amax
        want = torch.where(largest > 0, torch.full_like(largest, 448) / largest / 2**margin, used)
        assert torch.equal(layer.gemms.input_scale, want)
        assert torch.equal(layer.gemms.input_history[: len(history)], torch.stack(history))
    assert layer.gemms.grad_scale[0] > 57344 / 8 / 2**margin  # of E5M2
    assert layer.gemms.input_scale[1] == 1  # an expert that never had a token


def test_evaluation_leaves_the_histories_alone():
    layer, _ = layers(DelayedScaling(amax_history_len=2))
    run(layer, tokens())
    before = copy.deepcopy(layer.state_dict())
    layer.eval()
    layer(tokens(seed=5), SIZES)
    assert equal(layer.state_dict().values(), before.values())


def test_a_state_dict_carries_the_state_and_loads_without_it():
    recipe = DelayedScaling(amax_history_len=2)
    layer, dense = layers(recipe)
    run(layer, tokens())
    other = layers(recipe)[0]
    other.load_state_dict(layer.state_dict())
    assert equal(run(other, tokens(seed=3)), run(layer, tokens(seed=3)))
    scale = other.gemms.input_scale.clone()
    other.load_state_dict(dense.state_dict())
    assert torch.equal(other.gemms.input_scale, scale)
    with pytest.raises(RuntimeError, match=r"input_history: .* torch.Size\(\[2, 4\]\).* torch.Size\(\[5, 4\]\)"):
        layers(DelayedScaling(amax_history_len=5))[0].load_state_dict(layer.state_dict())


# --- stochastic rounding ----------------------------------------------------------------------------------------------


def test_stochastic_rounding_moves_on_and_repeats_from_its_state():
    layer, _ = layers(NVFP4BlockScaling())
    state = layer.gemms.rng_state.clone()
    first, second = run(layer, tokens()), run(layer, tokens())
    assert torch.equal(first[0], second[0])  # the forward rounds to nearest
    assert not torch.equal(first[1], second[1])
    assert layer.gemms.rng_state.tolist() == [state[0].item(), 2]
    layer.gemms.rng_state.copy_(state)
    assert equal(run(layer, tokens()), first)


def test_the_seed_comes_from_the_generator_without_moving_it():
    torch.manual_seed(3)
    one = tgl.GroupedLinear(G, K, N, recipe=NVFP4BlockScaling())
    after = torch.rand(())
    torch.manual_seed(3)
    two = tgl.GroupedLinear(G, K, N)
    assert torch.rand(()) == after
    assert torch.equal(one.weight, two.weight)
    torch.manual_seed(4)
    assert tgl.GroupedLinear(G, K, N, recipe=NVFP4BlockScaling()).gemms.rng_state[0] != one.gemms.rng_state[0]


# --- as modules -------------------------------------------------------------------------------------------------------


def test_casting_a_module_leaves_its_state_in_float32():
    layer, _ = layers(DelayedScaling(amax_history_len=2))
    run(layer, tokens(), None, True)
    kept = layer.gemms.kept_data
    layer.bfloat16()
    assert layer.weight.dtype == torch.bfloat16
    assert layer.gemms.input_scale.dtype == layer.gemms.input_history.dtype == torch.float32
    assert layer.gemms.kept_data.dtype == kept.dtype == E4M3


def test_a_module_made_on_the_meta_device():
    layer = tgl.GroupedLinear(G, K, N, device="meta", recipe=DelayedScaling(amax_history_len=2))
    layer.to_empty(device="cpu").reset_parameters()
    assert torch.equal(layer.gemms.weight_scale, torch.ones(G))
    assert not layer.gemms.weight_history.any()
    layer = tgl.GroupedLinear(G, K, N, device="meta", recipe=NVFP4BlockScaling())
    layer.to_empty(device="cpu").reset_parameters()
    assert layer.gemms.rng_state[1] == 0


@pytest.mark.parametrize("recipe", RECIPES, ids=ids)
def test_main_grad_and_discrete_weights(recipe):
    """The accumulating form and slots on an alignment give what the plain weight gradient gives."""
    layer, _ = layers(recipe, bias=False)
    dw = run(layer, tokens())[2]
    fused, _ = layers(recipe, bias=False, fuse_wgrad_accumulation=True)
    fused.weight.main_grad = torch.ones(G, N, K)
    run(fused, tokens())
    assert torch.equal(fused.weight.main_grad, 1 + dw)
    apart, _ = layers(recipe, bias=False, single_grouped_weight=False)
    with torch.no_grad():
        for i in range(G):
            getattr(apart, f"weight{i}").copy_(layer.weight[i])
    run(apart, tokens())
    assert equal([getattr(apart, f"weight{i}").grad for i in range(G)], dw.unbind())


@pytest.mark.parametrize("recipe", RECIPES, ids=ids)
def test_autocast_chooses_the_dtype_of_the_result(recipe):
    layer, _ = layers(recipe)
    want = run(layers(recipe)[0], tokens())[0]
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(tokens().requires_grad_(), SIZES)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y.detach(), want.bfloat16())


def test_the_oracle_agrees_with_a_layer():
    """A forward pass decoded element by element."""
    layer, _ = layers(MXFP8BlockScaling(scale_layout="compact"), bias=False)
    x = tokens()[:70]
    offs = torch.tensor([10, 20, 30, 70], dtype=torch.int32)
    a = tgl.group_quantize(x, offs, format="mxfp8", columnwise=False)
    w = tgl.group_quantize(layer.weight.detach(), None, format="mxfp8", columnwise=False)
    tensors = {"a": a.data, "a_scale": a.scale, "a_amax": None, "b": w.data, "b_scale": w.scale, "b_amax": None}
    options = {"format": "mxfp8", "scale_layout": "compact", "b_direction": "rowwise"}
    want = torch.from_numpy(scaled_oracle.gemm({**tensors, "offs": offs}, options))
    torch.testing.assert_close(layer.forward_offsets(x, offs).double(), want, rtol=0, atol=1e-4)


def test_an_input_quantised_for_another_number_of_groups():
    recipe = MXFP8BlockScaling(scale_layout="compact")
    layer, x = tgl.GroupedLinear(2, 64, 32, recipe=recipe), torch.randn(9, 64)
    offs, three = (torch.tensor(ends, dtype=torch.int32) for ends in ([3, 8], [3, 4, 8]))
    options = recipe.operands.input.options()
    for ends, found in ((three, "3 groups"), (None, "matrices")):
        with pytest.raises(ValueError, match=f"`inp` must be quantised as rows in 2 groups, but it was as {found}"):
            layer.forward_offsets(tgl.quantize(x, ends, **options), offs)
