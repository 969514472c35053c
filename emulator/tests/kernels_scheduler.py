"""A CuTe DSL kernel with a scheduler warp, which hands tile numbers to other warps through a ring in shared memory."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass.memory import SmemAllocator

CONSUMERS = 2  # warps


class Scheduled:
    """dst[tile] = src[tile] for every tile in the order that warp 0 gives; each consumer warp copies 32 columns.

    ``acquire=False`` plants a bug: the scheduler does not wait until a record of the ring is free.
    """

    def __init__(self, stages=2, acquire=True):
        self.stages, self.acquire = stages, acquire

    @cute.jit
    def __call__(self, src: cute.Tensor, dst: cute.Tensor, stream: cuda.CUstream):
        self.kernel(src, dst).launch(grid=(1, 1, 1), block=(32 * (1 + CONSUMERS), 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, src: cute.Tensor, dst: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator()
        barriers = smem.allocate_array(cutlass.Int64, 2 * self.stages)
        ring = smem.allocate_tensor(cutlass.Int32, cute.make_layout(self.stages), 16)
        thread = pipeline.Agent.Thread
        records = pipeline.PipelineAsync.create(
            num_stages=self.stages,
            producer_group=pipeline.CooperativeGroup(thread, 32),
            consumer_group=pipeline.CooperativeGroup(thread, 32 * CONSUMERS),
            barrier_storage=barriers,
        )
        tiles = src.shape[0]
        if warp == 0:
            state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
            for i in cutlass.range(tiles):
                if cutlass.const_expr(self.acquire):
                    records.producer_acquire(state)
                if tid == 0:
                    ring[state.index] = tiles - 1 - i
                cute.arch.sync_warp()
                records.producer_commit(state)
                state.advance()
            if cutlass.const_expr(self.acquire):
                records.producer_tail(state)
        else:
            state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
            for _ in cutlass.range(tiles):
                records.consumer_wait(state)
                tile = ring[state.index]
                cute.arch.sync_warp()
                records.consumer_release(state)
                state.advance()
                dst[tile, tid - 32] = src[tile, tid - 32]
