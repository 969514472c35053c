"""``GroupedLoRALinear`` against a layer whose weight is the sum, and what its calls allocate, save and compute."""

import copy

import pytest
import torch
from torch import nn

import tgl
from tests.nn.seen import Ops, Sizes, same
from tests.peak_memory import peak_memory
from tgl.nn import layouts

G, K, N, T = 3, 8, 12, 11
SPLITS = torch.tensor([4, 0, 5])
BASES = {"packed": {}, "no bias": {"bias": False}, "discrete": {"single_grouped_weight": False}}
RECIPES = {
    "mxfp8": tgl.recipes.MXFP8BlockScaling(),
    "fp8": tgl.recipes.Float8CurrentScaling(),
    "fp8 blocks": tgl.recipes.Float8BlockScaling(),
    "nvfp4": tgl.recipes.NVFP4BlockScaling(disable_stochastic_rounding=True),
}


def make(rank=4, alpha=6.0, *, dtype=torch.float64, sizes=(G, K, N), rank_stabilized=False, **options):
    """A layer whose update is not zero."""
    base = tgl.GroupedLinear(*sizes, params_dtype=dtype, **options)
    layer = tgl.GroupedLoRALinear(base, rank, alpha, rank_stabilized=rank_stabilized)
    nn.init.normal_(layer.lora_B)
    return layer


def update(layer):
    """``scaling * B A``, ``[G, N, K]``."""
    return layer.scaling * layer.lora_B @ layer.lora_A


def summed(layer, x, scale=None):
    """Return one group at a time, with the sum of the weights."""
    base = layer.base
    weight = torch.stack([w.detach() for part in base.group_parameters("weight") for w in part.view(-1, N, K)])
    biases = [b for part in base.group_parameters("bias") for b in part.view(-1, N)]
    rows, start = [], 0
    for g, size in enumerate(SPLITS.tolist()):
        part = slice(start, start + size)
        y = x[part] @ (weight + update(layer))[g].t()
        if biases:
            y = y + biases[g] * (1 if scale is None else scale[part, None])
        rows.append(y)
        start += size
    return torch.cat([*rows, x.new_zeros(x.shape[0] - start, N)])


@pytest.mark.parametrize("rank", [1, 5, 8])
@pytest.mark.parametrize("with_scale", [False, True])
@pytest.mark.parametrize("base", BASES)
def test_values_and_gradients(base, with_scale, rank):
    layer = make(rank, **BASES[base])
    if with_scale and not layer.has_bias:
        with pytest.raises(ValueError, match="bias_scale"):
            layer(torch.randn(T, K, dtype=torch.float64), SPLITS, bias_scale=torch.rand(T, dtype=torch.float64))
        return
    x = torch.randn(T, K, dtype=torch.float64, requires_grad=True)
    scale = torch.rand(T, dtype=torch.float64, requires_grad=True) if with_scale else None
    leaves = [x, layer.lora_A, layer.lora_B] + [scale] * with_scale
    y, expected = layer(x, SPLITS, bias_scale=scale), summed(layer, x, scale)
    dy = torch.randn_like(y)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(torch.autograd.grad(y, leaves, dy), torch.autograd.grad(expected, leaves, dy))


def test_a_new_layer_computes_what_its_base_does():
    base, x = tgl.GroupedLinear(G, K, N), torch.randn(T, K)
    assert torch.equal(tgl.GroupedLoRALinear(base, 4)(x, SPLITS), base(x, SPLITS))


@pytest.mark.parametrize(
    "alpha, rank_stabilized, scaling", [(None, False, 1), (8.0, False, 2), (8.0, True, 4), (None, True, 2)]
)
def test_scaling(alpha, rank_stabilized, scaling):
    assert make(4, alpha, rank_stabilized=rank_stabilized).scaling == scaling


