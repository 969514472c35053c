"""Order of the tiles within one group: plain arithmetic on Python ints or on device integers."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, Uint32

Int = Any  # int or cutlass.Int32


def smaller(x: Int, y: Int) -> Int:
    """Return the smaller of two ints, of Python or of the device."""
    return min(x, y) if isinstance(x, int) and isinstance(y, int) else cutlass.min(x, y)


def larger(x: Int, y: Int) -> Int:
    """Return the larger of two ints, of Python or of the device."""
    return max(x, y) if isinstance(x, int) and isinstance(y, int) else cutlass.max(x, y)


def quotient(x: Int, y: Int) -> Int:
    """Return ``x // y`` for ``x >= 0`` and ``y > 0``, of Python or of 32 bits.

    Unsigned on the device: rounding a signed quotient down takes six instructions more, and a shift would be wrong for
    anything but a power of two.
    """
    if isinstance(x, int) and isinstance(y, int):
        return x // y
    return Int32(Uint32(x) // Uint32(y))


def ceil_div(x: Int, y: Int) -> Int:
    """Return ``x / y`` rounded up, for ``x >= 0``."""
    return (x + y - 1) // y


def decode(index: Int, tiles_m: Int, tiles_n: Int, band: int) -> tuple[Int, Int]:
    """Return the coordinates ``(m, n)`` of the ``index``-th tile of a group of ``tiles_m x tiles_n`` tiles.

    Tiles are visited in bands of ``band`` tile rows, column by column within a band: CTAs that run at the same time
    share a few tiles of B and, one column later, the same ``band`` tiles of A, so both stay in L2. The last band has
    the rows that are left.
    """
    if isinstance(band, int) and band == 1:
        m = quotient(index, tiles_n)
        return m, index - m * tiles_n
    of_band = band * tiles_n
    bands = quotient(index, of_band)
    rest, above = index - bands * of_band, bands * band
    height = smaller(tiles_m - above, band)
    n = quotient(rest, height)
    return above + rest - n * height, n


def decode_triangle(index: Int, side: Int) -> tuple[Int, Int]:
    """Coordinates ``(m, n)``, ``n <= m``, of the ``index``-th place on and below the diagonal of ``side x side``.

    Rows come in pairs of constant total length: the last one with the first, the one before the last with the second.
    This needs no square root, whose rounding would decide where a row begins.
    """
    odd = side - quotient(side, 2) * 2
    width = side + 1 - odd
    pair = quotient(index, width)
    at, length = index - pair * width, side - pair
    second = smaller(larger(at - length + 1, 0), 1)  # 1 behind the longer row of the pair
    return length - 1 - second * (length - 1 - pair + odd), at - second * length
