"""Sizes of the L2 chunks of ``two_pass``, and the workspace that follows from them; plain Python."""

from __future__ import annotations

from torch import Tensor

ROWS = COLUMNS = 128  # of a tile
TILES = 128  # per window (L2 chunk); 4 MB of 16-bit values
LAG = 4  # windows between the amax pass and the second read; all of them must fit L2
HEAD = 32  # words before the others, so that the counter of all blocks has its own cache lines
ROW = 8  # words per row of tiles, two of them spare


def words_shared(rows: int, columns: int, offs: Tensor | None, matrices: int) -> int:
    """Return the int32 words that a launch's blocks share, for rows in groups or so many matrices; see ``two_pass``."""
    down, across = -(-rows // ROWS), -(-columns // COLUMNS)
    units = down * matrices if offs is None else down + offs.shape[0]
    return HEAD + ROW * units + -(-units * across // TILES) + units * across
