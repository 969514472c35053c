"""Who gets the longest tiles, where groups are of very unequal length.

Rounds of one tile to every cluster leave the work uneven if the first few groups are much longer than the others: their
tiles seldom fill a whole number of rounds, and what is short cannot make up for it later, as everybody gets as much of
it. So the longest tiles are not dealt in rounds: each goes to a cluster that has the least work so far, as many of them
as any it takes. Clusters with the same work are handled as one set, which the end of a group splits in two, so that a
step hands out tens of tiles and a few dozen steps are enough. What is left is dealt in rounds that go backwards every
other time (``group_sort``), to the clusters in order of their work. As this takes about two microseconds, it is done
only where a tile may be more than ``1 / WORTHWHILE`` of a cluster's work.

In shared memory: how many tiles a cluster got this way, what to add to its index in a round of those that are left, how
far back it is in a backward round, and the tiles' indices.
"""

import cutlass
from cutlass import Float32, Int32, cute

from .group_sort import Order, unequal

STEPS = 31  # one set at first and one more per step at most: a lane for each
HEAD = 3
ENTRIES = HEAD + STEPS
BYTES = ENTRIES * Int32.width // 8

LANES = 32
UNIT = 16  # rows of one MMA
EPILOGUE = 12  # units that a tile takes beyond its rows, as measured on an H200, roughly
WORTHWHILE = 16
NO_SET = (1 << 31) - 1


def allocate_deal(allocator) -> cute.Tensor:
    """Shared memory for one cluster's part."""
    return cute.make_tensor(allocator.allocate_array(Int32, num_elems=ENTRIES), cute.make_layout(ENTRIES))


@cute.jit
def deal_rounds(deal: cute.Tensor, back: Int32):
    """Deal everything in rounds, every other one backwards by ``back``; one warp calls it."""
    if cute.arch.lane_idx() == 0:
        deal[0] = Int32(0)
        deal[1] = Int32(0)
        deal[2] = back


@cute.jit
def work_of(order: Order, place: Int32) -> Int32:
    """Work of a tile of the group at ``place`` in the order, one of the first."""
    return (order.lengths[place] + UNIT - 1) // UNIT + EPILOGUE


@cute.jit
def worthwhile(order: Order, groups: Int32, rows: Int32, per_group: Int32, step: Int32) -> cutlass.Boolean:
    """Return whether the longest tile is a large part of what a cluster has to do."""
    everything = Float32(rows // UNIT + groups * EPILOGUE) * Float32(per_group)
    return Float32(work_of(order, Int32(0))) * Float32(WORTHWHILE * step) > everything


@cute.jit
def deal_longest(deal: cute.Tensor, order: Order, groups: Int32, per_group: Int32, first: Int32, step: Int32):
    """Deal the longest tiles to the clusters with the least work, the others in rounds; one warp calls it.

    Args:
        deal: shared memory of this cluster's part.
        order: the groups, longest first.
        groups: how many there are.
        per_group: tiles of a group.
        first, step: this cluster, and how many there are.
    """
    lane = cute.arch.lane_idx()
    # Every lane holds a set: clusters ``begin`` to ``begin + size - 1``, each with ``work`` to do.
    begin, size, work = Int32(0), Int32(0), Int32(NO_SET)
    if lane == 0:
        size, work = step, Int32(0)
    tiles = Int32(0)  # a lane for each group, of which there are more than steps
    if lane < groups:
        tiles = work_of(order, lane)
    sets, place, left, given, mine = Int32(1), Int32(0), per_group, Int32(0), Int32(0)
    turn = Int32(0)
    while turn < STEPS and place < groups:
        more = cute.arch.shuffle_sync(tiles, place)
        least = cute.arch.warp_redux_sync(work, "min")
        owner = lowest_bit(cute.arch.vote_ballot_sync(work == least))
        start, members = cute.arch.shuffle_sync(begin, owner), cute.arch.shuffle_sync(size, owner)
        taken = cutlass.min(members, left)
        if first >= start and first < start + taken:
            if lane == 0:
                deal[HEAD + mine] = given + first - start
            mine += 1
        if lane == owner:
            if taken == members:
                work += more
            else:
                begin += taken
                size -= taken
        if taken < members:
            if lane == sets:
                begin, size, work = start, taken, least + more
            sets += 1
        given += taken
        left -= taken
        if left == 0:
            place += 1
            left = per_group
        turn += 1
    holder = lowest_bit(cute.arch.vote_ballot_sync(first >= begin and first < begin + size))
    own = cute.arch.shuffle_sync(work, holder)
    before = Int32(0)
    if work < own or (work == own and lane < holder):
        before = size
    rank = cute.arch.warp_redux_sync(before, "add") + first - cute.arch.shuffle_sync(begin, holder)
    if lane == 0:
        deal[0] = mine
        deal[1] = given + rank - first - mine * step
        deal[2] = step - 1 - 2 * rank


@cute.jit
def deal_tiles(
    deal: cute.Tensor, order: Order, groups: Int32, rows: Int32, per_group: Int32, first: Int32, step: Int32
):
    """Deal in the way that suits the groups' lengths; one warp calls it.

    Args:
        rows: how many there are of all groups; the others are those of ``deal_longest``.
    """
    if unequal(order, groups, rows):
        if worthwhile(order, groups, rows, per_group, step):
            deal_longest(deal, order, groups, per_group, first, step)
        else:
            deal_rounds(deal, step - 1 - 2 * first)
    else:
        deal_rounds(deal, Int32(0))


@cute.jit
def lowest_bit(mask: Int32) -> Int32:
    """Index of the lowest bit that is set; there must be one."""
    return cute.arch.popc((mask & -mask) - 1)


@cute.jit
def dealt(deal: cute.Tensor, turn: Int32, index: Int32) -> Int32:
    """Index of the tile that a cluster gets in ``turn``, where ``index`` is that of rounds from the beginning."""
    own = deal[0]
    if turn < own:
        index = deal[HEAD + turn]
    else:
        index += deal[1] + (turn - own) % 2 * deal[2]
    return index
