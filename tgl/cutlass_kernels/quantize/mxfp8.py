"""MXFP8 quantisation in both directions in one pass over x.

A block of 8 warps takes 128 rows of one group and walks over tiles of 128 columns. Such a tile has exactly one atom of
512 bytes of scales in either direction, which is assembled in shared memory and stored in 16-byte pieces.

=============  ==========================================================
part of tile   owner
=============  ==========================================================
32 x 64        a warp
8 columns      a lane: ``8 (lane % 8)`` on, in rows ``lane // 8 + 4 i``
=============  ==========================================================

So a block of 32 along the columns is the eight values of four lanes in one row, and a block of 32 rows the eight rows
of four lanes. Either way four lanes share eight blocks. They exchange maxima such that each ends up with those of two
blocks, computes two scales and sends them to the others. Maxima are taken of magnitudes as integers, in which NaN is
the largest; 16-bit sources two at a time.
"""

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Uint8, Uint16, cute
from cutlass.memory import SmemAllocator

from .. import instructions
from ..bits import INFINITY, NAN, as_bits, as_float
from ..instructions import round_to_fp8
from ..runtime.elements import TYPES
from ..scheduler import ceil_div
from .lane_tile import COLUMNS, LANES, STEPS, UPPER_HALVES, VECTOR, WARPS, LaneValues, halves
from .quantize_spec import MXFP8Spec
from .tensors import Destinations, QuantizeSource, source_of
from .tiles import ROWS, ColumnTile, group_of_unit, group_tile, matrix_tile, tiles_at_most

BLOCK = 32
ATOM = 512
# Measured on an H200 over five shapes: chunks of 2 beat 4 and 8, and 1 where there are many groups to search. Four
# blocks per multiprocessor do not have enough registers for both directions.
CHUNK = 2  # tiles of columns per block, at most

MANTISSA = 0x7FFFFF
HALF_OF_FIRST = 0x400000  # 2^-127
ELEMENTS = {  # exponent of the largest element, bits of float32(1 / it), half a unit in its last place
    "float8_e4m3fn": (8, 0x3B124925, 1 << 19),
    "float8_e5m2": (15, 0x37924925, 1 << 20),
}


@cute.jit
def scale_byte(amax: Int32, element: cutlass.Constexpr, scaling: cutlass.Constexpr) -> Int32:
    """Return the E8M0 byte for a block whose largest magnitude has the bits ``amax``."""
    top, inverse, half = ELEMENTS[element]
    if cutlass.const_expr(scaling == "rceil"):
        bits = as_bits(as_float(amax) * as_float(Int32(inverse)))
        byte = (bits + MANTISSA) >> 23
        if bits <= HALF_OF_FIRST:  # 2^-127 is enough
            byte = Int32(0)
    else:
        rounded = amax + half if cutlass.const_expr(scaling == "even") else amax
        byte = cutlass.max((rounded >> 23) - top, 0)
    if amax >= INFINITY:
        byte = Int32(255)
    return byte


@cute.jit
def inverse_scale(byte: Int32) -> Int32:
    """Return the bits of ``2^(127 - byte)`` as float32, NaN for 255; 248 to 254 are the scales of no amax."""
    bits = (254 - byte) << 23
    if byte == 255:
        bits = Int32(NAN)
    return bits


