"""Groups in order of their length, where the work on a tile grows with it.

A static schedule deals out tiles in rounds, one to every cluster. If a tile's work is the length of its group, as in
weight gradients, rounds are even only if lengths fall slowly from one to the next, and what is left uneven cancels only
if the cluster that had the longest tile of one round gets the shortest of the next. So groups are visited longest
first, and if they are of unequal length every other round is dealt backwards, after the first tiles (``deal``).
"""

import cutlass
from cutlass import Int32, cute

from .groups import group_range

CAPACITY = 512
"""Groups that are sorted; more of them are visited as they come."""

BYTES = CAPACITY * Int32.width // 8
LANES = 32


def allocate_order(allocator) -> cute.Tensor:
    """Shared memory for the order."""
    return cute.make_tensor(allocator.allocate_array(Int32, num_elems=CAPACITY), cute.make_layout(CAPACITY))


@cute.jit
def sort_groups(order: cute.Tensor, offs: cute.Tensor, rows: Int32, warp: Int32, warps: cutlass.Constexpr):
    """Fill ``order`` with the groups, longest first and equal ones as they come.

    All ``warps`` of a CTA call it and then meet at a barrier. A group's place is the number of those before it.
    """
    lane = cute.arch.lane_idx()
    groups = cute.size(offs)
    if groups <= CAPACITY:
        for first in cutlass.range(warp * LANES, groups, warps * LANES, unroll=1):
            group = first + lane
            start, end = group_range(offs, rows, group, False)
            length, place = end - start, Int32(0)
            for others in cutlass.range(0, groups, LANES, unroll=1):
                start, end = group_range(offs, rows, others + lane, False)
                held = end - start
                for i in cutlass.range_constexpr(LANES):
                    other = cute.arch.shuffle_sync(held, i)
                    if other > length or (other == length and others + i < group):
                        place += 1
            if group < groups:
                order[place] = group


@cute.jit
def visited(order: cute.Tensor, groups: Int32, place: Int32) -> Int32:
    """The group at ``place`` in the order; any number that is no group's if there is none."""
    group = place
    if groups <= CAPACITY and place < groups:
        group = order[place]
    return group


@cute.jit
def unequal(order: cute.Tensor, offs: cute.Tensor, rows: Int32) -> cutlass.Boolean:
    """Whether the groups were sorted, and the longest of them is more than twice as long as the mean."""
    groups = Int32(cute.size(offs))
    found = cutlass.Boolean(False)
    if groups <= CAPACITY:
        start, end = group_range(offs, rows, order[0], False)
        found = end - start > 2 * (rows // groups)
    return found
