"""Block scales on their way from a stage of the ring into the registers of the consumers; see ``gemm.factors``."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, cute

from ...config import VARLEN_K, VARLEN_M
from ...scheduler.problem import Problem
from ..factors import column_factors
from .store import MMA_ROWS


class FactorRegisters(NamedTuple):
    """A thread's factors, in registers."""

    rows: cute.Tensor  # for both halves of 64 rows, and for each factor of the tile's columns
    columns: Any  # factors of its columns if B has a scale for each
    place: Any  # ``place_of`` the thread where warpgroups alternate, else None: found anew in every stage


@cute.jit
def ones(gemm: cutlass.Constexpr, problem: Problem) -> FactorRegisters:
    """Return factors of one that are opaque to the compiler, for operands without block scales.

    With known ones it moves plain additions behind the next MMA, whose registers are theirs, and waits for every MMA.
    """
    config = gemm.config
    columns: Any = None
    rows = cute.make_rmem_tensor(2 * pieces_of(gemm), Float32)
    one = Float32(1)
    if problem.rows < 0:
        one = Float32(0)
    rows.fill(one)
    if cutlass.const_expr(gemm.form.block and gemm.policy.kind == VARLEN_K):
        columns = cute.make_rmem_tensor(config.tile_n // 4, Float32)
    place: Any = None
    if cutlass.const_expr(gemm.alternates):
        # Opaque to the compiler, which would otherwise find it anew between the MMAs of every stage.
        place = tuple(cute.arch.shuffle_sync_bfly(at, 0) for at in place_of(gemm))
    return FactorRegisters(rows, columns, place)


def place_of(gemm: Any, m: int = 0) -> tuple[Int32, Int32]:
    """Return a thread's first row of the ``m``-th 64 of each warpgroup, and its pair of every 8 columns."""
    thread, _, _ = cute.arch.thread_idx()
    lane, warp, member = thread % 32, thread // 32 % 4, thread // 128 % gemm.sharing
    return (m * gemm.sharing + member) * MMA_ROWS + warp * 16 + lane // 4, lane % 4


def pieces_of(gemm: Any) -> int:
    """Return the number of column factors that a thread's row factors are multiplied by beforehand."""
    square = gemm.form.block and gemm.policy.kind == VARLEN_M
    return column_factors(gemm.config, gemm.form) if square else 1


@cute.jit
def read_rows(gemm: cutlass.Constexpr, buffer: cute.Tensor, factors: FactorRegisters, m: cutlass.Constexpr):
    """Read a thread's factors for the ``m``-th 64 rows of its warpgroup, times those of square blocks."""
    if cutlass.const_expr(factors.place is None):
        first, _ = place_of(gemm, m)
    else:
        first = factors.place[0] + m * gemm.sharing * MMA_ROWS
    for half in cutlass.range_constexpr(2):
        row = buffer[first + 8 * half]
        for piece in cutlass.range_constexpr(pieces_of(gemm)):
            if cutlass.const_expr(factors.columns is None):
                factors.rows[half + 2 * piece] = row * buffer[gemm.config.tile_m + piece]
            else:
                factors.rows[half] = row


@cute.jit
def read_columns(
    gemm: cutlass.Constexpr,
    buffer: cute.Tensor,
    factors: FactorRegisters,
    first: cutlass.Constexpr,
    end: cutlass.Constexpr,
):
    """Read a thread's factors for its pairs ``[first, end)`` of columns, if B has a factor for each column."""
    if cutlass.const_expr(factors.columns is not None):
        _, pair = place_of(gemm) if cutlass.const_expr(factors.place is None) else factors.place
        layout = cute.make_layout((2, 4, gemm.config.tile_n // 8), stride=(1, 2, 8))
        columns = cute.make_tensor(buffer.iterator + gemm.config.tile_m, layout)
        for j in cutlass.range_constexpr(first, end):
            own = cute.make_tensor(factors.columns.iterator + 2 * j, cute.make_layout(2))
            cute.autovec_copy(columns[None, pair, j], own)
