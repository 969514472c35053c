"""Send rows to other ranks and receive theirs in one launch, which reads arrived rows while others are in flight.

Rows for others are sent in pieces. One warp stores a piece to the memory of its rank, and then the piece's flag: the
number of the preceding barrier, so that no flag is ever reset. The flag is released at system scope after the rows, and
a reader acquires the flag of a piece before its rows. Rows of a rank's own experts are read in place: they have no flag
and take no time of the warps that keep the links busy.

=======  ===============================================================================================================
Pushing  ``PUSHING`` warps of a block: draw the numbers of pieces until there are no more, and never wait for a flag
Taking   the others: wait for the flags of the rows they read, and either copy the rows out or add them up
=======  ===============================================================================================================

It suffices that one block of every rank is resident: resident blocks push all pieces, so every flag arrives, however
many blocks run at a time. No warp waits for another of its block, so a warp that waits for a flag never delays a
pushing one. Blocks stay resident until they have taken their share. Three of them fit on a multiprocessor and an
exchange has two, so that the exchanges of two groups can share a device. The assignment of pieces to warps changes no
result: a row's place follows from counts, and sums have a fixed order.

Pieces are drawn and taken in the order of rows, adjacent ones for different ranks, so that few rows are left to be
taken when the last one has crossed the link. Two blocks per multiprocessor have 4 MB of loads in flight, where a link
of 450 GB/s with a latency of two microseconds needs 1 MB: more blocks would begin pieces earlier and end none earlier.

A sum is a chain of dependent loads: places, flags, rows. Behind stores that queue for a link, each takes 1.4 us instead
of 0.5. So a warp loads the places and flags of a token once, and then the rows of ``SHARES`` shares of its columns.
With a link that brings n tokens per microsecond, N warps have N / n microseconds for a token each.
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

WARPS = 8  # per block
PUSHING = 4  # of these
TAKING = WARPS - PUSHING
SHARES = 4  # of a token's columns that a warp adds up after one wait, at most

Line = tuple[cute.Tensor, Int32]  # rows, and the number of one row


class ExchangeState(NamedTuple):
    """State shared between ranks: fields of ``Peers``, one row of its ``watch``, and the rows of a piece."""

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
        """The number of ranks, W."""
        return Int32(cute.size(self.table))


class Moved(NamedTuple):
    """Source rows, the memory in which they arrive, and the destination of the rows or of their sums.

    Attributes:
        rows: ``[S, H]``, unit stride along rows, or ``[W P, H]`` answers; H at least 1.
        part: ``[W P, H]`` like rows, of this rank's memory.
        out: ``[W P, H]`` like rows, or ``[S, H]`` of sums, of any dtype.
    """

    rows: cute.Tensor
    part: cute.Tensor
    out: cute.Tensor


class Peer(NamedTuple):
    """A destination rank: its number, the distance of its memory in bytes, and the new value of its flags."""

    rank: Int32
    away: Int64
    now: Int32


class RowPushes(TopKSlots):
    """Copies of rows by one warp."""

    @cute.jit
    def copy(self, rows: cute.Tensor, owners: Any, source: Int32, target: cute.Tensor, to: Int32, count: Int32):
        """Copy ``count`` rows, from number ``source`` on or those that ``owners`` names, to rows from ``to`` on."""
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
    """Sums of rows from many ranks, by warps that wait for those rows."""

    @cute.jit
    def add_up(self, moved: Moved, position: cute.Tensor, ways: ExchangeState, warp: Int32, warps: Int32):
        """Add up this warp's share: parts of tokens, split by columns to keep all warps busy."""
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
            end = cutlass.min(first + turns * across, columns)  # narrow rows, which give a warp several, have one share
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
        """Wait for the rows of a batch of top-k slots, and return them."""
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
        cute.arch.sync_warp()  # makes rows acquired by one lane visible to all
        return [self.line(moved, row, ways.rank * pair_rows, pair_rows) for row in rows]

    def line(self, moved: Moved, row: Int32, first: Int32, count: Int32) -> Line:
        """Return an arriving row, or one of this rank's own answers, which are ``count`` rows from ``first`` on."""
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
    """Exchange tokens to the ranks of their experts, or answers back.

    Args:
        cuts: the tilings by which rows and, if any, weights are copied: the ``vector`` divides the numbers of
            columns, the pitches and the alignment of all of them.
        sums: the tilings by which answers are added up; none for tokens.
    """

    def __init__(self, cuts: tuple[PermuteTiling, ...], sums: tuple[PermuteTiling, ...] = ()):
        self.copies = [RowPushes(cut) for cut in cuts]
        self.sums = [RankSums(cut) for cut in sums]

    @cute.jit
    def __call__(self, places: cute.Tensor, all_moved: tuple, ways: ExchangeState, blocks: Int32, stream):
        """Launch.

        Args:
            places: ``token`` int32 ``[W P]``, -1 where unused, for every rank the used ones of its P first; for answers
                ``position`` int32 ``[S c]``.
            all_moved: a ``Moved`` of rows, and one of weights if there are some.
            ways: the state shared between ranks.
            blocks: number of blocks, at most.
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
        """Return the number of pieces that the rows for a rank make."""
        return ceil_div(Int32(part.shape[0]) // ways.ranks, ways.piece)

    @cute.kernel
    def kernel(self, all_moved: Any, token: Any, position: Any, ways: ExchangeState):
        """Process this block's share of the exchange."""
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        self.flow(all_moved, token, position, ways, block, blocks)

    @cute.jit
    def flow(self, all_moved: Any, token: Any, position: Any, ways: ExchangeState, block: Int32, blocks: Int32):
        """Push or take rows, depending on the warp."""
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
        """Push pieces for other ranks until there are no more, each with its flag.

        A lane reads the facts about its own peer once, because acquiring flags invalidates the cache. Every peer gets a
        first piece, even if it has no row: all ranks read row 0 as the answer of a step over capacity, and a rank whose
        first flag is missing has not arrived.
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
        """Release the flag of a piece that this warp has stored."""
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            place = place_of(further(ways.flags, peer.away), ways.rank, at)
            cute.arch.store(place, peer.now, sem="release", scope="sys")

    @cute.jit
    def draw(self, epoch: cute.Tensor) -> Int32:
        """Draw the number of a piece; no two warps get the same."""
        number = Int32(0)
        if cute.arch.lane_idx() == 0:
            number = cute.arch.atomic_add((epoch.iterator + 1).llvm_ptr, Int32(1), sem="relaxed", scope="gpu")
        return cute.arch.shuffle_sync(number, 0)

    @cute.jit
    def send(self, all_moved: Any, token: Any, ways: ExchangeState, peer: Peer, first: Int32, count: Int32):
        """Copy ``count`` rows to a peer."""
        pair_rows = Int32(all_moved[0].part.shape[0]) // ways.ranks
        source, to = peer.rank * pair_rows + first, ways.rank * pair_rows + first
        for i in cutlass.range_constexpr(len(all_moved)):
            rows, part, _ = all_moved[i]
            self.copies[i].copy(rows, token, source, further(part, peer.away), to, count)

    @cute.jit
    def take(self, all_moved: Any, token: cute.Tensor, ways: ExchangeState, warp: Int32, warps: Int32):
        """Copy arrived pieces out of the memory that the next exchange overwrites, and fill in those never sent."""
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
