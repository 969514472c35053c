"""The load warp: A and B tiles into the pipeline's buffers by TMA."""

import cutlass
from cutlass import Int32, cute, pipeline
from cutlass.cute.nvgpu import cpasync

from ...schedule import ceil_div
from ...varlen.policy import Problem


@cute.jit
def load_tiles(
    gemm: cutlass.Constexpr,
    thread_mma: cute.ThrMma,
    a,
    b,
    loads: pipeline.PipelineTmaUmma,
    problem: Problem,
    first: Int32,
    step: Int32,
):
    """Load every tile from ``first`` on in steps of ``step``.

    Args:
        gemm: the ``GroupedGemm``.
        thread_mma: this CTA's part of the MMA.
        a, b: (map, coordinate tensor of the map, buffers ``[..., stages]``).
        loads: pipeline to the MMA warp.
    """
    policy = gemm.policy
    tile_m, tile_n, tile_k = gemm.tiler
    a_map, a_coords, a_buffers = a
    b_map, b_coords, b_buffers = b
    a_stages, b_stages = cute.group_modes(a_buffers, 0, 3), cute.group_modes(b_buffers, 0, 3)
    state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, gemm.stages)
    search = policy.start(problem)
    search, tile = policy.find(search, first, problem)
    while tile.valid:
        a_tile = cute.local_tile(policy.a(a_coords, tile), (tile_m, tile_k), (tile.m, None))
        b_tile = cute.local_tile(policy.b(b_coords, tile), (tile_n, tile_k), (tile.n, None))
        a_part = cute.group_modes(thread_mma.partition_A(a_tile), 0, 3)
        b_part = cute.group_modes(thread_mma.partition_B(b_tile), 0, 3)
        alone = cute.make_layout(1)
        a_to, a_from = cpasync.tma_partition(a_map, 0, alone, a_stages, a_part)
        b_to, b_from = cpasync.tma_partition(b_map, 0, alone, b_stages, b_part)
        for k in cutlass.range(ceil_div(policy.depth(tile, problem), tile_k), unroll=1):
            loads.producer_acquire(state)
            barrier = loads.producer_get_barrier(state)
            cute.copy(a_map, a_from[None, k], a_to[None, state.index], tma_bar_ptr=barrier)
            cute.copy(b_map, b_from[None, k], b_to[None, state.index], tma_bar_ptr=barrier)
            state.advance()
        first += step
        search, tile = policy.find(search, first, problem)
    loads.producer_tail(state)