def test_offsets_and_leading_dimensions():
    layer, x = make(), torch.randn(T, K, dtype=torch.float64)
    y = layer(x, SPLITS)
    assert torch.equal(layer.forward_offsets(x, SPLITS.cumsum(0).int()), y)
    assert torch.equal(layer(x[None], SPLITS.tolist()), y[None])


def test_nothing_reads_the_tail():
    layer, results = make(), []
    for poison in (float("nan"), 3.0):
        x = torch.randn(T, K, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        x[9:] = poison
        x.requires_grad_()
        y = layer(x, SPLITS)
        dy = torch.ones_like(y)
        dy[9:] = poison
        results.append((y, *torch.autograd.grad(y, [x, layer.lora_A, layer.lora_B], dy)))
    assert same(*results)
    assert not results[0][0][9:].any()


@pytest.mark.parametrize("base", BASES)
def test_the_backward_forms_gradients_of_the_update_alone(base):
    layer = make(**BASES[base])
    x = torch.randn(T, K, dtype=torch.float64, requires_grad=True)
    y = layer(x, SPLITS)
    with Ops() as seen:
        y.sum().backward()
    products = ["grouped_gemm"] * 3 if base == "discrete" else ["grouped_gemm", "grouped_gemm_low_rank"]
    assert sorted(seen.names) == products + ["grouped_gemm_wgrad"] * 2
    assert {name for name, p in layer.named_parameters() if p.grad is not None} == {"lora_A", "lora_B"}


def test_the_sum_is_rounded_once():
    """Integers whose sums float32 holds and bfloat16 does not: forward, and in the gradient of the input."""
    layer = make(4, 4.0, dtype=torch.bfloat16, bias=False)
    with torch.no_grad():
        layer.base.weight.copy_(torch.randint(-255, 256, (G, N, K)))
        layer.lora_A.copy_(torch.randint(-1, 2, (G, 4, K)))
        layer.lora_B.copy_(torch.randint(-1, 2, (G, N, 4)))
    x, dy = (torch.randint(-7, 8, (T, n)).bfloat16() for n in (K, N))
    x.requires_grad_()
    y = layer(x, SPLITS)
    (dx,) = torch.autograd.grad(y, x, dy)
    weight = layer.base.weight.double() + layer.lora_B.double() @ layer.lora_A.double()
    offs = SPLITS.cumsum(0).int()
    assert torch.equal(y, tgl.grouped_gemm(x.double(), weight.mT, offs).bfloat16())
    assert torch.equal(dx, tgl.grouped_gemm(dy.double(), weight, offs).bfloat16())


def test_a_base_weight_that_requires_grad():
    """Its parameters get gradients, from two products and a sum."""
    layer, x = make(), torch.randn(T, K, dtype=torch.float64, requires_grad=True)
    frozen = layer(x, SPLITS)
    expected = torch.autograd.grad(frozen, [x, layer.lora_A, layer.lora_B], torch.ones_like(frozen))
    layer.base.requires_grad_()
    y = layer(x, SPLITS)
    torch.testing.assert_close(y, frozen)
    leaves = [x, layer.lora_A, layer.lora_B, layer.base.weight, layer.base.bias]
    *found, dw, dbias = torch.autograd.grad(y, leaves, torch.ones_like(y))
    torch.testing.assert_close(found, list(expected))
    offs = SPLITS.cumsum(0).int()
    torch.testing.assert_close(dw, tgl.ops.grouped_gemm_wgrad(torch.ones_like(y), x.detach(), offs))
    torch.testing.assert_close(dbias, SPLITS.double()[:, None].expand(G, N))


@pytest.mark.parametrize("base", BASES)
def test_saved_tensors(base):
    """Saved activations are the input, once, and the product of low rank."""
    layer, saved = make(**BASES[base]), []
    x = torch.randn(T, K, dtype=torch.float64)
    own = {p.untyped_storage().data_ptr() for p in layer.parameters()}

    def keep(t):
        if t.untyped_storage().data_ptr() not in own and t.dtype.is_floating_point:
            saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        layer(x, SPLITS)
    assert [tuple(t.shape) for t in saved] == [(T, K), (T, 4)]
    assert saved[0].data_ptr() == x.data_ptr()


def test_no_second_tensor_of_the_weights_size():
    layer = make(2, sizes=(G, 64, 48))
    x = torch.randn(T, 64, dtype=torch.float64, requires_grad=True)
    with Sizes() as seen:
        layer(x, SPLITS).sum().backward()
    assert seen.largest == x.numel()
    assert peak_memory(lambda: layer(x, SPLITS).sum().backward()) < layer.base.weight.nbytes / 2  # within ops as well


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_quantised_base(recipe, packed):
    """Its product with the recipe's arithmetic, the update in the input's dtype."""
    layer = make(8, dtype=torch.float32, sizes=(G, 128, 128), recipe=RECIPES[recipe])
    if packed:
        layer.base.quantize_weight()
    x = torch.randn(256, 128, requires_grad=True)
    splits = torch.tensor([128, 0, 128])
    twin = tgl.GroupedLinear(G, 128, 128, bias=False)
    with torch.no_grad():
        twin.weight.copy_(update(layer))
    y, base, delta = layer(x, splits), layer.base(x, splits), twin(x, splits)
    torch.testing.assert_close(y, base + delta)
    dy = torch.randn_like(y)
    (dx,), (dx_base,), (dx_delta,) = (torch.autograd.grad(t, x, dy, retain_graph=True) for t in (y, base, delta))
    torch.testing.assert_close(dx, dx_base + dx_delta)
    with Ops() as seen:
        y.backward(dy)
    assert seen.names.count("grouped_gemm_wgrad") == 2
    assert "grouped_gemm_scaled_wgrad" not in seen.names


@pytest.mark.parametrize("where", ["fc1", "fc2", "both"])
@pytest.mark.parametrize("kind", ["GroupedMLP", "MoE", "Sequential"])
def test_as_a_layer_of_an_expert_mlp(kind, where):
    """The whole as if the layers had the sum of the weights, with the gradients of probabilities."""
    torch.manual_seed(0)
    mlp = tgl.MoE if kind == "MoE" else tgl.GroupedMLP
    mlp = mlp(G, K, N, bias=True, params_dtype=torch.float64)
    for name in ("fc1", "fc2") if where == "both" else (where,):
        layer = tgl.GroupedLoRALinear(getattr(mlp, name), 4, 6.0)
        nn.init.normal_(layer.lora_B)
        setattr(mlp, name, layer)
    merged = copy.deepcopy(mlp)
    for name in ("fc1", "fc2"):
        layer = getattr(merged, name)
        if isinstance(layer, tgl.GroupedLoRALinear):
            setattr(merged, name, layer.merge())
    if kind == "Sequential":
        mlp = tgl.Sequential(mlp.fc1, tgl.GroupedActivation(), mlp.fc2)
    x = torch.randn(9, K, dtype=torch.float64, requires_grad=True)
    probs = torch.rand(9, dtype=torch.float64, requires_grad=True)
    if kind == "MoE":
        index, weights = torch.randint(G, (9, 1)), probs[:, None]
        y, expected = mlp(x, index, weights), merged(x, index, weights)
    else:
        y, expected = mlp(x, SPLITS, probs), merged(x, SPLITS, probs)
    torch.testing.assert_close(y, expected)
    dy = torch.randn_like(y)
    of_both = [torch.autograd.grad(t, (x, probs), dy) for t in (y, expected)]
    torch.testing.assert_close(*of_both)


def adapted_mlp(dtype=torch.float64, **options):
    """Return an MLP, both of whose layers have nonzero updates."""
    mlp = tgl.GroupedMLP(G, K, N, bias=True, params_dtype=dtype, **options)
    for name in ("fc1", "fc2"):
        layer = tgl.GroupedLoRALinear(getattr(mlp, name), 4, 6.0)
        nn.init.normal_(layer.lora_B)
        setattr(mlp, name, layer)
    return mlp


@pytest.mark.parametrize("activation", [{"interleaved": True}, {"activation": "srelu"}], ids=str)
def test_the_activation_is_in_the_op_of_the_first_layer(activation):
    """The result has the bits of the layers one after the other."""
    torch.manual_seed(0)
    mlp, results = adapted_mlp(torch.bfloat16, **activation), []
    kind = activation.get("activation", "swiglu")
    apart = tgl.Sequential(mlp.fc1, tgl.GroupedActivation(kind, interleaved=mlp.interleaved), mlp.fc2)
    x, probs, dy = torch.randn(T, K).bfloat16(), torch.rand(T), torch.randn(T, K).bfloat16()
    leaves = [x.requires_grad_(), probs.requires_grad_(), *(p for p in mlp.parameters() if p.requires_grad)]
    names = []
    for of in (mlp, apart):
        with Ops() as seen:
            y = of(x, SPLITS, probs)
        results.append([y, *torch.autograd.grad(y, leaves, dy)])
        names.append([name for name in seen.names if name != "splits_to_offsets"])
    assert same(*results)
    second = ["grouped_gemm", "grouped_gemm_low_rank"]
    assert names[0] == ["grouped_gemm", "grouped_gemm_low_rank_activation", *second]
    assert names[1] == ["grouped_gemm", "grouped_gemm_low_rank", "grouped_activation", *second]


def test_an_activated_layer_saves_the_pre_activation():
    """Saved activations are the input, the narrow product and the pre-activation, not the result."""
    mlp, saved = adapted_mlp(), []
    x = torch.randn(T, K, dtype=torch.float64)
    own = {p.untyped_storage().data_ptr() for p in mlp.parameters()}

    def keep(t):
        if t.untyped_storage().data_ptr() not in own and t.dtype.is_floating_point:
            saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        mlp(x, SPLITS)
    assert [tuple(t.shape) for t in saved] == [(T, K), (T, 4), (T, 2 * N), (T, N), (T, 4)]


def assert_near(found, wanted):
    """Equal up to a rounding: under a transform the sum of two products is two products and a sum."""
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)


