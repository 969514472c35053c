"""The load warp: TMA loads of A and B into the buffers of the pipeline, except for a gathered operand."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute, pipeline
from cutlass.cute.nvgpu import cpasync

from ...scheduler import Tile, ceil_div
from ...scheduler.problem import Share


def _partition(source, tensor: cute.Tensor, tile: tuple, at: Int32, partition, index: Int32 | int = 0, parts: int = 1):
    """Return (shared memory, global memory) of one operand's copies of tile ``at`` of ``tensor``, by stages and by k.

    If ``parts`` CTAs load for each other, only the part ``index``.
    """
    tma, _, buffers = source
    part = cute.group_modes(partition(cute.local_tile(tensor, tile, (at, None))), 0, 3)
    return cpasync.tma_partition(tma, index, cute.make_layout(parts), cute.group_modes(buffers, 0, 3), part)


class TilePart(NamedTuple):
    """Operands of a tile, for one part of its contraction or for all of it.

    Attributes:
        a, b: (map, coordinate tensor of the map, buffers ``[..., stages]``).
        scales: the same of their scales and the thread's part of the MMA that partitions those of B, or None.
        depth: elements of the contraction.
    """

    a: tuple
    b: tuple
    scales: Any
    depth: Int32


def part_of(a: tuple, b: tuple) -> TilePart:
    """Return the operands for the whole contraction, where groups share it."""
    return TilePart(a, b, None, Int32(a[1].shape[1]))


@cute.jit
def load_tiles(
    gemm: cutlass.Constexpr,
    thread_mma: cute.ThrMma,
    operands: tuple,
    pair: Any,
    scales: Any,
    loads: pipeline.PipelineTmaUmma,
    share: Share,
):
    """Load the share's tiles.

    Args:
        gemm: the GEMM kernel.
        thread_mma: this CTA's part of the MMA.
        operands: A and B, as a ``TilePart`` has them.
        pair: the second pair of operands where ``gemm`` is ``paired``, see ``gemm.two_products_call``; or None.
        scales: as a ``TilePart`` has them.
        loads: pipeline to the MMA warp.
        share: the CTA's share of the problem.
    """
    problem, _, first, step = share
    policy = gemm.policy
    state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, gemm.stages)
    search = policy.start(problem)
    search, tile = policy.find(search, first, problem)
    while tile.valid:
        if cutlass.const_expr(gemm.paired):
            state = load_tile(gemm, thread_mma, part_of(*operands), loads, share, tile, state)
            state = load_tile(gemm, thread_mma, part_of(*pair), loads, share, tile, state)
        else:
            whole = TilePart(operands[0], operands[1], scales, policy.depth(tile, problem))
            state = load_tile(gemm, thread_mma, whole, loads, share, tile, state)
        first += step
        search, tile = policy.find(search, first, problem)
    loads.producer_tail(state)


@cute.jit
def load_tile(
    gemm: cutlass.Constexpr,
    thread_mma: cute.ThrMma,
    part: TilePart,
    loads: pipeline.PipelineTmaUmma,
    share: Share,
    tile: Tile,
    state: pipeline.PipelineState,
) -> pipeline.PipelineState:
    """Load a part of a tile; return the state of the pipeline after it. Arguments are those of ``load_tiles``."""
    a, b, scales, depth = part
    policy, ctas, rank = gemm.policy, gemm.config.ctas, share.rank
    tile_m, _, tile_k = gemm.tiler
    if cutlass.const_expr(gemm.gathered != "a"):
        a_to, a_from = _partition(a, policy.a(a[1], tile), (tile_m, tile_k), tile.m, thread_mma.partition_A)
    if cutlass.const_expr(gemm.gathered != "b"):
        b_to, b_from = _partition(b, policy.b(b[1], tile), gemm.b_tile, tile.n, thread_mma.partition_B)
    if cutlass.const_expr(scales is not None):
        a_scale, b_scale, single = scales
        wide = policy.a_scale(a_scale[1], tile)
        sa_to, sa_from = _partition(a_scale, wide, (tile_m, tile_k), tile.m, thread_mma.partition_A)
        wide = policy.b_scale(b_scale[1], tile)
        sb_to, sb_from = _partition(b_scale, wide, gemm.b_tile, tile.n, single.partition_B, rank, ctas)
        sa_to, sa_from = cute.filter_zeros(sa_to), cute.filter_zeros(sa_from)
        sb_to, sb_from = cute.filter_zeros(sb_to), cute.filter_zeros(sb_from)
    for k in cutlass.range(ceil_div(depth, tile_k), unroll=1):
        loads.producer_acquire(state)
        barrier = loads.producer_get_barrier(state)
        if cutlass.const_expr(gemm.gathered != "a"):
            cute.copy(a[0], a_from[None, k], a_to[None, state.index], tma_bar_ptr=barrier)
        if cutlass.const_expr(gemm.gathered != "b"):
            cute.copy(b[0], b_from[None, k], b_to[None, state.index], tma_bar_ptr=barrier)
        if cutlass.const_expr(scales is not None):
            cute.copy(scales[0][0], sa_from[None, k], sa_to[None, state.index], tma_bar_ptr=barrier)
            both = {} if ctas == 1 else {"mcast_mask": cutlass.Int16((1 << ctas) - 1)}
            cute.copy(scales[1][0], sb_from[None, k], sb_to[None, state.index], tma_bar_ptr=barrier, **both)
        state.advance()
    return state
