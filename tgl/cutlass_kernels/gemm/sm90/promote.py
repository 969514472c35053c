"""The mainloop on FP8 operands: every stage is summed by itself, then added to the accumulator in float32.

Hopper's tensor cores add FP8 products with fewer bits than float32 has. They sum 128 products here, and from there on
additions are those of float32 registers, where a block's scales come in as well: a scale of its row of A and one of its
column of B, or of the matrix of B. They are read one stage ahead. While one warpgroup adds, the other one multiplies.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import warpgroup

from ...config import VARLEN_M
from ...schedule import Tile, ceil_div
from ...varlen.policy import Problem
from .load import Ring, advance, release
from .store import MMA_ROWS


class Factors(NamedTuple):
    """A thread's factors for a stage, in registers."""

    rows: cute.Tensor  # (half, M)
    columns: Any  # those of its columns where B has a scale for each
    matrix: Any  # one for all where B has that; belongs to the rows' product


@cute.jit
def multiply_promoted(
    gemm: cutlass.Constexpr,
    tiled_mma: cute.TiledMma,
    acc: cute.Tensor,
    a: cute.Tensor,
    b: cute.Tensor,
    scales: Any,
    ring: Ring,
    stage: Int32,
    phase: Int32,
    depth: Int32,
    tile: Tile,
    column: Int32,
    problem: Problem,
) -> tuple[Int32, Int32]:
    """``acc = A B`` over ``depth`` k tiles, zero if there is none; returns where the ring stands after them.

    Args:
        gemm: the ``GroupedGemm``.
        tiled_mma: the MMA of both warpgroups.
        acc: float32 registers ``((2, 2, N / 8), M, 1)``.
        a, b: descriptors of the operands, ``[MMA, M or N, K, stage]``.
        scales: those of blocks of A and of B in global memory, or None.
        ring, stage, phase: the ring and where it stands.
        depth: k tiles.
        tile, column: which tile, and its first column.
        problem: sizes and offsets.
    """
    policy, tile_k = gemm.policy, gemm.config.tile_k
    acc.fill(Float32(0))
    part = cute.make_rmem_tensor(tiled_mma.partition_shape_C((gemm.sharing * MMA_ROWS, gemm.config.tile_n)), Float32)
    factors, following = ones(gemm, scales, problem), ones(gemm, scales, problem)
    if cutlass.const_expr(scales is not None):
        fetch(gemm, scales, following, tile, column, Int32(0), problem)
        take(factors, following)
    whole = depth
    if cutlass.const_expr(policy.trims):
        whole = policy.depth(tile, problem) // tile_k
    for k in cutlass.range(whole, unroll=1):
        if cutlass.const_expr(scales is not None):
            fetch(gemm, scales, following, tile, column, k + 1, problem)
        add_stage(gemm, acc, part, a, b, factors, ring, stage, phase, None)
        if cutlass.const_expr(scales is not None):
            take(factors, following)
        stage, phase = advance(stage, phase, gemm.stages)
    if cutlass.const_expr(policy.trims):  # noqa: SIM102 - decided while tracing
        if whole < depth:
            left = policy.depth(tile, problem) - whole * tile_k
            add_stage(gemm, acc, part, a, b, factors, ring, stage, phase, left)
            stage, phase = advance(stage, phase, gemm.stages)
    return stage, phase


