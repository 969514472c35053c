"""NVFP4 quantisation in both directions in one pass over x, after one that finds the groups' largest magnitudes.

The first tiles of the second pass are on their way while the first one ends (programmatic dependent launch).

A block of 8 warps takes a tile: 128 rows of one group and 128 columns, in either direction eight blocks of 16 deep, two
atoms of 512 bytes of scales. It takes no second one: there are no registers left for what a loop keeps.

=============  =============================================================
of a tile      who holds it
=============  =============================================================
16 x 128       a warp
8 columns      a lane: ``8 (lane % 16)`` on, in the rows ``8 (lane // 16)`` on
=============  =============================================================

so a block along the columns is the eight values of two neighbouring lanes in one row, a block of rows those of two
lanes 16 apart in one column, and a square of 16 those of four. Two lanes share eight blocks; each makes the scales of
four and sends them to the other.

An element's multiplier follows from the byte of its scale and the group: a table of all 127, made while x is on its
way, takes the place of a division per block of 16. Where no instruction rounds to E2M1, float32 additions do
(``fp4``); they need products below 7, which all are but those of blocks whose scale is subnormal or NaN: a warp that
has one clamps.
"""

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint8, cute
from cutlass.memory import SmemAllocator

from ..tiles import ceil_div
from . import fp4
from .fp4 import BLOCK, SCALES
from .lanes import COLUMNS, LANES, STEPS, VECTOR, WARPS, BandValues, store_bytes
from .maxima import CARVEOUT, GroupMaxima
from .quantize_spec import NVFP4Spec
from .tiles import (
    ROWS,
    group_of_unit,
    group_place,
    group_tile,
    launch_grid,
    matrix_place,
    matrix_tile,
    source_of,
    stack_of,
    tiles_at_most,
)

UNIT = 64  # of the placement of columnwise data
ATOM = 512
DEPTH = COLUMNS // BLOCK  # blocks of a tile, in either direction
PIECE = 16  # bytes
WORD = 4
COLUMN_BYTES = ROWS // 2
GROUP_BYTES = VECTOR * COLUMN_BYTES + PIECE  # of eight columns, padded against conflicts
TURNED = COLUMNS // VECTOR * GROUP_BYTES


