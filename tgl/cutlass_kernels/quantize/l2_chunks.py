"""Sizes that ``two_pass`` goes by, and what follows from them on the host; plain Python."""

from __future__ import annotations

from torch import Tensor

ROWS = COLUMNS = 128  # of a tile
TILES = 128  # of a window; of 16-bit values 4 MB
LAG = 4  # windows, in which all that is being looked at has its place
HEAD = 32  # words before the others, so that what every block counts on is apart
ROW = 8  # words for a row of tiles, two of them spare


def words_shared(rows: int, columns: int, offs: Tensor | None, matrices: int) -> int:
    """How many int32 the blocks of a launch share, of rows in groups or of so many matrices; see ``two_pass``."""
    down, across = -(-rows // ROWS), -(-columns // COLUMNS)
    units = down * matrices if offs is None else down + offs.shape[0]
    return HEAD + ROW * units + -(-units * across // TILES) + units * across
