"""NVFP4 quantisation in both directions in one pass over x, after a pass for the groups' amax.

The loads of the second pass's first tiles are issued while the first pass ends (programmatic dependent launch).

A block of 8 warps takes a tile: 128 rows of one group and 128 columns, in either direction eight blocks of 16 deep, two
atoms of 512 bytes of scales. It takes only one tile: there are no registers left for loop state.

=============  =============================================================
part of tile   owner
=============  =============================================================
16 x 128       a warp
8 columns      a lane: ``8 (lane % 16)`` on, in the rows ``8 (lane // 16)`` on
=============  =============================================================

So a block along the columns is the eight values of two adjacent lanes in one row, a block of rows those of two lanes 16
apart in one column, and a square of 16 those of four. Two lanes share eight blocks; each computes the scales of four
and sends them to the other.

An element's multiplier follows from the byte of its scale and the group: a table of all 127, computed while the loads
of x are in flight, replaces a division per block of 16. Without an instruction that rounds to E2M1, float32 additions
round (``fp4``). They need products below 7, which holds for all blocks but those whose scale is subnormal or NaN: a
warp that has such a block clamps.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, Uint8, cute
from cutlass.memory import SmemAllocator

from .. import instructions
from ..scheduler import ceil_div
from . import fp4
from .amax import CARVEOUT, GroupAmaxKernel
from .fp4 import BLOCK, SCALES
from .lane_tile import COLUMNS, LANES, STEPS, VECTOR, WARPS, BandValues, store_bytes
from .quantize_spec import NVFP4Spec
from .tensors import Destinations, QuantizeSource, source_of
from .tiles import ROWS, ColumnTile, group_of_unit, group_place, group_tile, matrix_place, matrix_tile, tiles_at_most

UNIT = 64  # of the placement of columnwise data
ATOM = 512
DEPTH = COLUMNS // BLOCK  # blocks of a tile, in either direction
PIECE = 16  # bytes
WORD = 4
COLUMN_BYTES = ROWS // 2
GROUP_BYTES = VECTOR * COLUMN_BYTES + PIECE  # of eight columns, padded against conflicts
TURNED = COLUMNS // VECTOR * GROUP_BYTES


class Table(NamedTuple):
    """A group's table for a direction: the multiplier of every scale, and the factor from a maximum to its scale."""

    multipliers: cute.Tensor
    factor: Float32


class Held(NamedTuple):
    """A block's shared memory: a table per direction, scales of both, transposed elements."""

    row_table: Table
    column_table: Table
    scales: cute.Tensor
    turned: cute.Tensor


class LaneBlocks(NamedTuple):
    """A lane's values in one direction, the bytes of their eight scales, and whether a product needs a clamp."""

    values: Any
    words: Any
    clamped: Any


