"""Bias gradient: the sum of the rows of every group, in a fixed order.

The matrix is cut into strips of columns, and the rows, whatever their groups, into tiles, one per block, of as many
equal spans as a block has warps. So every warp streams the same number of bytes for any routing. A warp adds up its
rows as they come and, where a group ends, writes the sum: to the output if the group lies within its span, else to
shared memory. After a barrier, the warp in whose span such a group began adds the sums of the spans after it, in order;
if the group does not lie within the tile, the sum goes to a workspace, and a second kernel, which waits for the first
to end, adds the sums of the tiles of such groups, in order. No atomics are needed, and which warp adds which row
depends on shapes and offsets alone, so the bits are the same in every run.

=================  =================================================================================================
lanes of a warp    role
=================  =================================================================================================
lane l             columns ``l % across`` (a vector of them) of the strip, rows ``l // across + down i`` of the span
lanes < across     write a sum, after shuffles across the ``down`` rows
all 32             hold the ends of 32 groups, so that the next group costs a ballot and a shuffle
=================  =================================================================================================

With row scales (``bias`` was multiplied by ``bias_scale[t]``) rows are weighted as they are read, and a last pass, one
warp per row, forms the gradient of the scales: the product of the row with its group's bias.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from ..pointers import aligned
from ..schedule.deal import lowest_bit
from ..varlen.groups import clamp, group_range

LANES = 32
WARPS = 8
BATCH = 8  # loads of a lane in flight; a register is loaded again as soon as its rows are added
COLUMNS = 256  # of a block that adds up tiles
AHEAD = 16  # sums of tiles that a lane loads before it adds the first
HEAD, TAIL = 0, 1  # sums of groups that began before the span, and that end behind it
NO_END = (1 << 31) - 1


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


class Ends(NamedTuple):
    """A warp's window on the offsets: lane ``i`` holds the end of group ``first + i``, ``NO_END`` if there is none."""

    first: Int32
    end: Int32


@cute.jit
def ends_from(offs: cute.Tensor, total: Int32, first: Int32) -> Ends:
    """The window on the groups from ``first`` on; ends are clamped to ``[0, total]``."""
    group = first + cute.arch.lane_idx()
    end = Int32(NO_END)
    if group < cute.size(offs):
        end = clamp(offs[group], Int32(0), total)
    return Ends(first, end)


@cute.jit
def seek(ends: Ends, offs: cute.Tensor, total: Int32, row: Int32) -> tuple[Ends, Int32, Int32]:
    """The first group from the window on that ends behind ``row < total``, and its end.

    There is one, since the last group ends at ``total``, and its end is greater than ``row`` for any offsets.
    """
    first, end = ends
    beyond = cute.arch.vote_ballot_sync(end > row)
    while beyond == 0:
        first, end = ends_from(offs, total, first + LANES)
        beyond = cute.arch.vote_ballot_sync(end > row)
    lane = lowest_bit(beyond)
    return Ends(first, end), first + lane, cute.arch.shuffle_sync(end, lane)


@cute.jit
def count_ended(offs: cute.Tensor, total: Int32, row: Int32) -> Int32:
    """How many groups end up to ``row < total``; four loads of a lane in flight."""
    last = cute.size(offs) - 1  # ends at `total`, behind `row`: may be looked at again
    ended = Int32(0)
    for first in cutlass.range(cute.arch.lane_idx(), cute.size(offs), 4 * LANES, unroll=1):
        found = [offs[cutlass.min(first + i * LANES, last)] for i in range(4)]
        for end in found:
            if clamp(end, Int32(0), total) <= row:
                ended += 1
    for i in cutlass.range_constexpr(5):
        ended += cute.arch.shuffle_sync_bfly(ended, 1 << i)
    return ended


@cute.jit
def share_of(offs: cute.Tensor, rows: Int32, spans: Int32) -> tuple[Int32, Int32]:
    """The rows of all groups, and those of one of as many equal spans."""
    total = clamp(offs[cute.size(offs) - 1], Int32(0), rows)
    return total, cutlass.max(cute.ceil_div(total, spans), Int32(1))