def test_transforms_and_second_order_through_the_activation():
    mlp, x = adapted_mlp(), torch.randn(T, K, dtype=torch.float64, requires_grad=True)
    parameters, probs = dict(mlp.named_parameters()), torch.rand(T, dtype=torch.float64, requires_grad=True)

    def call(a, b, x, probs):
        given = {**parameters, "fc1.lora_A": a, "fc1.lora_B": b}
        return torch.func.functional_call(mlp, given, (x, SPLITS, probs))

    leaves = [mlp.fc1.lora_A, mlp.fc1.lora_B, x, probs]
    found = torch.func.grad(lambda *given: call(*given).square().sum(), argnums=(0, 1, 2, 3))(*leaves)
    assert_near(found, torch.autograd.grad(call(*leaves).square().sum(), leaves))
    assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)


def test_autocast_of_an_activated_layer():
    mlp = adapted_mlp(torch.float32)
    x, probs = torch.randn(T, K, requires_grad=True), torch.rand(T, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        y = mlp(x, SPLITS, probs)
    narrow = copy.deepcopy(mlp).bfloat16()
    assert torch.equal(y, narrow(x.bfloat16(), SPLITS, probs.float()))
    y.sum().backward()
    assert mlp.fc1.lora_A.grad.dtype == torch.float32


def test_hooks_of_the_base_and_of_the_layer_fire():
    mlp, seen = tgl.GroupedMLP(G, K, N), []
    mlp.fc1 = tgl.GroupedLoRALinear(mlp.fc1, 4)
    x = torch.randn(T, K)
    expected = mlp(x, SPLITS)
    mlp.fc1.base.register_forward_hook(lambda *_: seen.append("base"))
    mlp.fc1.register_forward_hook(lambda *_: seen.append("layer"))
    assert torch.equal(mlp(x, SPLITS), expected)
    assert seen == ["base", "layer"]


@pytest.mark.parametrize(
    "recipe, backend",
    [
        (None, "aot_eager"),
        ("mxfp8", "aot_eager"),
        pytest.param(None, "inductor", marks=pytest.mark.slow),
        pytest.param("mxfp8", "inductor", marks=pytest.mark.slow),
    ],
)
def test_compiles_whole(recipe, backend, fresh_compiler):
    mlp = tgl.GroupedMLP(G, 32, 32, bias=True, recipe=RECIPES.get(recipe))
    for name in ("fc1", "fc2"):
        layer = tgl.GroupedLoRALinear(getattr(mlp, name), 8)
        nn.init.normal_(layer.lora_B, std=0.1)
        setattr(mlp, name, layer)
    compiled = torch.compile(mlp, fullgraph=True, backend=backend, dynamic=True)
    for rows in (9, 12):
        x, probs = torch.randn(rows, 32, requires_grad=True), torch.rand(rows)
        leaves = [x, *(p for p in mlp.parameters() if p.requires_grad)]
        results = [torch.autograd.grad(call(x, SPLITS, probs).square().sum(), leaves) for call in (compiled, mlp)]
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_transforms_and_second_order():
    layer, x = make(), torch.randn(T, K, dtype=torch.float64, requires_grad=True)
    parameters = dict(layer.named_parameters())

    def call(a, b, x):
        return torch.func.functional_call(layer, {**parameters, "lora_A": a, "lora_B": b}, (x, SPLITS))

    leaves = [layer.lora_A, layer.lora_B, x]
    found = torch.func.grad(lambda *given: call(*given).square().sum(), argnums=(0, 1, 2))(*leaves)
    assert_near(found, torch.autograd.grad(layer(x, SPLITS).square().sum(), leaves))
    assert torch.autograd.gradgradcheck(call, leaves)


@pytest.mark.parametrize("params", [torch.float32, torch.bfloat16])
def test_parameters_of_another_dtype(params):
    """Wide parameters beside a narrow base, as PEFT makes them, and autocast."""
    base = tgl.GroupedLinear(G, K, N, params_dtype=torch.bfloat16)
    layer = tgl.GroupedLoRALinear(base, 8, params_dtype=params)
    nn.init.normal_(layer.lora_B)
    x = torch.randn(T, K, dtype=torch.bfloat16)
    y = layer(x, SPLITS)
    y.sum().backward()
    assert (y.dtype, layer.lora_A.grad.dtype, layer.lora_B.grad.dtype) == (torch.bfloat16, params, params)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x.float(), SPLITS), y)


