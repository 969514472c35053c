"""Layers whose gradients or inputs have any strides: the bits that contiguous ones give."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import tgl
from tests.odd_strides import MATRICES, laid_out, plain
from tgl import recipes

G, H, I, TOKENS = 4, 64, 128, 37
INDEX = torch.randint(G, (TOKENS, 2), generator=torch.Generator().manual_seed(1))
RECIPES = {
    "mxfp8": recipes.MXFP8BlockScaling,
    "nvfp4": recipes.NVFP4BlockScaling,
    "fp8_current": recipes.Float8CurrentScaling,
    "fp8_delayed": recipes.DelayedScaling,
    "fp8_block": recipes.Float8BlockScaling,
}


class OfTokens(nn.Module):
    """A layer of tokens as one of its input alone."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.scores = nn.Parameter(torch.rand(TOKENS, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x, INDEX, self.scores)


class OfRows(nn.Module):
    """A layer of rows as one of its input alone."""

    def __init__(self, layer: nn.Module, *, probs: bool = False) -> None:
        super().__init__()
        self.layer = layer
        self.probs = nn.Parameter(torch.rand(TOKENS)) if probs else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        splits = torch.tensor([5, 0, 30, 1])
        return self.layer(x, splits) if self.probs is None else self.layer(x, splits, probs=self.probs)


def linear(**options):
    return tgl.GroupedLinear(G, H, H, **{"bias": True, **options})


def sequential():
    return tgl.Sequential(linear(), linear(bias=False))


def low_rank_mlp():
    mlp = tgl.GroupedMLP(G, H, I)
    mlp.fc1, mlp.fc2 = (tgl.GroupedLoRALinear(fc.requires_grad_(False), 8) for fc in (mlp.fc1, mlp.fc2))
    return mlp


LAYERS = {
    "linear": lambda: OfRows(linear()),
    "linear, discrete": lambda: OfRows(linear(single_grouped_weight=False)),
    "linear, input kept": lambda: OfRows(linear(save_original_input=True, recipe=recipes.MXFP8BlockScaling())),
    "mlp": lambda: OfRows(tgl.GroupedMLP(G, H, I, bias=True), probs=True),
    "moe": lambda: OfTokens(tgl.MoE(G, H, I)),
    "sequential": lambda: OfRows(sequential()),
    "low rank": lambda: OfRows(tgl.GroupedLoRALinear(linear(), 8)),
    "low rank, activated": lambda: OfRows(low_rank_mlp()),
    "packed": lambda: OfRows(tgl.GroupedPackedLinear(G, H, H)),
    "low rank, packed": lambda: OfRows(tgl.GroupedLoRALinear(tgl.GroupedPackedLinear(G, H, H), 8)),
    **{f"linear, {name}": lambda recipe=recipe: OfRows(linear(recipe=recipe())) for name, recipe in RECIPES.items()},
    **{
        f"linear, discrete, {name}": lambda recipe=recipe: OfRows(linear(recipe=recipe(), single_grouped_weight=False))
        for name, recipe in RECIPES.items()
    },
    **{
        f"moe, {name}": lambda recipe=recipe: OfTokens(tgl.MoE(G, H, I, recipe=recipe()))
        for name, recipe in RECIPES.items()
    },
}


PLAIN = ["linear", "mlp", "moe", "sequential", "low rank", "low rank, activated"]
"""Layers whose gradients have derivatives."""


def made(kind):
    torch.manual_seed(0)
    return LAYERS[kind](), torch.randn(TOKENS, H, dtype=torch.bfloat16 if "packed" in kind else torch.float32)


def step(layer, x, cotangent):
    """The result and all gradients, of a copy of the layer: some recipes keep a state."""
    layer, x = copy.deepcopy(layer), x.detach().requires_grad_()
    y = layer(x)
    leaves = {"x": x, **{name: p for name, p in layer.named_parameters() if p.requires_grad}}
    return {"y": y, **dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), cotangent(y))))}


def same(found, wanted, where):
    assert found.keys() == wanted.keys()
    for name, t in wanted.items():
        assert torch.equal(found[name], t), f"{where}: {name}"


@pytest.mark.parametrize("kind", LAYERS)
def test_gradients_and_inputs(kind):
    layer, x = made(kind)
    for where in MATRICES:
        odd = laid_out(torch.randn_like(x), where)
        same(step(layer, x, lambda y, odd=odd: odd), step(layer, x, lambda y, odd=odd: plain(odd)), where)
    for where in ("every other element", "turned, with gaps", "negative", "one value"):
        odd, grad = laid_out(x, where), torch.randn_like(x)
        same(step(layer, odd, lambda y, g=grad: g), step(layer, plain(odd), lambda y, g=grad: g), f"x, {where}")