@cute.jit
def add_stage(
    gemm: cutlass.Constexpr,
    acc: cute.Tensor,
    part: cute.Tensor,
    a: cute.Tensor,
    b: cute.Tensor,
    factors: Factors,
    ring: Ring,
    stage: Int32,
    phase: Int32,
    left: Int32 | None,
):
    """Add the product of a stage to ``acc``, and give the stage back.

    Arguments are those of ``multiply_promoted``, and

    Args:
        part: registers for the sum of 64 rows.
        factors: of the thread's rows and columns.
        left: elements of the contraction that belong to the group, if not all: what lies behind a group in operands
            stored by place is the next one's.
    """
    blocks = cute.size(a, mode=[2])
    count = cute.size(acc, mode=[1])
    first, further = gemm.tiled_mma(True, True), gemm.tiled_mma(True, True)
    first.set(warpgroup.Field.ACCUMULATE, False)
    further.set(warpgroup.Field.ACCUMULATE, True)
    cute.arch.mbarrier_wait(ring.full + stage, phase)
    for m in cutlass.range_constexpr(count):
        a_part = cute.append_ones(a[None, m, None, stage], 3)  # [MMA, K, 1]
        warpgroup.fence()
        cute.gemm(first, part, a_part[None, 0, None], b[None, None, 0, stage], part)
        if cutlass.const_expr(left is not None):
            for block in cutlass.range(1, ceil_div(left, gemm.config.tile_k // blocks), unroll=1):
                cute.gemm(further, part, a_part[None, block, None], b[None, None, block, stage], part)
        else:
            for block in cutlass.range_constexpr(1, blocks):
                cute.gemm(further, part, a_part[None, block, None], b[None, None, block, stage], part)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        if cutlass.const_expr(m == count - 1):
            release(ring, stage, gemm.config.ctas)
        promote(acc[None, m, 0], part, m, factors)


@cute.jit
def promote(acc: cute.Tensor, part: cute.Tensor, m: cutlass.Constexpr, factors: Factors):
    """``acc += part``, each element times the factors of its row and its column.

    Args:
        acc, part: float32 registers of 64 rows per warpgroup; element ``(e, h, j)`` is in half ``h`` of the rows and in
            column ``8 j + e`` of the thread's.
        m: which 64 rows.
        factors: of the thread's rows and columns.
    """
    for i in cutlass.range(cute.size(part), unroll_full=True):
        value = part[i]
        if cutlass.const_expr(factors.columns is not None):
            value *= factors.columns[i % 2 + i // 4 * 2]
        acc[i] += value * factors.rows[i // 2 % 2 + 2 * m]


@cute.jit
def ones(gemm: cutlass.Constexpr, scales: Any, problem: Problem) -> Factors:
    """Factors of one, which the compiler must not know where there are no scales.

    It moves plain additions behind the next MMA, whose registers are theirs, and then waits for every single MMA.
    """
    config = gemm.config
    columns: Any = None
    matrix: Any = None
    rows = cute.make_rmem_tensor(2 * (config.tile_m // (gemm.sharing * MMA_ROWS)), Float32)
    one = Float32(1)
    if problem.rows < 0:
        one = Float32(0)
    rows.fill(one)
    if cutlass.const_expr(scales is not None):
        if cutlass.const_expr(gemm.policy.kind == VARLEN_M):
            matrix = cute.make_rmem_tensor(1, Float32)
        else:
            columns = cute.make_rmem_tensor(config.tile_n // 4, Float32)
    return Factors(rows, columns, matrix)


@cute.jit
def fetch(
    gemm: cutlass.Constexpr, scales: Any, factors: Factors, tile: Tile, column: Int32, k: Int32, problem: Problem
):
    """Begin to read the scales of stage ``k``; outside the operands the nearest ones, of which nothing is stored."""
    a, b = scales
    thread, _, _ = cute.arch.thread_idx()
    lane, warp, member = thread % 32, thread // 32 % 4, thread // 128 % gemm.sharing
    first = tile.m * gemm.config.tile_m + member * MMA_ROWS + warp * 16 + lane // 4
    for i in cutlass.range_constexpr(cute.size(factors.rows)):
        row = first + i // 2 * gemm.sharing * MMA_ROWS + 8 * (i % 2)
        if cutlass.const_expr(gemm.policy.kind == VARLEN_M):
            factors.rows[i] = a[_inside(tile.start + row, a, 0), _inside(k, a, 1)]
        else:
            factors.rows[i] = a[_place(gemm, tile, k, a), _inside(row, a, 1)]
    if cutlass.const_expr(gemm.policy.kind == VARLEN_M):
        block = column // gemm.form.block
        factors.matrix[0] = b[_inside(tile.group, b, 0), _inside(block, b, 1), _inside(k, b, 2)]
    else:
        line = b.iterator + Int64(_place(gemm, tile, k, b)) * b.stride[0]
        for j in cutlass.range_constexpr(gemm.config.tile_n // 8):
            at = cutlass.min(column + 8 * j + lane % 4 * 2, Int32(b.shape[1]) - 2)
            pair = cute.make_tensor((line + at).align(8), cute.make_layout(2))
            cute.autovec_copy(pair, cute.make_tensor(factors.columns.iterator + 2 * j, cute.make_layout(2)))


@cute.jit
def take(factors: Factors, fetched: Factors):
    """``factors = fetched``, with the matrix's factor in the rows'."""
    for i in cutlass.range_constexpr(cute.size(factors.rows)):
        factors.rows[i] = fetched.rows[i]
        if cutlass.const_expr(factors.matrix is not None):
            factors.rows[i] = fetched.rows[i] * fetched.matrix[0]
    if cutlass.const_expr(factors.columns is not None):
        factors.columns.store(fetched.columns.load())


def _inside(at: Int32, tensor: cute.Tensor, mode: int) -> Int32:
    return cutlass.min(at, Int32(tensor.shape[mode]) - 1)


def _place(gemm, tile: Tile, k: Int32, scales: cute.Tensor) -> Int32:
    """The row of ``[Tp / 128, features]`` scales for the group's ``k``-th block of tokens."""
    return _inside(tile.start // gemm.form.block + tile.group + k, scales, 0)
