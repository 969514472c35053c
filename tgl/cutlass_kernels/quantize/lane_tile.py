"""The lane tile of a quantisation kernel: eight adjacent columns in eight rows of a tile of 128 x 128."""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Uint8, Uint16, cute

from ..bits import as_bits, reinterpret
from ..instructions import larger_halves
from ..runtime.elements import TYPES
from .tiles import ROWS

LANES = 32
WARPS = 8
COLUMNS = 128
VECTOR = 8  # columns of a lane
STEPS = 8  # rows of a lane

MAGNITUDE = 0x7FFFFFFF
MAGNITUDES = 0x7FFF7FFF  # of two 16-bit values
LOWER_HALVES, UPPER_HALVES = 0x5410, 0x7632  # of two words, by prmt


def halves(a: Int32, b: Int32, which: int) -> Int32:
    """Return a half of ``a`` below a half of ``b``."""
    return Int32(cute.arch.prmt(a, b, which))


class LaneValues:
    """Loads, and maxima of magnitudes as integers, in which NaN is the largest; 16-bit sources two at a time.

    A subclass defines a lane's position by ``corner``.

    Args:
        source: name of the dtype of x.
        step: from a row of a lane to its next.
        elementwise: whether x and rowwise data are accessed element by element: x in any layout, both of any width.
    """

    def __init__(self, source: str, step: int, elementwise: bool = False):
        self.source = TYPES[source]
        self.elementwise = elementwise
        self.packed = self.source.width == 16
        self.step = step

    def corner(self, k: Int32, thread: Int32) -> tuple[Int32, Int32]:
        """Return a lane's first row and column of tile ``k``: within the rows of the tile, and of x."""
        raise NotImplementedError

    @cute.jit
    def whole(self, x, tile, k):
        """Return whether all of tile k exists and is not in the tail."""
        return not tile.tail and tile.count == ROWS and (k + 1) * COLUMNS <= x.shape[1]

    @cute.jit
    def has_rows(self, tile, thread):
        """Return whether there is a group's row in a warp's part of a tile."""
        top, _ = self.corner(Int32(0), thread // LANES * LANES)
        return top < tile.count and not tile.tail

    @cute.jit
    def read_tile(self, x, row_scale, values, spot, thread):
        """Read a warp's part of a tile, with zeros outside x and in the tail."""
        self.load_tile(x, values, spot.read, spot.k, thread)
        self.finish_tile(x, row_scale, values, spot.read, spot.k, thread)

    @cute.jit
    def finish_tile(self, x, row_scale, values, tile, k, thread):
        """Multiply rows by their factors, then zero values out of range, so that no factor turns them into NaN."""
        if cutlass.const_expr(row_scale is not None):
            self.multiply_rows(row_scale, values, tile, thread)
        if not self.whole(x, tile, k):
            self.clear_outside(x, values, tile, k, thread)

    @cute.jit
    def load_tile(self, x, values, tile, k, thread, policy=None):
        """Issue the loads of a warp's part of a tile; out-of-range rows and columns read others again."""
        row, column = self.corner(k, thread)
        if cutlass.const_expr(tile.order is not None):
            self.load_named(x, values, tile, row, column, policy)
        elif cutlass.const_expr(self.elementwise):
            if tile.count > 0 and not tile.tail:
                for i in cutlass.range_constexpr(STEPS):
                    at = tile.first + cutlass.min(row + self.step * i, tile.count - 1)
                    start = x.iterator + cutlass.Int64(at) * x.stride[0]
                    for j in cutlass.range_constexpr(VECTOR):
                        past = cutlass.Int64(cutlass.min(column + j, x.shape[1] - 1)) * x.stride[1]
                        values[j, i] = cute.make_tensor(start + past, cute.make_layout(1))[0]
        elif self.whole(x, tile, k):
            start = self.address(x, tile.first + row, column)
            for i in cutlass.range_constexpr(STEPS):
                self.copy_row(start + cutlass.Int64(x.stride[0]) * (self.step * i), values[None, i], True, policy)
        elif tile.count > 0 and not tile.tail:
            column = cutlass.min(column, x.shape[1] - VECTOR)
            for i in cutlass.range_constexpr(STEPS):
                at = tile.first + cutlass.min(row + self.step * i, tile.count - 1)
                self.copy_row(self.address(x, at, column), values[None, i], True, policy)

    @cute.jit
    def load_named(self, x, values, tile, row, column, policy):
        """Issue the loads of ``load_tile`` for rows by an index; zeros where the index is out of range."""
        if tile.count > 0 and not tile.tail:
            numbers = cute.make_rmem_tensor(STEPS, Int32)
            for i in cutlass.range_constexpr(STEPS):
                numbers[i] = tile.order[tile.first + cutlass.min(row + self.step * i, tile.count - 1)]
            for i in cutlass.range_constexpr(STEPS):
                number, part = numbers[i], values[None, i]
                cute.recast_tensor(part, Int32).fill(0)
                if number >= 0 and number < tile.tokens:
                    if cutlass.const_expr(self.elementwise):
                        start = x.iterator + cutlass.Int64(number) * x.stride[0]
                        for j in cutlass.range_constexpr(VECTOR):
                            past = cutlass.Int64(cutlass.min(column + j, x.shape[1] - 1)) * x.stride[1]
                            part[j] = cute.make_tensor(start + past, cute.make_layout(1))[0]
                    else:
                        left = cutlass.min(column, x.shape[1] - VECTOR)
                        self.copy_row(self.address(x, number, left), part, True, policy)

    @cute.jit
    def clear_outside(self, x, values, tile, k, thread):
        """Zero values that are out of range."""
        row, column = self.corner(k, thread)
        words = cute.recast_tensor(values, Int32)
        for i in cutlass.range_constexpr(STEPS):
            there = row + self.step * i < tile.count and column < x.shape[1] and not tile.tail
            for j in cutlass.range_constexpr(cute.size(words, mode=[0])):
                words[j, i] = words[j, i] if there else Int32(0)
        if cutlass.const_expr(self.elementwise):
            for j in cutlass.range_constexpr(1, VECTOR):
                if column + j >= x.shape[1]:
                    for i in cutlass.range_constexpr(STEPS):
                        values[j, i] = self.source(0.0)

    @cute.jit
    def multiply_rows(self, row_scale, values, tile, thread):
        """Multiply rows by their factors, rounded to their dtype."""
        row, _ = self.corner(Int32(0), thread)
        for i in cutlass.range_constexpr(STEPS):
            factor = Float32(0)
            if row + self.step * i < tile.count and not tile.tail:
                factor = row_scale[tile.first + row + self.step * i].to(Float32)
            values[None, i].store((values[None, i].load().to(Float32) * factor).to(self.source))

    def maxima(self, values):
        """Return a lane's largest magnitudes of 8 rows and of 8 columns, as four pairs each, packed if 16-bit."""
        words = cute.recast_tensor(values, Int32)
        many = cute.size(words, mode=[0])
        largest, mask = self.largest, MAGNITUDES if self.packed else MAGNITUDE
        rows: list[Any] = []
        columns: list[Any] = []
        for i in range(STEPS):
            magnitudes = [words[j, i] & mask for j in range(many)]
            columns = [largest(a, b) for a, b in zip(columns, magnitudes)] if i else magnitudes
            while len(magnitudes) > 1:
                magnitudes = [largest(a, b) for a, b in zip(magnitudes[::2], magnitudes[1::2])]
            rows.append(magnitudes[0])
        if not self.packed:
            return list(zip(rows[::2], rows[1::2])), list(zip(columns[::2], columns[1::2]))
        packed = [
            (largest(halves(a, b, LOWER_HALVES), halves(a, b, UPPER_HALVES)),) for a, b in zip(rows[::2], rows[1::2])
        ]
        return packed, [(word,) for word in columns]

    def shared_maximum(self, pairs, lane, *bits: int):
        """Return the maxima over lanes that differ in ``bits``, of the pair numbered by those bits."""
        for bit in bits:
            there = (lane & bit) != 0
            middle = len(pairs) // 2
            met = []
            for one, other in zip(pairs[:middle], pairs[middle:]):
                kept = [cutlass.select_(there, b, a) for a, b in zip(one, other)]
                sent = [cutlass.select_(there, a, b) for a, b in zip(one, other)]
                met.append(tuple(self.largest(a, cute.arch.shuffle_sync_bfly(b, bit)) for a, b in zip(kept, sent)))
            pairs = met
        return self.widened(pairs[0])

    def shared_halves(self, pairs, lane, bit: int):
        """Return the maxima over two lanes, which differ in ``bit``, of the four rows or columns of the lane's half."""
        upper = (lane & bit) != 0
        met = []
        for one, other in zip(pairs[:2], pairs[2:]):
            kept = [cutlass.select_(upper, b, a) for a, b in zip(one, other)]
            sent = [cutlass.select_(upper, a, b) for a, b in zip(one, other)]
            met.append(tuple(self.largest(a, cute.arch.shuffle_sync_bfly(b, bit)) for a, b in zip(kept, sent)))
        return [value for pair in met for value in self.widened(pair)]

    def lane_maximum(self, values):
        """Return the bits, as float32, of a lane's largest magnitude."""
        _, columns = self.maxima(values)
        pairs = [self.largest(a, b) for four in zip(*columns) for a, b in (four[:2], four[2:])]
        words = [self.largest(a, b) for a, b in zip(pairs[::2], pairs[1::2])]
        low, high = self.widened(words)
        return cutlass.max(low, high)

    @property
    def largest(self):
        """The function that returns the larger of two words of magnitudes."""
        return larger_halves if self.packed else cutlass.max

    def widened(self, pair):
        """Return the two magnitudes of a pair as bits of float32."""
        if not self.packed:
            return tuple(pair)
        (word,) = pair
        if self.source is cutlass.BFloat16:
            return word << 16, word & -65536
        return tuple(as_bits(reinterpret(Uint16(h), self.source).to(Float32)) for h in (word & 0xFFFF, word >> 16))

    def address(self, tensor, row, column):
        """Return a pointer to an element; the offset is 64 bits wide."""
        return tensor.iterator + (cutlass.Int64(row) * tensor.stride[0] + column)

    @cute.jit
    def copy_row(self, pointer, part, load: cutlass.Constexpr, policy=None):
        """Copy ``VECTOR`` elements of a row, to or from registers; ``policy`` as in ``copy_pieces``."""
        width = min(VECTOR * part.element_type.width // 8, 16)
        copy_pieces(cute.make_tensor(pointer.align(width), cute.make_layout(VECTOR)), part, load, policy)

    @cute.jit
    def store_row(self, pointer, part, there, policy=None):
        """Store elements of a row: ``VECTOR``, or one by one as many as are ``there``."""
        if cutlass.const_expr(self.elementwise):
            store_bytes(pointer, part, there * part.element_type.width // 8)
        else:
            self.copy_row(pointer, part, False, policy)


@cute.jit
def store_bytes(pointer, part, there):
    """Store the first bytes of registers to any address."""
    held = cute.recast_tensor(part, Uint8)
    memory = cute.make_tensor(cute.recast_ptr(pointer, dtype=Uint8), cute.make_layout(cute.size(held)))
    for i in cutlass.range_constexpr(cute.size(held)):
        if i < there:
            memory[i] = held[i]


@cute.jit
def copy_pieces(memory, part, load: cutlass.Constexpr, policy=None):
    """Copy adjacent elements to or from registers; ``policy`` is a 64-bit L2 cache policy or None."""
    if cutlass.const_expr(policy is None):
        if cutlass.const_expr(load):
            cute.autovec_copy(memory, part)
        else:
            cute.autovec_copy(part, memory)
    else:
        element = part.element_type
        count = min(cute.size(part), 128 // element.width)
        pieces = cute.make_layout((count, cute.size(part) // count))
        operation = cute.nvgpu.CopyG2ROp() if cutlass.const_expr(load) else cute.nvgpu.CopyR2GOp()
        atom = cute.make_copy_atom(operation, element, num_bits_per_copy=count * element.width)
        outside, inside = cute.composition(memory, pieces), cute.composition(part, pieces)
        if cutlass.const_expr(load):
            cute.copy(atom, outside, inside, cache_policy=policy)
        else:
            cute.copy(atom, inside, outside, cache_policy=policy)


class BandValues(LaneValues):
    """Lane tiles in bands: a warp has 16 x 128, a lane columns ``8 (lane % 16)``, rows ``8 (lane // 16)`` on."""

    def __init__(self, source: str, elementwise: bool = False):
        super().__init__(source, 1, elementwise)

    def corner(self, k, thread):
        warp, lane = thread // LANES, thread % LANES
        return warp * 16 + lane // 16 * STEPS, k * COLUMNS + lane % 16 * VECTOR
