"""Dequantisation of data in the order of its rows: all of MXFP8, and the rowwise components of the other formats.

A block of 8 warps takes 128 rows of one group, as the quantising kernels do, so that the scales of a tile of 128
columns lie together in either layout and either direction. Neighbouring lanes hold neighbouring vectors of a row, each
of which is one store of 16 bytes where K allows.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, Uint8, cute

from ..instructions import widened_fp8
from ..pointers import aligned
from ..runtime.elements import TYPES
from ..scheduler import ceil_div
from .decode import (
    ATOM,
    FP4,
    atom_row,
    decoding_scale,
    e8m0_value,
    element_pointer,
    fp4_values,
    load_bytes,
    scale_of_row,
)
from .lane_tile import COLUMNS, LANES, WARPS
from .quantize_spec import DequantizeSpec
from .tiles import ROWS, ColumnTile, group_of_unit, group_tile, launch_grid, matrix_tile, tiles_at_most

BAND = 32  # rows that share an MXFP8 scale
BATCH = 32  # elements of a lane that are loaded before the first is stored


class QuantizedSource(NamedTuple):
    """Operands of a dequantisation launch.

    Attributes:
        data: bytes, two elements of FP4 each.
        scale: compact ``[rows, columns]``, blocked ``[bytes]``, or per group float32 ``[G]``.
        offs: int32 ``[G]``, or None for matrices.
        amax: float32 ``[G]`` of NVFP4, or None.
        matrix_rows: N of matrices.
    """

    data: cute.Tensor
    scale: cute.Tensor
    offs: cute.Tensor | None
    amax: Any
    matrix_rows: Int32


class DequantizeRowsKernel:
    """The kernel for one ``DequantizeSpec``."""

    def __init__(self, spec: DequantizeSpec):
        self.spec = spec
        self.decoding = spec.decoding
        self.out = TYPES[spec.out]
        self.vector = spec.vector
        self.lanes = COLUMNS // self.vector  # lanes that hold a row of a tile
        self.height = WARPS * LANES // self.lanes  # rows that the block holds at once
        self.batch = min(BATCH // self.vector, 16)  # rows
        # A lane's rows of a batch are adjacent, in one band, or as far apart as the rows that the block holds at once.
        self.step = 1 if spec.columnwise else self.height
        self.fp4 = spec.element == FP4
        self.bytes = self.vector // 2 if self.fp4 else self.vector

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
            data: bytes ``[T, K]``, of FP4 ``[T, K / 2]``; of matrices ``[G N, ...]``, ``matrix_rows`` = N rows each.
            scale, offs, amax, matrix_rows: see ``QuantizedSource``.
            out: ``[T, K]`` or ``[G N, K]``.
            stream: CUDA stream.
        """
        grid = launch_grid(out, COLUMNS, offs, matrix_rows)
        self.kernel(QuantizedSource(data, scale, offs, amax, matrix_rows), out, grid.across).launch(
            grid=grid.shape,
            block=(WARPS * LANES, 1, 1),
            stream=stream,
            min_blocks_per_mp=3 if self.spec.columnwise or self.vector < 8 else 4,  # limited by registers
            preferred_smem_carveout=8,  # in %; the rest is cache
        )

    @cute.kernel
    def kernel(self, source: QuantizedSource, out: cute.Tensor, across: Int32):
        """Dequantise one tile of rows and columns."""
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        unit = block // across
        k = block - unit * across
        if cutlass.const_expr(self.spec.grouped):
            group = group_of_unit(source.offs, Int32(out.shape[0]), unit)
            tile = group_tile(source.offs, Int32(out.shape[0]), unit, group)
            units = tiles_at_most(Int32(out.shape[0]), Int32(cute.size(source.offs))) - 1
        else:
            tile, units = matrix_tile(source.matrix_rows, unit), ceil_div(source.matrix_rows, ROWS)
            group = unit // units
        if tile.tail:
            self.clear(out, tile, k, thread)
        elif tile.count > 0:
            whole = Float32(1.0)
            if cutlass.const_expr(self.decoding.amax):
                whole = decoding_scale(source.amax[group])
            elif cutlass.const_expr(not self.decoding.block):
                whole = source.scale[group]
            spot = ColumnTile(tile, tile, group, unit, units, k, across)
            for start in cutlass.range(0, ROWS, self.height * self.batch, unroll=1):
                self.decode(source, whole, out, spot, start, thread)

    @cute.jit
    def corner(self, k, thread):
        """Return a lane's first row and column, within the rows of the tile and the columns of the result."""
        # Shifts, here and below: a division would handle negative numbers.
        return thread >> self.lanes.bit_length() - 1, k * COLUMNS + (thread & self.lanes - 1) * self.vector

    @cute.jit
    def clear(self, out, tile, k, thread):
        """Zero a tile of the tail."""
        row, column = self.corner(k, thread)
        zeros = cute.make_rmem_tensor(self.vector, self.out)
        zeros.fill(0)
        if column < out.shape[1]:
            for at in cutlass.range(row, tile.count, self.height, unroll=1):
                self.store(out, tile.first + at, column, zeros)

    @cute.jit
    def store(self, out, row, column, values):
        """Store a vector of a row."""
        width = self.vector * self.out.width // 8
        pointer = aligned(element_pointer(out, row, column), width)
        cute.autovec_copy(values, cute.make_tensor(pointer, cute.make_layout(self.vector)))

    @cute.jit
    def decode(self, source, whole, out, spot, start, thread):
        """Decode a batch of a lane's rows of a tile; out-of-range rows and columns read others again."""
        tile = spot.tile
        row, column = self.corner(spot.k, thread)
        if cutlass.const_expr(self.spec.columnwise):
            row *= self.batch
        row += start
        there = column < out.shape[1]
        column = cutlass.min(column, out.shape[1] - self.vector)
        held = cute.make_rmem_tensor((max(self.bytes, 4), self.batch), Uint8)
        if cutlass.const_expr(self.bytes < 4):
            held.fill(0)
        for i in cutlass.range_constexpr(self.batch):
            at = tile.first + cutlass.min(row + self.step * i, tile.count - 1)
            part = cute.make_tensor(held[None, i].iterator, cute.make_layout(self.bytes))
            load_bytes(element_pointer(source.data, at, column * self.bytes // self.vector), part, self.bytes)
        bands: Any = None
        if cutlass.const_expr(self.spec.columnwise):
            bands = self.scales_of_columns(source, out, spot, column, row // BAND)
        factors = cute.make_rmem_tensor(self.batch, Float32)
        factors.fill(whole)
        if cutlass.const_expr(not self.spec.columnwise):
            for i in cutlass.range_constexpr(self.batch):
                at = cutlass.min(row + self.step * i, tile.count - 1)
                factors[i] = scale_of_row(self.spec, source.scale, whole, spot, at, column, out.shape[1])
        quantized = cute.make_rmem_tensor(self.vector, self.out)
        for i in cutlass.range_constexpr(self.batch):
            if cutlass.const_expr(self.fp4):
                eight = fp4_values(held[None, i])
                values = cute.make_tensor(eight.iterator, cute.make_layout(self.vector)).load()
            else:
                values = self.fp8(held[None, i])
            if cutlass.const_expr(self.spec.columnwise):
                values = values * bands.load()
            else:
                values = values * factors[i]
            quantized.store(values.to(self.out))
            if there and row + self.step * i < tile.count:
                self.store(out, tile.first + row + self.step * i, column, quantized)

    def fp8(self, held):
        """Return the first elements of ``held`` as float32; conversions take four."""
        wide = widened_fp8(held, TYPES[self.spec.element])
        if self.vector >= 4:
            return wide
        values = cute.make_rmem_tensor(4, Float32)
        values.store(wide)
        return cute.make_tensor(values.iterator, cute.make_layout(self.vector)).load()

    # --- scales ------------------------------------------------------------------------------------------------------

    @cute.jit
    def scales_of_columns(self, source, out, spot, column, band):
        """Return the factors of a lane's columns in a band of 32 rows."""
        scale, unit, units, k = source.scale, spot.unit, spot.units, spot.k
        found = cute.make_rmem_tensor(self.vector, Float32)
        if cutlass.const_expr(self.spec.blocked):
            atom = Int64(k) * units + unit
            if cutlass.const_expr(not self.spec.grouped):
                across = ceil_div(Int32(out.shape[1]), COLUMNS)
                atom = (Int64(unit // units) * across + k) * units + unit % units
            for j in cutlass.range_constexpr(self.vector):
                found[j] = e8m0_value(Int32(scale[atom * ATOM + (atom_row((column + j) & (COLUMNS - 1)) + band)]))
        else:
            row = unit * (ROWS // BAND)
            if cutlass.const_expr(not self.spec.grouped):
                row = unit // units * ceil_div(source.matrix_rows, BAND) + unit % units * (ROWS // BAND)
            held = cute.make_rmem_tensor(self.vector, Uint8)
            at = row + cutlass.min(band, (spot.tile.count - 1) // BAND)
            load_bytes(element_pointer(scale, at, column), held, self.vector)
            for j in cutlass.range_constexpr(self.vector):
                found[j] = e8m0_value(Int32(held[j]))
        return found
