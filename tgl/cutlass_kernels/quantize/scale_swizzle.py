"""Swizzle of compact rowwise one-byte scales to the tiles that tensor cores read, for rows in order or by an index.

A warp takes 16 columns of the 128 rows of a unit, which are four adjacent atoms of 512 bytes. A lane takes a row in
each of the four bands of 32, hence 16 bytes of every atom, which it stores as one piece: a warp stores a whole atom at
a time. Its loads are as wide as the rows allow. A token's scales are read once per top-k slot; they are 1/64 of its
bytes in bfloat16, so that L2 holds those of all tokens.

Units without rows and units of the tail are zeroed, as is everything else in an atom that no scale maps to.
"""

import cutlass
from cutlass import Int32, Int64, Uint8, Uint16, cute

from ..activation.kernel import neighbours
from ..scheduler import ceil_div
from .tiles import ROWS, group_of_unit, group_tile, tiles_at_most

LANES, WARPS = 32, 8
BANDS = ROWS // LANES
COLUMNS = 16  # per warp
ACROSS = 4  # columns of an atom
ATOM = ROWS * ACROSS
WORDS = {1: Uint8, 2: Uint16}  # type for the bytes of one access; wider ones use 32-bit words


class ScaleLayoutKernel:
    """The kernel for accesses of ``vector`` bytes: 1 to 16, a divisor of the columns, the pitch and the address."""

    def __init__(self, vector: int):
        self.vector = vector
        self.word = WORDS.get(vector, Int32)

    @cute.jit
    def __call__(
        self,
        scale: cute.Tensor,
        offs: cute.Tensor,
        rows: cute.Tensor | None,
        out: cute.Tensor,
        stream,
    ):
        """Launch.

        Args:
            scale: uint8 ``[S, columns]``, unit stride along rows; S and columns at least 1.
            offs: int32 ``[G]``, G at least 1.
            rows: int32 ``[T]``, the row of ``scale`` for every row of the groups; None: its own, and T is S.
            out: uint8, ``ceil(T / 128) + G - 1`` units of ``ceil(columns / 4)`` atoms; on 16 bytes.
            stream: CUDA stream.
        """
        total = Int32(scale.shape[0] if cutlass.const_expr(rows is None) else cute.size(rows))
        units = tiles_at_most(total, Int32(cute.size(offs))) - 1
        pieces = ceil_div(Int32(scale.shape[1]), COLUMNS)
        self.kernel(scale, offs, rows, out, total, units, pieces).launch(
            grid=(ceil_div(units * pieces, WARPS), 1, 1), block=(WARPS * LANES, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        scale: cute.Tensor,
        offs: cute.Tensor,
        rows: cute.Tensor | None,
        out: cute.Tensor,
        total: Int32,
        units: Int32,
        pieces: Int32,
    ):
        """Write four atoms of a unit per warp."""
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        warp = block * WARPS + thread // LANES
        unit = warp // pieces
        first = (warp - unit * pieces) * COLUMNS
        if unit < units:
            tile = group_tile(offs, total, unit, group_of_unit(offs, total, unit))
            held = cute.make_rmem_tensor((COLUMNS, BANDS), Uint8)
            words = cute.recast_tensor(held, Int32)
            words.fill(0)
            if tile.count > 0 and not tile.tail:
                self.load(scale, rows, tile, first, held)
            across = ceil_div(Int32(scale.shape[1]), ACROSS)
            for i in cutlass.range_constexpr(COLUMNS // ACROSS):
                k = first // ACROSS + i
                if k < across:
                    part = cute.make_rmem_tensor(BANDS, Int32)
                    for band in cutlass.range_constexpr(BANDS):
                        part[band] = words[i, band]
                    at = (Int64(unit) * across + k) * ATOM + thread % LANES * (ATOM // LANES)
                    pointer = (out.iterator + at).align(16)
                    cute.autovec_copy(cute.recast_tensor(part, Uint8), cute.make_tensor(pointer, cute.make_layout(16)))

    @cute.jit
    def load(self, scale, rows, tile, first, held):
        """Load a lane's scales; zeros for out-of-range rows and columns, instead of which others are read."""
        vector, lane = self.vector, cute.arch.lane_idx()
        count, columns = Int32(scale.shape[0]), Int32(scale.shape[1])
        numbers = cute.make_rmem_tensor(BANDS, Int32)
        for band in cutlass.range_constexpr(BANDS):
            row = tile.first + cutlass.min(band * LANES + lane, tile.count - 1)
            numbers[band] = row if cutlass.const_expr(rows is None) else rows[row]
        for band in cutlass.range_constexpr(BANDS):
            row = cutlass.min(cutlass.max(numbers[band], 0), count - 1)
            for i in cutlass.range_constexpr(COLUMNS // vector):
                column = cutlass.min(first + i * vector, columns - vector)
                piece = cute.make_tensor(held.iterator + (band * COLUMNS + i * vector), cute.make_layout(vector))
                cute.autovec_copy(neighbours(scale, row, column, vector), piece)
        width = self.word.width // 8
        words = cute.recast_tensor(held, self.word)
        for band in cutlass.range_constexpr(BANDS):
            there = band * LANES + lane < tile.count and numbers[band] >= 0 and numbers[band] < count
            for i in cutlass.range_constexpr(COLUMNS // width):
                if not there or first + i * width // vector * vector >= columns:
                    words[i, band] = self.word(0)
