"""Weights and biases that ``torch.nn.utils.parametrize`` computes, in every form of the layers."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import tgl
from tgl.recipes import Float8CurrentScaling, MXFP8BlockScaling

G, K, N, T = 3, 32, 32, 9
SPLITS = torch.tensor([4, 0, 3])


class Scaled(nn.Module):
    """``weight * scale``; counts how often it is computed."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.calls = 0

    def forward(self, weight):
        if not torch.compiler.is_compiling():
            self.calls += 1
        return weight * self.scale

    def right_inverse(self, weight):
        return weight / self.scale


OPTIONS = {
    "plain": {},
    "fp8": {"recipe": Float8CurrentScaling()},
    "mxfp8": {"recipe": MXFP8BlockScaling()},
    "discrete": {"single_grouped_weight": False},
    "discrete fp8": {"single_grouped_weight": False, "recipe": Float8CurrentScaling()},
    "out": {},
}


def names_of(layer):
    return [n for n, _ in layer.named_parameters(recurse=False)]


def parametrized(layer):
    for name in names_of(layer):
        parametrize.register_parametrization(layer, name, Scaled())
    return layer


def same_without(layer, options):
    """A layer whose parameters are those that ``layer`` computes."""
    plain = tgl.GroupedLinear(G, K, N, **options)
    with torch.no_grad():
        for name in names_of(plain):
            getattr(plain, name).copy_(getattr(layer, name))
    return plain


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_computed_weight(kind, compiled, fresh_compiler):
    """Values, and gradients of what it is computed from; computed once in a call."""
    torch.manual_seed(0)
    options = OPTIONS[kind]
    layer = parametrized(tgl.GroupedLinear(G, K, N, **options))
    plain = same_without(layer, options)
    x = torch.randn(T, K, requires_grad=True)
    grad = torch.randn(T, N)
    buffers = {"out": torch.zeros(T, N), "dgrad_out": torch.zeros(T, K)} if kind == "out" else {}
    counts = [layer.parametrizations[name][0] for name in names_of(plain)]
    before = [c.calls for c in counts]
    call = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    y = call(x, SPLITS, **buffers)
    if not compiled:
        assert [c.calls - b for c, b in zip(counts, before)] == [1] * len(counts)
    want = plain(x, SPLITS)
    assert torch.equal(y, want)
    (dx,) = torch.autograd.grad(want, x, grad, retain_graph=True)
    want.backward(grad)
    x.grad = None
    y.backward(grad)
    assert torch.equal(x.grad, dx)
    for name in names_of(plain):
        part, held = getattr(plain, name).grad, layer.parametrizations[name]
        torch.testing.assert_close(held.original.grad, part * held[0].scale)
        torch.testing.assert_close(held[0].scale.grad, (part * held.original).sum())


@pytest.mark.parametrize("recipe", [None, MXFP8BlockScaling()], ids=["dense", "mxfp8"])
def test_an_mlp(recipe):
    torch.manual_seed(0)
    mlp = tgl.GroupedMLP(G, K, N, recipe=recipe)
    x = torch.randn(T, K)
    want = mlp(x, SPLITS)
    want.sum().backward()
    grads = [mlp.fc1.weight.grad, mlp.fc2.weight.grad]
    mlp.zero_grad()
    for layer in (mlp.fc1, mlp.fc2):
        parametrize.register_parametrization(layer, "weight", Scaled())
    before = [layer.parametrizations.weight[0].calls for layer in (mlp.fc1, mlp.fc2)]
    y = mlp(x, SPLITS)
    assert [layer.parametrizations.weight[0].calls for layer in (mlp.fc1, mlp.fc2)] == [b + 1 for b in before]
    torch.testing.assert_close(y, want)
    y.sum().backward()
    for layer, grad in zip((mlp.fc1, mlp.fc2), grads):
        torch.testing.assert_close(layer.parametrizations.weight.original.grad, grad * 1.5)


@pytest.mark.parametrize("single", [True, False])
def test_it_moves_saves_loads_and_initialises(single):
    layer = parametrized(tgl.GroupedLinear(G, K, N, single_grouped_weight=single, state_dict_format="packed"))
    x = torch.randn(T, K)
    want = layer(x, SPLITS, out=torch.zeros(T, N))
    torch.testing.assert_close(layer.double().float()(x, SPLITS), want)
    other = parametrized(tgl.GroupedLinear(G, K, N, single_grouped_weight=single, state_dict_format="packed"))
    other.load_state_dict(layer.state_dict())
    torch.testing.assert_close(other(x, SPLITS), want)
    other.reset_parameters()
    bound = K**-0.5
    weight = other.weight if single else other.weight0
    assert not torch.equal(other(x, SPLITS), want)
    assert 0.9 * bound < weight.abs().max() <= bound * (1 + 1e-6)


@pytest.mark.parametrize("option", ["delay_wgrad_compute", "fuse_wgrad_accumulation"])
@pytest.mark.parametrize("single", [True, False])
def test_gradients_that_autograd_does_not_see(option, single):
    """One error comes before any work; a call that needs none of these gradients runs."""
    layer = tgl.GroupedLinear(G, K, N, single_grouped_weight=single, **{option: True})
    name = "weight" if single else "weight1"
    parametrize.register_parametrization(layer, name, Scaled())
    with pytest.raises(ValueError, match=f"`{option}` must be False for a layer whose `{name}` is computed"):
        layer(torch.randn(T, K), SPLITS)
    with torch.no_grad():
        assert layer(torch.randn(T, K), SPLITS).shape == (T, N)
