"""Bias gradient: the sum of the rows of every group, in a fixed order.

The matrix is cut into strips of columns. The rows, regardless of groups, are cut into tiles, one per block, and a tile
into one equal span per warp. So every warp streams the same number of bytes for any routing. A warp adds up its rows in
order and, where a group ends, writes the sum: to the output if the group lies within its span, else to shared memory.
After a barrier, every thread adds up one column of such groups, span by span. Sums of groups that extend beyond the
tile go to a workspace, and a second kernel, which waits for the first to end, adds them up over tiles, in order. No
atomics are needed, and the order of additions depends only on shapes and offsets, so the bits are the same in every
run.

=================  =================================================================================================
lanes of a warp    role
=================  =================================================================================================
lane l             columns ``l % across`` (a vector of them) of the strip, rows ``l // across + down i`` of the span
lane 0             sets the expected bytes of a ring slot; as many lanes as the slot has rows copy one each
lanes < across     write a sum, after shuffles across the ``down`` rows
all 32             hold the ends of 32 groups, so that the next group costs a ballot and a shuffle
=================  =================================================================================================

Rows of at least 32 vectors of 16 bytes are loaded by bulk copies through a ring in shared memory (``slots``), which
leaves registers for the second kernel, whose blocks wait beside those of the first. Other rows, and all rows with
scales, are loaded into registers.

With row scales (``bias`` was multiplied by ``bias_scale[t]``) rows are weighted as they are read, and a last pass, one
warp per row, forms the gradient of the scales: the product of the row with its group's bias.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from .. import instructions
from ..pointers import aligned
from ..scheduler.groups import clamp
from .ring import RingShape
from .row_blocks import LANES, Found, begin_of, first_behind, first_ends, group_of, seek, span_of, spans_of

WARPS = 8
BATCH = 8  # loads of a lane in flight, without a ring; a register is reused as soon as its rows are added
SLOT = 4  # rows per ring slot
COLUMNS = 256  # per block that adds up tiles
AHEAD = 8  # tile sums that a thread loads before it adds the first
SPLIT = 8  # tiles that may share the columns of one group, a power of two
HEAD, TAIL = 0, 1  # sums of groups that begin before the span, and that end after it
NOTHING, ENDS, GOES_ON = -1, 0, 1


class DbiasRows(NamedTuple):
    """The summed rows: ``dy [T, N]`` of the groups that end at ``offs``, times ``bias_scale [T]`` if given."""

    dy: cute.Tensor
    offs: cute.Tensor
    bias_scale: Any


class WarpPart(NamedTuple):
    """A warp's part of a strip: columns from ``first_column`` on, the rows ``[low, high)`` of its span."""

    warp: Int32
    first_column: Int32
    low: Int32
    high: Int32


