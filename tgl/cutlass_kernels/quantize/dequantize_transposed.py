"""Dequantisation of transposed data: the columnwise components of NVFP4, MXFP4 and of FP8 with float32 scales.

A block of 8 warps takes 128 rows of one group and walks over tiles of 64 columns of the result. A lane holds runs of 16
rows of two columns; a run is 16 bytes of FP8, half a block of MXFP4, or one block and one run of the Hadamard transform
of NVFP4. They are transposed in shared memory, two columns at a time, with the 16-byte pieces of a row permuted by
their run to avoid bank conflicts. As soon as a lane has transposed its runs it loads those of the next tile; tiles
alternate between two buffers, so that a block synchronises once per tile.
"""

import cutlass
from cutlass import Float32, Int32, Int64, Uint8, cute
from cutlass.memory import SmemAllocator

from ..instructions import e4m3_value, widened_fp8
from ..pointers import aligned
from ..runtime.elements import TYPES
from ..scheduler import ceil_div
from .decode import (
    ATOM,
    ATOM_COLUMNS,
    FP4,
    atom_row,
    decoding_scale,
    e8m0_value,
    element_pointer,
    fp4_values,
    load_bytes,
    product,
)
from .dequantize import QuantizedSource
from .lane_tile import LANES, WARPS
from .quantize_spec import DequantizeSpec
from .tiles import (
    ROWS,
    ColumnTile,
    group_of_unit,
    group_place,
    group_tile,
    launch_grid,
    matrix_place,
    matrix_tile,
    tiles_at_most,
)

COLUMNS = 64
RUN = 16
RUNS = ROWS // RUN
THREADS = WARPS * LANES
PIECE = 16  # bytes
SQUARE = 128
TURNS = 2  # rows of a lane in flight from shared memory
CHUNK, CHUNK_FP4 = 2, 4  # tiles of columns per block, at most
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)  # of the Hadamard transform


