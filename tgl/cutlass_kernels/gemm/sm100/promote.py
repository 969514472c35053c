"""Two-level accumulation of FP8 products: epilogue warps scale and add the sums of stages in float32 registers.

The MMA warp computes an accumulator per stage of 128 instead of one per tile. Two teams of four warps share the columns
of a tile; each warp reads its rows of an accumulator, releases it, and adds it to its sums: a thread has the sums of
one row. The factor of a sum is its row's scale of A times its column's of B, or that of the square block of B.
Meanwhile the MMAs of the next stages go on in the other accumulators. With one team nothing would run while a warp
waits for tensor memory, as it would be alone on its scheduler.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, cute, pipeline
from cutlass.cute.nvgpu import tcgen05

from ...config import VARLEN_K
from ..factors import LANES, factor_count
from ..ring import RingBarriers, advance, allocate_ring, open_ring, release

TEAMS = 2
STAGES = 6  # of factors: about their latency from memory
TOGETHER = 32  # columns that a thread reads at a time; the next ones are in flight while these are added
QUAD = 4  # factors in a load from shared memory


class FactorStages(NamedTuple):
    """The factors of the stages.

    Attributes:
        ring: barriers.
        buffers: shared memory ``[factors, STAGES]``.
    """

    ring: RingBarriers
    buffers: cute.Tensor


class Results(NamedTuple):
    """Results of the MMA warp, for the epilogue.

    Attributes:
        accumulators: tensor memory ``[..., accumulators]``.
        pipeline: says which may be read.
        factors: ``FactorStages`` of stages whose sums the epilogue scales and adds; None where the MMA adds them.
    """

    accumulators: cute.Tensor
    pipeline: pipeline.PipelineUmmaAsync
    factors: Any


def factor_bytes(gemm: Any) -> int:
    """Return the shared memory for factors; 0 without block scales."""
    return factor_count(gemm.kind, gemm.config, gemm.form) * STAGES * Float32.width // 8


def allocate_factors(gemm: Any, allocator, warps: int, opens: cutlass.Boolean) -> FactorStages:
    """Allocate shared memory for the factors; one warp ``opens`` the barriers, and all synchronise afterwards.

    Args:
        gemm: the GEMM kernel.
        warps: that read them.
    """
    ring = allocate_ring(allocator, STAGES)
    _open(ring, warps, opens)
    layout = cute.make_layout((factor_count(gemm.kind, gemm.config, gemm.form), STAGES))
    return FactorStages(ring, allocator.allocate_tensor(Float32, layout, 16))


@cute.jit
def _open(ring: RingBarriers, warps: cutlass.Constexpr, opens: cutlass.Boolean):
    if opens:
        with cute.arch.elect_one():
            open_ring(ring, STAGES, LANES, warps)


@cute.jit
def promote_tile(
    gemm: cutlass.Constexpr,
    sums: cute.Tensor,
    results: Results,
    made: pipeline.PipelineState,
    turn: tuple,
    depth: Int32,
) -> tuple:
    """Fill ``sums`` with those of a tile; return ``made`` and ``turn`` as they are after it.

    Args:
        gemm: the GEMM kernel.
        sums: a thread's registers, one per column of its team.
        results: those of the team's columns, accumulators ``[rows, columns, accumulators]``.
        made: state of their pipeline.
        turn: stage and phase of the factors.
        depth: k tiles.
    """
    accumulators, ready, factors = results
    thread, _, _ = cute.arch.thread_idx()
    team = cute.arch.make_warp_uniform(thread // (32 * 4))
    row, columns = thread % (32 * 4), cute.size(sums)
    by_column = gemm.policy.kind == VARLEN_K
    pieces = cute.flat_divide(accumulators, (gemm.config.cta_m, TOGETHER))
    load_atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(TOGETHER)), Float32)
    tiled_load = tcgen05.make_tmem_copy(load_atom, pieces[None, None, 0, 0, 0])
    thread_load = tiled_load.get_slice(row)
    source = thread_load.partition_S(pieces)
    shape = thread_load.partition_D(cute.make_identity_tensor((gemm.config.cta_m, TOGETHER))).shape
    parts = [cute.make_rmem_tensor(shape, Float32) for _ in range(2)]
    quads = cute.make_layout((QUAD, columns // QUAD, TEAMS), stride=(1, QUAD, columns))
    of_row = cute.make_rmem_tensor(1, Float32)
    scales = cute.make_tensor(of_row.iterator, cute.make_layout(TOGETHER, stride=0))
    if cutlass.const_expr(by_column):
        scales = cute.make_rmem_tensor(TOGETHER, Float32)
    ring, buffers = factors
    stage, phase = turn
    sums.fill(0.0)
    for _ in cutlass.range(depth, unroll=1):
        cute.arch.mbarrier_wait(ring.full + stage, phase)
        held = buffers[None, stage]
        of_row[0] = held[row]
        if cutlass.const_expr(not by_column):
            of_row[0] *= held[gemm.config.cta_m]
            give_back(ring, stage)
        ready.consumer_wait(made)
        cute.copy(tiled_load, source[None, None, None, 0, 0, made.index], parts[0])
        for piece in cutlass.range_constexpr(columns // TOGETHER):
            last = (piece + 1) * TOGETHER == columns
            if cutlass.const_expr(by_column):  # while the accumulator is on its way
                across = cute.make_tensor(held.iterator + gemm.config.cta_m, quads)[None, None, team]
                read_columns(scales, across, of_row[0], piece * TOGETHER // QUAD)
                if cutlass.const_expr(last):
                    give_back(ring, stage)
            cute.arch.fence_view_async_tmem_load()
            if cutlass.const_expr(last):
                with cute.arch.elect_one():
                    ready.consumer_release(made)
            else:
                cute.copy(tiled_load, source[None, None, None, 0, piece + 1, made.index], parts[(piece + 1) % 2])
            add_scaled(sums, parts[piece % 2], scales, piece * TOGETHER)
        made.advance()
        stage, phase = advance(stage, phase, STAGES)
    return made, (stage, phase)


@cute.jit
def give_back(ring: RingBarriers, stage: Int32):
    """Release a stage of factors that the warp has read."""
    cute.arch.sync_warp()  # every lane has read its factors
    release(ring, stage, 1)


def read_columns(scales: cute.Tensor, across: cute.Tensor, of_row: Float32, first: int):
    """Set ``scales`` to a row's factor times those of a piece's columns.

    Args:
        across: factors of the team's columns, in shared memory ``[QUAD, columns / QUAD]``.
        first: which four are those of the piece's first columns.
    """
    quad = cute.make_rmem_tensor(QUAD, Float32)
    for i in range(0, TOGETHER, QUAD):
        cute.autovec_copy(across[None, first + i // QUAD], quad)
        for j in range(0, QUAD, 2):
            pair = cute.arch.mul_packed_f32x2((quad[j], quad[j + 1]), (of_row, of_row))
            scales[i + j], scales[i + j + 1] = pair


def add_scaled(sums: cute.Tensor, part: cute.Tensor, scales: cute.Tensor, first: int):
    """Add a piece of a row times ``scales`` to the sums from ``first`` on, two columns by one instruction."""
    for i in range(0, TOGETHER, 2):
        at = first + i
        values = (part[i], part[i + 1]), (scales[i], scales[i + 1]), (sums[at], sums[at + 1])
        sums[at], sums[at + 1] = cute.arch.fma_packed_f32x2(*values)