@pytest.mark.parametrize("base", BASES)
def test_merge(base):
    layer, x = make(**BASES[base]), torch.randn(T, K, dtype=torch.float64)
    y = layer(x, SPLITS)
    with Sizes() as seen:
        merged = layer.merge()
    assert merged is layer.base
    assert seen.largest <= G * N * K  # what an in-place op returns is the weight itself
    torch.testing.assert_close(merged(x, SPLITS), y)


def test_a_quantised_weight_is_not_merged_into():
    layer = make(dtype=torch.float32, sizes=(G, 32, 32), recipe=RECIPES["mxfp8"])
    layer.base.quantize_weight()
    with pytest.raises(ValueError, match=r"`base` must have a weight of plain parameters.*MXFP8GroupedTensor"):
        layer.merge()


def test_layout_of_peft():
    layer = make(5)
    a, b = layouts.lora_to_peft(layer.lora_A, layer.lora_B)
    assert (a.shape, b.shape) == ((G * 5, K), (N, 5 * G))
    delta = torch.einsum("nrg,grk->gnk", b.view(N, 5, G), a.view(G, 5, K))
    torch.testing.assert_close(delta * layer.scaling, update(layer))
    assert same(layouts.lora_from_peft(a, b, G), (layer.lora_A, layer.lora_B))


