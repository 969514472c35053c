"""The product with a matrix of low rank for every group, and its addition to another product."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..ops.grouped_gemm import grouped_gemm


class LowRank(NamedTuple):
    """An update ``scaling * b[g] a[g]`` of the matrix of every group.

    Attributes:
        a: ``[G, r, K]``.
        b: ``[G, N, r]``.
        scaling: multiplies the result of ``a``, which is the smallest of the tensors.
    """

    a: Tensor
    b: Tensor
    scaling: float


def add_low_rank(y: Tensor, x: Tensor, update: LowRank, offs: Tensor) -> Tensor:
    """``y[t] + scaling * b[g] a[g] x[t]`` for the rows of group ``g``, as two grouped GEMMs and one addition.

    The matrices ``b[g] a[g]`` are never formed. The addition goes into the memory of the second product, so that the
    call holds two tensors of the size of ``y`` and not three. ``x`` and the ``[T, r]`` between the products are what
    autograd saves beside the parameters.

    Args:
        y: ``[T, N]``.
        x: ``[T, K]``; its tail is not read.
        update: of ``x``'s dtype, or cast by autocast.
        offs: int32 ``[G]``: cumulative group ends.
    """
    hidden = grouped_gemm(x, update.a.transpose(1, 2), offs)
    return grouped_gemm(hidden * update.scaling, update.b.transpose(1, 2), offs).add_(y)
