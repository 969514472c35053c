"""Everything at once: a training run with all features on gives what the plain layers give in eager mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from _compiling import graph_breaks
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import tgl

G, H, I, T, TOP_K = 4, 64, 32, 48, 2
STEPS = 3
RECIPES: dict[str, Callable[[], Any]] = {
    "dense": lambda: None,
    "mxfp8": tgl.recipes.MXFP8BlockScaling,
    "nvfp4": tgl.recipes.NVFP4BlockScaling,
    "fp8 current": tgl.recipes.Float8CurrentScaling,
    "fp8 block": tgl.recipes.Float8BlockScaling,
}
RUNS: list[Any] = [(recipe, backend) for recipe in RECIPES for backend in ("eager", "aot_eager")]
# Inductor with any two of the features is in tests/models.
RUNS += [pytest.param(recipe, "inductor", marks=pytest.mark.slow) for recipe in ("dense", "mxfp8")]


class Block(nn.Module):
    """Router, dispatch, two expert MLPs in a row, combine.

    With ``features``: weight gradients go to ``main_grad`` and are put off, the first MLP writes into caller buffers
    and offloads its activations, the second is checkpointed and does not.
    """

    def __init__(self, recipe: Any, features: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.features = features
        options: dict[str, Any] = {"recipe": recipe, "bias": True}
        if features:
            options |= {"fuse_wgrad_accumulation": True, "delay_wgrad_compute": True}
        self.router = nn.Linear(H, G, bias=False)
        self.first = tgl.GroupedMLP(G, H, I, **options)
        self.second = tgl.GroupedMLP(G, H, I, activation="srelu", **options)

    def forward(self, x: Tensor, out: Tensor | None = None, dgrad_out: Tensor | None = None) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(TOP_K)
        routing = tgl.route(chosen, G)
        rows = tgl.dispatch(x, routing)
        with tgl.cpu_offload(enabled=self.features, min_bytes=0):
            rows = self.first.forward_offsets(rows, routing.offs, out=out, dgrad_out=dgrad_out)
            with tgl.cpu_offload(enabled=False):
                if self.features:
                    rows = checkpoint(self.second.forward_offsets, rows, routing.offs, use_reentrant=False)
                else:
                    rows = self.second.forward_offsets(rows, routing.offs)
        return tgl.combine(rows, routing, weights)

    @property
    def layers(self) -> list[tgl.GroupedLinear]:
        return [m for m in self.modules() if isinstance(m, tgl.GroupedLinear)]


def train(block: Block, forward: Callable) -> tuple[list[Tensor], list[Tensor]]:
    """A few steps of plain gradient descent; losses, and the parameters in the end."""
    buffers: tuple[Tensor, ...] = ()
    if block.features:
        rows = T * TOP_K
        buffers = torch.empty(rows, H), torch.empty(rows, H)
        for layer in block.layers:
            layer.weight.main_grad = torch.zeros(layer.weight.shape)
            layer.reserve_delayed_wgrad(rows)
    losses = []
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x = torch.randn(T, H, generator=generator)
        loss = forward(x, *buffers).square().mean()
        loss.backward()
        for layer in block.layers:
            layer.backward_dw()
        losses.append(loss.detach())
        with torch.no_grad():
            for p in block.parameters():
                if block.features and hasattr(p, "main_grad"):
                    assert p.grad is None
                    p -= 0.5 * p.main_grad
                    p.main_grad.zero_()
                else:
                    p -= 0.5 * p.grad
                    p.grad = None
    return losses, [p.detach() for p in block.parameters()]


@pytest.mark.cover(1)
@pytest.mark.parametrize("recipe, backend", RUNS)
def test_training_with_everything_on(recipe: str, backend: str) -> None:
    plain = Block(RECIPES[recipe](), features=False)
    want_losses, want = train(plain, plain)
    assert want_losses[-1] < want_losses[0]

    block = Block(RECIPES[recipe](), features=True)
    counter = CompileCounterWithBackend(backend)
    forward = block if backend == "eager" else torch.compile(block, backend=counter, fullgraph=True)
    losses, parameters = train(block, forward)
    for have, exact in zip([*losses, *parameters], [*want_losses, *want], strict=True):
        if backend == "eager":
            assert torch.equal(have, exact)
        else:  # expressions round a weighted row before they add it, `embedding_bag` makes a fused multiply-add of both
            torch.testing.assert_close(have, exact, rtol=1e-5, atol=1e-6)
    assert counter.frame_count == (0 if backend == "eager" else 1)
    assert graph_breaks() == 0
