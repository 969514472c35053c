"""The tiling of permutation kernels: columns of rows over lanes, and the slots of a token into batches."""

from __future__ import annotations

from typing import NamedTuple

LANES = 32
LOADS = 4  # see kernel.py
MOST = 8  # top-k slots per batch


class PermuteTiling(NamedTuple):
    """The tiling of rows, for tokens of ``top_k`` slots.

    Attributes:
        vector: elements of one access.
        across: adjacent lanes on one row, a power of two; a strip is ``across * vector`` columns wide.
        strips: strips that a lane works on at a time.
        top_k: top-k slots of a token.
        batch: slots that are worked on at a time.
    """

    vector: int
    across: int
    strips: int
    top_k: int
    batch: int


def cut_of(
    columns: int, vector: int, top_k: int, least: int = 1, most: int = MOST, loads: int = LOADS
) -> PermuteTiling:
    """Return the tiling for rows of ``columns`` columns, accesses of up to ``vector`` elements, and ``top_k`` slots.

    Args:
        columns, vector, top_k: see above.
        least: lanes side by side on one row, at least.
        most: slots per batch, at most.
        loads: loads of a lane in flight, at least, where a row has as many strips.

    Batches are of one size but for the last, and as few as may be.
    """
    batches = -(-top_k // most)
    batch = -(-top_k // batches)
    pieces = columns // vector
    across = max(min(1 << (pieces - 1).bit_length(), LANES), least)
    strips = min(max(loads // batch, 1), -(-pieces // across))
    return PermuteTiling(vector, across, strips, top_k, batch)
