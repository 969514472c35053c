"""Small CuTe DSL kernels, one per mechanism, that the emulator's tests run.

Matrices are ``[rows, columns]`` and row-major; a kernel works on tiles of the sizes its class holds.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass.cute.nvgpu import cpasync, tcgen05, warpgroup
from cutlass.memory import SmemAllocator, TmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import blackwell_helpers, hopper_helpers

THREADS = 128
STREAM = cuda.CUstream(0)


def tile_layout(rows, columns, swizzle):
    """Row-major shared tile; ``swizzle`` is a triple or None."""
    plain = cute.make_layout((rows, columns), stride=(columns, 1))
    if swizzle is None:
        return plain
    return cute.make_composed_layout(cute.make_swizzle(*swizzle), 0, plain)


class Double:
    """dst = 2 * src (or dst += 2 * src) tile by tile: TMA load, generic access, proxy fence, TMA store."""

    def __init__(self, rows=32, columns=32, swizzle=None, reduce=False):
        self.rows, self.columns, self.swizzle, self.reduce = rows, columns, swizzle, reduce

    @cute.jit
    def __call__(self, src: cute.Tensor, dst: cute.Tensor, stream: cuda.CUstream):
        layout = tile_layout(self.rows, self.columns, self.swizzle)
        tiler = (self.rows, self.columns)
        load, src_map = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), src, layout, tiler)
        if cutlass.const_expr(self.reduce):
            store_op = cpasync.CopyReduceBulkTensorTileS2GOp()
        else:
            store_op = cpasync.CopyBulkTensorTileS2GOp()
        store, dst_map = cpasync.make_tiled_tma_atom(store_op, dst, layout, tiler)
        grid = (cute.ceil_div(src.shape[0], self.rows), cute.ceil_div(src.shape[1], self.columns), 1)
        self.kernel(load, src_map, store, dst_map, layout).launch(grid=grid, block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(
        self,
        load: cute.CopyAtom,
        src: cute.Tensor,
        store: cute.CopyAtom,
        dst: cute.Tensor,
        layout: cute.Layout | cute.ComposedLayout,
    ):
        tid, _, _ = cute.arch.thread_idx()
        row, column, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator()
        full = smem.allocate_array(cutlass.Int64, 1)
        outer = layout.outer if cutlass.const_expr(self.swizzle) else layout
        tile = smem.allocate_tensor(
            cutlass.Float32, outer, 1024, swizzle=layout.inner if cutlass.const_expr(self.swizzle) else None
        )
        tiler = (self.rows, self.columns)
        one = cute.make_layout(1)
        src_tile = cute.local_tile(src, tiler, (row, column))
        dst_tile = cute.local_tile(dst, tiler, (row, column))
        whole = cute.group_modes(tile, 0, 2)
        s_in, g_in = cpasync.tma_partition(load, 0, one, whole, cute.group_modes(src_tile, 0, 2))
        s_out, g_out = cpasync.tma_partition(store, 0, one, whole, cute.group_modes(dst_tile, 0, 2))
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(full, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, self.rows * self.columns * 4)
            cute.copy(load, g_in, s_in, tma_bar_ptr=full)
        cute.arch.mbarrier_wait(full, 0)
        for i in cutlass.range(tid, self.rows * self.columns, THREADS):
            r, c = i // self.columns, i % self.columns
            tile[r, c] = tile[r, c] * 2.0
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()
        if warp == 0:
            if cutlass.const_expr(self.reduce):
                cute.copy(store, s_out, g_out)
            else:
                with cute.arch.elect_one():
                    cute.copy(store, s_out, g_out)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)


class Overrun:
    """Writes one row behind the last one of a matrix of 32 columns."""

    @cute.jit
    def __call__(self, dst: cute.Tensor, stream: cuda.CUstream):
        self.kernel(dst).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, dst: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        dst[dst.shape[0], tid] = cutlass.Float32(1.0)


class Multicast:
    """Every CTA of a cluster loads a slice of a tile for all of them; each adds its rank and writes the whole tile."""

    def __init__(self, rows=64, columns=32, cluster=2):
        self.rows, self.columns, self.cluster = rows, columns, cluster

    @cute.jit
    def __call__(self, src: cute.Tensor, dst: cute.Tensor, stream: cuda.CUstream):
        part = self.rows // self.cluster
        layout = cute.make_layout((part, self.columns), stride=(self.columns, 1))
        op = cpasync.CopyBulkTensorTileG2SMulticastOp()
        load, src_map = cpasync.make_tiled_tma_atom(op, src, layout, (part, self.columns))
        self.kernel(load, src_map, dst).launch(
            grid=(self.cluster, 1, 1), block=(THREADS, 1, 1), cluster=(self.cluster, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, load: cute.CopyAtom, src: cute.Tensor, dst: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        part = self.rows // self.cluster
        smem = SmemAllocator()
        full = smem.allocate_array(cutlass.Int64, 1)
        layout = cute.make_layout((part, self.columns, self.cluster), stride=(self.columns, 1, part * self.columns))
        tile = smem.allocate_tensor(cutlass.Float32, layout, 128)
        slices = cute.local_tile(src, (part, self.columns), (None, 0))
        s_in, g_in = cpasync.tma_partition(
            load, 0, cute.make_layout(1), cute.group_modes(tile, 0, 2), cute.group_modes(slices, 0, 2)
        )
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(full, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, self.rows * self.columns * 4)
            mask = cutlass.Int16((1 << self.cluster) - 1)
            cute.copy(load, g_in[None, rank], s_in[None, rank], tma_bar_ptr=full, mcast_mask=mask)
        cute.arch.mbarrier_wait(full, 0)
        for i in cutlass.range(tid, self.rows * self.columns, THREADS):
            r, c = i // self.columns, i % self.columns
            dst[rank, r, c] = tile[r % part, c, r // part] + cutlass.Float32(rank)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()


class ColumnSums:
    """Sums of the columns of a matrix: a producer warp fills stages by TMA, a consumer warp adds them up."""

    def __init__(self, rows=16, columns=32, stages=3):
        self.rows, self.columns, self.stages = rows, columns, stages

    @cute.jit
    def __call__(self, src: cute.Tensor, dst: cute.Tensor, stream: cuda.CUstream):
        layout = cute.make_layout((self.rows, self.columns), stride=(self.columns, 1))
        tiler = (self.rows, self.columns)
        load, src_map = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), src, layout, tiler)
        self.kernel(load, src_map, dst).launch(grid=(1, 1, 1), block=(64, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, load: cute.CopyAtom, src: cute.Tensor, dst: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator()
        barriers = smem.allocate_array(cutlass.Int64, 2 * self.stages)
        layout = cute.make_layout(
            (self.rows, self.columns, self.stages), stride=(self.columns, 1, self.rows * self.columns)
        )
        tile = smem.allocate_tensor(cutlass.Float32, layout, 128)
        thread = pipeline.Agent.Thread
        stages = pipeline.PipelineTmaAsync.create(
            num_stages=self.stages,
            producer_group=pipeline.CooperativeGroup(thread),
            consumer_group=pipeline.CooperativeGroup(thread, 1),
            tx_count=self.rows * self.columns * 4,
            barrier_storage=barriers,
        )
        tiles = cute.local_tile(src, (self.rows, self.columns), (None, 0))
        s_in, g_in = cpasync.tma_partition(
            load, 0, cute.make_layout(1), cute.group_modes(tile, 0, 2), cute.group_modes(tiles, 0, 2)
        )
        count = cute.size(tiles, mode=[2])
        if warp == 0:
            state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
            for i in cutlass.range(count):
                stages.producer_acquire(state)
                cute.copy(load, g_in[None, i], s_in[None, state.index], tma_bar_ptr=stages.producer_get_barrier(state))
                stages.producer_commit(state)
                state.advance()
            stages.producer_tail(state)
        else:
            state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
            total = cutlass.Float32(0.0)
            for _ in cutlass.range(count):
                stages.consumer_wait(state)
                for r in cutlass.range_constexpr(self.rows):
                    total = total + tile[r, tid - 32, state.index]
                cute.arch.sync_warp()
                stages.consumer_release(state)
                state.advance()
            dst[tid - 32] = total


class HopperGemm:
    """C[m, n] = A[m, k] @ B[n, k]^T in fp32 for bf16 inputs: one warpgroup, wgmma from two stages of shared memory."""

    TILE = (64, 64, 64)

    def __init__(self, stages=2):
        self.stages = stages

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream: cuda.CUstream):
        m, n, k = self.TILE
        kmajor = cute.nvgpu.OperandMajorMode.K
        mma = hopper_helpers.make_trivial_tiled_mma(
            a.element_type, b.element_type, kmajor, kmajor, cutlass.Float32, (1, 1, 1), tiler_mn=(64, n)
        )
        row_major = LayoutEnum.ROW_MAJOR
        a_layout = hopper_helpers.make_smem_layout_a(row_major, self.TILE, a.element_type, self.stages)
        b_layout = hopper_helpers.make_smem_layout_b(row_major, self.TILE, b.element_type, self.stages)
        op = cpasync.CopyBulkTensorTileG2SOp()
        load_a, a_map = cpasync.make_tiled_tma_atom(op, a, cute.slice_(a_layout, (None, None, 0)), (m, k))
        load_b, b_map = cpasync.make_tiled_tma_atom(op, b, cute.slice_(b_layout, (None, None, 0)), (n, k))
        grid = (cute.ceil_div(c.shape[0], m), cute.ceil_div(c.shape[1], n), 1)
        self.kernel(mma, load_a, a_map, load_b, b_map, c, a_layout, b_layout).launch(
            grid=grid, block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mma: cute.TiledMma,
        load_a: cute.CopyAtom,
        a: cute.Tensor,
        load_b: cute.CopyAtom,
        b: cute.Tensor,
        c: cute.Tensor,
        a_layout: cute.ComposedLayout,
        b_layout: cute.ComposedLayout,
    ):
        tid, _, _ = cute.arch.thread_idx()
        row, column, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        m, n, k = self.TILE
        smem = SmemAllocator()
        full = smem.allocate_array(cutlass.Int64, self.stages)
        sa = smem.allocate_tensor(cutlass.BFloat16, a_layout.outer, 1024, swizzle=a_layout.inner)
        sb = smem.allocate_tensor(cutlass.BFloat16, b_layout.outer, 1024, swizzle=b_layout.inner)
        ga = cute.local_tile(a, (m, k), (row, None))
        gb = cute.local_tile(b, (n, k), (column, None))
        gc = cute.local_tile(c, (m, n), (row, column))
        one = cute.make_layout(1)
        ta_s, ta_g = cpasync.tma_partition(load_a, 0, one, cute.group_modes(sa, 0, 2), cute.group_modes(ga, 0, 2))
        tb_s, tb_g = cpasync.tma_partition(load_b, 0, one, cute.group_modes(sb, 0, 2), cute.group_modes(gb, 0, 2))
        thread = mma.get_slice(tid)
        ra, rb = mma.make_fragment_A(thread.partition_A(sa)), mma.make_fragment_B(thread.partition_B(sb))
        tc = thread.partition_C(gc)
        acc = cute.make_rmem_tensor(tc.shape, cutlass.Float32)
        if warp == 0:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(self.stages):
                    cute.arch.mbarrier_init(full + i, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        count = cute.size(ga, mode=[2])
        mma.set(warpgroup.Field.ACCUMULATE, False)
        for i in cutlass.range(count):
            stage = i % self.stages
            if warp == 0:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full + stage, (m + n) * k * 2)
                cute.copy(load_a, ta_g[None, i], ta_s[None, stage], tma_bar_ptr=full + stage)
                cute.copy(load_b, tb_g[None, i], tb_s[None, stage], tma_bar_ptr=full + stage)
            cute.arch.mbarrier_wait(full + stage, (i // self.stages) % 2)
            warpgroup.fence()
            for kb in cutlass.range_constexpr(cute.size(ra, mode=[2])):
                cute.gemm(mma, acc, ra[None, None, kb, stage], rb[None, None, kb, stage], acc)
                mma.set(warpgroup.Field.ACCUMULATE, True)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            cute.arch.sync_threads()
        cute.autovec_copy(acc, tc)


class BlackwellGemm:
    """C[m, n] = A[m, k] @ B[n, k]^T in fp32 for bf16 inputs: tcgen05.mma by a CTA or a pair, multicast in clusters."""

    def __init__(self, pair=False, cluster=(1, 1), stages=3):
        self.pair, self.cluster, self.stages = pair, cluster, stages
        self.tile = (256 if pair else 128, 64, 64)

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream: cuda.CUstream):
        kmajor = cute.nvgpu.OperandMajorMode.K
        group = tcgen05.CtaGroup.TWO if self.pair else tcgen05.CtaGroup.ONE
        mma = blackwell_helpers.make_trivial_tiled_mma(
            a.element_type, b.element_type, kmajor, kmajor, cutlass.Float32, group, self.tile[:2]
        )
        a_layout = blackwell_helpers.make_smem_layout_a(mma, self.tile, a.element_type, self.stages)
        b_layout = blackwell_helpers.make_smem_layout_b(mma, self.tile, b.element_type, self.stages)
        ctas = cute.tiled_divide(cute.make_layout((*self.cluster, 1)), (mma.thr_id.shape,))
        a_op = blackwell_helpers.cluster_shape_to_tma_atom_A(self.cluster, mma.thr_id)
        b_op = blackwell_helpers.cluster_shape_to_tma_atom_B(self.cluster, mma.thr_id)
        a_one, b_one = cute.slice_(a_layout, (None, None, None, 0)), cute.slice_(b_layout, (None, None, None, 0))
        load_a, a_map = cute.nvgpu.make_tiled_tma_atom_A(a_op, a, a_one, self.tile, mma, ctas.shape)
        load_b, b_map = cute.nvgpu.make_tiled_tma_atom_B(b_op, b, b_one, self.tile, mma, ctas.shape)
        size = cute.size(mma.thr_id.shape)
        tx = (cute.size_in_bytes(a.element_type, a_one) + cute.size_in_bytes(b.element_type, b_one)) * size
        rows = cute.round_up(cute.ceil_div(c.shape[0], self.tile[0] // size), self.cluster[0])
        columns = cute.round_up(cute.ceil_div(c.shape[1], self.tile[1]), self.cluster[1])
        self.kernel(mma, load_a, a_map, load_b, b_map, c, a_layout, b_layout, ctas, tx).launch(
            grid=(rows, columns, 1), block=(THREADS, 1, 1), cluster=(*self.cluster, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mma: cute.TiledMma,
        load_a: cute.CopyAtom,
        a: cute.Tensor,
        load_b: cute.CopyAtom,
        b: cute.Tensor,
        c: cute.Tensor,
        a_layout: cute.ComposedLayout,
        b_layout: cute.ComposedLayout,
        ctas: cute.Layout,
        tx: cutlass.Constexpr,
    ):
        tid, _, _ = cute.arch.thread_idx()
        row, column, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        size = cute.size(mma.thr_id.shape)
        half = row % size
        leader = half == 0
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        place = ctas.get_flat_coord(rank)
        smem = SmemAllocator()
        barriers = smem.allocate_array(cutlass.Int64, 2 * self.stages)
        done = smem.allocate_array(cutlass.Int64, 2)
        freed = smem.allocate_array(cutlass.Int64, 1)
        columns_at = smem.allocate_array(cutlass.Int32, 1)
        sa = smem.allocate_tensor(cutlass.BFloat16, a_layout.outer, 1024, swizzle=a_layout.inner)
        sb = smem.allocate_tensor(cutlass.BFloat16, b_layout.outer, 1024, swizzle=b_layout.inner)
        tmem = TmemAllocator(
            columns_at,
            barrier_for_retrieve=pipeline.NamedBarrier(barrier_id=1, num_threads=THREADS),
            is_two_cta=self.pair,
            two_cta_tmem_dealloc_mbar_ptr=freed,
        )
        thread = pipeline.Agent.Thread
        loads = pipeline.PipelineTmaUmma.create(
            num_stages=self.stages,
            producer_group=pipeline.CooperativeGroup(thread),
            consumer_group=pipeline.CooperativeGroup(thread, self.cluster[0] // size + self.cluster[1] - 1),
            tx_count=tx,
            barrier_storage=barriers,
            cta_layout_vmnk=ctas,
            defer_sync=True,
        )
        results = pipeline.PipelineUmmaAsync.create(
            num_stages=1,
            producer_group=pipeline.CooperativeGroup(thread),
            consumer_group=pipeline.CooperativeGroup(thread, THREADS * size),
            barrier_storage=done,
            cta_layout_vmnk=ctas,
            defer_sync=True,
        )
        pipeline.pipeline_init_arrive(cluster_shape_mn=ctas, is_relaxed=True)
        ga = cute.local_tile(a, cute.slice_(self.tile, (None, 0, None)), (row // size, None))
        gb = cute.local_tile(b, cute.slice_(self.tile, (0, None, None)), (column, None))
        gc = cute.local_tile(c, cute.slice_(self.tile, (None, None, 0)), (row // size, column))
        slice_ = mma.get_slice(half)
        ta, tb, tc = slice_.partition_A(ga), slice_.partition_B(gb), slice_.partition_C(gc)
        b_ctas = cute.make_layout(cute.slice_(ctas, (0, None, 0, 0)).shape)
        a_ctas = cute.make_layout(cute.slice_(ctas, (0, 0, None, 0)).shape)
        ta_s, ta_g = cpasync.tma_partition(
            load_a, place[2], a_ctas, cute.group_modes(sa, 0, 3), cute.group_modes(ta, 0, 3)
        )
        tb_s, tb_g = cpasync.tma_partition(
            load_b, place[1], b_ctas, cute.group_modes(sb, 0, 3), cute.group_modes(tb, 0, 3)
        )
        a_mask = cpasync.create_tma_multicast_mask(ctas, place, mcast_mode=2)
        b_mask = cpasync.create_tma_multicast_mask(ctas, place, mcast_mode=1)
        multicast = self.pair or self.cluster[0] * self.cluster[1] > 1
        ra, rb = mma.make_fragment_A(sa), mma.make_fragment_B(sb)
        pipeline.pipeline_init_wait(cluster_shape_mn=ctas)
        tmem.allocate(64)
        tmem.wait_for_alloc()
        layout = mma.make_fragment_C(mma.partition_shape_C(self.tile[:2])).layout
        acc = cute.make_tensor(tmem.retrieve_ptr(cutlass.Float32), layout)
        count = cute.size(ga, mode=[2])
        if warp == 0:
            state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
            for i in cutlass.range(count):
                loads.producer_acquire(state)
                full = loads.producer_get_barrier(state)
                cute.copy(
                    load_a,
                    ta_g[None, i],
                    ta_s[None, state.index],
                    tma_bar_ptr=full,
                    mcast_mask=a_mask if cutlass.const_expr(multicast) else None,
                )
                cute.copy(
                    load_b,
                    tb_g[None, i],
                    tb_s[None, state.index],
                    tma_bar_ptr=full,
                    mcast_mask=b_mask if cutlass.const_expr(multicast) else None,
                )
                state.advance()
            loads.producer_tail(state)
        if warp == 1 and leader:
            state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
            out = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, 1)
            results.producer_acquire(out)
            mma.set(tcgen05.Field.ACCUMULATE, False)
            for _ in cutlass.range(count):
                loads.consumer_wait(state)
                for kb in cutlass.range_constexpr(cute.size(ra, mode=[2])):
                    at = (None, None, kb, state.index)
                    cute.gemm(mma, acc, ra[at], rb[at], acc)
                    mma.set(tcgen05.Field.ACCUMULATE, True)
                loads.consumer_release(state)
                state.advance()
            results.producer_commit(out)
        got = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, 1)
        results.consumer_wait(got)
        atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition.x32), cutlass.Float32)
        flat = acc[(None, None), 0, 0]
        copy = tcgen05.make_tmem_copy(atom, flat)
        part = copy.get_slice(tid)
        source, target = part.partition_S(flat), part.partition_D(tc[(None, None), 0, 0])
        regs = cute.make_rmem_tensor(target.shape, cutlass.Float32)
        cute.copy(copy, source, regs)
        cute.arch.fence_view_async_tmem_load()
        results.consumer_release(got)
        if warp == 1 and leader:
            out = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, 1)
            out.advance()
            results.producer_tail(out)
        cute.autovec_copy(regs, target)
        tmem.relinquish_alloc_permit()
        pipeline.sync(barrier_id=2)
        tmem.free(tmem.retrieve_ptr(cutlass.Float32))
