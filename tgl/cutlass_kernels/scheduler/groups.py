"""The row range of a group, safe for any values in ``offs``."""

import cutlass
from cutlass import Int32, cute


@cute.jit
def clamp(value: Int32, low: Int32, high: Int32) -> Int32:
    """Return ``value`` within ``[low, high]``; ``high`` if the bounds cross."""
    return cutlass.min(cutlass.max(value, low), high)


@cute.jit
def slot_of(slots: cute.Tensor, count: Int32, group: Int32) -> Int32:
    """What the table says of ``group``, any number that is not negative; ``count`` if that is no group or no slot.

    The slot behind the last is out of bounds for loads and stores alike. A negative coordinate is so for loads alone: a
    tensor map may not be stored to from there, and the device stops with an illegal instruction.
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
    """First row of ``group`` and the row after its last; equal for an empty group and for one that does not exist.

    Ends outside ``[0, rows]`` are clamped and a descending end makes the group empty: bad offsets give wrong numbers,
    never an access out of bounds.

    Args:
        offs: int32 ``[G]``, group ends.
        rows: T, the rows there are.
        group: any number that is not negative.
        tail: whether group G is the rows past the last group.
        begin: int32 ``[1]``, the first row of the first group; None: row 0.
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
