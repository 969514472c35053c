"""Sort groups by length, for kernels in which the work on a tile grows with it.

A static schedule hands out tiles in rounds, one to every cluster. If a tile's work is the length of its group, as in
weight gradients, rounds are even only if lengths fall slowly from one tile to the next, and the remaining imbalance
cancels only if the cluster with the longest tile of one round gets the shortest of the next. So groups are visited
longest first, and if their lengths differ a lot every other round runs backwards, after the first tiles (``lpt``).
"""

from typing import NamedTuple

import cutlass
from cutlass import Int32, cute

from .groups import group_range
from .swizzle import ceil_div

CAPACITY = 512
"""Largest number of groups that are sorted; more of them are visited in order."""

LANES = 32
BYTES = (CAPACITY + LANES) * Int32.width // 8
TOGETHER = 4  # lengths per access to shared memory


class Order(NamedTuple):
    """The sorted groups, in shared memory.

    Attributes:
        groups: ``[CAPACITY]``, longest first.
        lengths: ``[LANES]``, the lengths of the first ``LANES`` of them.
    """

    groups: cute.Tensor
    lengths: cute.Tensor


def allocate_order(allocator) -> Order:
    """Allocate shared memory for the order."""
    sizes = (CAPACITY, LANES)
    arrays = (allocator.allocate_array(Int32, num_elems=size, byte_alignment=16) for size in sizes)
    return Order(*(cute.make_tensor(array, cute.make_layout(size)) for array, size in zip(arrays, sizes)))


@cute.jit
def sort_groups(order: Order, offs: cute.Tensor, rows: Int32, warp: Int32, warps: cutlass.Constexpr):
    """Fill ``order`` with the groups, longest first; equal ones keep their order.

    All ``warps`` of a CTA call it and then synchronise. The place of a group is the number of groups before it, so
    every
    thread needs all lengths: they are kept in the memory of the order until all places are known.
    """
    lane, threads = cute.arch.lane_idx(), warps * LANES
    thread, groups = warp * LANES + lane, cute.size(offs)
    if groups <= CAPACITY:
        turns = ceil_div(CAPACITY, threads)
        for turn in cutlass.range_constexpr(turns):
            group = turn * threads + thread
            if group < CAPACITY:
                order.groups[group] = length_of(offs, rows, group)
        cute.arch.sync_threads()
        places = cute.make_rmem_tensor(turns, Int32)
        lengths = cute.make_rmem_tensor(turns, Int32)
        for turn in cutlass.range_constexpr(turns):
            first = turn * threads + warp * LANES
            places[turn], lengths[turn] = Int32(CAPACITY), Int32(0)
            if first < groups:
                length = order.groups[first + lane]
                place = place_of(order.groups, groups, first, lane, length)
                if first + lane < groups:
                    lengths[turn], places[turn] = length, place
        cute.arch.sync_threads()
        for turn in cutlass.range_constexpr(turns):
            if places[turn] < CAPACITY:
                order.groups[places[turn]] = turn * threads + thread
            if places[turn] < LANES:
                order.lengths[places[turn]] = lengths[turn]


@cute.jit
def length_of(offs: cute.Tensor, rows: Int32, group: Int32) -> Int32:
    """Return the rows of ``group``, or -1, less than the length of any group, if there is no such group."""
    start, end = group_range(offs, rows, group, False)
    length = end - start
    if group >= cute.size(offs):
        length = Int32(-1)
    return length


@cute.jit
def place_of(lengths: cute.Tensor, groups: Int32, own: Int32, lane: Int32, length: Int32) -> Int32:
    """Return how many groups precede a lane's: longer than its ``length`` rows, or as long and before it.

    The lanes of a warp have the 32 groups from ``own`` on. Groups outside these 32 take one comparison each.
    """
    place = longer(lengths, Int32(0), own, length - 1) + longer(lengths, own + LANES, groups, length)
    some = cute.make_rmem_tensor(TOGETHER, Int32)
    for first in cutlass.range(0, cutlass.min(groups - own, LANES), TOGETHER, unroll=1):
        cute.autovec_copy(cute.make_tensor(lengths.iterator + own + first, TOGETHER), some)
        for i in cutlass.range_constexpr(TOGETHER):
            least = length
            if first + i < lane:
                least = length - 1
            if some[i] > least:
                place += 1
    return place


@cute.jit
def longer(lengths: cute.Tensor, first: Int32, last: Int32, least: Int32) -> Int32:
    """Return how many of ``lengths[first:last]`` exceed ``least``; the padding after the last group never does."""
    count, some = Int32(0), cute.make_rmem_tensor(TOGETHER, Int32)
    for at in cutlass.range(first, last, TOGETHER, unroll=4):
        cute.autovec_copy(cute.make_tensor(lengths.iterator + at, TOGETHER), some)
        for i in cutlass.range_constexpr(TOGETHER):
            if some[i] > least:
                count += 1
    return count


@cute.jit
def visited(order: cute.Tensor, groups: Int32, place: Int32) -> Int32:
    """Return the group at ``place`` in the order; if there is none, a number that is not a group's."""
    group = place
    if groups <= CAPACITY and place < groups:
        group = order[place]
    return group


@cute.jit
def unequal(order: Order, groups: Int32, rows: Int32) -> cutlass.Boolean:
    """Return whether the groups were sorted, and the longest of them is more than twice as long as the mean."""
    found = cutlass.Boolean(False)
    if groups <= CAPACITY:
        found = order.lengths[0] > 2 * (rows // groups)
    return found
