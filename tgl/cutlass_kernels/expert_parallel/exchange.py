"""Rows to other ranks and rows from them in one launch: what has arrived is read while more is on its way.

Rows for others go in pieces, each of which one warp stores to the memory of the rank that it is for, and then its flag:
the number of the barrier in front, so that no flag is ever reset. The flag is released to the whole system behind the
rows, and who reads rows acquires the flag of their piece first. Rows of a rank's own experts are read where they are:
they have no flag, and no warp that keeps a link busy has to do with them.

=======  ===============================================================================================================
Pushing  ``PUSHING`` warps of a block: draw the numbers of pieces until there are no more, and never wait for a flag
Taking   the others: wait for the flags of what they read, and either copy it out or add it up
=======  ===============================================================================================================

One block of every rank has to be on its device, and that is enough: the blocks that are there push all pieces. So every
flag comes, however many blocks run at a time. No warp waits for another one of its block, hence none that waits for a
flag keeps a pushing one from its next instruction. Blocks stay until they have taken their share. As three of them fit
on a multiprocessor, and an exchange has two, those of two groups may meet on a device. Which warp draws which piece
changes no result: a row's place follows from counts, and sums have an order of their own.

Pieces are drawn and taken in the order of rows, neighbouring ones to different ranks, so that few rows are left to be
taken when the last one has crossed the link. Two blocks a multiprocessor have 4 MB of loads on their way, where a link
of 450 GB/s with a latency of two microseconds asks for 1: more of them would begin pieces earlier and end none earlier.

A sum is a chain: places, flags, rows, each of which has to be there before the next is asked for. Behind stores that
queue for a link a step of it takes 1.4 us and not 0.5. So a warp asks for the places and flags of a token once, and
then for the rows of ``SHARES`` shares of its columns. A link that brings n tokens a microsecond allows N warps N / n
microseconds for a token of each.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ..activation.kernel import neighbours
from ..permute.kernel import CombineKernel, TopKSlots, load, place, store
from ..permute.tiling import LANES, PermuteTiling
from ..scheduler import ceil_div
from .barrier import place_of, wait
from .put import further, spread

WARPS = 8  # of a block
PUSHING = 4  # of them
TAKING = WARPS - PUSHING
SHARES = 4  # of a token's columns that a warp adds up behind one wait, at most

Line = tuple[cute.Tensor, Int32]  # rows, and the number of one of them


class ExchangeState(NamedTuple):
    """What ranks know of each other: of ``Peers``, of whose ``watch`` a row, and rows of a piece."""

    table: cute.Tensor
    flags: cute.Tensor
    epoch: cute.Tensor
    arrived: cute.Tensor
    leaving: cute.Tensor
    watch: cute.Tensor
    piece: Int32
    rank: Int32

    @property
    def ranks(self) -> Int32:
        """W."""
        return Int32(cute.size(self.table))


class Moved(NamedTuple):
    """Where rows come from, where they arrive, and where they or their sums end up.

    Attributes:
        rows: ``[S, H]``, unit stride along rows, or ``[W P, H]`` answers; H at least 1.
        part: ``[W P, H]`` like rows, of this rank's memory.
        out: ``[W P, H]`` like rows, or ``[S, H]`` of sums, of any dtype.
    """

    rows: cute.Tensor
    part: cute.Tensor
    out: cute.Tensor


class Peer(NamedTuple):
    """Whom rows are for: its number, how many bytes its memory is away, and what its flags become."""

    rank: Int32
    away: Int64
    now: Int32


class RowPushes(TopKSlots):
    """Rows by one warp."""

    @cute.jit
    def copy(self, rows: cute.Tensor, owners: Any, source: Int32, target: cute.Tensor, to: Int32, count: Int32):
        """So many rows from number ``source`` on, or those that ``owners`` have there, to those from ``to`` on."""
        cut = self.cut
        lane = cute.arch.lane_idx()
        side, across = LANES // cut.across, cut.across * cut.vector
        for base in cutlass.range(0, count, side, unroll=1):
            at = base + lane // cut.across
            row, there = Int32(-1), Int32(-1)
            if at < count:
                row = source + at
                if cutlass.const_expr(owners is not None):
                    row = place(owners, source + at, Int32(rows.shape[0]))
            if row >= 0:
                there = to + at
            for start in cutlass.range(0, Int32(rows.shape[1]), across * cut.strips, unroll=1):
                first = start + lane % cut.across * cut.vector
                held = cute.make_rmem_tensor((cut.vector, cut.strips), rows.element_type)
                for i in cutlass.range_constexpr(cut.strips):
                    load(rows, row, self.column(first, i), held[None, i])
                for i in cutlass.range_constexpr(cut.strips):
                    store(target, there, self.column(first, i), held[None, i])


class RankSums(CombineKernel):
    """Sums of rows of many ranks, by warps that wait for those rows."""

    @cute.jit
    def add_up(self, moved: Moved, position: cute.Tensor, ways: ExchangeState, warp: Int32, warps: Int32):
        """This warp's share: parts of tokens, as many columns as leave no warp without one, up to ``SHARES`` shares."""
        cut = self.cut
        side, across = LANES // cut.across, cut.across * cut.vector * cut.strips
        tokens, columns = Int32(moved.out.shape[0]), Int32(moved.out.shape[1])
        shares = ceil_div(columns, across)
        turns = cutlass.max(cutlass.min(ceil_div(ceil_div(tokens * shares, side), warps), SHARES), 1)
        parts = ceil_div(shares, turns)
        for n in cutlass.range(warp, ceil_div(tokens * parts, side), warps, unroll=1):
            number = n * side + cute.arch.lane_idx() // cut.across
            token = number // parts
            first = (number - token * parts) * turns * across
            end = cutlass.min(first + turns * across, columns)  # of narrow rows, of which a warp has some, one share
            if token >= tokens:
                token = Int32(-1)
            lines = None
            if cutlass.const_expr(cut.batch == cut.top_k):
                lines = self.awaited(moved, position, ways, token, 0)
            for start in cutlass.range(first, end, across, unroll=1):
                column = start + cute.arch.lane_idx() % cut.across * cut.vector
                total = self.zeros()
                if cutlass.const_expr(lines is not None):
                    self.add_lines(lines, None, token, 0, column, total)
                else:
                    for choice in cutlass.range(0, cut.top_k, cut.batch, unroll=1):
                        batch = self.awaited(moved, position, ways, token, choice)
                        self.add_lines(batch, None, token, choice, column, total)
                self.put(total, token, column, moved.out)

    @cute.jit
    def awaited(
        self, moved: Moved, position: cute.Tensor, ways: ExchangeState, token: Int32, choice: Any
    ) -> list[Line]:
        """The rows of a batch of choices, once they are there."""
        cut, at, places = self.cut, cute.arch.lane_idx() % self.cut.across, Int32(moved.part.shape[0])
        rows, pair_rows = self.batch(self.row_of, position, token, places, choice), places // ways.ranks
        for begin in cutlass.range_constexpr(0, cut.batch, cut.across):
            row = Int32(-1)
            for j in cutlass.range_constexpr(begin, min(begin + cut.across, cut.batch)):
                if at == j - begin:
                    row = rows[j]
            peer = row // pair_rows
            if row >= 0 and peer != ways.rank:
                wait(
                    ways.flags, peer, (row - peer * pair_rows) // ways.piece, ways.epoch[0], ways.watch, 1, exactly=True
                )
        cute.arch.sync_warp()  # what a lane has acquired, all may read
        return [self.line(moved, row, ways.rank * pair_rows, pair_rows) for row in rows]

    def line(self, moved: Moved, row: Int32, first: Int32, count: Int32) -> Line:
        """A row that arrives, or one of ``count`` from ``first`` on, which this rank has answered itself."""
        source, part = (
            neighbours(t, cutlass.max(row, Int32(0)), Int32(0), self.cut.vector).iterator
            for t in (moved.rows, moved.part)
        )
        own = (row >= first) & (row < first + count)
        address = cutlass.select_(own, source.toint(), part.toint())
        pointer = cute.make_ptr(part.dtype, address, cute.AddressSpace.gmem, assumed_align=part.alignment)
        there = cute.make_tensor(pointer, cute.make_layout((1, moved.part.shape[1]), stride=(0, 1)))
        return there, cutlass.min(row, Int32(0))


