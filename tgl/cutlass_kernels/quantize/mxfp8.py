"""MXFP8 quantisation in both directions in one pass over x.

A block of 8 warps takes 128 rows of one group and walks over tiles of 128 columns. Such a tile has exactly one atom of
512 bytes of scales in either direction, which is put together in shared memory and stored in 16-byte pieces.

=============  ==========================================================
of a tile      who holds it
=============  ==========================================================
32 x 64        a warp
8 columns      a lane: ``8 (lane % 8)`` on, in rows ``lane // 8 + 4 i``
=============  ==========================================================

so a block of 32 along the columns is four lanes' eight values in one row, and a block of 32 rows four lanes' eight
rows: two shuffles each. Maxima are taken of magnitudes as integers, in which NaN is the largest.
"""

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Uint8, cute
from cutlass.memory import SmemAllocator

from ..schedule import ceil_div
from .spec import MXFP8Spec
from .tiles import ROWS, group_tile, matrix_tile, tiles_at_most

LANES = 32
WARPS = 8
COLUMNS = 128
BLOCK = 32
VECTOR = 8  # columns of a lane
STEPS = 8  # rows of a lane
ATOM = 512
CHUNK = 8  # tiles of columns a block walks over: measured on an H200 against 2, 4 and 16

MAGNITUDE = 0x7FFFFFFF
INFINITY = 0x7F800000
NAN = 0x7FC00000
MANTISSA = 0x7FFFFF
HALF_OF_FIRST = 0x400000  # 2^-127
ELEMENTS = {  # exponent of the largest element, bits of float32(1 / it), half a unit in its last place
    "float8_e4m3fn": (8, 0x3B124925, 1 << 19),
    "float8_e5m2": (15, 0x37924925, 1 << 20),
}
TYPES = {
    "float8_e4m3fn": "Float8E4M3FN",
    "float8_e5m2": "Float8E5M2",
    "float32": "Float32",
    "bfloat16": "BFloat16",
    "float16": "Float16",
}


def as_float(bits: Int32) -> Float32:
    """The float32 of these bits."""
    held = cute.make_rmem_tensor(1, Int32)
    held[0] = bits
    return cute.recast_tensor(held, Float32)[0]


def as_bits(value: Float32) -> Int32:
    """The bits of a float32."""
    held = cute.make_rmem_tensor(1, Float32)
    held[0] = value
    return cute.recast_tensor(held, Int32)[0]


@cute.jit
def scale_byte(amax: Int32, element: cutlass.Constexpr, scaling: cutlass.Constexpr) -> Int32:
    """The E8M0 byte for a block whose largest magnitude has the bits ``amax``."""
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
def inverse_scale(byte: Int32) -> Float32:
    """``2^(127 - byte)``, NaN for 255; 248 to 254 are the scales of no amax."""
    bits = (254 - byte) << 23
    if byte == 255:
        bits = Int32(NAN)
    return as_float(bits)


