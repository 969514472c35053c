"""Two passes over x in one launch, the second close enough behind the first to find x in the L2 cache.

The first pass finds a tile's largest magnitude; the second quantises it, once those of all tiles of its group are
known. Blocks draw tickets. A ticket is one pass over one tile, and tickets are in stages:

    stage s:  the first pass over the tiles of window s and, evenly interleaved, the second pass over all groups that
              end in window ``s - LAG``, the last tile first

So a tile is read again once its group and a few windows more have been read. A ticket waits only for tiles of earlier
stages. The blocks that drew those are running and wait at most for still earlier ones: so the wait ends, however few
blocks run at a time.

Shared by the blocks of a launch, in int32: the number of drawn tickets; for every row of tiles the part of a ticket
that they have in common; for every window the number of tiles of the groups that end before it; and for every tile its
largest magnitude, as bits of float32 plus one, zero until it is known: since one word holds both, no memory ordering is
needed. A small launch before (``PrepareKernel``) initialises them.

The tiles of a group follow from the group starts (``units_of_group``) in a way that is defined for any offsets: bad
ones give wrong numbers, but no deadlock.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute

from .. import instructions
from ..runtime.function_names import named
from ..scheduler import ceil_div
from ..scheduler.groups import clamp
from . import l2_chunks
from .lane_tile import LANES, WARPS
from .tiles import AHEAD, ROWS, RowTile, group_tile, matrix_tile

# Notes of a block in shared memory: its stage, and two tickets.
STAGE, TICKETS = range(2)
WORK, TILE, GROUP, LOW, HIGH, FIRST, COUNT, TAIL, TICKET = range(9)  # the words of a ticket, and their number
ROW = TICKET - GROUP  # words that all tiles of a row of tiles have in common
NOTES = TICKETS + 2 * TICKET
LOOK, QUANTIZE, NOTHING = range(3)

DEPTH = 8  # words that a lane loads before it uses the first
NO_UNIT = (1 << 31) - 1


class Tiles(NamedTuple):
    """The tiles of x: ``number``, ``across`` in a row of 128 rows.

    Groups end at ``offs``, int32 ``[G]`` for ``rows`` rows; if that is None, they are matrices of ``matrix_rows`` rows.
    """

    offs: Any
    rows: Int32
    matrix_rows: Int32
    across: Int32
    number: Int32

    @property
    def units(self) -> Int32:
        """The number of rows of tiles."""
        return self.number // self.across

    @property
    def windows(self) -> Int32:
        """The number of windows."""
        return ceil_div(self.number, l2_chunks.TILES)


class LaunchState(NamedTuple):
    """The parts of the state that a launch's blocks share; see the module."""

    drawn: Any
    table: Any
    ended: Any
    seen: Any


def shared_at(pointer, tiles: Tiles) -> LaunchState:
    """Split ``l2_chunks.words_shared`` words into their parts; the counter of all blocks has its own cache lines."""
    table = pointer + l2_chunks.HEAD
    ended = table + tiles.units * l2_chunks.ROW
    return LaunchState(pointer, table, ended, ended + tiles.windows)


