"""Mainloop on FP8 operands with two-level accumulation: each stage is summed on its own, then added in float32.

Hopper's tensor cores add FP8 products with fewer bits than float32 has. Here they sum 128 products; all further
additions are done in float32 registers, where block scales are applied as well: the scale of the row of A, and that of
the column of B or of B's square block; see ``factors``. While one warpgroup adds, the other one multiplies.

A warpgroup has one stage's MMAs in flight at a time, so testing the next stage's barrier between two stages would leave
the tensor cores idle. It is tested before the sums of a stage are added.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import warpgroup

from ...scheduler import Tile, ceil_div
from ...scheduler.problem import Problem
from ..k_tail import clear_edges, is_cut
from ..ring import RingBarriers, advance, release
from .factors import FactorRegisters, ones, read_columns, read_rows
from .ping_pong import give_turn, wait_turn
from .store import MMA_ROWS

EDGES_BARRIER = 6  # named barrier of the warpgroups


class PromotionBuffers(NamedTuple):
    """Shared memory of the ring.

    Attributes:
        a, b: the operands ``[rows, tile_k, stages]``.
        factors: factors of the stages ``[factors, stages]``, or None.
    """

    a: cute.Tensor
    b: cute.Tensor
    factors: Any


class MmaStage(NamedTuple):
    """The stage of the ring that is multiplied next.

    Attributes:
        index, phase: its place in the ring, and the parity of its ``full`` barrier.
        full: whether its operands are known to have arrived.
        operands: descriptors of A and B in it, ``[MMA, M or N, K]``, where warpgroups alternate, because work that a
            warpgroup does in its turn delays the other one. None elsewhere: computing them before the additions of the
            previous stage made the forward GEMM 5 % slower on an H200.
    """

    index: Int32
    phase: Int32
    full: cutlass.Boolean
    operands: tuple[cute.Tensor, cute.Tensor] | None


@cute.jit
def multiply_promoted(
    gemm: cutlass.Constexpr,
    tiled_mma: cute.TiledMma,
    acc: cute.Tensor,
    a: cute.Tensor,
    b: cute.Tensor,
    shared: PromotionBuffers,
    ring: RingBarriers,
    stage: Int32,
    phase: Int32,
    depth: Int32,
    tile: Tile,
    problem: Problem,
) -> tuple[Int32, Int32]:
    """Compute ``acc = A B`` over ``depth`` k tiles, zero if there is none; return the next stage and phase of the ring.

    Args:
        gemm: the GEMM kernel.
        tiled_mma: the MMA of both warpgroups.
        acc: float32 registers ``((2, 2, N / 8), M, 1)``.
        a, b: descriptors of the operands, ``[MMA, M or N, K, stage]``.
        shared: the ring's memory.
        ring, stage, phase: the ring, and its current stage and phase.
        depth: k tiles.
        tile: which tile.
        problem: sizes and offsets.
    """
    policy, tile_k = gemm.policy, gemm.config.tile_k
    acc.fill(Float32(0))
    part = cute.make_rmem_tensor(tiled_mma.partition_shape_C((gemm.sharing * MMA_ROWS, gemm.config.tile_n)), Float32)
    factors = ones(gemm, problem)
    whole = depth
    if cutlass.const_expr(policy.trims):
        whole = policy.depth(tile, problem) // tile_k
    before = Int32(0)
    if cutlass.const_expr(policy.clears):
        before = policy.before(tile)
    at = MmaStage(stage, phase, cutlass.Boolean(False), operands_in(gemm, (a, b), stage))
    for _ in cutlass.range(whole, unroll=1):
        at = add_stage(gemm, acc, part, (a, b), shared, factors, ring, at, None, before)
        before = Int32(0)
    if cutlass.const_expr(policy.trims):  # noqa: SIM102 - decided while tracing
        if whole < depth:
            left = policy.depth(tile, problem) - whole * tile_k
            at = add_stage(gemm, acc, part, (a, b), shared, factors, ring, at, left, before)
    return at.index, at.phase


@cute.jit
def add_stage(
    gemm: cutlass.Constexpr,
    acc: cute.Tensor,
    part: cute.Tensor,
    operands: tuple[cute.Tensor, cute.Tensor],
    shared: PromotionBuffers,
    factors: FactorRegisters,
    ring: RingBarriers,
    at: MmaStage,
    left: Int32 | None,
    before: Int32,
) -> MmaStage:
    """Add the product of a stage to ``acc``, release the stage, and return the next one.

    Arguments are those of ``multiply_promoted``, and

    Args:
        part: registers for the sum of 64 rows.
        operands: descriptors of A and B in all stages.
        at: the stage.
        factors: registers for the factors of the thread's rows and columns.
        left: elements of the contraction that belong to the group, if not all: past the group's end, placed operands
            hold the next group.
        before: bytes of the stage before the group, where the policy ``clears``.
    """
    buffers, stage = shared.factors, at.index
    a, b = (t[None, None, None, stage] for t in operands) if at.operands is None else at.operands
    blocks = cute.size(a, mode=[2])
    count, pairs = cute.size(acc, mode=[1]), gemm.config.tile_n // 8
    first, further = gemm.tiled_mma(True, True), gemm.tiled_mma(True, True)
    first.set(warpgroup.Field.ACCUMULATE, False)
    further.set(warpgroup.Field.ACCUMULATE, True)
    if not at.full:
        cute.arch.mbarrier_wait(ring.full + stage, at.phase)
    if cutlass.const_expr(gemm.policy.clears):
        clear_stage(gemm, shared, stage, before, Int32(gemm.config.tile_k) if left is None else left)
    thread, _, _ = cute.arch.thread_idx()
    member = cute.arch.make_warp_uniform(thread // 128)
    for m in cutlass.range_constexpr(count):
        a_part = cute.append_ones(a[None, m, None], 3)  # [MMA, K, 1]
        if cutlass.const_expr(gemm.alternates):
            if cutlass.const_expr(m > 0):
                # Succeeds at once. Behind its branch the assembler does not move additions of the previous rows, which
                # would otherwise follow ``wait_turn`` and keep the other warpgroup from multiplying.
                cute.arch.mbarrier_wait(ring.full + stage, at.phase)
            read_rows(gemm, buffers[None, stage], factors, m)
            wait_turn(member)
        warpgroup.fence()
        cute.gemm(first, part, a_part[None, 0, None], b[None, None, 0], part)
        if cutlass.const_expr(left is not None):
            for block in cutlass.range(1, ceil_div(left, gemm.config.tile_k // blocks), unroll=1):
                cute.gemm(further, part, a_part[None, block, None], b[None, None, block], part)
        else:
            for block in cutlass.range_constexpr(1, blocks):
                cute.gemm(further, part, a_part[None, block, None], b[None, None, block], part)
        warpgroup.commit_group()
        if cutlass.const_expr(buffers is not None):
            if cutlass.const_expr(not gemm.alternates):
                read_rows(gemm, buffers[None, stage], factors, m)
            if cutlass.const_expr(m == 0):
                read_columns(gemm, buffers[None, stage], factors, 0, gemm.held_pairs)
        warpgroup.wait_group(0)
        if cutlass.const_expr(gemm.alternates):
            give_turn(1 - member)
        early = gemm.held_pairs == pairs
        if cutlass.const_expr(m == count - 1 and early):
            give_back(gemm, ring, stage)
        if cutlass.const_expr(m == count - 1):
            index, phase = advance(stage, at.phase, gemm.stages)
            full = cute.arch.mbarrier_test_wait(ring.full + index, phase)
            following = MmaStage(index, phase, full, operands_in(gemm, operands, index))
        promote(acc[None, m, 0], part, factors, 0, gemm.held_pairs)
        if cutlass.const_expr(not early):
            read_columns(gemm, buffers[None, stage], factors, gemm.held_pairs, pairs)
            if cutlass.const_expr(m == count - 1):
                give_back(gemm, ring, stage)
            promote(acc[None, m, 0], part, factors, gemm.held_pairs, pairs)
    return following


def operands_in(gemm: Any, operands: tuple[cute.Tensor, cute.Tensor], index: Int32) -> Any:
    """Return ``MmaStage.operands`` of the stage ``index``."""
    return tuple(t[None, None, None, index] for t in operands) if gemm.alternates else None


@cute.jit
def clear_stage(gemm: cutlass.Constexpr, shared: PromotionBuffers, stage: Int32, before: Int32, end: Int32):
    """Clear the bytes of other groups in a stage that is about to be multiplied; all consumers call it."""
    if is_cut(before, end):
        thread, _, _ = cute.arch.thread_idx()
        for operand in cutlass.range_constexpr(2):
            buffers = (shared.a, shared.b)[operand]
            rows, line = gemm.tiler[operand], gemm.config.tile_k
            at = buffers.iterator.toint() + stage * (rows * line)
            clear_edges(at, rows, before, end, thread, gemm.consumers)
        cute.arch.barrier(barrier_id=EDGES_BARRIER, number_of_threads=gemm.consumers)


@cute.jit
def give_back(gemm: cutlass.Constexpr, ring: RingBarriers, stage: Int32):
    """Release a stage whose operands and factors have been read."""
    if cutlass.const_expr(gemm.factors):
        cute.arch.sync_warp()  # every lane has read its factors
    release(ring, stage, gemm.config.ctas)


@cute.jit
def promote(
    acc: cute.Tensor, part: cute.Tensor, factors: FactorRegisters, first: cutlass.Constexpr, end: cutlass.Constexpr
):
    """Add ``part`` to ``acc``, times the factors of its row and its column, for pairs of columns ``[first, end)``.

    Args:
        acc, part: float32 registers of 64 rows per warpgroup; element ``(e, h, j)`` is in half ``h`` of the rows and in
            column ``8 j + e`` of the thread's.
        factors: factors of the thread's rows and columns.
    """
    pieces = cute.size(factors.rows) // 2
    across = cute.size(part) // pieces  # registers that share factors
    for i in cutlass.range(4 * first, 4 * end, unroll_full=True):
        value = part[i]
        if cutlass.const_expr(factors.columns is not None):
            value *= factors.columns[i % 2 + i // 4 * 2]
        acc[i] += value * factors.rows[i // 2 % 2 + i // across * 2]