class QuantizeMXFP8Kernel(LaneValues):
    """The kernel for one ``MXFP8Spec``; for ``spares_registers`` see ``Arch``."""

    def __init__(self, spec: MXFP8Spec, spares_registers: bool = True):
        super().__init__(spec.source, 4, spec.elementwise)
        self.spec = spec
        self.element = TYPES[spec.element]
        full = spec.slots and not spares_registers  # the slot lookup takes the last registers
        self.blocks_per_sm = 4 - (spec.rowwise and spec.columnwise) - (not self.packed) - full

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        offs: cute.Tensor | None,
        order: cute.Tensor | None,
        row_scale: cute.Tensor | None,
        noop: cute.Tensor | None,
        data: cute.Tensor | None,
        scale: cute.Tensor | None,
        columnwise_data: cute.Tensor | None,
        columnwise_scale: cute.Tensor | None,
        matrix_rows: Int32,
        stream,
    ):
        """Launch.

        Args:
            x, offs, order, row_scale, noop, matrix_rows: see ``QuantizeSource``.
            data, columnwise_data: ``[rows, K]``, contiguous; None without the direction.
            scale, columnwise_scale: bytes, contiguous.
            stream: CUDA stream.
        """
        source = QuantizeSource(x, offs, order, row_scale, noop, matrix_rows)
        out = Destinations(data, scale, None, columnwise_data, columnwise_scale, None)
        grid = source.grid(COLUMNS, 1 if self.spec.rows else CHUNK)
        self.kernel(source, out, grid.across, grid.chunk).launch(
            grid=grid.shape,
            block=(WARPS * LANES, 1, 1),
            stream=stream,
            min_blocks_per_mp=instructions.sharing(self.blocks_per_sm),
            preferred_smem_carveout=8,  # in %; the rest is cache
        )

    @cute.kernel
    def kernel(self, source: QuantizeSource, out: Destinations, across: Int32, chunk: Int32):
        """Quantise one tile of rows, a chunk of its tiles of columns."""
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        chunks = ceil_div(across, chunk)
        unit = block // chunks
        atoms = SmemAllocator().allocate_tensor(Uint16, cute.make_layout((32, WARPS, 2, 2)), byte_alignment=16)
        if not source.stopped():
            if cutlass.const_expr(self.spec.grouped):
                group = group_of_unit(source.offs, source.rows, unit)
                tile = group_tile(source.offs, source.rows, unit, group)
                units = tiles_at_most(source.rows, Int32(cute.size(source.offs))) - 1
            else:
                tile = matrix_tile(source.matrix_rows, unit)
                units = ceil_div(source.matrix_rows, ROWS)
                group = unit // units
            x, read = source_of(source, group, tile)
            first = (block - unit * chunks) * chunk
            last = cutlass.min(first + chunk, across) - 1
            spot = ColumnTile(tile, read, group, unit, units, first, across)
            if tile.count > 0 and not tile.tail:
                if cutlass.const_expr(self.spec.rows):
                    self.quantize_tile(atoms, source, x, out, spot, thread)
                else:
                    for k in cutlass.range(first, last + 1, unroll=1):
                        self.quantize_tile(atoms, source, x, out, spot._replace(k=k), thread)
            elif cutlass.const_expr(self.spec.grouped):
                for k in cutlass.range(first, last + 1, unroll=1):
                    self.clear_tile(x, out, spot._replace(k=k), thread)

    @cute.jit
    def quantize_tile(self, atoms, source, x, out, spot, thread):
        """Quantise a tile that has rows of a group; ``x`` is their source."""
        held = atoms[None, None, None, spot.k % 2]
        values = cute.make_rmem_tensor((VECTOR, STEPS), self.source)
        self.read_tile(x, source.row_scale, values, spot, thread)
        words = self.make_scales(values, x, out, held, source.matrix_rows, spot, thread)
        self.store_elements(values, words, x, out, spot, thread)
        if cutlass.const_expr(self.spec.blocked):
            cute.arch.sync_threads()
            self.store_atoms(held, out, spot, thread)

    @cute.jit
    def corner(self, k, thread):
        """Return a lane's first row and column: within the rows of the tile, and of x."""
        warp, lane = thread // LANES, thread % LANES
        return warp % 4 * BLOCK + lane // 8, k * COLUMNS + warp // 4 * 64 + lane % 8 * VECTOR

    # --- scales --------------------------------------------------------------------------------------------------

    @cute.jit
    def make_scales(self, values, x, out, held, matrix_rows, spot, thread):
        """Write scales to ``held``, compact ones to memory; return a word of this lane's two inverses per direction."""
        spec, tile, unit, units = self.spec, spot.tile, spot.unit, spot.units
        warp, lane = thread // LANES, thread % LANES
        _, column = self.corner(spot.k, thread)
        band, quarter = warp % 4, lane // 8
        row_word, column_word = Int32(0), Int32(0)
        bytes_ = cute.recast_tensor(held, Uint8)  # a warp's 64, by the row of the atom, then by its second coordinate
        row_pairs, column_pairs = self.maxima(values)
        if cutlass.const_expr(spec.rowwise):
            low, high = self.shared_maximum(row_pairs, lane, 2, 1)
            row_bytes = (scale_byte(low, spec.element, spec.scaling), scale_byte(high, spec.element, spec.scaling))
            row_word = halves(inverse_scale(row_bytes[0]), inverse_scale(row_bytes[1]), UPPER_HALVES)
            for i in cutlass.range_constexpr(2):
                y = quarter + 8 * (lane % 4) + 4 * i
                if cutlass.const_expr(spec.blocked):
                    bytes_[2 * y + lane % 8 // 4, warp, 0] = Uint8(row_bytes[i])
                else:
                    row = band * BLOCK + y
                    if row < tile.count and column // BLOCK * BLOCK < x.shape[1]:
                        out.scale[tile.first + row, column // BLOCK] = Uint8(row_bytes[i])
        if cutlass.const_expr(spec.columnwise):
            low, high = self.shared_maximum(column_pairs, lane, 16, 8)
            column_bytes = (scale_byte(low, spec.element, spec.scaling), scale_byte(high, spec.element, spec.scaling))
            column_word = halves(inverse_scale(column_bytes[0]), inverse_scale(column_bytes[1]), UPPER_HALVES)
            if cutlass.const_expr(spec.blocked):
                for i in cutlass.range_constexpr(2):
                    y = lane % 4 * VECTOR + 2 * quarter + i
                    bytes_[2 * y + lane % 8 // 4, warp, 1] = Uint8(column_bytes[i])
            else:
                row = unit * 4 + band
                wanted = unit < units
                if cutlass.const_expr(not spec.grouped):
                    row = unit // units * ceil_div(matrix_rows, BLOCK) + unit % units * 4 + band
                    wanted = band * BLOCK < tile.count
                if cutlass.const_expr(self.elementwise):
                    for i in cutlass.range_constexpr(2):
                        if wanted and column + 2 * quarter + i < x.shape[1]:
                            out.columnwise_scale[row, column + 2 * quarter + i] = Uint8(column_bytes[i])
                elif wanted and column < x.shape[1]:
                    for i in cutlass.range_constexpr(2):
                        out.columnwise_scale[row, column + 2 * quarter + i] = Uint8(column_bytes[i])
        return row_word, column_word

    # --- elements ------------------------------------------------------------------------------------------------

    @cute.jit
    def store_elements(self, values, words, x, out, spot, thread):
        """Store the elements of a warp's 32 x 64; the inverses of all blocks come from the lanes that computed them."""
        spec, tile, lane = self.spec, spot.tile, thread % LANES
        row_word, column_word = words
        top, column = self.corner(spot.k, thread)
        row_inverses: Any = None
        column_inverses: Any = None
        if cutlass.const_expr(spec.rowwise):
            row_inverses = self.inverses(row_word, [lane // 4 * 4 + i for i in range(4)])
        if cutlass.const_expr(spec.columnwise):
            column_inverses = self.inverses(column_word, [lane % 8 + 8 * i for i in range(4)])
        rows = tile.count - top
        if column >= x.shape[1]:
            rows = Int32(0)
        step = cutlass.Int64(x.shape[1]) * 4
        quantized = cute.make_rmem_tensor(VECTOR, self.element)
        for i in cutlass.range_constexpr(STEPS):
            wide = values[None, i].load().to(Float32)
            if cutlass.const_expr(spec.rowwise):
                round_to_fp8(wide * row_inverses[i], quantized)
                if 4 * i < rows:
                    start = self.address(out.data, tile.first + top, column)
                    self.store_row(start + step * i, quantized, x.shape[1] - column)
            if cutlass.const_expr(spec.columnwise):
                round_to_fp8(wide * column_inverses.load(), quantized)
                if 4 * i < rows:
                    start = self.address(out.columnwise_data, tile.first + top, column)
                    self.store_row(start + step * i, quantized, x.shape[1] - column)

    def inverses(self, word, lanes):
        """Return eight inverse scales in order, two from each of four lanes."""
        found = cute.make_rmem_tensor(2 * len(lanes), Float32)
        for i, lane in enumerate(lanes):
            pair = cute.arch.shuffle_sync(word, lane)
            found[2 * i], found[2 * i + 1] = as_float(pair << 16), as_float(pair & -65536)
        return found

    @cute.jit
    def store_atoms(self, held, out, spot, thread):
        """Store one atom of scales in each direction, 16 bytes a thread."""
        unit, units, k, across = spot.unit, spot.units, spot.k, spot.across
        side, y = thread // 32, thread % 32
        wanted = Boolean(True)
        if cutlass.const_expr(self.spec.grouped):
            wanted = unit < units
        if side < 2 and wanted:
            pairs = cute.make_rmem_tensor((WARPS,), Uint16)
            for warp in cutlass.range_constexpr(WARPS):
                pairs[warp] = held[y, warp, side]
            taken = cute.recast_tensor(pairs, Uint8)
            part = cute.make_rmem_tensor((2, 2, 4), Uint8)
            if side == 0:  # noqa: SIM102 (one is known while tracing, the other is not)
                if cutlass.const_expr(self.spec.rowwise):
                    for band in cutlass.range_constexpr(4):
                        for half in cutlass.range_constexpr(2):
                            for i in cutlass.range_constexpr(2):
                                part[i, half, band] = taken[2 * (band + 4 * half) + i]
                    self.store_atom(out.scale, cutlass.Int64(unit) * across + k, y, part)
            if side == 1:  # noqa: SIM102
                if cutlass.const_expr(self.spec.columnwise):
                    for quarter in cutlass.range_constexpr(4):
                        for band in cutlass.range_constexpr(4):
                            byte = taken[2 * (band + 4 * (quarter // 2)) + quarter % 2]
                            part[band % 2, band // 2, quarter] = byte
                    if cutlass.const_expr(self.spec.grouped):
                        at = cutlass.Int64(k) * units + unit
                    else:
                        at = (cutlass.Int64(unit // units) * across + k) * units + unit % units
                    self.store_atom(out.columnwise_scale, at, y, part)

    @cute.jit
    def store_atom(self, scales, atom, y, part):
        """Store the bytes of an atom from ``16 y`` on."""
        pointer = (scales.iterator + (atom * ATOM + y * 16)).align(16)
        cute.autovec_copy(part, cute.make_tensor(pointer, cute.make_layout((2, 2, 4))))

    # --- tiles without a row of a group ------------------------------------------------------------------------------

    @cute.jit
    def clear_tile(self, x, out, spot, thread):
        """Zero a tile that has no row of a group; it may have rows past all groups."""
        tile, unit, units, k = spot.tile, spot.unit, spot.units, spot.k
        if tile.count > 0:
            top, column = self.corner(k, thread)
            nothing = cute.make_rmem_tensor(VECTOR, self.element)
            cute.recast_tensor(nothing, Int32).fill(0)
            for to in (out.data, out.columnwise_data):
                if cutlass.const_expr(to is not None):
                    for i in cutlass.range_constexpr(STEPS):
                        if top + 4 * i < tile.count and column < x.shape[1]:
                            start = self.address(to, tile.first + top + 4 * i, column)
                            self.store_row(start, nothing, x.shape[1] - column)
        for side, scales in enumerate((out.scale, out.columnwise_scale)):
            if cutlass.const_expr(scales is not None):
                if cutlass.const_expr(self.spec.blocked):
                    if unit < units and thread // 32 == side:
                        part = cute.make_rmem_tensor((2, 2, 4), Uint8)
                        part.fill(0)
                        at = cutlass.Int64(k) * units + unit if side else cutlass.Int64(unit) * spot.across + k
                        self.store_atom(scales, at, thread % 32, part)
                else:
                    self.clear_scales(scales, x, spot, thread, side)

    @cute.jit
    def clear_scales(self, scales, x, spot, thread, side: cutlass.Constexpr):
        """Zero compact scales of such a tile, by rows (``side`` 0) or by columns: two of 512 for a thread."""
        tile, unit, k = spot.tile, spot.unit, spot.k
        for i in cutlass.range_constexpr(2):
            at, block = thread % ROWS, thread // ROWS * 2 + i
            if cutlass.const_expr(side == 0):
                if at < tile.count and k * COLUMNS + block * BLOCK < x.shape[1]:
                    scales[tile.first + at, k * (COLUMNS // BLOCK) + block] = Uint8(0)
            elif unit < spot.units and k * COLUMNS + at < x.shape[1]:
                scales[unit * (ROWS // BLOCK) + block, k * COLUMNS + at] = Uint8(0)
