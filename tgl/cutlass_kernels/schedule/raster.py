"""Order of the tiles within one group: plain arithmetic, the same on Python ints and on device integers."""

from __future__ import annotations

from typing import Any

import cutlass

Int = Any  # int or cutlass.Int32


def smaller(x: Int, y: Int) -> Int:
    """The smaller of two ints, of Python or of the device."""
    return min(x, y) if isinstance(x, int) and isinstance(y, int) else cutlass.min(x, y)


def larger(x: Int, y: Int) -> Int:
    """The larger of two ints, of Python or of the device."""
    return max(x, y) if isinstance(x, int) and isinstance(y, int) else cutlass.max(x, y)


def ceil_div(x: Int, y: Int) -> Int:
    """``x / y`` rounded up, for ``x >= 0``."""
    return (x + y - 1) // y


def decode(index: Int, tiles_m: Int, tiles_n: Int, band: int) -> tuple[Int, Int]:
    """Coordinates ``(m, n)`` of the ``index``-th tile of a group of ``tiles_m x tiles_n`` tiles.

    Tiles are visited in bands of ``band`` tile rows, column by column within a band: CTAs that run at the same time
    share a few tiles of B and, one column later, the same ``band`` tiles of A, so both stay in L2. The last band is as
    high as what is left.
    """
    if isinstance(band, int) and band == 1:
        return index // tiles_n, index % tiles_n
    above = index // (band * tiles_n) * band
    rest = index - above * tiles_n
    height = smaller(tiles_m - above, band)
    return above + rest % height, rest // height
