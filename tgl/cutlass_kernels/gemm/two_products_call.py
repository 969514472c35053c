"""Shared parts, on every architecture, of GEMM kernels that add the product of a second pair of operands.

``a [T, K] x b [G, K, N] + low [T, R] x up [G, R, N]`` is one contraction of ``K + R`` whose operands come from two
places: the load warp fills stages from the first pair and then from the second, and the consumer warps see no
difference. Each pair begins with a stage of its own, and its last stage is filled up with zeros. Because R is small,
MMAs past the end of the second pair, which would multiply nothing but zeros, are left out.
"""

from typing import Any

from cutlass import Int32, cute

from ..epilogue.vectors import EpilogueArgs
from ..scheduler import ceil_div
from ..scheduler.problem import Problem


class TwoProducts:
    """Mixin before a GEMM kernel that adds a second pair of operands."""

    paired = True
    policy: Any
    start: Any

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.policy.trims = True


class TwoProductsCall(TwoProducts):
    """``__call__`` of kernels whose epilogue adds at most a bias."""

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        low: cute.Tensor,
        up: cute.Tensor,
        offs: cute.Tensor,
        out: cute.Tensor,
        bias: cute.Tensor | None,
        bias_scale: cute.Tensor | None,
        clusters: Int32,
        stream,
    ):
        """Launch. Tensors have the shapes of the op; ``up`` has the memory order of ``b``."""
        self.start(a, b, None, offs, out, EpilogueArgs(bias, bias_scale), clusters, stream, pair=(low, up))


class TwoProductsActivationCall(TwoProducts):
    """``__call__`` of kernels whose epilogue has an activation."""

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        low: cute.Tensor,
        up: cute.Tensor,
        offs: cute.Tensor,
        h: cute.Tensor,
        y: cute.Tensor,
        bias: cute.Tensor | None,
        probs: cute.Tensor | None,
        clusters: Int32,
        stream,
    ):
        """Launch. Tensors have the shapes of the op; ``up`` has the memory order of ``b``."""
        self.start(a, b, None, offs, h, EpilogueArgs(bias, None, probs=probs), clusters, stream, y, pair=(low, up))


def lengthened(problem: Problem, low: cute.Tensor, tile_k: int) -> Problem:
    """Return ``problem`` with the contraction of both pairs, the first in whole stages."""
    return problem._replace(depth=ceil_div(problem.depth, tile_k) * tile_k + Int32(low.shape[1]))