class AsContiguous(torch.autograd.Function):
    """The identity, whose gradient is made contiguous."""

    @staticmethod
    def forward(ctx, y):
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad):
        return plain(grad)


LOSSES = {
    "spectrum": lambda y: torch.fft.rfft(y, dim=-1).abs().sum(),
    "spectrum over tokens": lambda y: torch.fft.rfft(y, dim=0).abs().sum(),
    "complex": lambda y: torch.complex(y.flip(0), y).conj().abs().square().sum(),
    "imaginary": lambda y: (torch.complex(y.flip(0), y).conj().imag * y).sum(),
    "weighted stack": lambda y: (torch.stack([y, 2 * y], -1) * torch.tensor([0.25, 0.5])).square().sum(),
    "sum": torch.sum,
    "one column": lambda y: (y * torch.arange(TOKENS)[:, None]).sum(),
}
"""Losses whose gradients come at strides that autograd chooses."""


@pytest.mark.parametrize("kind", ["linear", "moe", "mlp", "low rank", "linear, fp8_block"])
@pytest.mark.parametrize("loss", LOSSES)
def test_losses(kind, loss):
    layer, x = made(kind)
    found, wanted = [
        step_of(copy.deepcopy(layer), x, lambda y, last=last: LOSSES[loss](last(y)))
        for last in (lambda y: y, AsContiguous.apply)
    ]
    same(found, wanted, loss)


def step_of(layer, x, loss):
    x = x.detach().requires_grad_()
    loss(layer(x)).backward()
    return {"x": x.grad, **{name: p.grad for name, p in layer.named_parameters() if p.requires_grad}}


@pytest.mark.parametrize("kind", PLAIN)
def test_second_order(kind):
    """A penalty on the spectrum of the gradient of the input."""
    layer, x = made(kind)

    def penalty(loss):
        def of_result(y):
            (grad,) = torch.autograd.grad(loss(y), inputs, create_graph=True)
            return torch.fft.rfft(grad, dim=-1).abs().sum() + torch.fft.rfft(grad, dim=0).abs().sum()

        here = copy.deepcopy(layer)
        inputs = x.detach().requires_grad_()
        of_result(here(inputs)).backward()
        return {"x": inputs.grad, **{n: p.grad for n, p in here.named_parameters() if p.grad is not None}}

    found = penalty(lambda y: torch.fft.rfft(y, dim=-1).abs().sum())
    wanted = penalty(lambda y: torch.fft.rfft(AsContiguous.apply(y), dim=-1).abs().sum())
    assert any(t.any() for t in wanted.values())
    assert found.keys() == wanted.keys()
    for name, t in wanted.items():
        torch.testing.assert_close(found[name], t, msg=lambda text, name=name: f"{name}: {text}")


SCORES = {
    "softmax": {},
    "renormalised": {"renormalize": True},
    "groups": {"score_function": "sigmoid", "renormalize": True, "num_groups": 3, "topk_groups": 2},
}


@pytest.mark.parametrize("where", MATRICES)
@pytest.mark.parametrize("scores", SCORES)
def test_router(scores, where):
    """Logits, and the gradients of weights and losses."""
    logits, weights = torch.randn(TOKENS, 6), torch.randn(TOKENS, 2)

    def step(layout):
        x = layout(logits).detach().requires_grad_()
        made = tgl.topk_router(x, 2, losses=True, **SCORES[scores])
        loss = made.load_balancing_loss + made.z_loss
        (gradient,) = torch.autograd.grad([made.weights, loss], x, [layout(weights), None])
        return {"index": made.top_k_index, "weights": made.weights, "loss": loss, "gradient": gradient}

    same(step(lambda t: laid_out(t, where)), step(lambda t: plain(laid_out(t, where))), where)


@pytest.mark.parametrize("where", MATRICES)
def test_routing(where):
    """Rows of tokens, the sum over a token's rows, and the gradients of both."""
    routing = tgl.route(INDEX, G)
    x, scores, rows, dy = (torch.randn(n, c) for n, c in ((TOKENS, H), (TOKENS, 2), (2 * TOKENS, H), (TOKENS, H)))

    def step(layout):
        leaves = [layout(t).detach().requires_grad_() for t in (x, scores, rows)]
        found = [tgl.dispatch(leaves[0], routing), tgl.combine(leaves[2], routing, leaves[1])]
        gradients = torch.autograd.grad(found, leaves, [layout(rows), layout(dy)])
        return dict(enumerate((*found, *gradients)))

    same(step(lambda t: laid_out(t, where)), step(lambda t: plain(laid_out(t, where))), where)
