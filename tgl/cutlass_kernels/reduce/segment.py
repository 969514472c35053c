"""Which rows belong to a group: the arithmetic every reduction kernel shares."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32


@cute.jit
def clamp_rows(value: Int32, rows: Int32) -> Int32:
    """``value`` forced into ``[0, rows]``, so that a bad offset cannot name a row that does not exist."""
    return cutlass.min(cutlass.max(value, Int32(0)), rows)


@cute.jit
def segment_bounds(offs: cute.Tensor, group: Int32, rows: Int32):
    """First row of ``group`` and the row after its last one; a descending offset makes the group empty.

    Args:
        offs: int32 ``[G]``, cumulative ends.
        group: which one, below G.
        rows: T, rows of the tensor that the offsets index.
    """
    begin = Int32(0)
    if group > 0:
        begin = clamp_rows(offs[group - 1], rows)
    end = cutlass.max(clamp_rows(offs[group], rows), begin)
    return begin, end