class QuantizeMXFP8:
    """The kernel for one ``MXFP8Spec``."""

    def __init__(self, spec: MXFP8Spec):
        self.spec = spec
        self.element = getattr(cutlass, TYPES[spec.element])
        self.source = getattr(cutlass, TYPES[spec.source])

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        offs: cute.Tensor | None,
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
            x: ``[T, K]``, or ``[G N, K]`` of stacked matrices of ``matrix_rows`` = N rows each; rows on 16 bytes, K a
                multiple of 8.
            offs: int32 ``[G]``, or None for matrices.
            row_scale: ``[T]`` or None.
            noop: one element; if not zero, nothing is written.
            data, columnwise_data: ``[rows, K]``, contiguous; None without the direction.
            scale, columnwise_scale: bytes, contiguous.
            stream: CUDA stream.
        """
        rows, columns = Int32(x.shape[0]), Int32(x.shape[1])
        if cutlass.const_expr(self.spec.grouped):
            units = tiles_at_most(rows, Int32(cute.size(offs)))
        else:
            units = rows // matrix_rows * ceil_div(matrix_rows, ROWS)
        across = ceil_div(columns, COLUMNS)
        self.kernel(
            x, offs, row_scale, noop, data, scale, columnwise_data, columnwise_scale, matrix_rows, across
        ).launch(grid=(units * ceil_div(across, CHUNK), 1, 1), block=(WARPS * LANES, 1, 1), stream=stream)

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        offs: cute.Tensor | None,
        row_scale: cute.Tensor | None,
        noop: Any,
        data: cute.Tensor | None,
        scale: cute.Tensor | None,
        columnwise_data: cute.Tensor | None,
        columnwise_scale: cute.Tensor | None,
        matrix_rows: Int32,
        across: Int32,
    ):
        """One tile of rows, a chunk of its tiles of columns."""
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        chunks = ceil_div(across, CHUNK)
        unit = block // chunks
        atoms = SmemAllocator().allocate_tensor(Uint8, cute.make_layout((64, WARPS, 2, 2)), byte_alignment=16)
        stopped = Boolean(False)
        if cutlass.const_expr(noop is not None):
            stopped = noop[0] != noop.element_type(0)
        if not stopped:
            if cutlass.const_expr(self.spec.grouped):
                tile = group_tile(offs, Int32(x.shape[0]), unit)
                units = tiles_at_most(Int32(x.shape[0]), Int32(cute.size(offs))) - 1
            else:
                tile = matrix_tile(matrix_rows, unit)
                units = ceil_div(matrix_rows, ROWS)
            first = (block - unit * chunks) * CHUNK
            last = cutlass.min(first + CHUNK, across) - 1
            parts = cute.make_rmem_tensor((VECTOR, STEPS), self.source)
            self.load_tile(x, parts, tile, first, thread)
            for k in cutlass.range(first, last + 1, unroll=1):
                held = atoms[None, None, None, k % 2]
                values = self.widen(x, row_scale, parts, tile, k, thread)
                self.load_tile(x, parts, tile, cutlass.min(k + 1, last), thread)  # while this one is worked on
                self.quantize_tile(values, x, data, scale, columnwise_data, held, tile, k, thread)
                if cutlass.const_expr(self.spec.columnwise and not self.spec.blocked):
                    self.store_columnwise(columnwise_scale, held, tile, unit, units, matrix_rows, k, thread)
                if cutlass.const_expr(self.spec.blocked):
                    cute.arch.sync_threads()
                    self.store_atoms(held, scale, columnwise_scale, unit, units, k, across, thread)

    @cute.jit
    def load_tile(self, x, parts, tile, k, thread):
        """Start a warp's 32 x 64 of a tile on their way; rows and columns that do not exist read others again."""
        if tile.count > 0 and not tile.tail:
            row, column = self.corner(k, thread)
            column = cutlass.min(column, x.shape[1] - VECTOR)
            for i in cutlass.range_constexpr(STEPS):
                at = tile.first + cutlass.min(row + 4 * i, tile.count - 1)
                self.copy_row(x, at, column, parts[None, i], True)

    @cute.jit
    def widen(self, x, row_scale, parts, tile, k, thread):
        """The loaded values in float32, zero where there are none."""
        row, column = self.corner(k, thread)
        values = cute.make_rmem_tensor((VECTOR, STEPS), Float32)
        for i in cutlass.range_constexpr(STEPS):
            there = row + 4 * i < tile.count and column < x.shape[1] and not tile.tail
            wide = parts[None, i].load().to(Float32)
            if cutlass.const_expr(row_scale is not None):
                factor = Float32(0)
                if there:
                    factor = row_scale[tile.first + row + 4 * i].to(Float32)
                wide = (wide * factor).to(self.source).to(Float32)
            values[None, i].store(wide)
            for j in cutlass.range_constexpr(VECTOR):
                values[j, i] = values[j, i] if there else Float32(0)
        return values

    @cute.jit
    def corner(self, k, thread):
        """A lane's first row and column: within the rows of the tile, and of x."""
        warp, lane = thread // LANES, thread % LANES
        return warp % 4 * BLOCK + lane // 8, k * COLUMNS + warp // 4 * 64 + lane % 8 * VECTOR

    @cute.jit
    def quantize_tile(self, values, x, data, scale, columnwise_data, held, tile, k, thread):
        """A warp's 32 x 64 of a tile: elements to memory, scales to ``held`` (rowwise to memory, if compact)."""
        spec = self.spec
        warp, lane = thread // LANES, thread % LANES
        top, column = self.corner(k, thread)
        inside = column < x.shape[1]
        bits = cute.recast_tensor(values, Int32)
        quantized = cute.make_rmem_tensor(VECTOR, self.element)
        if cutlass.const_expr(spec.rowwise):
            for i in cutlass.range_constexpr(STEPS):
                row = top + 4 * i
                amax = Int32(0)
                for j in cutlass.range_constexpr(VECTOR):
                    amax = cutlass.max(amax, bits[j, i] & MAGNITUDE)
                for shift in (1, 2):
                    amax = cutlass.max(amax, cute.arch.shuffle_sync_bfly(amax, shift))
                byte = scale_byte(amax, spec.element, spec.scaling)
                quantized.store((values[None, i].load() * inverse_scale(byte)).to(self.element))
                if row < tile.count and inside:
                    self.copy_row(data, tile.first + row, column, quantized, False)
                if lane % 4 == 0:
                    if cutlass.const_expr(spec.blocked):
                        held[(lane // 8 + 4 * i) * 2 + lane % 8 // 4, warp, 0] = Uint8(byte)
                    elif row < tile.count and inside:
                        scale[tile.first + row, column // BLOCK] = Uint8(byte)
        if cutlass.const_expr(spec.columnwise):
            inverses = cute.make_rmem_tensor(VECTOR, Float32)
            bytes_ = cute.make_rmem_tensor(VECTOR, Uint8)
            for j in cutlass.range_constexpr(VECTOR):
                amax = Int32(0)
                for i in cutlass.range_constexpr(STEPS):
                    amax = cutlass.max(amax, bits[j, i] & MAGNITUDE)
                for shift in (8, 16):
                    amax = cutlass.max(amax, cute.arch.shuffle_sync_bfly(amax, shift))
                byte = scale_byte(amax, spec.element, spec.scaling)
                inverses[j] = inverse_scale(byte)
                bytes_[j] = Uint8(byte)
            for i in cutlass.range_constexpr(STEPS):
                row = top + 4 * i
                quantized.store((values[None, i].load() * inverses.load()).to(self.element))
                if row < tile.count and inside:
                    self.copy_row(columnwise_data, tile.first + row, column, quantized, False)
            if lane < 8:
                for j in cutlass.range_constexpr(VECTOR):
                    held[lane * VECTOR + j, warp, 1] = bytes_[j]

    @cute.jit
    def copy_row(self, tensor, row, column, part, load: cutlass.Constexpr):
        """``VECTOR`` elements of a row, to or from registers."""
        width = min(VECTOR * tensor.element_type.width // 8, 16)
        pointer = (tensor.iterator + (cutlass.Int64(row) * tensor.stride[0] + column)).align(width)
        memory = cute.make_tensor(pointer, cute.make_layout(VECTOR))
        if cutlass.const_expr(load):
            cute.autovec_copy(memory, part)
        else:
            cute.autovec_copy(part, memory)

    @cute.jit
    def store_columnwise(self, columnwise_scale, held, tile, unit, units, matrix_rows, k, thread):
        """Compact columnwise scales: a row of them for every block of 32 rows, the warp's 64 by 8 lanes."""
        warp, lane = thread // LANES, thread % LANES
        band, column = warp % 4, k * COLUMNS + warp // 4 * 64 + lane * VECTOR
        cute.arch.sync_warp()
        row = unit * 4 + band
        wanted = Boolean(unit < units)
        if cutlass.const_expr(not self.spec.grouped):
            row = unit // units * ceil_div(matrix_rows, BLOCK) + unit % units * 4 + band
            wanted = band * BLOCK < tile.count
        if lane < 8 and column < columnwise_scale.shape[1] and wanted:
            part = cute.make_rmem_tensor(VECTOR, Uint8)
            for j in cutlass.range_constexpr(VECTOR):
                part[j] = held[lane * VECTOR + j, warp, 1]
            self.copy_row(columnwise_scale, row, column, part, False)

    @cute.jit
    def store_atoms(self, held, scale, columnwise_scale, unit, units, k, across, thread):
        """One atom of scales in each direction to memory, 16 bytes a thread: those of a row of every 32."""
        side, y = thread // 32, thread % 32
        part = cute.make_rmem_tensor((2, 2, 4), Uint8)
        wanted = Boolean(True)
        if cutlass.const_expr(self.spec.grouped):
            wanted = unit < units
        if side == 0 and wanted:  # noqa: SIM102 (one is known while tracing, the other is not)
            if cutlass.const_expr(self.spec.rowwise):
                for band in cutlass.range_constexpr(4):
                    for half in cutlass.range_constexpr(2):
                        for i in cutlass.range_constexpr(2):
                            part[i, half, band] = held[y * 2 + i, band + 4 * half, 0]
                self.store_atom(scale, cutlass.Int64(unit) * across + k, y, part)
        if side == 1 and wanted:  # noqa: SIM102
            if cutlass.const_expr(self.spec.columnwise):
                for quarter in cutlass.range_constexpr(4):
                    for band in cutlass.range_constexpr(4):
                        byte = held[quarter % 2 * 32 + y, band + 4 * (quarter // 2), 1]
                        part[band % 2, band // 2, quarter] = byte
                if cutlass.const_expr(self.spec.grouped):
                    at = cutlass.Int64(k) * units + unit
                else:
                    at = (cutlass.Int64(unit // units) * across + k) * units + unit % units
                self.store_atom(columnwise_scale, at, y, part)

    @cute.jit
    def store_atom(self, scales, atom, y, part):
        """Bytes ``16 y`` on of an atom."""
        pointer = (scales.iterator + (atom * ATOM + y * 16)).align(16)
        cute.autovec_copy(part, cute.make_tensor(pointer, cute.make_layout((2, 2, 4))))