class QuantizeNVFP4(BandValues):
    """The kernel for one ``NVFP4Spec``."""

    def __init__(self, spec: NVFP4Spec):
        super().__init__(spec.source, spec.elementwise)
        self.spec = spec
        self.transformed = BandValues("bfloat16")
        self.find_maxima = GroupMaxima(spec.source, spec.grouped, spec.rht, spec.elementwise)
        self.tables = 2 if spec.rht and spec.rowwise else 1
        # As registers suffice for.
        self.blocks_per_sm = 2 if not self.packed or spec.stochastic else 3 if spec.rht else 4

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        offs: cute.Tensor | None,
        order: cute.Tensor | None,
        row_scale: cute.Tensor | None,
        rng: cute.Tensor | None,
        noop: cute.Tensor | None,
        data: cute.Tensor | None,
        scale: cute.Tensor | None,
        amax: cute.Tensor | None,
        columnwise_data: cute.Tensor | None,
        columnwise_scale: cute.Tensor | None,
        columnwise_amax: cute.Tensor | None,
        matrix_rows: Int32,
        stream,
    ):
        """Launch: a clear of the maxima, their search, the elements.

        Args:
            x: ``[T, K]``, or ``[G N, K]`` of stacked matrices of ``matrix_rows`` = N rows each, K even; unless element
                by element, rows on 16 bytes, K a multiple of 8.
            offs: int32 ``[G]``, or None for matrices.
            order: int32 or None. Of rows in groups ``[T]``: ``x`` is ``[S, K]``, and its row ``order[t]`` stands in
                row t. Of matrices ``[G]``: ``x`` is ``[S, N, K]``, and that of group g is ``order[g]``.
            row_scale: ``[T]`` or None.
            rng: four words, those of the seed and of the offset, the lower ones first; or None.
            noop: one element; if not zero, nothing is written.
            data: bytes ``[rows, K / 2]``; None without the direction, as all of its components.
            scale: bytes, ``[rows, ceil(K / 16)]`` or blocked.
            amax: float32 ``[G]``, for the largest finite magnitudes.
            columnwise_data: bytes ``[K, Tp / 2]``, of matrices ``[G K, N / 2]``, N even, a multiple of 32
                unless element by element.
            columnwise_scale: bytes, ``[K, Tp / 16]``, of matrices ``[G K, ceil(N / 16)]``, or blocked.
            columnwise_amax: float32 ``[G]``, for those of what columnwise data is made from.
            stream: CUDA stream.
        """
        bits = [None if t is None else cute.recast_tensor(t, Int32) for t in (amax, columnwise_amax)]
        self.find_maxima(x, offs, order, row_scale, noop, *bits, matrix_rows, stream)
        grid = launch_grid(stack_of(x, order, matrix_rows), COLUMNS, offs, matrix_rows)
        self.kernel(
            x, offs, order, row_scale, rng, noop, data, scale, amax,
            columnwise_data, columnwise_scale, columnwise_amax, matrix_rows, grid.across,
        ).launch(
            grid=grid.shape,
            block=(WARPS * LANES, 1, 1),
            stream=stream,
            min_blocks_per_mp=self.blocks_per_sm,
            use_pdl=True,
            preferred_smem_carveout=CARVEOUT,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        offs: cute.Tensor | None,
        order: cute.Tensor | None,
        row_scale: cute.Tensor | None,
        rng: cute.Tensor | None,
        noop: Any,
        data: cute.Tensor | None,
        scale: cute.Tensor | None,
        amax: cute.Tensor | None,
        columnwise_data: cute.Tensor | None,
        columnwise_scale: cute.Tensor | None,
        columnwise_amax: cute.Tensor | None,
        matrix_rows: Int32,
        across: Int32,
    ):
        """One tile."""
        spec = self.spec
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        unit = block // across
        k = block - unit * across
        smem = SmemAllocator()
        turned = smem.allocate_tensor(Uint8, cute.make_layout(TURNED), byte_alignment=128)
        scales = smem.allocate_tensor(Uint8, cute.make_layout((ROWS, DEPTH, 2)), byte_alignment=128)
        tables = smem.allocate_tensor(Float32, cute.make_layout((SCALES, self.tables)), byte_alignment=128)
        stopped = Boolean(False)
        if cutlass.const_expr(noop is not None):
            stopped = noop[0] != noop.element_type(0)
        if not stopped:
            rows = Int32(stack_of(x, order, matrix_rows).shape[0])
            if cutlass.const_expr(spec.grouped):
                group = group_of_unit(offs, rows, unit)
                tile = group_tile(offs, rows, unit, group)
                place = group_place(offs, rows, unit, group, UNIT)
            else:
                tile, place = matrix_tile(matrix_rows, unit), matrix_place(matrix_rows, unit)
            source, read = source_of(x, order, matrix_rows, place.group, tile)
            values = cute.make_rmem_tensor((VECTOR, STEPS), self.source)
            self.load_tile(source, values, read, k, thread)
            cute.arch.griddepcontrol_wait()
            row_table, column_table = tables[None, 0], tables[None, self.tables - 1]
            row_factor, column_factor = Float32(1.0), Float32(1.0)
            if cutlass.const_expr(spec.rowwise):
                row_factor = self.make_table(row_table, amax, place.group, tile.tail, thread)
            if cutlass.const_expr(spec.columnwise and (self.tables == 2 or not spec.rowwise)):
                column_factor = self.make_table(column_table, columnwise_amax, place.group, tile.tail, thread)
            else:
                column_factor = row_factor
            cute.arch.sync_threads()
            if self.has_rows(tile, thread):
                self.quantize_warp(
                    values, (row_factor, column_factor), (row_table, column_table), scales, turned,
                    source, row_scale, rng, data, tile, read, place, matrix_rows, k, thread,
                )  # fmt: skip
            else:
                self.clear_warp(scales, turned, source, data, tile, k, thread)
            cute.arch.sync_threads()
            if cutlass.const_expr(spec.rowwise):
                self.store_row_scales(scales[None, None, 0], scale, offs, source, tile, unit, k, thread)
            if cutlass.const_expr(spec.columnwise):
                self.store_column_scales(
                    scales[None, None, 1], columnwise_scale, offs, source, place, matrix_rows, k, across, thread
                )
                self.store_turned(turned, columnwise_data, source, place, k, thread)
        else:
            cute.arch.griddepcontrol_wait()  # here too: nothing may follow that finds the kernel before at work

    @cute.jit
    def quantize_warp(
        self,
        values,
        factors,
        tables,
        scales,
        turned,
        x,
        row_scale,
        rng,
        data,
        tile,
        read,
        place,
        matrix_rows,
        k,
        thread,
    ):
        """A warp's part: elements of rows to memory, the others and scales to shared memory."""
        spec, lane = self.spec, thread % LANES
        self.finish_tile(x, row_scale, values, read, k, thread)
        rows_of, columns_of = self.block_maxima(self, values, lane, spec.rowwise, spec.columnwise and not spec.rht)
        row_scales: Any = None
        column_scales: Any = None  # made before elements, if they can: maxima take more registers
        if cutlass.const_expr(spec.rowwise):
            row_scales = self.scale_rows(rows_of, factors[0], scales[None, None, 0], tile, k, thread)
        if cutlass.const_expr(columns_of is not None):
            column_scales = self.scale_columns(columns_of, factors[1], scales[None, None, 1], x, k, thread)
        if cutlass.const_expr(spec.rowwise):
            self.quantize_rows(values, row_scales, tables[0], x, rng, data, tile, k, thread)
        if cutlass.const_expr(spec.columnwise):
            taken = values
            if cutlass.const_expr(spec.rht):
                taken = fp4.hadamard(values, lane)
                _, columns_of = self.block_maxima(self.transformed, taken, lane, False, True)
                column_scales = self.scale_columns(columns_of, factors[1], scales[None, None, 1], x, k, thread)
            self.quantize_columns(taken, column_scales, tables[1], turned, x, rng, place, matrix_rows, k, thread)

    @cute.jit
    def clear_warp(self, scales, turned, x, data, tile, k, thread):
        """Zeros for that of a warp which has no row of a group."""
        lane = thread % LANES
        top, column = self.corner(k, thread)
        if cutlass.const_expr(self.spec.rowwise):
            self.store_word(scales[None, None, 0], row_scales_at(top, lane), Int32(0))
            start, rows = self.rows_of(x, data, tile, top, column)
            for i in cutlass.range_constexpr(STEPS):
                if i < rows:
                    self.store_elements(start, data, i, Int32(0), x.shape[1] - column)
        if cutlass.const_expr(self.spec.columnwise):
            self.store_word(scales[None, None, 1], column_scales_at(top, lane), Int32(0))
            for j in cutlass.range_constexpr(VECTOR):
                self.store_word(turned, turned_at(top, j, lane), Int32(0))

    # --- scales ------------------------------------------------------------------------------------------------------

    @cute.jit
    def make_table(self, table, amax, group, tail, thread):
        """The multiplier of every scale to ``table``; what a block's maximum is multiplied by for its scale."""
        largest = Float32(0.0)
        if not tail:
            largest = amax[group]
        encode, decode = fp4.group_scales(largest)
        if thread < SCALES:
            table[thread] = fp4.multiplier(thread, decode)
        return encode * fp4.as_float(Int32(fp4.SIXTH))

    def block_maxima(self, of: BandValues, values, lane, rowwise: bool, columnwise: bool):
        """Bits of the largest magnitudes of four of a lane's eight blocks in either direction; one of a square."""
        if self.spec.blocks_2d:
            top = of.lane_maximum(values)
            for other in (1, 16):
                top = cutlass.max(top, cute.arch.shuffle_sync_bfly(top, other))
            return [top] if rowwise else None, [top] if columnwise else None
        rows, columns = of.maxima(values)
        return (
            of.shared_halves(rows, lane, 1) if rowwise else None,
            of.shared_halves(columns, lane, 16) if columnwise else None,
        )

    def scale_rows(self, maxima, factor, held, tile, k, thread):
        """Scales of a warp's rows to ``held``; those of a lane's, and whether one in the warp needs clamps."""
        lane = thread % LANES
        top, _ = self.corner(k, thread)
        word, words, coarse = self.make_bytes(maxima, factor, lane, 1, tile.count - top - lane % 2 * WORD)
        self.store_word(held, row_scales_at(top, lane), word)
        return words, cute.arch.vote_any_sync(coarse) if self.may_clamp else None

    def scale_columns(self, maxima, factor, held, x, k, thread):
        """Those of a warp's columns."""
        lane = thread % LANES
        top, column = self.corner(k, thread)
        word, words, coarse = self.make_bytes(maxima, factor, lane, 16, x.shape[1] - column - lane // 16 * WORD)
        self.store_word(held, column_scales_at(top, lane), word)
        return words, cute.arch.vote_any_sync(coarse) if self.may_clamp else None

    def make_bytes(self, maxima, factor, lane, bit: int, there: Int32):
        """Scales of a lane's eight rows (``bit`` 1) or columns (16): its own four, all eight, and if any needs clamps.

        ``there``: how many of its own four exist; a square may be partial, and scales of what does not exist are zero.
        """
        word, coarse = fp4.scale_bytes(maxima, factor)
        if self.spec.blocks_2d:
            word *= 0x01010101
            missing = cutlass.min(cutlass.max(WORD - there, 0), WORD)
            there = Int32(0x7F7F7F7F) >> (8 * cutlass.min(missing, WORD - 1))
            return cutlass.select_(missing == WORD, Int32(0), word & there), (word, word), coarse
        other = cute.arch.shuffle_sync_bfly(word, bit)
        upper = (lane & bit) != 0
        return word, (cutlass.select_(upper, other, word), cutlass.select_(upper, word, other)), coarse

    def multipliers(self, words, table):
        """Those of eight blocks, from their scales."""
        return [table[(words[i // WORD] >> (8 * (i % WORD))) & 0xFF] for i in range(STEPS)]

    @cute.jit
    def store_word(self, to, at, word: Int32):
        """Four bytes to shared memory."""
        pointer = (to.iterator + at).align(WORD)
        cute.autovec_copy(word_of(word), cute.make_tensor(pointer, cute.make_layout(WORD)))

    @cute.jit
    def store_row_scales(self, held, scale, offs, x, tile, unit, k, thread):
        """Scales of a tile's rows to memory."""
        blocks = ceil_div(Int32(x.shape[1]), BLOCK)
        if cutlass.const_expr(self.spec.blocked):
            atom, across = thread // 32, ceil_div(blocks, WORD)
            wanted = atom < 2 and 2 * k + atom < across
            if cutlass.const_expr(self.spec.grouped):
                wanted = wanted and unit < tiles_at_most(Int32(x.shape[0]), Int32(cute.size(offs))) - 1
            if wanted:
                self.store_atom(held, scale, Int64(unit) * across + 2 * k + atom, atom, thread % 32)
        else:
            row, first = thread % ROWS, thread // ROWS * WORD
            if row < tile.count:
                for i in cutlass.range_constexpr(WORD):
                    if k * DEPTH + first + i < blocks:
                        scale[tile.first + row, k * DEPTH + first + i] = held[row, first + i]

    @cute.jit
    def store_column_scales(self, held, scale, offs, x, place, matrix_rows, k, across, thread):
        """Scales of a tile's columns to memory, those in gaps of the placement included."""
        if cutlass.const_expr(self.spec.blocked):
            atom = thread // 32
            if atom < 2 and atom * UNIT < place.places:
                if cutlass.const_expr(self.spec.grouped):
                    units = ceil_div(Int32(x.shape[0]), UNIT) + Int32(cute.size(offs)) - 1
                    at = Int64(k) * units
                else:
                    at = (Int64(place.group) * across + k) * ceil_div(matrix_rows, UNIT)
                self.store_atom(held, scale, at + place.first // UNIT + atom, atom, thread % 32)
        else:
            column, first = thread % COLUMNS, thread // COLUMNS * WORD
            at = k * COLUMNS + column
            if at < x.shape[1]:
                row = at
                if cutlass.const_expr(not self.spec.grouped):
                    row = place.group * x.shape[1] + at
                for i in cutlass.range_constexpr(WORD):
                    if (first + i) * BLOCK < place.places:
                        scale[row, place.first // BLOCK + first + i] = held[column, first + i]

    @cute.jit
    def store_atom(self, held, scales, at, atom, y):
        """Bytes ``16 y`` on of an atom: four rows, or columns, by four blocks."""
        part = cute.make_rmem_tensor((WORD, WORD), Uint8)
        for band in cutlass.range_constexpr(WORD):
            for i in cutlass.range_constexpr(WORD):
                part[i, band] = held[y + 32 * band, atom * WORD + i]
        pointer = (scales.iterator + (at * ATOM + y * PIECE)).align(PIECE)
        cute.autovec_copy(part, cute.make_tensor(pointer, cute.make_layout((WORD, WORD))))

    # --- elements ----------------------------------------------------------------------------------------------------

    @cute.jit
    def quantize_rows(self, values, scales, table, x, rng, data, tile, k, thread):
        """Elements of a warp's rows to memory, four bytes of a row at a time."""
        top, column = self.corner(k, thread)
        words, clamped = scales
        if cutlass.const_expr(self.may_clamp):
            if clamped:
                self.store_rows(values, words, table, x, rng, data, tile, top, column, True)
            else:
                self.store_rows(values, words, table, x, rng, data, tile, top, column, False)
        else:
            self.store_rows(values, words, table, x, rng, data, tile, top, column, False)

    @cute.jit
    def store_rows(self, values, words, table, x, rng, data, tile, top, column, clamped: cutlass.Constexpr):
        """Elements of a lane's rows to memory."""
        start, rows = self.rows_of(x, data, tile, top, column)
        factors = self.multipliers(words, table)
        blocks = ceil_div(Int32(x.shape[1]), BLOCK)
        for i in cutlass.range_constexpr(STEPS):
            block = Int64(tile.first + top + i) * blocks + column // BLOCK
            word = self.elements(fp4.row_of(values, i), factors[i], rng, block, column // VECTOR % 2, 0, clamped)
            if i < rows:
                self.store_elements(start, data, i, word, x.shape[1] - column)

    def rows_of(self, x, data, tile, top, column):
        """Where the elements of a lane's rows begin, and how many rows there are."""
        start = data.iterator + (Int64(tile.first + top) * data.stride[0] + column // 2)
        return start, cutlass.select_(column < x.shape[1], tile.count - top, Int32(0))

    @cute.jit
    def store_elements(self, start, data, i: cutlass.Constexpr, word: Int32, there: Int32):
        """Elements of row ``i`` of a lane's to memory, where ``there`` of them are."""
        pointer = start + Int64(data.stride[0]) * i
        if cutlass.const_expr(self.elementwise):
            store_bytes(pointer, word_of(word), there // 2)
        else:
            cute.autovec_copy(word_of(word), cute.make_tensor(pointer.align(WORD), cute.make_layout(WORD)))

    @cute.jit
    def quantize_columns(self, values, scales, table, part, x, rng, place, matrix_rows, k, thread):
        """Elements of a warp's columns to the transposed tile."""
        lane = thread % LANES
        top, column = self.corner(k, thread)
        words, clamped = scales
        run = Int64(place.first + top) // BLOCK
        if cutlass.const_expr(not self.spec.grouped):
            run += Int64(place.group) * ceil_div(matrix_rows, BLOCK)
        block = run * x.shape[1] + column
        if cutlass.const_expr(self.may_clamp):
            if clamped:
                self.turn_columns(values, words, table, part, rng, block, top, lane, True)
            else:
                self.turn_columns(values, words, table, part, rng, block, top, lane, False)
        else:
            self.turn_columns(values, words, table, part, rng, block, top, lane, False)

    @cute.jit
    def turn_columns(self, values, words, table, part, rng, block, top, lane, clamped: cutlass.Constexpr):
        """Elements of a lane's columns, four bytes each, to the transposed tile."""
        factors = self.multipliers(words, table)
        for j in cutlass.range_constexpr(VECTOR):
            word = self.elements(fp4.column_of(values, j), factors[j], rng, block + j, lane // 16, 1, clamped)
            self.store_word(part, turned_at(top, j, lane), word)

    def elements(self, values, factor, rng, block, half, stream: int, clamped: bool):
        """A word of eight elements, half a block."""
        if not self.spec.stochastic:
            return fp4.nearest(values, factor, self.spec.converts, clamped)
        random = fp4.random_words(block, half, (rng[0], rng[1]), (rng[2], rng[3]), stream)
        return fp4.stochastic(values, factor, random)

    @property
    def may_clamp(self):
        """Whether it has to be found out if products may be 7 or more, or NaN."""
        return not self.spec.stochastic and not self.spec.converts

    @cute.jit
    def store_turned(self, part, columnwise_data, x, place, k, thread):
        """The transposed tile to memory, a column by four neighbouring lanes."""
        number = thread % 4
        piece = cute.make_rmem_tensor(PIECE, Uint8)
        for turn in cutlass.range_constexpr(2):
            column = thread // 4 + turn * (COLUMNS // 2)
            at = k * COLUMNS + column
            if number * 2 * PIECE < place.places and at < x.shape[1]:
                start = column // VECTOR * GROUP_BYTES + column % VECTOR * COLUMN_BYTES + number * PIECE
                pointer = (part.iterator + start).align(PIECE)
                cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(PIECE)), piece)
                row = at
                if cutlass.const_expr(not self.spec.grouped):
                    row = place.group * x.shape[1] + at
                where = self.address(columnwise_data, row, place.first // 2 + number * PIECE)
                if cutlass.const_expr(self.elementwise):
                    store_bytes(where, piece, place.places // 2 - number * PIECE)
                else:
                    cute.autovec_copy(piece, cute.make_tensor(where.align(PIECE), cute.make_layout(PIECE)))


# --- where a lane's words lie in shared memory, ``top`` being its first row in the tile -------------------------------


def row_scales_at(top, lane):
    """Scales of four of its rows."""
    return lane % 16 // 2 * ROWS + top + lane % 2 * WORD


def column_scales_at(top, lane):
    """Scales of four of its columns."""
    return top // BLOCK * ROWS + lane % 16 * VECTOR + lane // 16 * WORD


def turned_at(top, j, lane):
    """Elements of its column ``j``."""
    return lane % 16 * GROUP_BYTES + j * COLUMN_BYTES + top // 2


def word_of(word: Int32):
    """Its four bytes."""
    held = cute.make_rmem_tensor(WORD, Uint8)
    cute.recast_tensor(held, Int32)[0] = word
    return held