@pytest.mark.parametrize(
    "shapes, message",
    [
        (((G, 5), (G, N, 5)), r"`lora_a` must be \[G, r, K\], but got \(3, 5\)"),
        (((G, 5, K), (G, N, 4)), r"`lora_b` must be \[G, N, r\] with G = 3 and r = 5, but got \(3, 12, 4\)"),
        (((G * 5 + 1, K), (N, 5 * G)), r"`lora_a` must be \[G r, K\] with G = 3, but got \(16, 8\)"),
        (((G * 5, K), (N, 5)), r"`lora_b` must be \[N, r G\] with G = 3 and r = 5, but got \(12, 5\)"),
    ],
)
def test_shapes_of_peft_that_do_not_fit(shapes, message):
    a, b = (torch.zeros(shape) for shape in shapes)
    with pytest.raises(ValueError, match=message):
        layouts.lora_from_peft(a, b, G) if a.dim() == 2 and a.shape[1] == K else layouts.lora_to_peft(a, b)


def test_copies_and_state_dicts():
    layer, x = make(), torch.randn(T, K, dtype=torch.float64)
    y = layer(x, SPLITS)
    again = copy.deepcopy(layer)
    assert torch.equal(again(x, SPLITS), y)
    assert not again.base.weight.requires_grad
    other = make()
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x, SPLITS), y)
    assert set(layer.state_dict()) == {"base.weight", "base.bias", "lora_A", "lora_B"}


