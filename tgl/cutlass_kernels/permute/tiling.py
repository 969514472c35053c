"""How the columns of rows are dealt to lanes, and the choices of a token to batches."""

from __future__ import annotations

from typing import NamedTuple

LANES = 32
LOADS = 4  # see kernel.py
MOST = 8  # choices of a batch


class PermuteTiling(NamedTuple):
    """Of rows, for tokens of ``top_k`` choices.

    Attributes:
        vector: elements of one access.
        across: lanes side by side on one row, a power of two; a strip is ``across * vector`` columns wide.
        strips: that a lane works on at a time.
        top_k: choices of a token.
        batch: choices that are worked on at a time.
    """

    vector: int
    across: int
    strips: int
    top_k: int
    batch: int


def cut_of(
    columns: int, vector: int, top_k: int, least: int = 1, most: int = MOST, loads: int = LOADS
) -> PermuteTiling:
    """For rows of so many columns, of which an access may take ``vector``, and so many choices.

    Args:
        columns, vector, top_k: those.
        least: lanes side by side on one row, at least.
        most: choices of a batch.
        loads: of a lane in flight, at least, where a row has as many strips.

    Batches are of one size but for the last, and as few as may be.
    """
    batches = -(-top_k // most)
    batch = -(-top_k // batches)
    pieces = columns // vector
    across = max(min(1 << (pieces - 1).bit_length(), LANES), least)
    strips = min(max(loads // batch, 1), -(-pieces // across))
    return PermuteTiling(vector, across, strips, top_k, batch)