class QuantizeNVFP4Kernel(BandValues):
    """The kernel for one ``NVFP4Spec``; for ``spares_registers`` see ``Arch``."""

    def __init__(self, spec: NVFP4Spec, spares_registers: bool = True):
        super().__init__(spec.source, spec.elementwise)
        self.spec = spec
        self.transformed = BandValues("bfloat16")
        self.find_maxima = GroupAmaxKernel(
            spec.source, spec.grouped, spec.rht, spec.elementwise, spec.row_scale is not None, spares_registers
        )
        self.tables = 2 if spec.rht and spec.rowwise else 1
        # limited by registers
        blocks = 2 if not self.packed or spec.stochastic or (spec.rht and spec.elementwise) else 3 if spec.rht else 4
        # the row lookup takes the last registers
        full = spec.rows and blocks == 4
        self.blocks_per_sm = blocks - (full and not spares_registers)

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
        """Launch three kernels: they clear the maxima, find them, and write the elements.

        Args:
            x, offs, order, row_scale, noop, matrix_rows: see ``QuantizeSource``; K is even.
            rng: four words, the seed's and the offset's, the lower ones first; or None.
            data: bytes ``[rows, K / 2]``; None if the direction is not requested, like all its components.
            scale: bytes, ``[rows, ceil(K / 16)]`` or blocked.
            amax: float32 ``[G]``, for the largest finite magnitudes.
            columnwise_data: bytes ``[K, Tp / 2]``, of matrices ``[G K, N / 2]``, N even, a multiple of 32
                unless element by element.
            columnwise_scale: bytes, ``[K, Tp / 16]``, of matrices ``[G K, ceil(N / 16)]``, or blocked.
            columnwise_amax: float32 ``[G]``, for the amax of the source of columnwise data.
            stream: CUDA stream.
        """
        source = QuantizeSource(x, offs, order, row_scale, noop, matrix_rows)
        out = Destinations(data, scale, amax, columnwise_data, columnwise_scale, columnwise_amax)
        bits = [None if t is None else cute.recast_tensor(t, Int32) for t in (amax, columnwise_amax)]
        self.find_maxima(source, *bits, stream)
        grid = source.grid(COLUMNS)
        self.kernel(source, rng, out, grid.across).launch(
            grid=grid.shape,
            block=(WARPS * LANES, 1, 1),
            stream=stream,
            min_blocks_per_mp=instructions.sharing(self.blocks_per_sm),
            use_pdl=instructions.overlaps(),
            preferred_smem_carveout=CARVEOUT,
        )

    @cute.kernel
    def kernel(self, source: QuantizeSource, rng: cute.Tensor | None, out: Destinations, across: Int32):
        """Quantise one tile."""
        spec = self.spec
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        unit = block // across
        k = block - unit * across
        smem = SmemAllocator()
        turned = smem.allocate_tensor(Uint8, cute.make_layout(TURNED), byte_alignment=128)
        scales = smem.allocate_tensor(Uint8, cute.make_layout((ROWS, DEPTH, 2)), byte_alignment=128)
        tables = smem.allocate_tensor(Float32, cute.make_layout((SCALES, self.tables)), byte_alignment=128)
        if not source.stopped():
            if cutlass.const_expr(spec.grouped):
                group = group_of_unit(source.offs, source.rows, unit)
                tile = group_tile(source.offs, source.rows, unit, group)
                place = group_place(source.offs, source.rows, unit, group, UNIT)
                units = tiles_at_most(source.rows, Int32(cute.size(source.offs))) - 1
            else:
                tile, place = matrix_tile(source.matrix_rows, unit), matrix_place(source.matrix_rows, unit)
                units = ceil_div(source.matrix_rows, ROWS)
            x, read = source_of(source, place.group, tile)
            spot = ColumnTile(tile, read, place.group, unit, units, k, across, place)
            values = cute.make_rmem_tensor((VECTOR, STEPS), self.source)
            self.load_tile(x, values, read, k, thread)
            instructions.wait()
            row_table, column_table = tables[None, 0], tables[None, self.tables - 1]
            row_factor, column_factor = Float32(1.0), Float32(1.0)
            if cutlass.const_expr(spec.rowwise):
                row_factor = self.make_table(row_table, out.amax, place.group, tile.tail, thread)
            if cutlass.const_expr(spec.columnwise and (self.tables == 2 or not spec.rowwise)):
                column_factor = self.make_table(column_table, out.columnwise_amax, place.group, tile.tail, thread)
            else:
                column_factor = row_factor
            cute.arch.sync_threads()
            held = Held(Table(row_table, row_factor), Table(column_table, column_factor), scales, turned)
            if self.has_rows(tile, thread):
                self.finish_tile(x, source.row_scale, values, read, k, thread)
                left = self.quantize_rows(values, held, x, rng, out.data, spot, thread)
                if cutlass.const_expr(spec.columnwise):
                    self.quantize_columns(left, held, x, rng, source.matrix_rows, spot, thread)
            else:
                self.clear_warp(held, x, out.data, tile, k, thread)
            cute.arch.sync_threads()
            if cutlass.const_expr(spec.rowwise):
                self.store_row_scales(scales[None, None, 0], out.scale, x, spot, thread)
            if cutlass.const_expr(spec.columnwise):
                self.store_column_scales(scales[None, None, 1], out.columnwise_scale, x, source, spot, thread)
                self.store_turned(turned, out.columnwise_data, x, place, k, thread)
        else:
            instructions.wait()  # here too: no later launch may run beside the previous kernel

    @cute.jit
    def quantize_rows(self, values, held, x, rng, data, spot, thread):
        """Store a warp's row elements, write scales to shared memory, and return the remaining work for its columns."""
        spec, k, lane = self.spec, spot.k, thread % LANES
        rows_of, columns_of = self.block_maxima(self, values, lane, spec.rowwise, spec.columnwise and not spec.rht)
        rows: Any = None
        columns: Any = None  # before the elements where possible: maxima take more registers
        if cutlass.const_expr(spec.rowwise):
            factor, scales = held.row_table.factor, held.scales[None, None, 0]
            rows = LaneBlocks(values, *self.scale_rows(rows_of, factor, scales, spot.tile, k, thread))
        factor, scales = held.column_table.factor, held.scales[None, None, 1]
        if cutlass.const_expr(columns_of is not None):
            columns = LaneBlocks(values, *self.scale_columns(columns_of, factor, scales, x, k, thread))
        if cutlass.const_expr(spec.rowwise):
            self.store_rows(rows, held.row_table.multipliers, x, rng, data, spot, thread)
        if cutlass.const_expr(spec.columnwise and spec.rht):
            taken = fp4.hadamard(values, lane)
            _, columns_of = self.block_maxima(self.transformed, taken, lane, False, True)
            columns = LaneBlocks(taken, *self.scale_columns(columns_of, factor, scales, x, k, thread))
        return columns

    @cute.jit
    def clear_warp(self, held, x, data, tile, k, thread):
        """Zero the outputs of a warp that has no row of a group."""
        lane = thread % LANES
        top, column = self.corner(k, thread)
        if cutlass.const_expr(self.spec.rowwise):
            self.store_word(held.scales[None, None, 0], row_scales_at(top, lane), Int32(0))
            start, rows = self.rows_of(x, data, tile, top, column)
            for i in cutlass.range_constexpr(STEPS):
                if i < rows:
                    self.store_elements(start, data, i, Int32(0), x.shape[1] - column)
        if cutlass.const_expr(self.spec.columnwise):
            self.store_word(held.scales[None, None, 1], column_scales_at(top, lane), Int32(0))
            for j in cutlass.range_constexpr(VECTOR):
                self.store_word(held.turned, turned_at(top, j, lane), Int32(0))

    # --- scales ------------------------------------------------------------------------------------------------------

    @cute.jit
    def make_table(self, table, amax, group, tail, thread):
        """Write the multiplier of every scale to ``table``; return the factor from a block's maximum to its scale."""
        largest = Float32(0.0)
        if not tail:
            largest = amax[group]
        encode, decode = fp4.group_scales(largest)
        if thread < SCALES:
            table[thread] = fp4.multiplier(thread, decode)
        return encode * fp4.as_float(Int32(fp4.SIXTH))

    def block_maxima(self, of: BandValues, values, lane, rowwise: bool, columnwise: bool):
        """Return bits of the largest magnitudes of four of a lane's eight blocks in either direction; one for a
        square.
        """
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
        """Write the scales of a warp's rows to ``held``; return the lane's, and whether the warp needs clamps."""
        lane = thread % LANES
        top, _ = self.corner(k, thread)
        word, words, coarse = self.make_bytes(maxima, factor, lane, 1, tile.count - top - lane % 2 * WORD)
        self.store_word(held, row_scales_at(top, lane), word)
        return words, cute.arch.vote_any_sync(coarse) if self.may_clamp else None

    def scale_columns(self, maxima, factor, held, x, k, thread):
        """Write the scales of a warp's columns to ``held``; return as ``scale_rows`` does."""
        lane = thread % LANES
        top, column = self.corner(k, thread)
        word, words, coarse = self.make_bytes(maxima, factor, lane, 16, x.shape[1] - column - lane // 16 * WORD)
        self.store_word(held, column_scales_at(top, lane), word)
        return words, cute.arch.vote_any_sync(coarse) if self.may_clamp else None

    def make_bytes(self, maxima, factor, lane, bit: int, there: Int32):
        """Compute the scales of a lane's eight rows (``bit`` 1) or columns (16): its own four, all eight, and if any
        needs clamps.

        ``there``: how many of its own four exist; a square may be partial, and scales of missing rows or columns are
        zero.
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
        """Return the multipliers of eight blocks, from their scales."""
        return [table[(words[i // WORD] >> (8 * (i % WORD))) & 0xFF] for i in range(STEPS)]

    @cute.jit
    def store_word(self, to, at, word: Int32):
        """Store four bytes to shared memory."""
        pointer = (to.iterator + at).align(WORD)
        cute.autovec_copy(word_of(word), cute.make_tensor(pointer, cute.make_layout(WORD)))

    @cute.jit
    def store_row_scales(self, held, scale, x, spot, thread):
        """Store the scales of a tile's rows."""
        tile, k = spot.tile, spot.k
        blocks = ceil_div(Int32(x.shape[1]), BLOCK)
        if cutlass.const_expr(self.spec.blocked):
            atom, across = thread // 32, ceil_div(blocks, WORD)
            wanted = atom < 2 and 2 * k + atom < across
            if cutlass.const_expr(self.spec.grouped):
                wanted = wanted and spot.unit < spot.units
            if wanted:
                self.store_atom(held, scale, Int64(spot.unit) * across + 2 * k + atom, atom, thread % 32)
        else:
            row, first = thread % ROWS, thread // ROWS * WORD
            if row < tile.count:
                for i in cutlass.range_constexpr(WORD):
                    if k * DEPTH + first + i < blocks:
                        scale[tile.first + row, k * DEPTH + first + i] = held[row, first + i]

    @cute.jit
    def store_column_scales(self, held, scale, x, source, spot, thread):
        """Store the scales of a tile's columns, including those in gaps of the placement."""
        place, k = spot.place, spot.k
        if cutlass.const_expr(self.spec.blocked):
            atom = thread // 32
            if atom < 2 and atom * UNIT < place.places:
                if cutlass.const_expr(self.spec.grouped):
                    units = ceil_div(Int32(x.shape[0]), UNIT) + Int32(cute.size(source.offs)) - 1
                    at = Int64(k) * units
                else:
                    at = (Int64(place.group) * spot.across + k) * ceil_div(source.matrix_rows, UNIT)
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
        """Store the bytes of an atom from ``16 y`` on: four rows, or columns, by four blocks."""
        part = cute.make_rmem_tensor((WORD, WORD), Uint8)
        for band in cutlass.range_constexpr(WORD):
            for i in cutlass.range_constexpr(WORD):
                part[i, band] = held[y + 32 * band, atom * WORD + i]
        pointer = (scales.iterator + (at * ATOM + y * PIECE)).align(PIECE)
        cute.autovec_copy(part, cute.make_tensor(pointer, cute.make_layout((WORD, WORD))))

    # --- elements ----------------------------------------------------------------------------------------------------

    @cute.jit
    def store_rows(self, blocks, table, x, rng, data, spot, thread):
        """Store the elements of a warp's rows, four bytes of a row at a time."""
        if cutlass.const_expr(self.may_clamp):
            if blocks.clamped:
                self.store_rows_of_lane(blocks._replace(clamped=True), table, x, rng, data, spot, thread)
            else:
                self.store_rows_of_lane(blocks._replace(clamped=False), table, x, rng, data, spot, thread)
        else:
            self.store_rows_of_lane(blocks._replace(clamped=False), table, x, rng, data, spot, thread)

    @cute.jit
    def store_rows_of_lane(self, blocks, table, x, rng, data, spot, thread):
        """Store the elements of a lane's rows."""
        values, words, clamped = blocks
        top, column = self.corner(spot.k, thread)
        start, rows = self.rows_of(x, data, spot.tile, top, column)
        factors = self.multipliers(words, table)
        across = ceil_div(Int32(x.shape[1]), BLOCK)
        random: tuple = ()
        for i in cutlass.range_constexpr(STEPS):
            number = Int64(spot.unit) * (ROWS // 2) + (top + i) // 2 if self.draws else Int64(spot.tile.first + top + i)
            random = self.draw(random, i, rng, number * across + column // BLOCK, column // VECTOR % 2, 0)
            word = self.elements(fp4.row_of(values, i), factors[i], random, clamped)
            if i < rows:
                self.store_elements(start, data, i, word, x.shape[1] - column)

    def rows_of(self, x, data, tile, top, column):
        """Return the start of the elements of a lane's rows, and how many rows there are."""
        start = data.iterator + (Int64(tile.first + top) * data.stride[0] + column // 2)
        return start, cutlass.select_(column < x.shape[1], tile.count - top, Int32(0))

    @cute.jit
    def store_elements(self, start, data, i: cutlass.Constexpr, word: Int32, there: Int32):
        """Store the elements of a lane's row ``i``, as many as are ``there``."""
        pointer = start + Int64(data.stride[0]) * i
        if cutlass.const_expr(self.elementwise):
            store_bytes(pointer, word_of(word), there // 2)
        else:
            cute.autovec_copy(word_of(word), cute.make_tensor(pointer.align(WORD), cute.make_layout(WORD)))

    @cute.jit
    def quantize_columns(self, blocks, held, x, rng, matrix_rows, spot, thread):
        """Write the elements of a warp's columns to the transposed tile."""
        place = spot.place
        top, column = self.corner(spot.k, thread)
        run = Int64(place.first + top) // BLOCK
        if cutlass.const_expr(not self.spec.grouped):
            run += Int64(place.group) * ceil_div(matrix_rows, BLOCK)
        first = run * x.shape[1] + column
        if cutlass.const_expr(self.draws):
            first = ((Int64(spot.unit) * ROWS + top) // BLOCK * x.shape[1] + column) // 2
        table = held.column_table.multipliers
        if cutlass.const_expr(self.may_clamp):
            if blocks.clamped:
                self.turn_columns(blocks._replace(clamped=True), table, held.turned, rng, first, thread)
            else:
                self.turn_columns(blocks._replace(clamped=False), table, held.turned, rng, first, thread)
        else:
            self.turn_columns(blocks._replace(clamped=False), table, held.turned, rng, first, thread)

    @cute.jit
    def turn_columns(self, blocks, table, turned, rng, first, thread):
        """Write the elements of a lane's columns, four bytes each, to the transposed tile.

        Its blocks, or pairs of them where two share random words, count from ``first`` on.
        """
        values, words, clamped = blocks
        lane = thread % LANES
        top, _ = self.corner(Int32(0), thread)
        factors = self.multipliers(words, table)
        random: tuple = ()
        for j in cutlass.range_constexpr(VECTOR):
            random = self.draw(random, j, rng, first + (j // 2 if self.draws else j), lane // 16, 1)
            word = self.elements(fp4.column_of(values, j), factors[j], random, clamped)
            self.store_word(turned, turned_at(top, j, lane), word)

    def draw(self, left: tuple, i: int, rng, number, half, stream: int) -> tuple:
        """Return random words for a lane's row or column ``i``, if any; ``left`` are those left by the one before.

        Integer rounding takes four words for half a block, from its ``number``. The instruction takes two: the other
        two are for the next row or column, and ``number`` is that of the pair.
        """
        if not self.spec.stochastic:
            return ()
        if self.draws and i % 2:
            return left[2:]
        return tuple(fp4.random_words(number, half, (rng[0], rng[1]), (rng[2], rng[3]), stream))

    def elements(self, values, factor, random: tuple, clamped: bool):
        """Return a word of eight elements, half a block."""
        if not self.spec.stochastic:
            return fp4.nearest(values, factor, self.spec.converts, clamped)
        return fp4.drawn(values, factor, random[:2]) if self.draws else fp4.stochastic(values, factor, random)

    @property
    def draws(self):
        """Whether an instruction rounds stochastically."""
        return self.spec.chip is not None

    @property
    def may_clamp(self):
        """Whether to check if products may be 7 or more, or NaN."""
        return not self.spec.stochastic and not self.spec.converts

    @cute.jit
    def store_turned(self, part, columnwise_data, x, place, k, thread):
        """Store the transposed tile; four adjacent lanes store a column."""
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


# --- positions of a lane's words in shared memory; ``top`` is its first row in the tile ------------------------------


def row_scales_at(top, lane):
    """Return the position of the scales of four of a lane's rows."""
    return lane % 16 // 2 * ROWS + top + lane % 2 * WORD


def column_scales_at(top, lane):
    """Return the position of the scales of four of a lane's columns."""
    return top // BLOCK * ROWS + lane % 16 * VECTOR + lane // 16 * WORD


def turned_at(top, j, lane):
    """Return the position of the elements of a lane's column ``j``."""
    return lane % 16 * GROUP_BYTES + j * COLUMN_BYTES + top // 2


def word_of(word: Int32):
    """Return the four bytes of a word."""
    held = cute.make_rmem_tensor(WORD, Uint8)
    cute.recast_tensor(held, Int32)[0] = word
    return held
