"""Look up the tile and group of a linear tile index on the device, without a table in memory.

Every warp that needs a tile finds it itself: the lanes hold 32 consecutive groups, their row ranges and a prefix sum of
their tiles, so a tile costs one ballot and three shuffles, and the offsets are read once per 32 groups. There is no
scheduler warp, no shared memory and no barrier, hence nothing to synchronise; in exchange every role of a CTA executes
the same two dozen instructions per tile.
"""

from typing import NamedTuple

import cutlass
from cutlass import Boolean, Int32, cute

from .group_sort import visited
from .groups import group_range
from .swizzle import decode, quotient

LANES = 32
NO_EDGE = (1 << 31) - 1


class Tile(NamedTuple):
    """One output tile.

    ``m`` and ``n`` count tiles within the group; ``start`` and ``length`` are the group's rows. ``group`` equals the
    number of groups for the tail, the rows past the last group. ``slot`` is the index of the group's matrix, if there
    is a table of slots. The other fields are undefined unless ``valid``.
    """

    valid: Boolean
    group: Int32
    m: Int32
    n: Int32
    start: Int32
    length: Int32
    slot: Int32 | None = None


class GroupSearch(NamedTuple):
    """State of a warp's tile lookup. The first two are uniform, the others differ from lane to lane.

    =============  =====================================================
    ``first``      first of the 32 groups the lanes hold
    ``edge``       tiles of all groups up to and with the last one held,
                   if more groups follow, else no index at all
    ``before``     tiles of all groups before this lane's
    ``start``      first row of this lane's group
    ``length``     rows of this lane's group
    =============  =====================================================
    """

    first: Int32
    edge: Int32
    before: Int32
    start: Int32
    length: Int32


def _tiles(rows: Int32, tile_m: int) -> Int32:
    """Return the number of tiles down ``rows`` rows."""
    return quotient(rows + tile_m - 1, tile_m)


class TileGrid(NamedTuple):
    """The tiles of groups of rows.

    Attributes:
        offs: int32 ``[G]``, group ends.
        rows: T, the number of rows.
        tiles_n: tiles across N.
        tile_m: rows of a tile.
        band: see ``decode``.
        tail: whether the rows past the last group are a group of their own, number G.
        begin: int32 ``[1]``, the row offset of the first group; None: row 0.
    """

    offs: cute.Tensor
    rows: Int32
    tiles_n: Int32
    tile_m: int
    band: int
    tail: bool
    begin: cute.Tensor | None = None


@cute.jit
def _hold(grid: TileGrid, first: Int32, before: Int32) -> GroupSearch:
    """Return a search that holds the 32 groups from ``first`` on, before which there are ``before`` tiles."""
    lane = cute.arch.lane_idx()
    start, end = group_range(grid.offs, grid.rows, first + lane, grid.tail, grid.begin)
    tiles = _tiles(end - start, grid.tile_m) * grid.tiles_n
    upto = tiles
    for i in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(upto, 1 << i)
        if lane >= (1 << i):
            upto = upto + below
    upto += before
    edge = cute.arch.shuffle_sync(upto, LANES - 1)
    if first + LANES >= cute.size(grid.offs) + (1 if cutlass.const_expr(grid.tail) else 0):
        edge = Int32(NO_EDGE)
    return GroupSearch(first, edge, upto - tiles, start, end - start)


@cute.jit
def start_search(grid: TileGrid) -> GroupSearch:
    """Return a search that holds the first 32 groups."""
    return _hold(grid, Int32(0), Int32(0))


@cute.jit
def find_tile(search: GroupSearch, index: Int32, grid: TileGrid) -> tuple[GroupSearch, Tile]:
    """Return the ``index``-th tile of all, and the new state.

    The indices of a warp must ascend. All 32 lanes take part and get the same tile.
    """
    while index >= search.edge:
        search = _hold(grid, search.first + LANES, search.edge)
    first, _, before, start, length = search
    # Of groups that begin with the same tile, all but the last are empty.
    source = cute.arch.popc(cute.arch.vote_ballot_sync(before <= index)) - 1
    group_length = cute.arch.shuffle_sync(length, source)
    inside = index - cute.arch.shuffle_sync(before, source)
    tiles_m = _tiles(group_length, grid.tile_m)
    m, n = decode(inside, tiles_m, grid.tiles_n, grid.band)
    # Past the last tile this finds the last lane's group, which has fewer tiles.
    exists = inside < tiles_m * grid.tiles_n
    tile = Tile(exists, first + source, m, n, cute.arch.shuffle_sync(start, source), group_length)
    return search, tile


@cute.jit
def exact_tile(
    index: Int32,
    offs: cute.Tensor,
    rows: Int32,
    tiles_m: Int32,
    tiles_n: Int32,
    band: cutlass.Constexpr,
    order: cute.Tensor | None,
) -> Tile:
    """Return the ``index``-th tile where every group has ``tiles_m x tiles_n`` tiles, as weight gradients do.

    ``order`` is the order of the groups; None means by number.
    """
    per_group = tiles_m * tiles_n
    place = quotient(index, per_group)
    groups = Int32(cute.size(offs))
    group = place
    if cutlass.const_expr(order is not None):
        group = visited(order, groups, place)
    start, end = group_range(offs, rows, group, False)
    m, n = decode(index - place * per_group, tiles_m, tiles_n, band)
    return Tile(place < groups, group, m, n, start, end - start)
