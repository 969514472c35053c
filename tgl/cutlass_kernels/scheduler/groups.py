"""The row range of a group, safe for any values in ``offs``."""

import cutlass
from cutlass import Int32, cute


@cute.jit
def clamp(value: Int32, low: Int32, high: Int32) -> Int32:
    """Return ``value`` within ``[low, high]``; ``high`` if the bounds cross."""
    return cutlass.min(cutlass.max(value, low), high)


@cute.jit
def slot_of(slots: cute.Tensor, count: Int32, group: Int32) -> Int32:
    """Return the table entry of ``group``, any non-negative number; ``count`` if it has no group or no valid slot.

    Slot ``count`` is out of bounds for loads and for stores. A negative coordinate would be out of bounds for loads
    only:
    a TMA store from there stops the device with an illegal instruction.
    """
    slot = count
    if group < cute.size(slots):
        slot = slots[group]
        if slot < 0 or slot > count:
            slot = count
    return slot


@cute.jit
def group_range(
    offs: cute.Tensor, rows: Int32, group: Int32, tail: cutlass.Constexpr, begin: cute.Tensor | None = None
) -> tuple[Int32, Int32]:
    """Return the first row of ``group`` and the row after its last; equal for an empty or nonexistent group.

    Ends outside ``[0, rows]`` are clamped and a descending end makes the group empty: bad offsets give wrong numbers,
    never an access out of bounds.

    Args:
        offs: int32 ``[G]``, group ends.
        rows: T, the number of rows.
        group: any non-negative number.
        tail: whether the rows past the last group are group G.
        begin: int32 ``[1]``, the row offset of the first group; None: row 0.
    """
    groups = cute.size(offs)
    start, end = Int32(0), Int32(0)
    if group < groups + (1 if cutlass.const_expr(tail) else 0):
        if group > 0:
            start = clamp(offs[group - 1], Int32(0), rows)
        elif cutlass.const_expr(begin is not None):
            start = clamp(begin[0], Int32(0), rows)  # type: ignore[index]
        end = rows
        if group < groups:
            end = clamp(offs[group], start, rows)
    return start, end