class DbiasKernel:
    """The kernel for ``out[g] = sum of dy[t]`` over the rows ``t`` of group ``g``, in float32.

    With scales ``out[g] = sum of bias_scale[t] dy[t]`` and ``dscales[t] = dy[t] . bias[g]``, zero past the last group.

    Args:
        vector: elements per load: the largest power of two up to 16 bytes that divides N, the row pitch and the
            alignment of the data; 1 takes any strides.
        across: adjacent lanes on one row, a power of two; a strip is ``across * vector`` columns wide.
        slots: slots of a warp's ring in shared memory, 0 for none; with one, a vector has 16 bytes, all lanes are on
            one row, and there are no scales.
    """

    def __init__(self, vector: int, across: int, slots: int):
        self.vector, self.across = vector, across
        self.columns = across * vector
        self.down = LANES // across  # rows that a warp reads at a time
        self.ring: Any = RingShape(slots, SLOT, self.columns, WARPS) if slots else None
        self.batch = SLOT if slots else BATCH

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
        carveout = 100 if self.ring else 15  # in %, the rest is cache; equal for both, or the second one waits
        self.sum_tiles(DbiasRows(dy, offs, bias_scale), out, partial, bias, dscales, strips).launch(
            grid=(strips * tiles, 1, 1),
            block=(WARPS * LANES, 1, 1),
            stream=stream,
            min_blocks_per_mp=1 if self.ring else 2,  # limited by registers
            preferred_smem_carveout=carveout,
        )
        if tiles > 1:
            self.add_tiles(offs, out, partial, Int32(dy.shape[0])).launch(
                grid=(tiles - 1, columns, 1),
                block=(COLUMNS, 1, 1),
                stream=stream,
                use_pdl=instructions.overlaps(),
                preferred_smem_carveout=carveout,
            )

    @cute.kernel
    def sum_tiles(
        self,
        source: DbiasRows,
        out: cute.Tensor,
        partial: cute.Tensor,
        bias: cute.Tensor | None,
        dscales: cute.Tensor | None,
        strips: Int32,
    ):
        """Sum every warp's span, then the groups of several spans; then multiply rows by warps."""
        dy, offs = source.dy, source.offs
        # Blocks of the second kernel find their groups wherever they fit beside these.
        instructions.launch_dependents()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        tile = block // strips  # adjacent blocks read adjacent columns
        first_column = (block - tile * strips) * self.columns
        count = partial.shape[0] // 2 * WARPS
        span, rows = tile * WARPS + warp, Int32(dy.shape[0])
        # First, since the total is needed before any row, and later loads of offsets would queue behind rows.
        found = first_ends(offs)
        own_empty = self.is_empty(offs, rows, span)
        smem = SmemAllocator()
        sums = smem.allocate_tensor(Float32, cute.make_layout((self.columns, 2, WARPS)), byte_alignment=128)
        notes = smem.allocate_tensor(Int32, cute.make_layout((2, WARPS)), byte_alignment=8)
        ring: Any = None
        if cutlass.const_expr(self.ring is not None):
            ring = self.ring.allocate(smem, dy.element_type, warp)
        spans = spans_of(found.last, rows, count)
        low, high = begin_of(spans, span), begin_of(spans, span + 1)
        goes_on, began = Int32(NOTHING), Int32(NOTHING)
        if low < high:
            part = WarpPart(warp, first_column, low, high)
            goes_on, began = self.sum_span(source, out, sums, ring, found, spans.total, part)
        if cute.arch.lane_idx() == 0:
            notes[HEAD, warp] = goes_on
            notes[TAIL, warp] = began
        if own_empty:
            self.clear(out, span, first_column)
        for group in cutlass.range(span + count, cute.size(offs), count, unroll=1):
            if self.is_empty(offs, rows, group):
                self.clear(out, group, first_column)
        cute.arch.sync_threads()
        self.add_spans(sums, notes, out, partial, tile, first_column)
        if cutlass.const_expr(bias is not None):
            self.multiply_rows(dy, offs, bias, dscales, block * WARPS + warp, blocks * WARPS)

    @cute.kernel
    def add_tiles(self, offs: cute.Tensor, out: cute.Tensor, partial: cute.Tensor, rows: Int32):
        """Add up the group that extends across the tile's end; tiles that share a group also share its columns.

        A block has 256 columns, or a half, a quarter or an eighth of them where there are enough tiles. Then as many
        threads share a column, each adds a run of the tiles' sums, and the runs are added in order.
        """
        tile, part, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        found = first_ends(offs)
        spans = spans_of(found.last, rows, partial.shape[0] // 2 * WARPS)
        high = begin_of(spans, (tile + 1) * WARPS)
        group, begin, end = Int32(0), high, Int32(0)
        if high < spans.total:
            _, group, begin, end = first_behind(offs, found, spans.total, high)
        first, last, split = Int32(0), Int32(0), Int32(1)
        if begin < high:
            first, last = span_of(spans, begin) // WARPS, span_of(spans, end - 1) // WARPS
            while 2 * split <= last - first and split < SPLIT:
                split *= 2
        width = COLUMNS // split
        run = thread // width
        column = part * COLUMNS + (tile - first) * width + thread - run * width
        share = cute.ceil_div(last - first + 1, split)
        low = run * share
        stop = cutlass.min(low + share, last - first + 1)
        if column >= out.shape[1]:
            stop = low
        runs = SmemAllocator().allocate_tensor(Float32, cute.make_layout(COLUMNS), byte_alignment=128)
        instructions.wait()  # all threads: no later launch may run beside the first kernel
        if begin < high and tile - first < split:
            value = Float32(0.0)
            for i in cutlass.range(low, stop, AHEAD, unroll=1):
                held = []
                for j in cutlass.range_constexpr(AHEAD):
                    loaded = Float32(0.0)
                    if i + j < stop:
                        side = Int32(HEAD)
                        if i + j == 0:
                            side = Int32(TAIL)
                        loaded = partial[2 * (first + i + j) + side, column]
                    held.append(loaded)
                for j in cutlass.range_constexpr(AHEAD):
                    value += held[j]
            if split > 1:
                runs[thread] = value
                cute.arch.sync_threads()
                for i in cutlass.range(1, split, unroll=1):
                    if run == 0:
                        value += runs[i * width + thread]
            if run == 0 and column < out.shape[1]:
                out[group, column] = value

    @cute.jit
    def sum_span(
        self,
        source: DbiasRows,
        out: cute.Tensor,
        sums: cute.Tensor,
        ring: Any,
        found: Found,
        total: Int32,
        part: WarpPart,
    ) -> tuple[Int32, Int32]:
        """Sum the rows of a warp's part; all groups together have ``total``.

        Returns:
            Contents of ``sums[HEAD]``: ``NOTHING``, or a group that began before and ``ENDS`` here or ``GOES_ON``.
            Contents of ``sums[TAIL]``: ``NOTHING``, or the number of a group that begins here and ends after ``high``.
        """
        dy, offs, bias_scale = source
        warp, first_column, low, high = part
        lane = cute.arch.lane_idx()
        step = self.batch * self.down
        # Lanes past the last column read it again; their sums are not written.
        column = cutlass.min(first_column + lane % self.across * self.vector, dy.shape[1] - self.vector)
        acc = cute.make_rmem_tensor(self.vector, Float32)
        acc.fill(0.0)
        parts = cute.make_rmem_tensor((self.vector, self.batch), dy.element_type)
        weights: Any = None
        if cutlass.const_expr(bias_scale is not None):
            weights = cute.make_rmem_tensor(self.batch, bias_scale.element_type)
        if cutlass.const_expr(self.ring is not None):
            for i in cutlass.range_constexpr(self.ring.slots):
                self.ring.fill(ring, dy, first_column, low + i * step, high, Int32(i))
        self.load_rows(source, low, high, column, parts, weights)

        # while the loads of the first rows are in flight
        ends, group, begin, end = first_behind(offs, found, total, low)
        whole = begin >= low  # whether the group begins in this span
        goes_on, began = Int32(NOTHING), Int32(NOTHING)
        if not whole:
            goes_on = Int32(ENDS)
        at, base = low, low  # rows before `at` are in `acc` or written
        slot, turn = Int32(0), Int32(0)
        while base < high:
            row = base + lane // self.across
            stop = base + step
            if cutlass.const_expr(self.ring is not None):
                self.ring.wait(ring, slot, turn)
                for i in cutlass.range_constexpr(self.batch):
                    self.ring.read(ring, slot, i, column - first_column, parts[None, i])
                cute.arch.sync_warp()
                self.ring.fill(ring, dy, first_column, base + self.ring.slots * step, high, slot)
                slot += 1
                if slot == self.ring.slots:
                    slot, turn = Int32(0), turn ^ 1
            if stop <= high and stop < end:
                for i in cutlass.range_constexpr(self.batch):
                    self.add(acc, parts, weights, i)
                    self.load_row(source, row + step + i * self.down, high, column, parts, weights, i)
            else:
                limit = cutlass.min(stop, high)
                more = at < limit
                while more:
                    for i in cutlass.range_constexpr(self.batch):
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
                    self.load_rows(source, stop, high, column, parts, weights)
            base = stop
            at = cutlass.max(at, cutlass.min(base, high))
        if end > high:
            side = Int32(HEAD)
            if whole:
                side, began = Int32(TAIL), group
            else:
                goes_on = Int32(GOES_ON)
            self.write(acc, out, sums[None, side, warp], group, first_column, cutlass.Boolean(False))
        return goes_on, began

    @cute.jit
    def load_rows(self, source: DbiasRows, base: Int32, high: Int32, column: Int32, parts: cute.Tensor, weights: Any):
        """Load a batch of rows from ``base`` on."""
        for i in cutlass.range_constexpr(self.batch):
            row = base + cute.arch.lane_idx() // self.across + i * self.down
            self.load_row(source, row, high, column, parts, weights, i)

    @cute.jit
    def load_row(
        self,
        source: DbiasRows,
        row: Int32,
        high: Int32,
        column: Int32,
        parts: cute.Tensor,
        weights: Any,
        i: cutlass.Constexpr,
    ):
        """Load the parts of a lane's ``i``-th row that bypass the ring; past the span its last row, not added."""
        row = cutlass.min(row, high - 1)
        if cutlass.const_expr(self.ring is None):
            self.load(source.dy, row, column, parts[None, i])
        if cutlass.const_expr(weights is not None):
            weights[i] = source.bias_scale[row]

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
        notes: cute.Tensor,
        out: cute.Tensor,
        partial: cute.Tensor,
        tile: Int32,
        first_column: Int32,
    ):
        """Add up the warps' sums of groups of several spans, in order; one thread per column."""
        thread, _, _ = cute.arch.thread_idx()
        column = first_column + thread
        if thread < self.columns and column < out.shape[1]:
            held = []  # everything is loaded before it is needed
            for warp in cutlass.range_constexpr(WARPS):
                goes_on, began = notes[HEAD, warp], notes[TAIL, warp]
                head, tail = Float32(0.0), Float32(0.0)
                if goes_on != NOTHING:
                    head = sums[thread, HEAD, warp]
                if began != NOTHING:
                    tail = sums[thread, TAIL, warp]
                held.append((goes_on, began, head, tail))
            value, group, side = Float32(0.0), Int32(NOTHING), Int32(NOTHING)  # side: where it is kept if it goes on
            for goes_on, began, head, tail in held:
                if goes_on != NOTHING:
                    value += head
                    if group == NOTHING:
                        side = Int32(HEAD)
                    if goes_on == ENDS:
                        if group == NOTHING:
                            partial[2 * tile + HEAD, column] = value
                        else:
                            out[group, column] = value
                        side = Int32(NOTHING)
                if began != NOTHING:
                    value, group, side = tail, began, Int32(TAIL)
            if side != NOTHING:
                partial[2 * tile + side, column] = value

    @cute.jit
    def is_empty(self, offs: cute.Tensor, rows: Int32, group: Int32) -> cutlass.Boolean:
        """Return whether the group exists and has no rows; two loads at a time."""
        last = cute.size(offs) - 1
        begin, end = offs[cutlass.min(cutlass.max(group - 1, 0), last)], offs[cutlass.min(group, last)]
        begin = clamp(begin, Int32(0), rows)
        if group == 0:
            begin = Int32(0)
        return group <= last and clamp(end, begin, rows) == begin

    @cute.jit
    def clear(self, out: cute.Tensor, group: Int32, first_column: Int32):
        """Zero the strip's sums of an empty group; one warp calls it."""
        for i in cutlass.range_constexpr((self.columns + LANES - 1) // LANES):
            offset = cute.arch.lane_idx() + i * LANES
            if offset < self.columns and first_column + offset < out.shape[1]:
                out[group, first_column + offset] = Float32(0.0)

    @cute.jit
    def add(self, acc: cute.Tensor, parts: cute.Tensor, weights: Any, i: cutlass.Constexpr):
        """Apply ``acc += weights[i] parts[i]``."""
        values = parts[None, i].load().to(Float32)
        if cutlass.const_expr(weights is not None):
            values = values * weights[i].to(Float32)
        acc.store(acc.load() + values)

    @cute.jit
    def multiply_rows(
        self, dy: cute.Tensor, offs: cute.Tensor, bias: cute.Tensor, dscales: cute.Tensor, first: Int32, step: Int32
    ):
        """Write ``dscales[t] = dy[t] . bias[g]`` for every ``step``-th row from ``first`` on; one warp calls it."""
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
        """Load ``vector`` adjacent elements of a row into registers; the offset is 64 bits wide."""
        offset = Int64(row) * matrix.stride[0] + Int64(column) * matrix.stride[1]
        source = matrix.iterator + offset
        width = self.vector * matrix.element_type.width // 8
        cute.autovec_copy(cute.make_tensor(aligned(source, width), cute.make_layout(self.vector)), fragment)
