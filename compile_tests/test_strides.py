"""A layer and a loss as one graph, whose gradients lie at strides of autograd's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from _compiling import graph_breaks
from torch import Tensor, nn

import tgl

G, H, I, T = 4, 16, 32, 12
SPLITS = torch.tensor([3, 0, 8, 1])
INDEX = torch.randint(G, (T, 2), generator=torch.Generator().manual_seed(1))
SCALES = torch.rand(T, 2, generator=torch.Generator().manual_seed(2))
FACTORS = torch.tensor([0.25, 0.5])
LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "spectrum": lambda y: torch.fft.rfft(y, dim=-1).abs().sum(),
    "spectrum over tokens": lambda y: torch.fft.rfft(y, dim=0).abs().sum(),
    "complex": lambda y: torch.complex(y.flip(0), y).conj().abs().square().sum(),
    "weighted stack": lambda y: (torch.stack([y, 2 * y], -1) * FACTORS).square().sum(),
}
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple]] = {
    "linear": (lambda: tgl.GroupedLinear(G, H, H), (SPLITS,)),
    "discrete": (lambda: tgl.GroupedLinear(G, H, H, single_grouped_weight=False), (SPLITS,)),
    "recipe": (lambda: tgl.GroupedLinear(G, H, H, recipe=tgl.recipes.MXFP8BlockScaling()), (SPLITS,)),
    "moe": (lambda: tgl.MoE(G, H, I), (INDEX, SCALES)),
    "low rank": (lambda: tgl.GroupedLoRALinear(tgl.GroupedLinear(G, H, H), 4), (SPLITS,)),
}


def gradients(layer: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    leaves = [x, *(p for p in layer.parameters() if p.requires_grad)]
    return list(torch.autograd.grad(run(x), leaves))


@pytest.mark.cover(1)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("kind", LAYERS)
def test_whole_steps(kind: str, loss: str, backend: str) -> None:
    make, routing = LAYERS[kind]
    torch.manual_seed(0)
    layer, x = make(), torch.randn(T, H)

    def run(x: Tensor) -> Tensor:
        return LOSSES[loss](layer(x, *routing))

    wanted = gradients(layer, run, x)
    found = gradients(layer, torch.compile(run, backend=backend, fullgraph=True), x)
    assert graph_breaks() == 0
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("loss", LOSSES)
def test_an_eager_loss_of_a_compiled_layer(loss: str) -> None:
    torch.manual_seed(0)
    layer, x = tgl.MoE(G, H, I), torch.randn(T, H)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    wanted = gradients(layer, lambda x: LOSSES[loss](layer(x, INDEX, SCALES)), x)
    found = gradients(layer, lambda x: LOSSES[loss](compiled(x, INDEX, SCALES)), x)
    torch.testing.assert_close(found, wanted)


def test_strides_of_operands_make_no_further_graph() -> None:
    """One graph whose number of rows is a symbol serves operands with gaps as it does others of their kind."""
    compiled = torch.compile(tgl.grouped_gemm, backend="aot_eager", fullgraph=True, dynamic=True)
    b, offs = torch.randn(G, H, I), torch.tensor([3, 3, 11, 12], dtype=torch.int32)
    for rows in (12, 20):
        a = torch.randn(rows, 2 * H)[:, ::2]
        torch.testing.assert_close(compiled(a, b, offs), tgl.grouped_gemm(a, b, offs))