class GroupedDbias:
    """``out[g] = sum of dy[t]`` over the rows ``t`` of group ``g``, in float32.

    With scales ``out[g] = sum of bias_scale[t] dy[t]`` and ``dscales[t] = dy[t] . bias[g]``, zero past the last group.

    Args:
        vector: elements per load: the largest power of two up to 16 bytes that divides N, the row pitch and the
            alignment of the data; 1 takes any strides.
        across: lanes side by side on one row, a power of two; a strip is ``across * vector`` columns wide.
    """

    def __init__(self, vector: int, across: int):
        self.vector, self.across = vector, across
        self.columns = across * vector
        self.down = LANES // across  # rows that a warp reads at a time

    @cute.jit
    def __call__(
        self,
        dy: cute.Tensor,
        offs: cute.Tensor,
        out: cute.Tensor,
        partial: cute.Tensor,
        bias: cute.Tensor | None,
        bias_scale: cute.Tensor | None,
        dscales: cute.Tensor | None,
        stream,
    ):
        """Launch the reduction.

        Args:
            dy: ``[T, N]``, float32, bfloat16 or float16.
            offs: int32 ``[G]``, cumulative ends; G > 0.
            out: float32 ``[G, N]``; N > 0. Empty groups come out as zeros.
            partial: float32 ``[2 tiles, N]``, a workspace; rows are cut into so many tiles.
            bias: ``[G, N]``, loaded like ``dy``; None without scales.
            bias_scale: ``[T]`` or None.
            dscales: float32 ``[T]`` or None.
            stream: CUDA stream.
        """
        strips = cute.ceil_div(cute.size(out, mode=[1]), self.columns)
        columns = cute.ceil_div(cute.size(out, mode=[1]), COLUMNS)
        tiles = partial.shape[0] // 2
        self.sum_tiles(dy, offs, out, partial, bias, bias_scale, dscales, strips).launch(
            grid=(strips * tiles, 1, 1),
            block=(WARPS * LANES, 1, 1),
            stream=stream,
            min_blocks_per_mp=2,  # as registers suffice for
            preferred_smem_carveout=15,  # in %; the rest is cache
        )
        if tiles > 1:
            self.add_tiles(offs, out, partial, Int32(dy.shape[0])).launch(
                grid=(tiles - 1, columns, 1), block=(COLUMNS, 1, 1), stream=stream, use_pdl=True
            )

    @cute.kernel
    def sum_tiles(
        self,
        dy: cute.Tensor,
        offs: cute.Tensor,
        out: cute.Tensor,
        partial: cute.Tensor,
        bias: cute.Tensor | None,
        bias_scale: cute.Tensor | None,
        dscales: cute.Tensor | None,
        strips: Int32,
    ):
        """Every warp its span, then the groups of several spans; then the rows by warps."""
        # Blocks of the second kernel look for their groups wherever one of these has ended.
        cute.arch.griddepcontrol_launch_dependents()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        tile = block // strips  # neighbours read neighbouring columns
        first_column = (block - tile * strips) * self.columns
        spans = partial.shape[0] // 2 * WARPS
        span = tile * WARPS + warp
        total, share = share_of(offs, Int32(dy.shape[0]), spans)
        low = cutlass.min(span * share, total)
        high = cutlass.min(low + share, total)
        sums = SmemAllocator().allocate_tensor(Float32, cute.make_layout((self.columns, 2, WARPS)), byte_alignment=128)
        group, end, before = Int32(0), Int32(0), Int32(0)
        if low < high:
            group, end, before = self.sum_span(dy, bias_scale, offs, out, sums, total, first_column, low, high, warp)
        self.clear_empty(offs, out, Int32(dy.shape[0]), first_column, span, spans)
        cute.arch.sync_threads()
        if end > high:
            last = (end - 1) // share - tile * WARPS  # the warp in whose span, or behind this tile, the group ends
            if last < WARPS:
                self.add_spans(sums, TAIL, out, group, first_column, warp, last)
            else:
                self.add_spans(sums, TAIL, partial, 2 * tile + TAIL, first_column, warp, last)
        if warp == 0 and before > low:
            self.add_spans(sums, HEAD, partial, 2 * tile + HEAD, first_column, warp, (before - 1) // share - span)
        if cutlass.const_expr(bias is not None):
            self.multiply_rows(dy, offs, bias, dscales, block * WARPS + warp, blocks * WARPS)

    @cute.kernel
    def add_tiles(self, offs: cute.Tensor, out: cute.Tensor, partial: cute.Tensor, rows: Int32):
        """The group that begins in a tile, the block's, and ends behind it; a lane has a column."""
        tile, part, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        total, share = share_of(offs, rows, partial.shape[0] // 2 * WARPS)
        share *= WARPS
        low = tile * share
        high = low + share
        group, begin, last = Int32(0), Int32(0), Int32(0)
        if high < total:
            _, group, end = seek(ends_from(offs, total, count_ended(offs, total, high)), offs, total, high)
            if group > 0:
                begin = clamp(offs[group - 1], Int32(0), total)
            last = (end - 1) // share
        cute.arch.griddepcontrol_wait()  # all of them: nothing may follow that finds the first kernel at work
        column = part * COLUMNS + thread
        if high < total and begin >= low and begin < high and column < out.shape[1]:
            value = partial[2 * tile + TAIL, column]
            for first in cutlass.range(tile + 1, last + 1, AHEAD, unroll=1):
                held = [partial[2 * cutlass.min(first + i, last) + HEAD, column] for i in range(AHEAD)]
                for i in cutlass.range_constexpr(AHEAD):
                    if first + i <= last:
                        value += held[i]
            out[group, column] = value

    @cute.jit
    def sum_span(
        self,
        dy: cute.Tensor,
        bias_scale: Any,
        offs: cute.Tensor,
        out: cute.Tensor,
        sums: cute.Tensor,
        total: Int32,
        first_column: Int32,
        low: Int32,
        high: Int32,
        warp: Int32,
    ) -> tuple[Int32, Int32, Int32]:
        """Sum rows ``[low, high)`` of one strip.

        Returns:
            A group that begins here and ends behind ``high``, and that end; if there is none, an end up to ``high``.
            The end of the group that began before ``low``; if there is none, ``low``.
        """
        lane = cute.arch.lane_idx()
        # Lanes beyond the last column read it again: what they add up is not written.
        column = cutlass.min(first_column + lane % self.across * self.vector, dy.shape[1] - self.vector)
        acc = cute.make_rmem_tensor(self.vector, Float32)
        acc.fill(0.0)
        parts = cute.make_rmem_tensor((self.vector, BATCH), dy.element_type)
        weights: Any = None
        if cutlass.const_expr(bias_scale is not None):
            weights = cute.make_rmem_tensor(BATCH, bias_scale.element_type)

        ends, group, end = Ends(Int32(0), Int32(0)), Int32(0), Int32(0)
        whole = cutlass.Boolean(False)  # whether the group begins in this span
        before = low
        at = low  # rows before are in `acc` or written
        base = low
        self.load_rows(dy, bias_scale, low, high, column, parts, weights)
        while base < high:
            row = base + lane // self.across
            stop = base + BATCH * self.down
            if base == low:  # while the first rows are on their way
                ends, group, end = seek(ends_from(offs, total, count_ended(offs, total, low)), offs, total, low)
                begin = Int32(0)
                if group > 0:
                    begin = clamp(offs[group - 1], Int32(0), total)
                whole = begin >= low
                if not whole:
                    before = end
            if stop <= high and stop < end:
                for i in cutlass.range_constexpr(BATCH):
                    self.add(acc, parts, weights, i)
                    self.load_row(dy, bias_scale, row + (BATCH + i) * self.down, high, column, parts, weights, i)
            else:
                limit = cutlass.min(stop, high)
                more = at < limit
                while more:
                    for i in cutlass.range_constexpr(BATCH):
                        if row + i * self.down >= at and row + i * self.down < cutlass.min(end, limit):
                            self.add(acc, parts, weights, i)
                    more = end <= limit
                    if more:
                        self.write(acc, out, sums[None, HEAD, warp], group, first_column, whole)
                        acc.fill(0.0)
                        at = end
                        whole = cutlass.Boolean(True)
                        more = at < limit
                        if at < high:
                            ends, group, end = seek(ends, offs, total, at)
                if stop < high:
                    self.load_rows(dy, bias_scale, stop, high, column, parts, weights)
            base = stop
            at = cutlass.max(at, cutlass.min(base, high))
        if end > high:
            side = Int32(HEAD)
            if whole:
                side = Int32(TAIL)
            self.write(acc, out, sums[None, side, warp], group, first_column, cutlass.Boolean(False))
            if not whole:
                end = high  # it is the warp's where the group began
        return group, end, before

    @cute.jit
    def load_rows(
        self,
        dy: cute.Tensor,
        bias_scale: Any,
        base: Int32,
        high: Int32,
        column: Int32,
        parts: cute.Tensor,
        weights: Any,
    ):
        """A batch of rows from ``base`` on."""
        for i in cutlass.range_constexpr(BATCH):
            row = base + cute.arch.lane_idx() // self.across + i * self.down
            self.load_row(dy, bias_scale, row, high, column, parts, weights, i)

    @cute.jit
    def load_row(
        self,
        dy: cute.Tensor,
        bias_scale: Any,
        row: Int32,
        high: Int32,
        column: Int32,
        parts: cute.Tensor,
        weights: Any,
        i: cutlass.Constexpr,
    ):
        """A lane's ``i``-th row of a batch; one beyond the span reads its last again, and is not added."""
        row = cutlass.min(row, high - 1)
        self.load(dy, row, column, parts[None, i])
        if cutlass.const_expr(weights is not None):
            weights[i] = bias_scale[row]

    @cute.jit
    def write(
        self,
        acc: cute.Tensor,
        out: cute.Tensor,
        held: cute.Tensor,
        group: Int32,
        first_column: Int32,
        whole: cutlass.Boolean,
    ):
        """Add the warp's rows up and write the sum: to ``out`` if it is a whole group's, else to ``held``."""
        lane = cute.arch.lane_idx()
        offset = lane % self.across * self.vector
        total = cute.make_rmem_tensor(self.vector, Float32)
        for v in cutlass.range_constexpr(self.vector):
            value = acc[v]
            for i in cutlass.range_constexpr(self.down.bit_length() - 1):
                value += cute.arch.shuffle_sync_bfly(value, self.across << i)
            total[v] = value
        if lane < self.across:
            width = min(4 * self.vector, 16)
            if whole:
                if first_column + offset < out.shape[1]:
                    sink = out.iterator + (Int64(group) * out.stride[0] + first_column + offset)
                    cute.autovec_copy(total, cute.make_tensor(aligned(sink, width), cute.make_layout(self.vector)))
            else:
                sink = held.iterator + offset
                cute.autovec_copy(total, cute.make_tensor(aligned(sink, width), cute.make_layout(self.vector)))

    @cute.jit
    def add_spans(
        self,
        sums: cute.Tensor,
        side: cutlass.Constexpr,
        sink: cute.Tensor,
        row: Int32,
        first_column: Int32,
        warp: Int32,
        last: Int32,
    ):
        """Add up what warps from ``warp`` to ``last`` hold of a group, and write it to a row of ``sink``."""
        for i in cutlass.range_constexpr((self.columns + LANES - 1) // LANES):
            offset = cute.arch.lane_idx() + i * LANES
            if offset < self.columns and first_column + offset < sink.shape[1]:
                total = sums[offset, side, warp]
                for other in cutlass.range_constexpr(1, WARPS):
                    if other > warp and other <= last:
                        total += sums[offset, HEAD, other]
                sink[row, first_column + offset] = total

    @cute.jit
    def clear_empty(
        self, offs: cute.Tensor, out: cute.Tensor, rows: Int32, first_column: Int32, span: Int32, spans: Int32
    ):
        """Set the strip's sums of empty groups to zero; its warps share the groups."""
        lane = cute.arch.lane_idx()
        groups = cute.size(offs)
        for first in cutlass.range(span * LANES, groups, spans * LANES, unroll=1):
            start, end = group_range(offs, rows, first + lane, False)
            empty = cute.arch.vote_ballot_sync(start >= end and first + lane < groups)
            while empty != 0:
                group = first + lowest_bit(empty)
                empty &= empty - 1
                for i in cutlass.range_constexpr((self.columns + LANES - 1) // LANES):
                    offset = lane + i * LANES
                    if offset < self.columns and first_column + offset < out.shape[1]:
                        out[group, first_column + offset] = Float32(0.0)

    @cute.jit
    def add(self, acc: cute.Tensor, parts: cute.Tensor, weights: Any, i: cutlass.Constexpr):
        """``acc += weights[i] parts[i]``."""
        values = parts[None, i].load().to(Float32)
        if cutlass.const_expr(weights is not None):
            values = values * weights[i].to(Float32)
        acc.store(acc.load() + values)

    @cute.jit
    def multiply_rows(
        self, dy: cute.Tensor, offs: cute.Tensor, bias: cute.Tensor, dscales: cute.Tensor, first: Int32, step: Int32
    ):
        """``dscales[t] = dy[t] . bias[g]`` for every ``step``-th row from ``first`` on; one warp calls it."""
        lane = cute.arch.lane_idx()
        rows, n = dy.shape
        left = cute.make_rmem_tensor(self.vector, dy.element_type)
        right = cute.make_rmem_tensor(self.vector, bias.element_type)
        for row in cutlass.range(first, rows, step, unroll=1):
            group = group_of(offs, row, rows)
            sums = cute.make_rmem_tensor(self.vector, Float32)
            sums.fill(0.0)
            if group < cute.size(offs):
                for column in cutlass.range(lane * self.vector, n, LANES * self.vector, unroll=2):
                    self.load(dy, row, column, left)
                    self.load(bias, group, column, right)
                    sums.store(sums.load() + left.load().to(Float32) * right.load().to(Float32))
            total = sums[0]
            for v in cutlass.range_constexpr(1, self.vector):
                total += sums[v]
            for i in cutlass.range_constexpr(5):
                total += cute.arch.shuffle_sync_bfly(total, 1 << i)
            if lane == 0:
                dscales[row] = total

    @cute.jit
    def load(self, matrix: cute.Tensor, row: Int32, column: Int32, fragment: cute.Tensor):
        """``vector`` neighbouring elements of a row into registers; the offset is 64 bits wide."""
        offset = Int64(row) * matrix.stride[0] + Int64(column) * matrix.stride[1]
        source = matrix.iterator + offset
        width = self.vector * matrix.element_type.width // 8
        cute.autovec_copy(cute.make_tensor(aligned(source, width), cute.make_layout(self.vector)), fragment)
