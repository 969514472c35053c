"""Bias gradient: the sum of the rows of every group, in one launch, in a fixed order.

The matrix is cut into items: one group times one strip of columns, 8 threads wide (128 bytes where the alignment allows
16-byte loads). An item of at most ``SPLIT_ROWS`` rows is summed by one thread block. A longer one is shared by the 8
blocks of a cluster, each taking an eighth of its rows, and their partial sums meet through distributed shared memory:
when every row belongs to one group there are still ``8 N / 64`` blocks at work, and neither a workspace nor atomics
are needed. Which block adds which row depends on shapes and offsets alone, so the bits are the same in every run.

==============  ======================================================================================
threads         role
==============  ======================================================================================
thread t        columns ``t % 8`` of the strip, rows ``t // 8 + 32 i`` of the block's share
warp            adds its 4 row slots by shuffles, writes its row of ``warp_sums``
first COLUMNS   add the 8 warps' sums in order; write the result, or the block's share of it
first VECTOR    of each block of a cluster: add the 8 blocks' shares in order and write the result
==============  ======================================================================================

With row scales (``bias`` was multiplied by ``bias_scale[t]``) rows are weighted as they are read, and a last pass, one
warp per row, forms the gradient of the scales: the product of the row with its group's bias.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from ..varlen.groups import clamp, group_range

THREADS = 256
WARPS = THREADS // 32
ACROSS = 8  # threads side by side on one row
SLOTS = THREADS // ACROSS  # rows a block reads at a time
CLUSTER = 8
BATCH = 4  # loads in flight per thread
SPLIT_ROWS = 2048
BLOCKS_PER_SM = 4


@cute.jit
def load_remote(pointer: cute.Pointer) -> Float32:
    """A float32 of the shared memory of another block of the cluster."""
    return cute.arch.inline_ptx(
        "ld.shared::cluster.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[pointer.toint()]
    )


@cute.jit
def group_of(offs: cute.Tensor, row: Int32, rows: Int32) -> Int32:
    """The group that ``row`` belongs to, the number of groups if none; by bisection."""
    low, high = Int32(0), Int32(cute.size(offs))
    while low < high:
        middle = (low + high) // 2
        if clamp(offs[middle], Int32(0), rows) > row:
            high = middle
        else:
            low = middle + 1
    return low


class GroupedDbias:
    """``out[g] = sum of dy[t]`` over the rows ``t`` of group ``g``, in float32.

    With scales ``out[g] = sum of bias_scale[t] dy[t]`` and ``dscales[t] = dy[t] . bias[g]``, zero past the last group.

    Args:
        vector: elements per load: the largest power of two up to 16 bytes that divides N, the row pitch and the
            alignment of the data; 1 takes any strides.
    """

    def __init__(self, vector: int):
        self.vector = vector
        self.columns = ACROSS * vector

    @cute.jit
    def __call__(
        self,
        dy: cute.Tensor,
        offs: cute.Tensor,
        out: cute.Tensor,
        bias: cute.Tensor | None,
        bias_scale: cute.Tensor | None,
        dscales: cute.Tensor | None,
        sm_count: Int32,
        stream,
    ):
        """Launch the reduction.

        Args:
            dy: ``[T, N]``, float32, bfloat16 or float16.
            offs: int32 ``[G]``, cumulative ends; G > 0.
            out: float32 ``[G, N]``; N > 0. Empty groups come out as zeros.
            bias: ``[G, N]``, loaded like ``dy``; None without scales.
            bias_scale: ``[T]`` or None.
            dscales: float32 ``[T]`` or None.
            sm_count: multiprocessors of the device; bounds the grid.
            stream: CUDA stream.
        """
        items = cute.size(offs) * cute.ceil_div(cute.size(out, mode=[1]), self.columns)
        clusters = cutlass.max(cutlass.min(items, sm_count * BLOCKS_PER_SM // CLUSTER), Int32(1))
        self.kernel(dy, offs, out, bias, bias_scale, dscales).launch(
            grid=(clusters * CLUSTER, 1, 1), block=(THREADS, 1, 1), cluster=(CLUSTER, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        dy: cute.Tensor,
        offs: cute.Tensor,
        out: cute.Tensor,
        bias: cute.Tensor | None,
        bias_scale: cute.Tensor | None,
        dscales: cute.Tensor | None,
    ):
        """Device code: the long items by clusters, the short ones by single blocks, then the rows by warps."""
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        rank = cute.arch.block_idx_in_cluster()
        rows, n = dy.shape
        strips = cute.ceil_div(n, self.columns)
        items = cute.size(offs) * strips
        smem = SmemAllocator()
        warp_sums = smem.allocate_tensor(Float32, cute.make_layout((self.columns, WARPS)), byte_alignment=128)
        shares = smem.allocate_tensor(Float32, cute.make_layout((self.columns, 2)), byte_alignment=128)

        turn = Int32(0)
        for item in cutlass.range(block // CLUSTER, items, blocks // CLUSTER, unroll=1):
            group = item // strips
            first_column = (item - group * strips) * self.columns
            begin, end = group_range(offs, rows, group, False)
            if end - begin > SPLIT_ROWS:
                share = cute.ceil_div(end - begin, CLUSTER)
                low = cutlass.min(begin + rank * share, end)
                self.sum_rows(dy, bias_scale, warp_sums, first_column, low, cutlass.min(low + share, end), tid)
                if tid < self.columns:
                    shares[tid, turn] = self.sum_warps(warp_sums, tid)
                # Shares alternate between two buffers: passing this barrier for the next item proves that every
                # block has read this item's, so it may be overwritten the time after.
                cute.arch.cluster_arrive(aligned=True)
                cute.arch.cluster_wait()
                if tid < self.vector:
                    column = rank * self.vector + tid
                    total = Float32(0.0)
                    for peer in cutlass.range_constexpr(CLUSTER):
                        remote = cute.arch.map_dsmem_ptr(shares.iterator + turn * self.columns + column, Int32(peer))
                        total += load_remote(remote)
                    if first_column + column < n:
                        out[group, first_column + column] = total
                turn ^= 1

        for item in cutlass.range(block, items, blocks, unroll=1):
            group = item // strips
            first_column = (item - group * strips) * self.columns
            begin, end = group_range(offs, rows, group, False)
            if end - begin <= SPLIT_ROWS:
                self.sum_rows(dy, bias_scale, warp_sums, first_column, begin, end, tid)
                if tid < self.columns:
                    total = self.sum_warps(warp_sums, tid)
                    if first_column + tid < n:
                        out[group, first_column + tid] = total
        if cutlass.const_expr(bias is not None):
            self.multiply_rows(dy, offs, bias, dscales, block * WARPS + cute.arch.warp_idx(), blocks * WARPS)
        # A block's shared memory must outlive its peers' reads.
        cute.arch.cluster_arrive(aligned=True)
        cute.arch.cluster_wait()

    @cute.jit
    def sum_rows(
        self,
        dy: cute.Tensor,
        bias_scale: cute.Tensor | None,
        warp_sums: cute.Tensor,
        first_column: Int32,
        low: Int32,
        high: Int32,
        tid: Int32,
    ):
        """Sum rows ``[low, high)`` of one strip into ``warp_sums``; returns with the block synchronised."""
        lane = cute.arch.lane_idx()
        warp = cute.arch.warp_idx()  # a shuffle: not inside a branch that only some lanes take
        across = tid % ACROSS
        column = first_column + across * self.vector
        acc = cute.make_rmem_tensor(self.vector, Float32)
        acc.fill(0.0)
        if column < dy.shape[1]:
            row = low + tid // ACROSS
            batches = cutlass.max(high - row + (SLOTS - 1), Int32(0)) // SLOTS // BATCH
            for _ in cutlass.range(batches, unroll=1):
                parts = [self.weighted(dy, bias_scale, row + i * SLOTS, column) for i in range(BATCH)]
                for part, weight in parts:
                    self.add(acc, part, weight)
                row += BATCH * SLOTS
            for late in cutlass.range(row, high, SLOTS, unroll=1):
                part, weight = self.weighted(dy, bias_scale, late, column)
                self.add(acc, part, weight)
        cute.arch.sync_threads()  # warp_sums of the item before have been read
        for v in cutlass.range_constexpr(self.vector):
            value = acc[v]
            value += cute.arch.shuffle_sync_bfly(value, ACROSS)
            value += cute.arch.shuffle_sync_bfly(value, 2 * ACROSS)
            if lane < ACROSS:
                warp_sums[across * self.vector + v, warp] = value
        cute.arch.sync_threads()

    @cute.jit
    def sum_warps(self, warp_sums: cute.Tensor, column: Int32) -> Float32:
        """Add the warps' sums of one column, in order."""
        total = warp_sums[column, 0]
        for warp in cutlass.range_constexpr(1, WARPS):
            total += warp_sums[column, warp]
        return total

    def weighted(self, dy: cute.Tensor, bias_scale: cute.Tensor | None, row: Int32, column: Int32) -> tuple:
        """Neighbouring elements of a row and its weight, None without scales; loads are issued, not waited for."""
        return self.load(dy, row, column), None if bias_scale is None else bias_scale[row]

    def add(self, acc: cute.Tensor, part: cute.Tensor, weight: cutlass.Numeric | None):
        """``acc += weight part``."""
        values = part.load().to(Float32)
        acc.store(acc.load() + (values if weight is None else values * weight.to(Float32)))

    @cute.jit
    def multiply_rows(
        self, dy: cute.Tensor, offs: cute.Tensor, bias: cute.Tensor, dscales: cute.Tensor, first: Int32, step: Int32
    ):
        """``dscales[t] = dy[t] . bias[g]`` for every ``step``-th row from ``first`` on; one warp calls it."""
        lane = cute.arch.lane_idx()
        rows, n = dy.shape
        for row in cutlass.range(first, rows, step, unroll=1):
            group = group_of(offs, row, rows)
            sums = cute.make_rmem_tensor(self.vector, Float32)
            sums.fill(0.0)
            if group < cute.size(offs):
                for column in cutlass.range(lane * self.vector, n, 32 * self.vector, unroll=2):
                    factors = self.load(bias, group, column).load().to(Float32)
                    sums.store(sums.load() + self.load(dy, row, column).load().to(Float32) * factors)
            total = sums[0]
            for v in cutlass.range_constexpr(1, self.vector):
                total += sums[v]
            for step_ in cutlass.range_constexpr(5):
                total += cute.arch.shuffle_sync_bfly(total, 1 << step_)
            if lane == 0:
                dscales[row] = total

    @cute.jit
    def load(self, dy: cute.Tensor, row: Int32, column: Int32) -> cute.Tensor:
        """``vector`` neighbouring elements of a row, in registers; the offset is 64 bits wide."""
        offset = Int64(row) * dy.stride[0] + Int64(column) * dy.stride[1]
        source = dy.iterator + offset
        fragment = cute.make_rmem_tensor(self.vector, dy.element_type)
        width = self.vector * dy.element_type.width // 8
        cute.autovec_copy(cute.make_tensor(source.align(width), cute.make_layout(self.vector)), fragment)
        return fragment
