"""Gradients of gradients of modules around layers, against products of whole matrices in float64, or an error.

The loss is that of ``test_second_order``: ``sum(y) + 10 * sum(g^2)`` with ``g`` the gradient of an inner loss by the
input. It is differentiated by each leaf alone too, for which the engine runs other nodes than for all of them.
"""

import pytest
import torch

import tgl
from tests.journeys import HALF_STEP, RECIPES

G, H, I, T, R = 3, 32, 32, 20, 4
SPLITS = torch.tensor([7, 0, 10])
INNER = {"square": lambda y: y.square().sum(), "linear": lambda y: y.sum()}
FIRST_ORDER = "gradients of a layer of this kind have no derivative"


def linear(n=I, k=H, dtype=torch.float64, **options):
    return tgl.GroupedLinear(G, k, n, params_dtype=dtype, **options)


def packed(n=I, k=H, format="mxfp8"):
    return tgl.GroupedPackedLinear(G, k, n, format=format, params_dtype=torch.float32)


def lora(base):
    layer = tgl.GroupedLoRALinear(base, R, alpha=2.0)
    torch.nn.init.normal_(layer.lora_B)
    return layer


def sequential(first, second):
    return tgl.nn.Sequential(first, tgl.nn.GroupedActivation("swiglu"), second)


def mlp_of(first, second, **options):
    dtype = second.base.weight.dtype
    mlp = tgl.GroupedMLP(G, H, I, activation="swiglu", params_dtype=dtype, bias=True, **options)
    mlp.fc1, mlp.fc2 = first, second
    return mlp


DISCRETE = {"single_grouped_weight": False}
EXACT = {
    "lora": lambda: lora(linear()),
    "lora of discrete weights": lambda: lora(linear(**DISCRETE)),
    "lora of a packed weight": lambda: lora(packed(format="mxfp4")),
    "packed mxfp8": packed,
    "packed nvfp4": lambda: packed(format="nvfp4"),
    "sequential": lambda: sequential(linear(2 * I), linear()),
    "sequential of discrete weights": lambda: sequential(linear(2 * I, **DISCRETE), linear(**DISCRETE)),
    "sequential of loras": lambda: sequential(lora(linear(2 * I)), lora(linear(**DISCRETE))),
    "sequential of an mlp": lambda: tgl.nn.Sequential(
        linear(**DISCRETE), tgl.GroupedMLP(G, H, I, params_dtype=torch.float64, bias=True, **DISCRETE)
    ),
    "mlp of loras": lambda: mlp_of(lora(linear(2 * I)), lora(linear())),
    "mlp of loras of packed weights": lambda: mlp_of(lora(packed(2 * I)), lora(packed())),
}


class Reference:
    """The same module in float64, with a leaf for each of its trainable parameters."""

    def __init__(self, module):
        self.names = {id(m): name for name, m in module.named_modules()}
        self.module, self.leaves = module, {}
        for name, p in parameters(module).items():
            self.leaves[name] = (torch.stack([q.detach() for q in p]) if len(p) > 1 else p[0].detach()).double()
            self.leaves[name].requires_grad_()

    def __call__(self, x, probs):
        return self.call(self.module, x, probs)

    def leaf(self, module, name):
        full = f"{self.names[id(module)]}.{name}".lstrip(".")
        if full in self.leaves:
            return self.leaves[full]
        whole = module.packed(name)
        return (whole.dequantize() if isinstance(whole, tgl.GroupedTensor) else whole).detach().double()

    def call(self, module, x, probs):
        if isinstance(module, tgl.GroupedLoRALinear):
            a, b = (self.leaf(module, name) for name in ("lora_A", "lora_B"))
            return self.call(module.base, x, probs) + module.scaling * product(product(x, a), b)
        if isinstance(module, tgl.GroupedLinear):
            bias = product(x.new_ones(T, 1), self.leaf(module, "bias")[..., None])
            return product(x, self.leaf(module, "weight")) + (bias if probs is None else bias * probs[:, None])
        if isinstance(module, tgl.nn.GroupedActivation):
            gate, value = x.chunk(2, 1)
            return torch.nn.functional.silu(gate) * value * probs[:, None]
        if isinstance(module, tgl.GroupedMLP):
            h = self.call(tgl.nn.GroupedActivation("swiglu"), self.call(module.fc1, x, None), probs)
            return self.call(module.fc2, h, probs)
        scaled = False
        for part in module:
            if isinstance(part, (tgl.GroupedLinear, tgl.GroupedLoRALinear)):
                x, scaled = self.call(part, x, probs if scaled else None), False
            else:
                x, scaled = self.call(part, x, probs), isinstance(part, tgl.nn.GroupedActivation)
        return x


def product(x, matrices):
    parts = [rows @ matrices[g].t() for g, rows in enumerate(x[: SPLITS.sum()].split(SPLITS.tolist()))]
    return torch.cat([*parts, x.new_zeros(T - len(torch.cat(parts)), matrices.shape[1])])


def parameters(module):
    """Trainable ones by name, those of one weight in a list."""
    found = {}
    for name, p in module.named_parameters():
        if p.requires_grad:
            found.setdefault(name.rstrip("0123456789"), []).append(p)
    return found


