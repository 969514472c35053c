"""Peak memory of a compiled step of the block, in tensors by name.

On a CPU, of the ops that a graph for a GPU calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import tgl
from tests.peak_memory import peak_memory

FLOAT = 4


class Sizes(NamedTuple):
    """Experts, tokens, choices of each, width, and width of the activation."""

    groups: int
    tokens: int
    top_k: int
    width: int
    inner: int


def step_of_the_block(sizes: Sizes) -> Callable[[str | None], int]:
    """The peak of a step under a backend, or eagerly, in numbers of float32."""
    groups, tokens, top_k, width, inner = sizes
    shapes = (tokens, width), (tokens, top_k), (groups, width, 2 * inner), (groups, inner, width)
    leaves = [torch.randn(shape).requires_grad_() for shape in shapes]
    source, position, offs, _, token = tgl.route(torch.arange(tokens * top_k).view(tokens, top_k) % groups, groups)
    dy = torch.randn(tokens, width)

    def block(x: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return torch.ops.tgl.moe(x, w1, w2, source, position, token, offs, weights, top_k=top_k)[0]

    def peak(backend: str | None) -> int:
        call = block if backend is None else torch.compile(block, backend=backend, fullgraph=True, dynamic=False)
        return peak_memory(lambda: torch.autograd.grad(call(*leaves), leaves, dy)) // FLOAT

    return peak


# Of one of them the weights are more than the pre-activation, of the other one less.
SIZES = Sizes(16, 256, 2, 64, 64), Sizes(2, 256, 4, 64, 64)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("sizes", SIZES, ids=["wide weights", "many rows"])
def test_the_backward_frees_the_pre_activation(sizes: Sizes, backend: str) -> None:
    """The pre-activation is held beside the gradient of the second weight, not beside that of the first one."""
    groups, tokens, top_k, width, inner = sizes
    peak, rows = step_of_the_block(sizes), tokens * top_k
    hidden, second, own = rows * 2 * inner, groups * inner * width, tokens * width
    # y, the hidden activations, their gradient, and two matrices that it, or then the second weight's, is made of.
    early = own + 2 * hidden + rows * (inner + width)
    held = early + second
    # y, that gradient alone, a matrix of rows, dx, dw1 and dw2.
    late = own + hidden + rows * width + own + 3 * second
    places = 16 * rows  # integers, weights and their gradients
    assert max(early, late) <= peak(None) <= max(early, late) + places
    assert peak(backend) <= max(held, late) + places