def test_meta_device_then_reset():
    layer = tgl.GroupedLoRALinear(tgl.GroupedLinear(G, K, N, device="meta"), 4).to_empty(device="cpu")
    layer.base.reset_parameters()
    layer.reset_parameters()
    assert layer.lora_A.any()
    assert not layer.lora_B.any()


def test_bad_input():
    base = tgl.GroupedLinear(G, K, N)
    with pytest.raises(TypeError, match="`base` must be a GroupedLinear, but got a Linear"):
        tgl.GroupedLoRALinear(nn.Linear(K, N), 4)
    with pytest.raises(ValueError, match="`rank` must be at least 1, but got 0"):
        tgl.GroupedLoRALinear(base, 0)
    with pytest.raises(TypeError, match=r"`params_dtype` must be a floating dtype, but got torch.int8"):
        tgl.GroupedLoRALinear(base, 4, params_dtype=torch.int8)
    assert all(p.requires_grad for p in base.parameters())
    with pytest.raises(ValueError, match="`m_splits` must be of shape"):
        make()(torch.randn(T, K, dtype=torch.float64), SPLITS[:2])


def test_inputs_and_buffers_that_the_update_cannot_take():
    mlp = tgl.GroupedMLP(G, 32, 32, recipe=RECIPES["mxfp8"])
    mlp.fc1, mlp.fc2 = tgl.GroupedLoRALinear(mlp.fc1, 4), tgl.GroupedLoRALinear(mlp.fc2, 4)
    x = torch.randn(T, 32)
    quantised = tgl.quantize(x, SPLITS.cumsum(0).int(), format="mxfp8")
    with pytest.raises(TypeError, match="`inp` must be a plain tensor for the low-rank update, but got a MXFP8"):
        mlp.fc1(quantised, SPLITS)
    with pytest.raises(TypeError, match=r"`fc2` must be a module whose forward takes \(inp, m_splits, out=...\)"):
        mlp(x, SPLITS, out=torch.zeros(T, 32))
    with pytest.raises(TypeError, match=r"`fc1` must be a module whose forward takes \(inp, m_splits, dgrad_out=...\)"):
        mlp(x, SPLITS, dgrad_out=torch.zeros(T, 32))
    with pytest.raises(ValueError, match="can take 'output', but got module 0, a GroupedLoRALinear"):
        tgl.Sequential(mlp.fc1)(x, SPLITS, op_kwargs={0: {"output": torch.zeros(T, 64)}})
