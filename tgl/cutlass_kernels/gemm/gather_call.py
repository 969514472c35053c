"""What GEMM kernels that read rows of an operand by an index share on every architecture.

An operand is stored ``[S, columns]``, and row t of the grouped order is its row ``index[t]``. The grouped order is that
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
"""Which operand may be gathered, by kind of problem."""


class Gathered(NamedTuple):
    """The operand that is gathered, in global memory."""

    values: cute.Tensor  # [S, columns], row-major
    index: cute.Tensor  # int32 [T]: the row of ``values`` that is row t of the grouped order


def check(kind: str, gathered: str | None, reason: str | None):
    """Whether kernels of a kind can gather an operand; None is none.

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
    """What the index says of row ``at`` of the grouped order; of its last row where it has no row ``at``."""
    return source.index[clamp(at, Int32(0), Int32(source.index.shape[0]) - 1)]


@cute.jit
def row_at(source: Gathered, found: Int32, at: Int32, end: Int32) -> Int32:
    """The row of the operand that ``found`` names for row ``at`` of the grouped order; -1 from row ``end`` on."""
    row = found
    if at >= end or row >= source.values.shape[0]:
        row = Int32(-1)
    return row


def read_index(source: Gathered, first: Int32, step: int, found: cute.Tensor):
    """Write to ``found`` what the index says of every ``step``-th row of the grouped order from ``first`` on.

    Behind the index it is the last row's: without branches, all reads are on their way at once.
    """
    for i in range(cute.size(found)):
        found[i] = index_at(source, first + i * step)


@cute.jit
def find_rows(
    source: Gathered, found: cute.Tensor, first: Int32, step: cutlass.Constexpr, end: Int32, rows: cute.Tensor
):
    """Write to ``rows`` those of the operand that ``found`` names; -1 from row ``end`` of the grouped order on.

    So it is for numbers behind the operand. Negative ones stay as they are: no row has these either.

    Args:
        found, first, step: of ``read_index``.
    """
    for i in cutlass.range_constexpr(cute.size(rows)):
        rows[i] = row_at(source, found[i], first + i * step, end)


class GatheredCall:
    """Goes before a GEMM kernel whose operand ``gathered`` is ``[S, ...]``."""

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
        """Launch; arguments of the GEMM kernel and ``index``, int32 ``[T]``."""
        args = EpilogueArgs(bias, bias_scale)
        self.start(a, b, None, offs, out, args, clusters, stream, slots=slots, begin=begin, index=index)


class GatheredActivatedCall:
    """Goes before an ``ActivatedGroupedGemm`` on rows of ``a [S, K]``."""

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
        """Launch; arguments of ``ActivatedGroupedGemm`` and ``index``, int32 ``[T]``."""
        args = EpilogueArgs(bias, None, probs=probs)
        self.start(a, b, None, offs, h, args, clusters, stream, y, index=index)


class GatheredGradientCall:
    """Goes before a ``GradientGroupedGemm`` on rows of ``a [S, N]``."""

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
        """Launch; arguments of ``GradientGroupedGemm`` and ``index``, int32 ``[T]``."""
        args, extra = EpilogueArgs(None, None), (h, probs, sums)
        self.start(a, b, None, offs, dh, args, clusters, stream, act, extra=extra, index=index)
        if cutlass.const_expr(sums is not None):
            PartialSumsKernel()(sums, dprobs, stream)
