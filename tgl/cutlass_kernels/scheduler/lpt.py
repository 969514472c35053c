"""Longest-first (LPT) scheduling, for groups of very unequal length.

Rounds of one tile per cluster leave the work uneven if the first few groups are much longer than the others: their
tiles seldom fill a whole number of rounds, and the short tiles cannot make up for it later, since every cluster gets
equally many. So the longest tiles are not handed out in rounds: each goes to the cluster with the least work so far, of
which any number may be taken. Clusters with equal work are handled as one set, which the end of a group splits in two,
so a step hands out tens of tiles and a few dozen steps are enough. The remaining tiles are handed out in rounds, every
other one backwards (``group_sort``), to the clusters in order of their work. This takes about two microseconds, so it
is done only where a tile may be more than ``1 / WORTHWHILE`` of a cluster's work.

Shared memory holds the number of tiles that a cluster got this way, the offset to add to its index in a round of the
remaining tiles, how far back it is in a backward round, and the indices of its tiles.
"""

import cutlass
from cutlass import Float32, Int32, cute

from .group_sort import Order, unequal

STEPS = 31  # one set at first and at most one more per step: one lane for each
HEAD = 3
ENTRIES = HEAD + STEPS
BYTES = ENTRIES * Int32.width // 8

LANES = 32
UNIT = 16  # rows of one MMA
EPILOGUE = 12  # fixed cost of a tile in units, roughly, as measured on an H200
WORTHWHILE = 16
NO_SET = (1 << 31) - 1


def allocate_deal(allocator) -> cute.Tensor:
    """Allocate shared memory for one cluster's share."""
    return cute.make_tensor(allocator.allocate_array(Int32, num_elems=ENTRIES), cute.make_layout(ENTRIES))


@cute.jit
def deal_rounds(deal: cute.Tensor, back: Int32):
    """Hand out everything in rounds, every other one backwards by ``back``; one warp calls it."""
    if cute.arch.lane_idx() == 0:
        deal[0] = Int32(0)
        deal[1] = Int32(0)
        deal[2] = back


@cute.jit
def work_of(order: Order, place: Int32) -> Int32:
    """Return the work of a tile of the group at ``place`` in the order, one of the first ``LANES``."""
    return (order.lengths[place] + UNIT - 1) // UNIT + EPILOGUE


@cute.jit
def worthwhile(order: Order, groups: Int32, rows: Int32, per_group: Int32, step: Int32) -> cutlass.Boolean:
    """Return whether the longest tile is a large part of a cluster's work."""
    everything = Float32(rows // UNIT + groups * EPILOGUE) * Float32(per_group)
    return Float32(work_of(order, Int32(0))) * Float32(WORTHWHILE * step) > everything


@cute.jit
def deal_longest(deal: cute.Tensor, order: Order, groups: Int32, per_group: Int32, first: Int32, step: Int32):
    """Hand out the longest tiles to the clusters with the least work, the others in rounds; one warp calls it.

    Args:
        deal: shared memory of this cluster's share.
        order: the groups, longest first.
        groups: number of groups.
        per_group: tiles of a group.
        first, step: index of this cluster, and the number of clusters.
    """
    lane = cute.arch.lane_idx()
    # Every lane holds a set: clusters ``begin`` to ``begin + size - 1``, each with ``work`` to do.
    begin, size, work = Int32(0), Int32(0), Int32(NO_SET)
    if lane == 0:
        size, work = step, Int32(0)
    tiles = Int32(0)  # work of one tile, a lane for each group: there are no more steps than lanes
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
    """Hand out the tiles in the way that suits the lengths of the groups; one warp calls it.

    Args:
        rows: number of rows of all groups; see ``deal_longest`` for the others.
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
    """Return the index of the tile that a cluster gets in ``turn``; ``index`` is the one of plain rounds."""
    own = deal[0]
    if turn < own:
        index = deal[HEAD + turn]
    else:
        index += deal[1] + (turn - own) % 2 * deal[2]
    return index