class ExchangeKernel:
    """Tokens to the ranks of their experts, or answers home.

    Args:
        cuts: of rows and, where there are some, of weights, how they are copied: the ``vector`` divides the numbers of
            columns, the pitches and the alignment of all of them.
        sums: likewise how answers are added up; of tokens none.
    """

    def __init__(self, cuts: tuple[PermuteTiling, ...], sums: tuple[PermuteTiling, ...] = ()):
        self.copies = [RowPushes(cut) for cut in cuts]
        self.sums = [RankSums(cut) for cut in sums]

    @cute.jit
    def __call__(self, places: cute.Tensor, all_moved: tuple, ways: ExchangeState, blocks: Int32, stream):
        """Launch.

        Args:
            places: ``token`` int32 ``[W P]``, of which -1 has none, of every rank's P the used ones first; of answers
                ``position`` int32 ``[S c]``.
            all_moved: a ``Moved`` of rows, and one of weights if there are some.
            ways: of all ranks.
            blocks: at most.
            stream: CUDA stream.
        """
        part = all_moved[0].part
        work = self.pieces(part, ways) * ways.ranks
        for i in cutlass.range_constexpr(len(self.sums)):
            cut, sums = self.sums[i].cut, all_moved[i].out
            work = cutlass.max(
                work, Int32(sums.shape[0]) * ceil_div(Int32(sums.shape[1]), cut.across * cut.vector * cut.strips)
            )
        token, position = (None, places) if self.sums else (places, None)
        self.kernel(all_moved, token, position, ways).launch(
            grid=(cutlass.min(ceil_div(work, min(PUSHING, TAKING)), blocks), 1, 1),
            block=(WARPS * LANES, 1, 1),
            stream=stream,
            min_blocks_per_mp=3,
            preferred_smem_carveout=15,  # in %, the rest is cache; without a number the compiler asks a driver
        )

    @cute.jit
    def pieces(self, part: cute.Tensor, ways: ExchangeState) -> Int32:
        """Of the rows for a rank."""
        return ceil_div(Int32(part.shape[0]) // ways.ranks, ways.piece)

    @cute.kernel
    def kernel(self, all_moved: Any, token: Any, position: Any, ways: ExchangeState):
        """A share of all."""
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        self.flow(all_moved, token, position, ways, block, blocks)

    @cute.jit
    def flow(self, all_moved: Any, token: Any, position: Any, ways: ExchangeState, block: Int32, blocks: Int32):
        """A block's part."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp < PUSHING:
            self.push(all_moved, token, ways)
        else:
            number, count = block * TAKING + warp - PUSHING, blocks * TAKING
            if cutlass.const_expr(position is None):
                self.take(all_moved, token, ways, number, count)
            else:
                for i in cutlass.range_constexpr(len(all_moved)):
                    self.sums[i].add_up(all_moved[i], position, ways, number, count)

    @cute.jit
    def push(self, all_moved: Any, token: Any, ways: ExchangeState):
        """Pieces for others as long as there are some, each with its flag.

        Of a lane's own peer all that has to be known is read once: where flags are acquired, a cache keeps nothing. All
        peers get a first piece, though it may be of no row: all read row 0 as the answer of a step that did not fit,
        and a rank whose first flag is missing has not come.
        """
        ranks, others, known = ways.ranks, ways.ranks - 1, cutlass.min(cute.arch.lane_idx(), ways.ranks - 1)
        away, now = ways.table[known] - ways.table[ways.rank], ways.epoch[0]
        ends = cutlass.max((ways.arrived if cutlass.const_expr(token is None) else ways.leaving)[known], 1)
        if known == ways.rank:
            ends = Int32(0)
        count = others * ceil_div(cute.arch.warp_redux_sync(ends, kind="max"), ways.piece)
        number = self.draw(ways.epoch)
        while number < count:
            at = number // others
            rank = (number - at * others + ways.rank + 1) % ranks
            peer, first = Peer(rank, cute.arch.shuffle_sync(away, rank), now), at * ways.piece
            rows = cutlass.min(ways.piece, cute.arch.shuffle_sync(ends, rank) - first)
            if rows > 0:
                self.send(all_moved, token, ways, peer, first, rows)
                self.release(ways, peer, at)
            number = self.draw(ways.epoch)

    @cute.jit
    def release(self, ways: ExchangeState, peer: Peer, at: Int32):
        """The flag of a piece that this warp has stored."""
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            place = place_of(further(ways.flags, peer.away), ways.rank, at)
            cute.arch.store(place, peer.now, sem="release", scope="sys")

    @cute.jit
    def draw(self, epoch: cute.Tensor) -> Int32:
        """The number of a piece that nobody else has."""
        number = Int32(0)
        if cute.arch.lane_idx() == 0:
            number = cute.arch.atomic_add((epoch.iterator + 1).llvm_ptr, Int32(1), sem="relaxed", scope="gpu")
        return cute.arch.shuffle_sync(number, 0)

    @cute.jit
    def send(self, all_moved: Any, token: Any, ways: ExchangeState, peer: Peer, first: Int32, count: Int32):
        """So many rows."""
        pair_rows = Int32(all_moved[0].part.shape[0]) // ways.ranks
        source, to = peer.rank * pair_rows + first, ways.rank * pair_rows + first
        for i in cutlass.range_constexpr(len(all_moved)):
            rows, part, _ = all_moved[i]
            self.copies[i].copy(rows, token, source, further(part, peer.away), to, count)

    @cute.jit
    def take(self, all_moved: Any, token: cute.Tensor, ways: ExchangeState, warp: Int32, warps: Int32):
        """Pieces out of the memory that the next exchange writes to, and those that never were there."""
        ranks, now, pair_rows = ways.ranks, ways.epoch[0], Int32(all_moved[0].part.shape[0]) // ways.ranks
        ends = ways.arrived[cutlass.min(cute.arch.lane_idx(), ranks - 1)]
        pieces = ceil_div(cute.arch.warp_redux_sync(ends, kind="max"), ways.piece)
        for number in cutlass.range(warp, ranks * pieces, warps, unroll=1):
            peer, at = spread(number, ranks, ways.rank)
            first = at * ways.piece
            row, count = peer * pair_rows + first, cutlass.min(ways.piece, cute.arch.shuffle_sync(ends, peer) - first)
            if peer == ways.rank:
                for i in cutlass.range_constexpr(len(all_moved)):
                    self.copies[i].copy(all_moved[i].rows, token, row, all_moved[i].out, row, count)
            elif count > 0:
                wait(ways.flags, peer, at, now, ways.watch, 1, exactly=True)
                for i in cutlass.range_constexpr(len(all_moved)):
                    self.copies[i].copy(all_moved[i].part, None, row, all_moved[i].out, row, count)
