"""The mainloop on FP8 operands: every stage is summed by itself, then added to the accumulator in float32.

Hopper's tensor cores add FP8 products with fewer bits than float32 has. They sum 128 products here, and from there on
additions are those of float32 registers, where a block's scales come in as well: a scale of its row of A and one of its
column of B, or of the matrix of B. While one warpgroup adds, the other one multiplies.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import warpgroup

from ...config import VARLEN_M
from ...schedule import Tile, ceil_div
from ...varlen.policy import Problem
from .load import Ring, advance, release
from .store import MMA_ROWS


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
    config, policy = gemm.config, gemm.policy
    blocks = cute.size(a, mode=[2])
    acc.fill(Float32(0))
    part = cute.make_rmem_tensor(tiled_mma.partition_shape_C((gemm.sharing * MMA_ROWS, config.tile_n)), Float32)
    for k in cutlass.range(depth, unroll=1):
        factors: Any = ones(acc, problem)
        if cutlass.const_expr(scales is not None):
            factors = load_scales(gemm, scales, tile, column, k, problem)
        inside = blocks
        if cutlass.const_expr(policy.trims):
            # What lies behind a group in operands stored by place belongs to the next one.
            left = policy.depth(tile, problem) - k * config.tile_k
            inside = cutlass.min(ceil_div(left, config.tile_k // blocks), Int32(blocks))
        cute.arch.mbarrier_wait(ring.full + stage, phase)
        for m in cutlass.range_constexpr(cute.size(acc, mode=[1])):
            a_part = cute.append_ones(a[None, m, None, stage], 3)  # [MMA, K, 1]
            warpgroup.fence()
            tiled_mma.set(warpgroup.Field.ACCUMULATE, False)
            cute.gemm(tiled_mma, part, a_part[None, 0, None], b[None, None, 0, stage], part)
            tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
            if cutlass.const_expr(policy.trims):
                for block in cutlass.range(1, inside, unroll=1):
                    cute.gemm(tiled_mma, part, a_part[None, block, None], b[None, None, block, stage], part)
            else:
                for block in cutlass.range_constexpr(1, blocks):
                    cute.gemm(tiled_mma, part, a_part[None, block, None], b[None, None, block, stage], part)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            if cutlass.const_expr(m == cute.size(acc, mode=[1]) - 1):
                release(ring, stage, config.ctas)
            promote(acc[None, m, 0], part, m, factors)
        stage, phase = advance(stage, phase, gemm.stages)
    return stage, phase


@cute.jit
def promote(acc: cute.Tensor, part: cute.Tensor, m: cutlass.Constexpr, factors: Any):
    """``acc += part``, each element times the factors of its row and its column.

    Args:
        acc, part: float32 registers of 64 rows per warpgroup; element ``(e, h, j)`` is in half ``h`` of the rows and in
            column ``8 j + e`` of the thread's.
        m: which 64 rows.
        factors: of the thread's rows and columns.
    """
    rows, columns = factors
    for i in cutlass.range_constexpr(cute.size(part)):
        value = part[i]
        if cutlass.const_expr(columns is not None):
            value *= columns[i % 2 + i // 4 * 2]
        acc[i] += value * rows[i // 2 % 2 + 2 * m]


@cute.jit
def ones(acc: cute.Tensor, problem: Problem) -> tuple[Any, Any]:
    """Factors where there are no scales: one, which the compiler must not know.

    It moves plain additions behind the next MMA, whose registers are theirs, and then waits for every single MMA.
    """
    rows = cute.make_rmem_tensor(2 * cute.size(acc, mode=[1]), Float32)
    one = Float32(1)
    if problem.rows < 0:
        one = Float32(0)
    rows.fill(one)
    return rows, None


@cute.jit
def load_scales(
    gemm: cutlass.Constexpr, scales: Any, tile: Tile, column: Int32, k: Int32, problem: Problem
) -> tuple[Any, Any]:
    """A thread's factors for stage ``k``: of its rows, ``(half, M)``, and of its columns; None if those are one.

    Read ahead of the stage's MMAs, which hide the latency. Rows and columns outside the output get the factor
    of one inside: they are not stored.
    """
    a, b = scales
    thread, _, _ = cute.arch.thread_idx()
    lane, warp = thread % 32, thread // 32 % 4
    config = gemm.config
    member = thread // 128 % gemm.sharing
    count = cutlass.const_expr(config.tile_m // (gemm.sharing * MMA_ROWS))
    rows = cute.make_rmem_tensor(2 * count, Float32)
    columns: Any = None
    for i in cutlass.range_constexpr(2 * count):
        block = (i // 2 * gemm.sharing + member) * MMA_ROWS
        row = tile.m * config.tile_m + block + warp * 16 + lane // 4 + 8 * (i % 2)
        if cutlass.const_expr(gemm.policy.kind == VARLEN_M):
            rows[i] = a[cutlass.min(tile.start + row, Int32(a.shape[0]) - 1), k]
        else:
            rows[i] = a[_place(gemm, tile, k, a), cutlass.min(row, Int32(a.shape[1]) - 1)]
    if cutlass.const_expr(gemm.policy.kind == VARLEN_M):
        whole = b[tile.group, cutlass.min(column // gemm.form.block, Int32(b.shape[1]) - 1), k]
        for i in cutlass.range_constexpr(2 * count):
            rows[i] *= whole
    else:
        columns = cute.make_rmem_tensor(config.tile_n // 4, Float32)
        line = b.iterator + Int64(_place(gemm, tile, k, b)) * b.stride[0]
        for j in cutlass.range_constexpr(config.tile_n // 8):
            at = cutlass.min(column + 8 * j + lane % 4 * 2, Int32(b.shape[1]) - 2)
            pair = cute.make_tensor((line + at).align(8), cute.make_layout(2))
            cute.autovec_copy(pair, cute.make_tensor(columns.iterator + 2 * j, cute.make_layout(2)))
    return rows, columns


@cute.jit
def _place(gemm: cutlass.Constexpr, tile: Tile, k: Int32, scales: cute.Tensor) -> Int32:
    """The row of ``[Tp / 128, features]`` scales for the group's ``k``-th block of tokens."""
    return cutlass.min(tile.start // gemm.form.block + tile.group + k, Int32(scales.shape[0]) - 1)
