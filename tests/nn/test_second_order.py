"""Gradients of gradients: exact, or an error; never a number that lacks a term.

The loss is ``sum(y) + 10 * sum(g^2)`` with ``g`` the gradient of an inner loss by the input, differentiated by every
parameter and by what the input was made of. The reference is the same in float64, by products of whole matrices.
"""

import pytest
import torch

import tgl
from tests.journeys import RECIPES

G, H, I, T, S = 3, 32, 32, 20, 10
SPLITS = torch.tensor([7, 0, 10])
TOP = torch.stack([torch.arange(S) % G, (torch.arange(S) + 1) % G], 1)

LAYERS = {
    "linear": (lambda **o: tgl.GroupedLinear(G, H, I, **o), lambda: (SPLITS,)),
    "mlp": (lambda **o: tgl.GroupedMLP(G, H, I, bias=True, **o), lambda: (SPLITS, torch.linspace(0.2, 1, T))),
    "moe": (lambda **o: tgl.MoE(G, H, I, bias=True, **o), lambda: (TOP, torch.linspace(0.2, 1, 2 * S).view(S, 2))),
}
INNER = {"square": lambda y: y.square().sum(), "linear": lambda y: y.sum()}


def make(kind, dtype=torch.float64, **options):
    torch.manual_seed(0)
    layer = LAYERS[kind][0](params_dtype=dtype, **options)
    for linear in [m for m in layer.modules() if isinstance(m, tgl.GroupedLinear)]:
        if linear.fuse_wgrad_accumulation:
            for weight in linear.group_parameters("weight"):
                weight.main_grad = torch.zeros_like(weight)
    source = torch.randn(S if kind == "moe" else T, H, dtype=dtype).requires_grad_()
    rest = [t.to(dtype) if t.is_floating_point() else t for t in LAYERS[kind][1]()]
    return layer, source, [t.requires_grad_() if t.is_floating_point() else t for t in rest]


def second_order(layer, source, rest, inner, by):
    """The loss, and by name the leaves to differentiate it by."""
    x = source * 1.5  # not a leaf
    y = layer(x, *rest)
    (g,) = torch.autograd.grad(inner(y), x, create_graph=True)
    leaves = {"source": source, **dict(layer.named_parameters()), "probs": rest[-1]}
    wanted = {name: t for name, t in leaves.items() if t.requires_grad and by(name)}
    return y.sum() + 10 * g.square().sum(), wanted


def gradients(*case):
    """Gradients of ``second_order``; those of discrete parameters are stacked."""
    loss, wanted = second_order(*case)
    found = {}
    for name, t in zip(wanted, torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)):
        if t is not None:
            found.setdefault(name.rstrip("0123456789") if name[-1].isdecimal() else name, []).append(t)
    return {name: torch.stack(parts) if len(parts) > 1 else parts[0] for name, parts in found.items()}


BY = {
    "all": lambda name: True,
    "weights": lambda name: "weight" in name,
    "what made the input": lambda name: name == "source",
    "probs": lambda name: name in ("source", "probs"),
}

PLAIN = [
    ("linear", {"single_grouped_weight": True}),
    ("linear", {"single_grouped_weight": False}),
    ("mlp", {"single_grouped_weight": False}),
    ("mlp", {"single_grouped_weight": False, "recompute_activation": True}),
    ("moe", {"single_grouped_weight": True}),
    ("moe", {"single_grouped_weight": False}),
]


@pytest.mark.parametrize("kind, options", PLAIN)
@pytest.mark.parametrize("inner", INNER)
def test_layers_without_a_recipe_have_a_second_order(kind, options, inner):
    """Discrete parameters as packed ones have it, which are the reference."""
    layer, source, rest = make(kind, **options)
    plain, _, others = make(kind)
    with torch.no_grad():
        for ours, theirs in zip(layer.modules(), plain.modules()):
            if isinstance(ours, tgl.GroupedLinear):
                theirs.weight.copy_(ours.packed("weight"))
                theirs.bias.copy_(ours.packed("bias"))
    for by in BY.values():
        got = gradients(layer, source, rest, INNER[inner], by)
        wanted = gradients(plain, source, others, INNER[inner], by)
        assert got.keys() == wanted.keys()
        for name, t in wanted.items():
            torch.testing.assert_close(got[name], t, msg=name)


@pytest.mark.parametrize("kind, options", [case for case in PLAIN if not case[1]["single_grouped_weight"]])
def test_gradgradcheck_of_discrete_parameters(kind, options):
    layer, source, rest = make(kind, **options)
    names = [name for name, _ in layer.named_parameters()]

    def call(x, *parameters):
        return torch.func.functional_call(layer, dict(zip(names, parameters)), (x, *rest))

    inputs = (source, *[p.detach().requires_grad_() for p in layer.parameters()])
    assert torch.autograd.gradgradcheck(call, inputs, fast_mode=True, atol=1e-4)


FIRST_ORDER = [(kind, {"recipe": name}) for kind in LAYERS for name in RECIPES if name != "none"]
FIRST_ORDER += [("linear", {"recipe": "current", "single_grouped_weight": False})]
FIRST_ORDER += [("linear", {"fuse_wgrad_accumulation": True}), ("moe", {"delay_wgrad_compute": True})]


@pytest.mark.parametrize("kind, options", FIRST_ORDER)
def test_layers_of_first_order_say_so(kind, options):
    """An error, whatever the outer gradient is taken by, and where the inner loss has a constant gradient."""
    options = {**options, "recipe": RECIPES[options["recipe"]]} if "recipe" in options else options
    layer, source, rest = make(kind, torch.bfloat16, **options)
    for inner in INNER.values():
        for by in BY.values():
            loss, wanted = second_order(layer, source, rest, inner, by)
            with pytest.raises(RuntimeError, match="gradients of a layer of this kind have no derivative"):
                torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
        with pytest.raises(RuntimeError, match="gradients of a layer of this kind have no derivative"):
            second_order(layer, source, rest, inner, BY["all"])[0].backward()
    assert all(p.grad is None for p in layer.parameters())


def test_a_gradient_with_an_unused_graph_is_only_a_gradient():
    layer, source, rest = make("linear", torch.bfloat16, recipe=RECIPES["current"])
    y = layer(source, *rest)
    (g,) = torch.autograd.grad(y.square().sum(), source, create_graph=True)
    (plain,) = torch.autograd.grad(layer(source, *rest).square().sum(), source)
    assert torch.equal(g.detach(), plain)
