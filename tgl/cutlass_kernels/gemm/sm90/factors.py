"""Scales of blocks on their way to the accumulators: into the ring with the operands of a stage, then into registers.

A stage has a factor for each of its rows of A and for each of its columns of B, or one for all of them where B is a
matrix of square blocks. Scales are float32 and begin anywhere, so no tensor map reads them: a warp copies them four
bytes a lane, and its copies arrive at the stage's barrier like the operands.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync

from ...config import VARLEN_K, VARLEN_M, GemmConfig
from ...tiles import Tile, ceil_div
from ...tiles.policy import Problem
from ..scaling import OperandFormat
from .load import Ring, advance
from .store import MMA_ROWS

LANES = 32


class Factors(NamedTuple):
    """A thread's factors, in registers."""

    rows: cute.Tensor  # of the two halves of 64 rows
    columns: Any  # those of its columns where B has a scale for each


def factor_count(kind: str, config: GemmConfig, form: OperandFormat) -> int:
    """Factors of a stage: of its rows, then of its columns. One for the matrix takes 16 bytes."""
    if not form.block:
        return 0
    return config.tile_m + (config.tile_n if kind == VARLEN_K else 4)


@cute.jit
def load_factors(
    gemm: cutlass.Constexpr,
    scales: Any,
    buffers: cute.Tensor,
    ring: Ring,
    problem: Problem,
    rank: Int32,
    first: Int32,
    step: Int32,
):
    """Load the factors of every tile from ``first`` on in steps of ``step``; one warp calls it.

    Args:
        gemm: the ``GroupedGemm``.
        scales: of A and of B, in global memory.
        buffers: shared memory ``[factors, stages]``.
        ring: barriers.
        problem: sizes and offsets.
        rank: of this CTA in its cluster.
    """
    policy, config = gemm.policy, gemm.config
    a, b = scales
    along = 1 if cutlass.const_expr(policy.kind == VARLEN_M) else 0
    lane = cute.arch.lane_idx()
    stage, phase = Int32(0), Int32(0)
    search = policy.start(problem)
    search, tile = policy.find(search, first, problem)
    while tile.valid:
        column = (tile.n * config.ctas + rank) * config.tile_n
        rows, columns = _lines(gemm, a, b, tile, column, lane)
        for k in cutlass.range(ceil_div(policy.depth(tile, problem), config.tile_k), unroll=1):
            cute.arch.mbarrier_wait(ring.empty + stage, phase ^ 1)
            into = buffers[None, stage].iterator + lane
            for i in cutlass.range_constexpr(len(rows)):
                _copy(rows[i] + Int64(k) * a.stride[along], into + i * LANES)
            if cutlass.const_expr(policy.kind == VARLEN_K):
                for i in cutlass.range_constexpr(len(columns)):
                    _copy(columns[i] + Int64(k) * b.stride[0], into + config.tile_m + i * LANES)
            else:
                if lane == 0:
                    _copy(columns[0] + k, into + config.tile_m)
            cute.arch.cp_async_mbarrier_arrive_noinc(ring.full + stage)
            stage, phase = advance(stage, phase, gemm.stages)
        first += step
        search, tile = policy.find(search, first, problem)


def _lines(gemm, a: cute.Tensor, b: cute.Tensor, tile: Tile, column: Int32, lane: Int32) -> tuple[list, list]:
    """A lane's first factors of rows and of columns; outside the operands the nearest ones, which reach no output."""
    config, block = gemm.config, gemm.form.block
    rows = [tile.m * config.tile_m + i * LANES + lane for i in range(config.tile_m // LANES)]
    if gemm.policy.kind == VARLEN_M:
        inside = [_inside(tile.start + row, a, 0) for row in rows]
        matrix = Int64(tile.group) * b.stride[0] + Int64(_inside(column // block, b, 1)) * b.stride[1]
        return [a.iterator + Int64(row) * a.stride[0] for row in inside], [b.iterator + matrix]
    place = Int64(tile.start // block + tile.group)  # the group's first row of [Tp / 128, features]
    columns = [column + i * LANES + lane for i in range(config.tile_n // LANES)]
    a_line, b_line = a.iterator + place * a.stride[0], b.iterator + place * b.stride[0]
    return [a_line + _inside(row, a, 1) for row in rows], [b_line + _inside(at, b, 1) for at in columns]


def _inside(at: Int32, tensor: cute.Tensor, mode: int) -> Int32:
    return cutlass.min(at, Int32(tensor.shape[mode]) - 1)


def _copy(source: cute.Pointer, target: cute.Pointer):
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(), Float32, num_bits_per_copy=Float32.width)
    one = cute.make_layout(1)
    cute.copy(atom, cute.make_tensor(source, one), cute.make_tensor(target, one))


@cute.jit
def ones(gemm: cutlass.Constexpr, problem: Problem) -> Factors:
    """Factors of one, which the compiler must not know where there are no scales.

    It moves plain additions behind the next MMA, whose registers are theirs, and then waits for every single MMA.
    """
    config = gemm.config
    columns: Any = None
    rows = cute.make_rmem_tensor(2, Float32)
    one = Float32(1)
    if problem.rows < 0:
        one = Float32(0)
    rows.fill(one)
    if cutlass.const_expr(gemm.form.block and gemm.policy.kind == VARLEN_K):
        columns = cute.make_rmem_tensor(config.tile_n // 4, Float32)
    return Factors(rows, columns)


@cute.jit
def read_rows(gemm: cutlass.Constexpr, buffer: cute.Tensor, factors: Factors, m: cutlass.Constexpr):
    """A thread's factors for the ``m``-th 64 rows of its warpgroup, times the matrix's where B has one factor."""
    thread, _, _ = cute.arch.thread_idx()
    lane, warp, member = thread % 32, thread // 32 % 4, thread // 128 % gemm.sharing
    first = (m * gemm.sharing + member) * MMA_ROWS + warp * 16 + lane // 4
    for half in cutlass.range_constexpr(2):
        factors.rows[half] = buffer[first + 8 * half]
        if cutlass.const_expr(factors.columns is None):
            factors.rows[half] *= buffer[gemm.config.tile_m]


@cute.jit
def read_columns(
    gemm: cutlass.Constexpr, buffer: cute.Tensor, factors: Factors, first: cutlass.Constexpr, end: cutlass.Constexpr
):
    """A thread's factors for its pairs ``[first, end)`` of columns, where B has a factor for each column."""
    if cutlass.const_expr(factors.columns is not None):
        lane = cute.arch.lane_idx()
        layout = cute.make_layout((2, 4, gemm.config.tile_n // 8), stride=(1, 2, 8))
        columns = cute.make_tensor(buffer.iterator + gemm.config.tile_m, layout)
        for j in cutlass.range_constexpr(first, end):
            own = cute.make_tensor(factors.columns.iterator + 2 * j, cute.make_layout(2))
            cute.autovec_copy(columns[None, lane % 4, j], own)