@named
class PrepareKernel:
    """The launch before, which initialises the shared state."""

    @cute.jit
    def __call__(self, words: cute.Tensor, tiles: Tiles, stream):
        """Launch; a warp takes a window and a row of tiles."""
        self.kernel(words, tiles.offs, tiles.rows, tiles.matrix_rows, tiles.across, tiles.number).launch(
            grid=(ceil_div(cutlass.max(tiles.windows, tiles.units), WARPS), 1, 1),
            block=(WARPS * LANES, 1, 1),
            stream=stream,
            preferred_smem_carveout=40,  # as for the other launch, which would otherwise wait for a reconfiguration
        )

    @cute.kernel
    def kernel(
        self,
        words: cute.Tensor,
        offs: cute.Tensor | None,
        rows: Int32,
        matrix_rows: Int32,
        across: Int32,
        number: Int32,
    ):
        """Initialise one window and one row of tiles per warp; all threads together write zeros."""
        instructions.launch_dependents()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        thread, _, _ = cute.arch.thread_idx()
        tiles = Tiles(offs, rows, matrix_rows, across, number)
        shared = shared_at(words.iterator, tiles)
        at = block * (WARPS * LANES) + thread
        mine = at // LANES
        if mine < tiles.windows:
            _, low, _ = units_of_group(tiles, mine * l2_chunks.TILES // across)
            if thread % LANES == 0:
                shared.ended[mine] = low * across
        if mine < tiles.units:
            group, low, high = units_of_group(tiles, mine)
            if cutlass.const_expr(offs is None):
                row = matrix_tile(matrix_rows, mine)
            else:
                row = group_tile(offs, rows, mine, group)
            if thread % LANES == 0:
                words_of_row = (group, low * across, high * across, row.first, row.count, Int32(row.tail))
                for i in cutlass.range_constexpr(ROW):
                    shared.table[mine * l2_chunks.ROW + i] = words_of_row[i]
        if at == 0:
            shared.drawn[0] = Int32(0)
        for i in cutlass.range(at, number, blocks * (WARPS * LANES), unroll=1):
            shared.seen[i] = Int32(0)


@cute.jit
def units_of_group(tiles: Tiles, unit: Int32) -> tuple[Int32, Int32, Int32]:
    """Return the group of a row of tiles (the tail is the last), its first row of tiles and the one after its last.

    All 32 lanes of a warp call it. For any offsets the ranges partition the rows of tiles, and ``group_of_unit``
    agrees.
    """
    if cutlass.const_expr(tiles.offs is None):
        units = ceil_div(tiles.matrix_rows, ROWS)
        return unit // units, unit // units * units, (unit // units + 1) * units
    offs, rows = tiles.offs, tiles.rows
    groups = Int32(cute.size(offs))
    lane = cute.arch.lane_idx()
    before, low, high = Int32(0), Int32(0), Int32(NO_UNIT)
    for first in cutlass.range(0, groups, AHEAD * LANES, unroll=1):
        ahead = [cutlass.min(first + i * LANES + lane, groups - 1) for i in range(AHEAD)]
        found = [(one, offs[cutlass.max(one - 1, 0)], offs[one]) for one in ahead]
        for i in cutlass.range_constexpr(AHEAD):
            one, start, end = found[i]
            start = cutlass.select_(one > 0, clamp(start, Int32(0), rows), Int32(0))
            after = (clamp(end, start, rows) >> 7) + one + 1  # where the next group begins
            begun = after <= unit
            before += cute.arch.popc(cute.arch.vote_ballot_sync(begun and first + i * LANES + lane < groups))
            low = cutlass.max(low, cutlass.select_(begun, after, Int32(0)))
            high = cutlass.min(high, cutlass.select_(begun, Int32(NO_UNIT), after))
    low, high = cute.arch.warp_redux_sync(low, kind="max"), cute.arch.warp_redux_sync(high, kind="min")
    return before, low, cutlass.min(high, tiles.number // tiles.across)


@cute.jit
def ended(shared: LaunchState, tiles: Tiles, window: Int32) -> Int32:
    """Return how many tiles the groups have that end before a window; all of them if it does not exist."""
    many = Int32(0)
    if window >= tiles.windows:
        many = tiles.number
    elif window > 0:
        many = shared.ended[window]
    return many


@cute.jit
def draw_ticket(notes: cute.Tensor, slot: Int32, shared: LaunchState, tiles: Tiles):
    """Draw a new ticket and note it; one warp calls it."""
    lane = cute.arch.lane_idx()
    number = Int32(0)
    if lane == 0:
        number = cute.arch.atomic_add(shared.drawn.llvm_ptr, Int32(1), sem="relaxed", scope="gpu")
    number = cute.arch.shuffle_sync(number, 0)
    # Lane i gets the start of the i-th stage after the previous one, and the tiles quantised by then.
    stage, low, high, passed = notes[STAGE] - LANES, Int32(0), Int32(0), Int32(LANES)
    while passed == LANES and number < 2 * tiles.number:
        stage += LANES
        low = ended(shared, tiles, stage + lane - l2_chunks.LAG)
        high = ended(shared, tiles, stage + lane + 1 - l2_chunks.LAG)
        after = cutlass.min((stage + lane + 1) * l2_chunks.TILES, tiles.number) + high
        passed = cute.arch.popc(cute.arch.vote_ballot_sync(after <= number))
    work, tile, word = Int32(NOTHING), Int32(0), Int32(0)
    if number < 2 * tiles.number:
        stage += passed
        low, high = cute.arch.shuffle_sync(low, passed), cute.arch.shuffle_sync(high, passed)
        begins = cutlass.min(stage * l2_chunks.TILES, tiles.number)
        looks = cutlass.min((stage + 1) * l2_chunks.TILES, tiles.number) - begins
        place = number - begins - low
        step = cutlass.max((looks + high - low) // cutlass.max(looks, 1), 1)
        nth = place // step
        work, tile = Int32(QUANTIZE), high - 1 - place + cutlass.min(nth + 1, looks)
        if nth * step == place and nth < looks:
            work, tile = Int32(LOOK), begins + nth
        word = shared.table[tile // tiles.across * l2_chunks.ROW + cutlass.min(lane, ROW - 1)]
    at = TICKETS + slot * TICKET
    cute.arch.sync_warp()  # all lanes have read the stage
    if lane < ROW:
        notes[at + GROUP + lane] = word
    if lane == 0:
        notes[STAGE] = stage
        notes[at + WORK], notes[at + TILE] = work, tile
    cute.arch.sync_warp()


class Ticket(NamedTuple):
    """A ticket as noted: one pass over one tile.

    Attributes:
        index: the tile's number.
        group: the tile's; its tiles are ``low`` to ``high - 1``.
        tile: the rows.
    """

    index: Int32
    group: Int32
    low: Int32
    high: Int32
    tile: RowTile


def ticket_at(notes: cute.Tensor, slot: Int32) -> Ticket:
    """Return the ticket that ``draw_ticket`` noted."""
    at = TICKETS + slot * TICKET
    tile = RowTile(notes[at + FIRST], notes[at + COUNT], notes[at + TAIL] != 0)
    return Ticket(notes[at + TILE], notes[at + GROUP], notes[at + LOW], notes[at + HIGH], tile)


@cute.jit
def tell(shared: LaunchState, tile: Int32, bits: Int32):
    """Publish the largest magnitude of a tile."""
    pointer = shared.seen + tile
    cute.arch.store(pointer.llvm_ptr, bits + 1, sem="relaxed", scope="gpu")


@cute.jit
def largest_of(shared: LaunchState, low: Int32, high: Int32, warp: Int32) -> Int32:
    """Return a warp's part of the largest magnitude of tiles ``low`` to ``high - 1``, once all of them are known."""
    top, first = Int32(1), low + warp * LANES
    while first < high:
        most, least = top, Int32(1)
        for i in cutlass.range_constexpr(DEPTH):
            tile = first + i * WARPS * LANES + cute.arch.lane_idx()
            if tile < high:
                pointer = shared.seen + tile
                word = cute.arch.load(pointer.llvm_ptr, Int32, sem="relaxed", scope="gpu")
                most, least = cutlass.max(most, word), cutlass.min(least, word)
        if cute.arch.vote_all_sync(least > 0):
            top, first = most, first + DEPTH * WARPS * LANES
    return cute.arch.warp_redux_sync(top, kind="max") - 1
