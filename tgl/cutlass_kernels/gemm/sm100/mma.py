"""The MMA warp: tcgen05.mma from the pipeline's buffers into the accumulators."""

import cutlass
from cutlass import Int32, cute, pipeline
from cutlass.cute.nvgpu import tcgen05

from ...schedule import ceil_div
from ...varlen.policy import Problem


@cute.jit
def multiply_tiles(
    gemm: cutlass.Constexpr,
    tiled_mma: cute.TiledMma,
    a_buffers: cute.Tensor,
    b_buffers: cute.Tensor,
    accumulators: cute.Tensor,
    loads: pipeline.PipelineTmaUmma,
    results: pipeline.PipelineUmmaAsync,
    problem: Problem,
    first: Int32,
    step: Int32,
):
    """Multiply every tile from ``first`` on in steps of ``step``; a tile of depth 0 makes no accumulator.

    Args:
        gemm: the ``GroupedGemm``.
        a_buffers, b_buffers: shared memory ``[..., stages]``.
        accumulators: tensor memory ``[..., ACCUMULATORS]``.
        loads: pipeline from the load warp.
        results: pipeline to the epilogue warps.
    """
    policy = gemm.policy
    a_operand, b_operand = tiled_mma.make_fragment_A(a_buffers), tiled_mma.make_fragment_B(b_buffers)
    blocks = cute.size(a_operand, mode=[2])
    loaded = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, gemm.stages)
    made = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, cute.size(accumulators, mode=[3]))
    search = policy.start(problem)
    search, tile = policy.find(search, first, problem)
    while tile.valid:
        if policy.is_product(tile, problem):
            results.producer_acquire(made)
            accumulator = accumulators[None, None, None, made.index]
            tiled_mma.set(tcgen05.Field.ACCUMULATE, False)
            for _ in cutlass.range(ceil_div(policy.depth(tile, problem), gemm.tiler[2]), unroll=1):
                loads.consumer_wait(loaded)
                for block in cutlass.range_constexpr(blocks):
                    at = (None, None, block, loaded.index)
                    cute.gemm(tiled_mma, accumulator, a_operand[at], b_operand[at], accumulator)
                    tiled_mma.set(tcgen05.Field.ACCUMULATE, True)
                loads.consumer_release(loaded)
                loaded.advance()
            results.producer_commit(made)
            made.advance()
        first += step
        search, tile = policy.find(search, first, problem)
    results.producer_tail(made)