class DequantizeTransposedKernel:
    """The kernel for one ``DequantizeSpec``."""

    def __init__(self, spec: DequantizeSpec):
        self.spec = spec
        self.decoding = spec.decoding
        self.out = TYPES[spec.out]
        self.fp4 = spec.element == FP4
        self.bytes = RUN // 2 if self.fp4 else RUN  # of a run
        self.elements = PIECE * 8 // self.out.width  # of a piece of the result
        self.pieces = COLUMNS // self.elements
        # limited by registers and shared memory
        self.blocks = 2 if spec.rht else 3 if spec.square or self.out.width == 32 else 4

    @cute.jit
    def __call__(
        self,
        data: cute.Tensor,
        scale: cute.Tensor,
        offs: cute.Tensor | None,
        amax: cute.Tensor | None,
        out: cute.Tensor,
        matrix_rows: Int32,
        stream,
    ):
        """Launch.

        Args:
            data: bytes ``[K, Tp]``, of FP4 ``[K, Tp / 2]``; of matrices ``[G K, ...]`` of ``matrix_rows`` = N columns.
            scale, offs, amax, matrix_rows: see ``QuantizedSource``.
            out: ``[T, K]`` or ``[G N, K]``.
            stream: CUDA stream.
        """
        grid = launch_grid(out, COLUMNS, offs, matrix_rows, CHUNK_FP4 if self.fp4 else CHUNK)
        self.kernel(QuantizedSource(data, scale, offs, amax, matrix_rows), out, grid.across, grid.chunk).launch(
            grid=grid.shape,
            block=(THREADS, 1, 1),
            stream=stream,
            min_blocks_per_mp=self.blocks,
            preferred_smem_carveout=60,
        )

    @cute.kernel
    def kernel(self, source: QuantizedSource, out: cute.Tensor, across: Int32, chunk: Int32):
        """Dequantise one tile of rows, a chunk of its tiles of columns."""
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        chunks = ceil_div(across, chunk)
        unit = block // chunks
        turned = SmemAllocator().allocate_tensor(self.out, cute.make_layout(2 * ROWS * COLUMNS), byte_alignment=128)
        if cutlass.const_expr(self.spec.grouped):
            rows = Int32(out.shape[0])
            group = group_of_unit(source.offs, rows, unit)
            tile = group_tile(source.offs, rows, unit, group)
            place = group_place(source.offs, rows, unit, group, self.decoding.unit)
            units = tiles_at_most(rows, Int32(cute.size(source.offs))) - 1
        else:
            tile, place = matrix_tile(source.matrix_rows, unit), matrix_place(source.matrix_rows, unit)
            units = ceil_div(source.matrix_rows, ROWS)
        first = (block - unit * chunks) * chunk
        if tile.count > 0:
            whole = Float32(1.0)
            if cutlass.const_expr(self.decoding.amax or not self.decoding.block):  # noqa: SIM102 (one is known while tracing)
                if not tile.tail:
                    whole = self.scale_of_group(source, place.group)
            last = cutlass.min(first + chunk, across)
            if tile.tail:
                for k in cutlass.range(first, last, unroll=1):
                    self.clear(out, tile, k, thread)
            else:
                held = cute.make_rmem_tensor((self.bytes, 2), Uint8)
                factors = cute.make_rmem_tensor(2, Float32)
                if cutlass.const_expr(not self.spec.grouped):
                    held.fill(0)
                spot = ColumnTile(tile, tile, place.group, unit, units, first, across, place)
                self.load(held, factors, source, whole, out, spot, thread)
                for k in cutlass.range(first, last, unroll=1):
                    buffer = turned.iterator + (k - first & 1) * ROWS * COLUMNS
                    self.decode(held, factors, buffer, thread)
                    if k + 1 < last:
                        self.load(held, factors, source, whole, out, spot._replace(k=k + 1), thread)
                    cute.arch.sync_threads()
                    self.store_tile(out, buffer, tile, k, thread)

    # --- from memory -------------------------------------------------------------------------------------------------

    @cute.jit
    def load(self, held, factors, source, whole, out, spot, thread):
        """Issue the loads of a lane's runs of a tile, of two columns; out-of-range runs read others again."""
        tile, place, k = spot.tile, spot.place, spot.k
        number, left = thread & (RUNS - 1), (thread >> 3) * 2
        run = cutlass.min(number, (tile.count - 1) >> 4)
        for i in cutlass.range_constexpr(2):
            if cutlass.const_expr(self.spec.vector > 1):
                column = cutlass.min(k * COLUMNS + left, out.shape[1] - 2) + i
            else:
                column = cutlass.min(k * COLUMNS + left + i, out.shape[1] - 1)
            row = column
            if cutlass.const_expr(not self.spec.grouped):
                row = place.group * out.shape[1] + column
            start = (place.first + run * RUN) * self.bytes // RUN
            self.load_run(element_pointer(source.data, row, start), held[None, i], tile.count - run * RUN)
            factors[i] = self.scale_of_run(source, whole, out, spot, row, column, run)

    @cute.jit
    def decode(self, held, factors, buffer, thread):
        """Decode a lane's runs to shared memory."""
        number, left = thread & (RUNS - 1), (thread >> 3) * 2
        pairs = cute.make_rmem_tensor((2, RUN), Float32)
        for i in cutlass.range_constexpr(2):
            if cutlass.const_expr(self.fp4):
                values = fp4_values(held[None, i])
            else:
                values = cute.make_rmem_tensor(RUN, Float32)
                values.store(widened_fp8(held[None, i], TYPES[self.spec.element]))
            if cutlass.const_expr(self.spec.rht):
                for j in cutlass.range_constexpr(RUN):
                    values[j] = product(values[j], factors[i])
                self.transform_back(values)
            else:
                values.store(values.load() * factors[i])
            for j in cutlass.range_constexpr(RUN):
                pairs[i, j] = values[j]
        rounded = cute.make_rmem_tensor((2, RUN), self.out)
        rounded.store(pairs.load().to(self.out))
        start = self.piece(number * RUN, number, left >> self.elements.bit_length() - 1) + (left & self.elements - 1)
        for j in cutlass.range_constexpr(RUN):
            pointer = aligned(buffer + (start + j * COLUMNS), self.out.width // 4)
            cute.autovec_copy(rounded[None, j], cute.make_tensor(pointer, cute.make_layout(2)))

    @cute.jit
    def load_run(self, pointer, held, left):
        """Load the bytes of a run with at least ``left`` rows; a run of a matrix may be cut off by its end."""
        width = self.spec.run
        step = width * RUN // self.bytes
        for i in cutlass.range_constexpr(self.bytes // width):
            part = cute.make_tensor(held.iterator + i * width, cute.make_layout(width))
            if cutlass.const_expr(self.spec.grouped) or i * step < left:
                load_bytes(pointer + i * width, part, width)

    def transform_back(self, values):
        """Invert the Hadamard transform of a run, in place."""
        for distance in (1, 2, 4, 8):
            for i in range(RUN):
                if not i & distance:
                    a, b = values[i], values[i + distance]
                    values[i], values[i + distance] = a + b, a - b
        for i in range(RUN):
            values[i] = values[i] * Float32(0.25) * Float32(SIGNS[i])

    # --- scales ------------------------------------------------------------------------------------------------------

    @cute.jit
    def scale_of_group(self, source, group):
        """Return the factor of a whole group."""
        if cutlass.const_expr(self.decoding.amax):
            return decoding_scale(source.amax[group])
        return source.scale[group]

    @cute.jit
    def scale_of_run(self, source, whole, out, spot, row, column, number):
        """Return the factor of a run; ``row`` of the data, ``column`` of the result."""
        spec, decoding = self.spec, self.decoding
        scale, place, unit, units = source.scale, spot.place, spot.unit, spot.units
        if cutlass.const_expr(not decoding.block):
            return whole
        if cutlass.const_expr(decoding.scale == "float32"):
            if cutlass.const_expr(spec.square):
                return scale[unit // units * ceil_div(Int32(out.shape[1]), SQUARE) + (column >> 7), unit % units]
            return scale[unit, column]
        block = (place.first // RUN + number) >> (decoding.block // RUN).bit_length() - 1
        if cutlass.const_expr(spec.blocked):
            atoms = self.atoms_across(out, source)
            down = column >> 7
            if cutlass.const_expr(not spec.grouped):
                down = place.group * ceil_div(Int32(out.shape[1]), SQUARE) + down
            at = atom_row(column & (SQUARE - 1)) + (block & (ATOM_COLUMNS - 1))
            byte = scale[(Int64(down) * atoms + (block >> 2)) * ATOM + at]
        else:
            byte = scale[row, block]
        if cutlass.const_expr(decoding.scale == "float8_e8m0fnu"):
            return e8m0_value(Int32(byte))
        return e4m3_value(byte) * whole

    def atoms_across(self, out, source):
        """Return the number of adjacent atoms of blocked scales."""
        block = self.decoding.block
        if self.spec.grouped:
            return ceil_div(Int32(out.shape[0]), block * ATOM_COLUMNS) + Int32(cute.size(source.offs)) - 1
        return ceil_div(ceil_div(source.matrix_rows, block), ATOM_COLUMNS)

    # --- to memory ---------------------------------------------------------------------------------------------------

    def piece(self, row, run, number):
        """Return the offset of piece ``number`` of a tile's row, which is in run ``run``."""
        return row * COLUMNS + (number ^ run) * self.elements

    @cute.jit
    def store_tile(self, out, buffer, tile, k, thread):
        """Store the existing rows of the tile; adjacent lanes store a row."""
        vector = self.spec.vector
        height = THREADS // self.pieces
        turns = ROWS // height
        row, number = thread // self.pieces, thread % self.pieces
        parts = cute.make_rmem_tensor((self.elements, TURNS), self.out)
        for first in cutlass.range_constexpr(0, turns, TURNS):
            for turn in cutlass.range_constexpr(TURNS):
                at = row + (first + turn) * height
                pointer = aligned(buffer + self.piece(at, at // RUN, number), PIECE)
                cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(self.elements)), parts[None, turn])
            for i in cutlass.range_constexpr(self.elements // vector):
                column = k * COLUMNS + number * self.elements + i * vector
                if column < out.shape[1]:
                    start = element_pointer(out, tile.first + row, column)
                    for turn in cutlass.range_constexpr(TURNS):
                        if row + (first + turn) * height < tile.count:
                            some = cute.make_tensor(parts[None, turn].iterator + i * vector, cute.make_layout(vector))
                            self.store(start + Int64(out.stride[0]) * ((first + turn) * height), some)

    @cute.jit
    def clear(self, out, tile, k, thread):
        """Zero a tile of the tail."""
        vector = self.spec.vector
        height = THREADS // self.pieces
        zeros = cute.make_rmem_tensor(vector, self.out)
        zeros.fill(0)
        for row in cutlass.range(thread // self.pieces, tile.count, height, unroll=1):
            for i in cutlass.range_constexpr(self.elements // vector):
                column = k * COLUMNS + thread % self.pieces * self.elements + i * vector
                if column < out.shape[1]:
                    self.store(element_pointer(out, tile.first + row, column), zeros)

    @cute.jit
    def store(self, pointer, values):
        """Store a vector of a row."""
        pointer = aligned(pointer, self.spec.vector * self.out.width // 8)
        cute.autovec_copy(values, cute.make_tensor(pointer, cute.make_layout(self.spec.vector)))