def call(module, x, probs):
    if isinstance(module, (tgl.GroupedLinear, tgl.GroupedLoRALinear)):
        return module(x, SPLITS, bias_scale=probs)
    return module(x, SPLITS, probs)


def loss(forward, source, probs, inner):
    x = source * 1.5  # not a leaf
    y = forward(x, probs)
    (g,) = torch.autograd.grad(inner(y), x, create_graph=True)
    return y.sum() + 10 * g.square().sum()


def problem(make):
    torch.manual_seed(0)
    module = make()
    dtype = next(p.dtype for p in module.parameters() if not isinstance(p, tgl.GroupedTensor))
    source, probs = torch.randn(T, H, dtype=dtype), torch.linspace(0.2, 1, T, dtype=dtype)
    return module, source.requires_grad_(), probs.requires_grad_()


def gradients(module, source, probs, inner, names):
    """Return the gradients by name; None where the loss does not depend on a leaf."""
    leaves = {"source": [source], "probs": [probs], **parameters(module)}
    wanted = {name: leaves[name] for name in names}
    value = loss(lambda *args: call(module, *args), source, probs, inner)
    found = iter(torch.autograd.grad(value, [t for ts in wanted.values() for t in ts], allow_unused=True))
    stacked = {}
    for name, tensors in wanted.items():
        parts = [next(found) for _ in tensors]
        stacked[name] = torch.stack(parts) if len(parts) > 1 else parts[0]
    return stacked


def expected(module, source, probs, inner):
    reference = Reference(module)
    leaves = {"source": source, "probs": probs}
    leaves = {name: t.detach().double().requires_grad_() for name, t in leaves.items()}
    value = loss(reference, *leaves.values(), inner)
    leaves |= reference.leaves
    return dict(zip(leaves, torch.autograd.grad(value, list(leaves.values()), allow_unused=True)))


def distance(got, wanted):
    """Relative, of the norms; a gradient of zeros may be missing."""
    zero = torch.zeros(()) if wanted is None else torch.zeros_like(wanted)
    wanted = zero if wanted is None else wanted
    got = zero if got is None else got
    return float((got.double() - wanted).norm() / wanted.norm().clamp_min(1e-30))


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("inner", INNER)
def test_values_of_a_second_order(kind, inner):
    module, source, probs = problem(EXACT[kind])
    wanted = expected(module, source, probs, INNER[inner])
    bound = 100 * torch.finfo(source.dtype).eps
    for names in (list(wanted), *([name] for name in wanted)):
        for name, grad in gradients(module, source, probs, INNER[inner], names).items():
            assert distance(grad, wanted[name]) < bound, (name, names)


RECIPE = RECIPES["current"]
PARTLY = {
    "lora of a recipe": lambda: lora(linear(dtype=torch.bfloat16, recipe=RECIPE)),
    "sequential with one recipe": lambda: sequential(
        linear(2 * I, dtype=torch.bfloat16), linear(dtype=torch.bfloat16, recipe=RECIPE)
    ),
    "sequential behind a recipe": lambda: sequential(
        linear(2 * I, dtype=torch.bfloat16, recipe=RECIPE), lora(linear(dtype=torch.bfloat16))
    ),
    "mlp of loras of recipes": lambda: mlp_of(
        lora(linear(2 * I, dtype=torch.bfloat16, recipe=RECIPE)), lora(linear(dtype=torch.bfloat16, recipe=RECIPE))
    ),
}


@pytest.mark.parametrize("kind", PARTLY)
@pytest.mark.parametrize("inner", INNER)
def test_values_or_an_error_where_a_layer_is_of_first_order(kind, inner):
    module, source, probs = problem(PARTLY[kind])
    wanted = expected(module, source, probs, INNER[inner])
    errors = []
    for names in (list(wanted), *([name] for name in wanted)):
        try:
            found = gradients(module, source, probs, INNER[inner], names)
        except RuntimeError as error:
            errors.append((names, FIRST_ORDER in str(error)))
        else:
            for name, grad in found.items():
                assert distance(grad, wanted[name]) < HALF_STEP["current"], (name, names)
    assert all(known for _, known in errors)
    assert (list(wanted), True) in errors
    assert (["source"], True) in errors


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("buffers", [["out"], ["dgrad_out"], ["out", "dgrad_out"]])
def test_buffers_of_results(buffers, inner):
    """A gradient in a buffer has no derivative; a result in one has."""
    module, source, probs = problem(linear)
    wanted = expected(module, source, probs, INNER[inner])
    given = {name: torch.empty(T, {"out": I, "dgrad_out": H}[name], dtype=torch.float64) for name in buffers}

    def forward(x, probs):
        return module(x, SPLITS, bias_scale=probs, **given)

    leaves = {"source": source, "probs": probs, **dict(module.named_parameters())}
    for name, leaf in leaves.items():
        value = loss(forward, source, probs, INNER[inner])
        if "dgrad_out" in buffers:
            with pytest.raises(RuntimeError, match=FIRST_ORDER):
                torch.autograd.grad(value, leaf, allow_unused=True)
        else:
            (grad,) = torch.autograd.grad(value, leaf, allow_unused=True)
            assert distance(grad, wanted[name]) < 100 * torch.finfo(torch.float64).eps, name
