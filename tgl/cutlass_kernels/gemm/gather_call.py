"""Shared parts, on every architecture, of GEMM kernels that gather rows of an operand by an index.

The operand is stored ``[S, columns]``, and row t of the grouped order is its row ``index[t]``. The grouped order is
that
of A's rows, or of the contraction in a weight gradient.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute

from ..config import VARLEN_K, VARLEN_M
from ..epilogue.vectors import EpilogueArgs
from ..reduce.partial_sums import PartialSumsKernel
from ..scheduler.groups import clamp

OPERANDS = {VARLEN_M: ("a",), VARLEN_K: ("a", "b")}
"""Operands that can be gathered, by problem kind."""


class Gathered(NamedTuple):
    """The operand that is gathered, in global memory."""

    values: cute.Tensor  # [S, columns], row-major
    index: cute.Tensor  # int32 [T]: the row of ``values`` that is row t of the grouped order


def check(kind: str, gathered: str | None, reason: str | None):
    """Check that kernels of a kind can gather an operand; None gathers nothing.

    Args:
        reason: why kernels of their tiling gather nothing, or None.

    Raises:
        ValueError: they cannot.
    """
    if gathered is None:
        return
    if gathered not in OPERANDS[kind]:
        raise ValueError(f"`gathered` must be None or one of {OPERANDS[kind]} for {kind}, not {gathered!r}")
    if reason is not None:
        raise ValueError(reason)


def index_at(source: Gathered, at: Int32) -> Int32:
    """Return the index at row ``at`` of the grouped order; past its end, the last entry."""
    return source.index[clamp(at, Int32(0), Int32(source.index.shape[0]) - 1)]


@cute.jit
def row_at(source: Gathered, found: Int32, at: Int32, end: Int32) -> Int32:
    """Return the operand's row for row ``at`` of the grouped order, given index entry ``found``; -1 from ``end`` on."""
    row = found
    if at >= end or row >= source.values.shape[0]:
        row = Int32(-1)
    return row


def read_index(source: Gathered, first: Int32, step: int, found: cute.Tensor):
    """Write to ``found`` the index at every ``step``-th row of the grouped order from ``first`` on.

    Past the end of the index it is the last entry: without branches, all reads are in flight at once.
    """
    for i in range(cute.size(found)):
        found[i] = index_at(source, first + i * step)


@cute.jit
def find_rows(
    source: Gathered, found: cute.Tensor, first: Int32, step: cutlass.Constexpr, end: Int32, rows: cute.Tensor
):
    """Write to ``rows`` the rows of the operand that ``found`` names; -1 from row ``end`` of the grouped order on.

    Entries past the end of the operand also become -1. Negative ones stay as they are: no row has a negative number.

    Args:
        found, first, step: as for ``read_index``.
    """
    for i in cutlass.range_constexpr(cute.size(rows)):
        rows[i] = row_at(source, found[i], first + i * step, end)


class GatheredCall:
    """Mixin before a GEMM kernel whose operand ``gathered`` is ``[S, ...]``."""

    start: Any

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        offs: cute.Tensor,
        out: cute.Tensor,
        bias: cute.Tensor | None,
        bias_scale: cute.Tensor | None,
        slots: cute.Tensor | None,
        begin: cute.Tensor | None,
        index: cute.Tensor,
        clusters: Int32,
        stream,
    ):
        """Launch. Arguments are those of the GEMM kernel, and ``index``, int32 ``[T]``."""
        args = EpilogueArgs(bias, bias_scale)
        self.start(a, b, None, offs, out, args, clusters, stream, slots=slots, begin=begin, index=index)


class GatheredActivatedCall:
    """Mixin before a kernel with an activation epilogue, on rows of ``a [S, K]``."""

    start: Any

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        offs: cute.Tensor,
        h: cute.Tensor | None,
        y: cute.Tensor,
        bias: cute.Tensor | None,
        probs: cute.Tensor | None,
        index: cute.Tensor,
        clusters: Int32,
        stream,
    ):
        """Launch. Arguments are those of ``ActivationKernelCall``, and ``index``, int32 ``[T]``."""
        args = EpilogueArgs(bias, None, probs=probs)
        self.start(a, b, None, offs, h, args, clusters, stream, y, index=index)


class GatheredGradientCall:
    """Mixin before a kernel with a dactivation epilogue, on rows of ``a [S, N]``."""

    start: Any

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        offs: cute.Tensor,
        dh: cute.Tensor,
        h: cute.Tensor,
        probs: cute.Tensor | None,
        sums: cute.Tensor | None,
        dprobs: cute.Tensor | None,
        act: cute.Tensor | None,
        index: cute.Tensor,
        clusters: Int32,
        stream,
    ):
        """Launch. Arguments are those of ``DactivationKernelCall``, and ``index``, int32 ``[T]``."""
        args, extra = EpilogueArgs(None, None), (h, probs, sums)
        self.start(a, b, None, offs, dh, args, clusters, stream, act, extra=extra, index=index)
        if cutlass.const_expr(sums is not None):
            PartialSumsKernel()(sums, dprobs, stream)
