"""FP8 quantisation with float32 scales, per group or per block of 128, with transposed columnwise data.

A block of 8 warps takes a tile: 128 rows of one group and 128 columns, one block of scales in either direction. Unlike
the MXFP8 kernel it takes only one: there are no registers left for loop state.

=============  =============================================================
part of tile   owner
=============  =============================================================
16 x 128       a warp
8 columns      a lane: ``8 (lane % 16)`` on, in the rows ``8 (lane // 16)`` on
=============  =============================================================

Row maxima are exchanged by shuffles, column maxima through shared memory. A lane's eight rows of a column are eight
bytes of the transposed tile, which is assembled in shared memory and stored in 16-byte pieces; the pieces of a row are
rotated by column to reduce bank conflicts.

This kernel takes given scales per group; for scales from the group's amax, see ``fp8_groups``.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint8, cute
from cutlass.memory import SmemAllocator

from .. import instructions
from ..bits import INFINITY, NAN, as_bits, as_float
from ..instructions import round_to_fp8
from ..runtime.elements import TYPES
from ..scheduler import ceil_div
from .amax import raise_maximum
from .lane_tile import COLUMNS, LANES, STEPS, VECTOR, WARPS, BandValues, copy_pieces, store_bytes
from .quantize_spec import FP8Spec
from .tensors import Destinations, QuantizeSource, source_of
from .tiles import ROWS, ColumnTile, group_of_unit, group_place, group_tile, matrix_place, matrix_tile, tiles_at_most

UNIT = 32  # of the placement of transposed data
PIECE = 16
LARGEST = 0x7F7FFFFF
BIAS = 127
MANTISSA = 0x7FFFFF
THREE_QUARTERS = 0x600000  # of a mantissa
SMALLEST_INVERSE = 0x400000  # 2^-127
ELEMENTS = {"float8_e4m3fn": (448.0, 8), "float8_e5m2": (57344.0, 15)}  # the largest element and its exponent


@cute.jit
def block_scale(bits: Int32, spec: cutlass.Constexpr) -> tuple[Float32, Float32]:
    """Return the scale and its inverse for the largest magnitude ``bits``."""
    amax = bits
    if cutlass.const_expr(spec.eps > 0):
        amax = cutlass.max(bits, Int32(spec.eps))
    largest, exponent = ELEMENTS[spec.element]
    if cutlass.const_expr(spec.power_of_two):
        # No division: the largest element is 1.75 times a power of two, and no quotient below one of them rounds to it.
        biased = exponent + 2 * BIAS - (amax >> 23)
        if (amax & MANTISSA) > THREE_QUARTERS:
            biased -= 1
        biased = cutlass.min(biased, 2 * BIAS)
        if amax == 0 or amax >= INFINITY:
            biased = Int32(BIAS)
        inverse = (2 * BIAS - biased) << 23
        if biased == 2 * BIAS:
            inverse = Int32(SMALLEST_INVERSE)
        if amax >= INFINITY:
            inverse = Int32(NAN)
        return as_float(biased << 23), as_float(inverse)
    scale = cutlass.min(as_bits(Float32(largest) / as_float(amax)), Int32(LARGEST))
    if amax == 0 or amax >= INFINITY:
        scale = as_bits(Float32(1.0))
    quotient = Float32(1.0) / as_float(scale)
    if amax >= INFINITY:
        quotient = as_float(Int32(NAN))
    return as_float(scale), quotient


class QuantizeFP8Kernel(BandValues):
    """The kernel for one ``FP8Spec`` with blocks or given scales."""

    policy: Any = None  # L2 cache policy of the codes; see ``copy_pieces``

    def __init__(self, spec: FP8Spec):
        super().__init__(spec.source, spec.elementwise)
        self.spec = spec
        self.element = TYPES[spec.element]
        divides = spec.blocks is not None and not spec.power_of_two
        # Limited by registers; with both directions a fourth block is no gain (measured on an H200).
        self.blocks_per_sm = 2 if divides or not self.packed else 3 if spec.rowwise and spec.columnwise else 4

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        offs: cute.Tensor | None,
        order: cute.Tensor | None,
        given: cute.Tensor | None,
        row_scale: cute.Tensor | None,
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
        """Launch.

        Args:
            x, offs, order, row_scale, noop, matrix_rows: see ``QuantizeSource``.
            given: float32 ``[G]``, the scale of each group, or None.
            data: ``[rows, K]``; None if the direction is not requested, like all its components.
            scale: float32 ``[rows, blocks]``, or ``[G]`` per group.
            amax: int32 ``[G]``, bits of the largest magnitudes, of whole groups, which are raised.
            columnwise_data: ``[K, Tp]``, of matrices ``[G K, N]``, N a multiple of 16 unless element by element.
            columnwise_scale, columnwise_amax: like the others; by blocks ``[Tp / 128, K]``, of matrices
                ``[G ceil(N / 128), K]``, of blocks of 128 x 128 ``[G ceil(K / 128), ceil(N / 128)]``.
            stream: CUDA stream.
        """
        source = QuantizeSource(x, offs, order, row_scale, noop, matrix_rows)
        out = Destinations(data, scale, amax, columnwise_data, columnwise_scale, columnwise_amax)
        grid = source.grid(COLUMNS)
        self.kernel(source, given, out, grid.across).launch(
            grid=grid.shape,
            block=(WARPS * LANES, 1, 1),
            stream=stream,
            min_blocks_per_mp=instructions.sharing(self.blocks_per_sm),
            preferred_smem_carveout=40,
        )

    @cute.kernel
    def kernel(self, source: QuantizeSource, given: Any, out: Destinations, across: Int32):
        """Quantise one tile."""
        spec = self.spec
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        unit = block // across
        k = block - unit * across
        smem = SmemAllocator()
        turned = smem.allocate_tensor(Uint8, cute.make_layout(COLUMNS * ROWS), byte_alignment=128)
        maxima = smem.allocate_tensor(Int32, cute.make_layout((COLUMNS, WARPS)), byte_alignment=128)
        factors = smem.allocate_tensor(Float32, cute.make_layout(COLUMNS), byte_alignment=128)
        if not source.stopped():
            if cutlass.const_expr(spec.grouped):
                group = group_of_unit(source.offs, source.rows, unit)
                tile = group_tile(source.offs, source.rows, unit, group)
                place = group_place(source.offs, source.rows, unit, group, UNIT)
                units = tiles_at_most(source.rows, Int32(cute.size(source.offs))) - 1
            else:
                tile, place = matrix_tile(source.matrix_rows, unit), matrix_place(source.matrix_rows, unit)
                units = ceil_div(source.matrix_rows, ROWS)
            whole_scale = Float32(1.0)
            if cutlass.const_expr(spec.blocks is None):  # noqa: SIM102 (one is known while tracing, the other is not)
                if not tile.tail:
                    whole_scale = given[place.group]
                    whole_inverse = Float32(1.0) / whole_scale
                    if place.leads and k == 0 and thread == 0:
                        if cutlass.const_expr(spec.rowwise):
                            out.scale[place.group] = whole_inverse
                        if cutlass.const_expr(spec.columnwise):
                            out.columnwise_scale[place.group] = whole_inverse
            x, read = source_of(source, place.group, tile)
            spot = ColumnTile(tile, read, place.group, unit, units, k, across, place)
            if tile.count > 0 and not tile.tail:
                self.quantize_tile(whole_scale, (turned, maxima, factors), x, source.row_scale, out, spot, thread)
            else:
                self.clear_tile(x, out, spot, thread)

    @cute.jit
    def quantize_tile(self, whole_scale, held, x, row_scale, out, spot, thread):
        """Quantise a tile that has rows of a group; ``held`` is the shared memory."""
        spec = self.spec
        turned, maxima, factors = held
        tile, k = spot.tile, spot.k
        values = cute.make_rmem_tensor((VECTOR, STEPS), self.source)
        self.read_tile(x, row_scale, values, spot, thread)
        row_factors = cute.make_rmem_tensor(STEPS, Float32)
        column_factors = cute.make_rmem_tensor(VECTOR, Float32)
        row_factors.fill(whole_scale)
        column_factors.fill(whole_scale)
        if cutlass.const_expr(spec.blocks == "1d"):
            row_pairs, column_pairs = self.maxima(values)
            if cutlass.const_expr(spec.columnwise):
                self.share_columns(column_pairs, maxima, thread)
            if cutlass.const_expr(spec.rowwise):
                self.scale_rows(row_pairs, row_factors, out.scale, x, tile, k, thread)
        elif cutlass.const_expr(spec.blocks == "2d"):
            top = self.tile_maximum(values, maxima, thread)
            made, inverse = block_scale(top, spec)
            row_factors.fill(made)
            column_factors.fill(made)
            if thread == 0:
                if cutlass.const_expr(spec.rowwise):
                    out.scale[spot.unit, k] = inverse
                if cutlass.const_expr(spec.columnwise):
                    down = spot.unit // spot.units * spot.across + k
                    out.columnwise_scale[down, spot.unit % spot.units] = inverse
        else:
            raise_maximum(self.lane_maximum(values), out.amax, out.columnwise_amax, spot.group)
        if cutlass.const_expr(spec.rowwise):
            self.store_rows(values, row_factors, x, out.data, tile, k, thread)
        if cutlass.const_expr(spec.columnwise):
            if cutlass.const_expr(spec.blocks == "1d"):
                self.scale_columns(column_factors, maxima, factors, out.columnwise_scale, x, spot, thread)
            self.turn_columns(values, column_factors, turned, thread)
            cute.arch.sync_threads()
            self.store_turned(turned, out.columnwise_data, x, spot.place, k, thread)

    @cute.jit
    def clear_tile(self, x, out, spot, thread):
        """Zero a tile that has no row of a group; it may have rows past all groups."""
        tile, k = spot.tile, spot.k
        if cutlass.const_expr(self.spec.rowwise):  # noqa: SIM102 (one is known while tracing, the other is not)
            if tile.count > 0:
                top, column = self.corner(k, thread)
                nothing = cute.make_rmem_tensor(VECTOR, self.element)
                cute.recast_tensor(nothing, Int32).fill(0)
                for i in cutlass.range_constexpr(STEPS):
                    if top + i < tile.count and column < x.shape[1]:
                        start = self.address(out.data, tile.first + top + i, column)
                        self.store_row(start, nothing, x.shape[1] - column, self.policy)
                if cutlass.const_expr(self.spec.blocks == "1d"):  # noqa: SIM102
                    if thread < tile.count:
                        out.scale[tile.first + thread, k] = Float32(0.0)
        if cutlass.const_expr(self.spec.columnwise):
            if cutlass.const_expr(self.spec.blocks == "1d"):  # noqa: SIM102
                if thread < COLUMNS and spot.unit < spot.units and k * COLUMNS + thread < x.shape[1]:
                    out.columnwise_scale[spot.unit, k * COLUMNS + thread] = Float32(0.0)
            self.store_turned(None, out.columnwise_data, x, spot.place, k, thread)

    # --- scales ------------------------------------------------------------------------------------------------------

    @cute.jit
    def scale_rows(self, pairs, row_factors, scale, x, tile, k, thread):
        """Compute the scales of a lane's rows: 16 lanes share eight blocks; four of them make the same two scales."""
        lane = thread % LANES
        row, _ = self.corner(k, thread)
        met = cute.make_rmem_tensor(2, Int32)
        met[0], met[1] = self.shared_maximum(pairs, lane, 8, 4)
        for i in cutlass.range_constexpr(2):
            for bit in (2, 1):
                met[i] = cutlass.max(met[i], cute.arch.shuffle_sync_bfly(met[i], bit))
        stored = Float32(0.0)
        for i in cutlass.range_constexpr(2):
            made, inverse = block_scale(met[i], self.spec)
            if lane % 4 == i:
                stored = inverse
            for maker in cutlass.range_constexpr(4):
                row_factors[2 * maker + i] = cute.arch.shuffle_sync(made, lane // 16 * 16 + 4 * maker)
        mine = row + 2 * (lane // 4 % 4) + lane % 4
        if lane % 4 < 2 and mine < tile.count:
            scale[tile.first + mine, k] = stored

    @cute.jit
    def share_columns(self, pairs, maxima, thread):
        """Write a warp's column maxima to ``maxima``."""
        warp, lane = thread // LANES, thread % LANES
        four = self.shared_halves(pairs, lane, 16)
        for j in cutlass.range_constexpr(4):
            maxima[lane % 16 * VECTOR + lane // 16 * 4 + j, warp] = four[j]

    @cute.jit
    def scale_columns(self, column_factors, maxima, factors, columnwise_scale, x, spot, thread):
        """Compute the scales of a lane's columns, from the maxima of all warps."""
        cute.arch.sync_threads()
        if thread < COLUMNS:
            top = maxima[thread, 0]
            for w in cutlass.range_constexpr(1, WARPS):
                top = cutlass.max(top, maxima[thread, w])
            made, inverse = block_scale(top, self.spec)
            factors[thread] = made
            column = spot.k * COLUMNS + thread
            wanted = column < x.shape[1]
            if cutlass.const_expr(self.spec.grouped):
                wanted = wanted and spot.unit < spot.units
            if wanted:
                columnwise_scale[spot.unit, column] = inverse
        cute.arch.sync_threads()
        for j in cutlass.range_constexpr(VECTOR):
            column_factors[j] = factors[thread % 16 * VECTOR + j]

    @cute.jit
    def tile_maximum(self, values, maxima, thread):
        """Return the largest magnitude of the block's tile to all threads."""
        top = cute.arch.warp_redux_sync(self.lane_maximum(values), kind="max")
        if thread % LANES == 0:
            maxima[0, thread // LANES] = top
        cute.arch.sync_threads()
        top = maxima[0, 0]
        for w in cutlass.range_constexpr(1, WARPS):
            top = cutlass.max(top, maxima[0, w])
        cute.arch.sync_threads()
        return top

    # --- elements ----------------------------------------------------------------------------------------------------

    @cute.jit
    def store_rows(self, values, factors, x, data, tile, k, thread):
        """Store the elements of a lane's rows."""
        top, column = self.corner(k, thread)
        rows = tile.count - top
        if column >= x.shape[1]:
            rows = Int32(0)
        pitch = Int64(x.shape[1])
        start = self.address(data, tile.first + top, column)
        quantized = cute.make_rmem_tensor(VECTOR, self.element)
        for i in cutlass.range_constexpr(STEPS):
            round_to_fp8(values[None, i].load().to(Float32) * factors[i], quantized)
            if i < rows:
                self.store_row(start + pitch * i, quantized, x.shape[1] - column, self.policy)

    @cute.jit
    def turn_columns(self, values, factors, turned, thread):
        """Write the elements of a lane's columns, eight bytes each, to the transposed tile."""
        top, column = self.corner(Int32(0), thread)
        quantized = cute.make_rmem_tensor(STEPS, self.element)
        for j in cutlass.range_constexpr(VECTOR):
            round_to_fp8(self.column_of(values, j) * factors[j], quantized)
            at = self.piece(column + j, top // PIECE) + top % PIECE
            pointer = (turned.iterator + at).align(STEPS)
            cute.autovec_copy(cute.recast_tensor(quantized, Uint8), cute.make_tensor(pointer, cute.make_layout(STEPS)))

    def column_of(self, values, j: int):
        """Return a lane's values in its column ``j``, widened."""
        return values[j, None].load().to(Float32)

    def piece(self, column, number):
        """Return the position of piece ``number`` of a column in the transposed tile."""
        return column * ROWS + (number ^ (column // VECTOR % 8)) * PIECE

    @cute.jit
    def store_turned(self, turned, columnwise_data, x, place, k, thread):
        """Store the transposed tile, zeros if it is None; eight adjacent lanes store a column."""
        number = thread % 8
        part = cute.make_rmem_tensor(PIECE, Uint8)
        if cutlass.const_expr(turned is None):
            part.fill(0)
        for turn in cutlass.range_constexpr(COLUMNS // (WARPS * LANES // 8)):
            column = thread // 8 + turn * (WARPS * LANES // 8)
            at = k * COLUMNS + column
            if number * PIECE < place.places and at < x.shape[1]:
                if cutlass.const_expr(turned is not None):
                    pointer = (turned.iterator + self.piece(column, number)).align(PIECE)
                    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(PIECE)), part)
                row = at
                if cutlass.const_expr(not self.spec.grouped):
                    row = place.group * x.shape[1] + at
                where = self.address(columnwise_data, row, place.first + number * PIECE)
                if cutlass.const_expr(self.elementwise):
                    store_bytes(where, part, place.places - number * PIECE)
                else:
                    piece = cute.make_tensor(where.align(PIECE), cute.make_layout(PIECE))
                    copy_pieces(piece, part, False, self.policy)
