"""Sort of top-k slots by expert: a stable counting sort in two launches, without order-dependent atomics.

The pairs (token, slot) are cut into equal chunks, one per block. The first kernel counts the experts of every chunk
into a table. In the second, a block finds the rows of its chunk: those of an expert begin where the experts before it
end, after the expert's pairs in the chunks before. Few pairs are a single chunk, for ``route_one``.

A warp ranks 32 adjacent pairs at a time. One ballot per bit of the expert's number gives each lane the set of lanes
with its expert, so that its rank is the number of those below it, plus the warp's count of that expert so far. The
counts of a block's warps are added up expert by expert, in the order of the warps. So pairs of one expert keep their
order, and the result depends only on the pairs.

==============  =====================================================================================================
threads         role
==============  =====================================================================================================
warp w          ranks the w-th run of up to 256 pairs of each 4,096 of the chunk, 32 in a round
thread t        has experts t and t + 512: adds up their counts over warps, and takes part in the scan over experts
quads of lanes  of the table: a thread adds up four adjacent experts over every n-th chunk, n of them in parallel
==============  =====================================================================================================

The second kernel starts while the first one runs (programmatic dependent launch) and ranks its first 4,096 pairs before
it waits for the table. The estimated cost of 131,072 int64 pairs among 128 experts, in 64 chunks: 1 MiB read twice and
1.5 MiB written, a table of 32 KiB that every block reads, and about 4,300 and 14,500 warp instructions of a block
(counted by the emulator), which four schedulers issue in 1,100 and 3,600 cycles: less than 3 us beside two launches.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.memory import SmemAllocator

from .. import instructions
from .sizes import MOST_EXPERTS, QUAD, ROUNDS, THREADS, TILE

LANES = 32
WARPS = THREADS // LANES


@cute.jit
def expert_of(chosen: Any, exists: cutlass.Boolean, groups: Int32) -> Int32:
    """Return the expert of a pair; ``groups`` for a number out of range, and for a pair that does not exist."""
    if cutlass.const_expr(chosen.width < Int32.width):
        chosen = chosen.to(Int32)
    found = groups
    if exists and chosen >= 0 and chosen < groups:
        found = chosen.to(Int32)
    return found


class Ranking:
    """A warp's pairs and their ranks.

    Args:
        bits: bits of an expert's number, ``groups`` included.
        rounds: rounds of 32 pairs that a warp ranks, at most.
    """

    def __init__(self, bits: int, rounds: int):
        self.bits, self.rounds = bits, rounds
        self.experts = min(max(1 << bits, QUAD), MOST_EXPERTS)  # at most, in whole quads

    @cute.jit
    def load(self, top_k_index: cute.Tensor, pair: Int32, step: cutlass.Constexpr) -> tuple[cute.Tensor, cute.Tensor]:
        """Load the experts of ``pair`` and of every ``step``-th pair after it, and their tokens, ``rounds`` at once.

        Pairs past the last one get another's expert. Tokens are counted up, as a division takes 20 instructions.
        """
        top_k, last = Int32(top_k_index.shape[1]), Int32(top_k_index.shape[0]) - 1
        chosen = cute.make_rmem_tensor(self.rounds, top_k_index.element_type)
        tokens = cute.make_rmem_tensor(self.rounds, Int32)
        down = Int32(step) // top_k
        across = step - down * top_k
        row = pair // top_k
        column = pair - row * top_k
        for i in cutlass.range_constexpr(self.rounds):
            chosen[i] = top_k_index[cutlass.min(row, last), column]
            tokens[i] = row
            row, column = row + down, column + across
            if column >= top_k:
                row, column = row + 1, column - top_k
        return chosen, tokens

    @cute.jit
    def rank(self, counts: cute.Tensor, experts: cute.Tensor, ranks: cute.Tensor, rounds: Int32, groups: Int32):
        """Rank a warp's pairs among those of their experts, and count each expert's pairs in ``counts``."""
        lane = cute.arch.lane_idx()
        below = (Int32(1) << lane) - 1
        for group in cutlass.range(lane, groups, LANES, unroll=1):
            counts[group] = counts.element_type(0)
        cute.arch.sync_warp()
        for i in cutlass.range_constexpr(self.rounds):
            ranks[i] = Int32(0)
            if i < rounds:
                alike = Int32(-1)
                for j in cutlass.range_constexpr(self.bits):
                    bit = (experts[i] >> j) & 1
                    alike &= cute.arch.vote_ballot_sync(bit != 0) ^ (bit - 1)
                before = cute.arch.popc(alike & below)
                counted = Int32(0)
                if experts[i] < groups:
                    counted = counts[experts[i]].to(Int32)
                cute.arch.sync_warp()
                if experts[i] < groups and before == 0:
                    counts[experts[i]] = (counted + cute.arch.popc(alike)).to(counts.element_type)
                cute.arch.sync_warp()
                ranks[i] = counted + before

    @cute.jit
    def sum_up(self, own: Int32, end: Int32, totals: cute.Tensor) -> tuple[Int32, Int32]:
        """Return ``end`` plus the sum over threads up to this one, and ``end`` plus the sum over all, by all threads.

        Args:
            totals: as many as there are warps, written.
        """
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        value = own
        for i in cutlass.range_constexpr(5):
            left = cute.arch.shuffle_sync_up(value, 1 << i)
            if lane >= (1 << i):
                value += left
        if lane == LANES - 1:
            totals[warp] = value
        cute.arch.sync_threads()
        of_warp, of_earlier = Int32(0), Int32(0)
        if lane < cute.size(totals):
            of_warp = totals[lane]
        if lane < warp:
            of_earlier = of_warp
        value += end + cute.arch.warp_redux_sync(of_earlier, "add")
        return value, end + cute.arch.warp_redux_sync(of_warp, "add")


class RouteKernel(Ranking):
    """Compute the rows of pairs, and the pairs of rows."""

    def __init__(self, bits: int):
        super().__init__(bits, ROUNDS)

    @cute.jit
    def __call__(
        self,
        top_k_index: cute.Tensor,
        places: tuple,
        offs: cute.Tensor,
        table: cute.Tensor,
        overlap: Int32,
        stream,
    ):
        """Launch the kernels.

        Args:
            top_k_index: ``[S, k]``, any integer dtype and strides; S and k > 0, up to 2^30 elements.
            places: the outputs: the pairs of rows, int32 ``[T]``, any number of rows; the rows of pairs, int32
                ``[S k]``; and the tokens of rows, int32 ``[T]``.
            offs: int32 ``[G]``; ``0 < G <= 1024``.
            table: int32 ``[blocks, G rounded up to 4]``, a workspace.
            overlap: used by the kernels for fewer pairs.
            stream: CUDA stream.
        """
        blocks = table.shape[0]
        self.count(top_k_index, Int32(cute.size(offs)), table).launch(
            grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream
        )
        self.sort(top_k_index, *places, offs, table).launch(
            grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=instructions.overlaps()
        )

    @cute.kernel
    def count(self, top_k_index: cute.Tensor, groups: Int32, table: cute.Tensor):
        """Count the experts of a chunk; integer sums, so the order of the atomics does not matter."""
        instructions.launch_dependents()
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        counts = SmemAllocator().allocate_tensor(Int32, cute.make_layout(self.experts), byte_alignment=16)
        for group in cutlass.range(thread, table.shape[1], THREADS, unroll=1):
            counts[group] = Int32(0)
        cute.arch.sync_threads()
        begin, end = self.chunk(top_k_index, block)
        for base in cutlass.range(begin, end, TILE, unroll=1):
            pair = base + thread
            chosen, _ = self.load(top_k_index, pair, THREADS)
            for i in cutlass.range_constexpr(ROUNDS):
                expert = expert_of(chosen[i], pair + i * THREADS < end, groups)
                if expert < groups:
                    cute.arch.atomic_add((counts.iterator + expert).llvm_ptr, Int32(1), sem="relaxed", scope="cta")
        cute.arch.sync_threads()
        for group in cutlass.range(thread, table.shape[1], THREADS, unroll=1):
            table[block, group] = counts[group]

    @cute.kernel
    def sort(
        self,
        top_k_index: cute.Tensor,
        source: cute.Tensor,
        position: cute.Tensor,
        token: cute.Tensor,
        offs: cute.Tensor,
        table: cute.Tensor,
    ):
        """Write the rows of a chunk's pairs, and a share of the rows that belong to no expert."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        groups, rows = Int32(cute.size(offs)), Int32(cute.size(source))
        smem = SmemAllocator()
        counts = smem.allocate_tensor(Int32, cute.make_layout((self.experts, WARPS)), byte_alignment=16)
        bases = smem.allocate_tensor(Int32, cute.make_layout(self.experts), byte_alignment=16)
        totals = smem.allocate_tensor(Int32, cute.make_layout((WARPS, 2)), byte_alignment=16)
        sums = smem.allocate_tensor(Int32, cute.make_layout((QUAD * THREADS, 2)), byte_alignment=16)
        begin, end = self.chunk(top_k_index, block)
        experts, ranks = cute.make_rmem_tensor(ROUNDS, Int32), cute.make_rmem_tensor(ROUNDS, Int32)
        routed = Int32(0)
        for base in cutlass.range(begin, cutlass.max(end, begin + 1), TILE, unroll=1):  # once if there are no pairs
            rounds = cutlass.min(cute.ceil_div(end - base, THREADS), Int32(ROUNDS))
            run = base + warp * rounds * LANES + cute.arch.lane_idx()
            chosen, tokens = self.load(top_k_index, run, LANES)
            for i in cutlass.range_constexpr(ROUNDS):
                experts[i] = expert_of(chosen[i], run + i * LANES < end, groups)
            self.rank(counts[None, warp], experts, ranks, rounds, groups)
            cute.arch.sync_threads()
            if base == begin:
                instructions.wait()
                self.add_chunks(table, sums)
                cute.arch.sync_threads()
                routed = self.scan(sums, bases, totals, offs, rows)
            for group in cutlass.range(thread, groups, THREADS, unroll=1):
                row = bases[group]
                for other in cutlass.range_constexpr(WARPS):
                    count = counts[group, other]
                    counts[group, other] = row
                    row += count
                bases[group] = row
            cute.arch.sync_threads()
            for i in cutlass.range_constexpr(ROUNDS):
                pair = run + i * LANES
                if i < rounds and pair < end:
                    row = rows
                    if experts[i] < groups:
                        row = counts[experts[i], warp] + ranks[i]
                    if row < rows:
                        source[row] = pair
                        token[row] = tokens[i]
                    else:
                        row = Int32(-1)
                    position[pair] = row
            cute.arch.sync_threads()
        for row in cutlass.range(routed + block * THREADS + thread, rows, blocks * THREADS, unroll=1):
            source[row] = Int32(-1)
            token[row] = Int32(-1)

    @cute.jit
    def chunk(self, top_k_index: cute.Tensor, block: Int32) -> tuple[Int32, Int32]:
        """Return the pairs of a block: equally many for each, in whole rounds of all warps."""
        blocks, _, _ = cute.arch.grid_dim()
        pairs = Int32(top_k_index.shape[0]) * Int32(top_k_index.shape[1])
        size = cute.ceil_div(cute.ceil_div(pairs, blocks), THREADS) * THREADS
        begin = cutlass.min(block * size, pairs)
        return begin, cutlass.min(begin + size, pairs)

    @cute.jit
    def add_chunks(self, table: cute.Tensor, sums: cute.Tensor):
        """Write to ``sums`` every expert's pairs in the chunks before this one, and in all chunks, in parts."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks = Int32(table.shape[0])
        quads = Int32(table.shape[1]) // QUAD
        part = thread // quads
        parts = THREADS // quads
        quad = thread - part * quads
        before, everything = cute.make_rmem_tensor(QUAD, Int32), cute.make_rmem_tensor(QUAD, Int32)
        before.fill(0)
        everything.fill(0)
        if part < parts:
            by_quads = cute.make_tensor(
                table.iterator, cute.make_layout((QUAD, quads, blocks), stride=(1, QUAD, QUAD * quads))
            )
            loaded = cute.make_rmem_tensor((QUAD, ROUNDS), Int32)
            for first in cutlass.range(part, blocks, parts * ROUNDS, unroll=1):
                for i in cutlass.range_constexpr(ROUNDS):
                    loaded[None, i].fill(0)
                    if first + i * parts < blocks:
                        cute.autovec_copy(by_quads[None, quad, first + i * parts], loaded[None, i])
                for i in cutlass.range_constexpr(ROUNDS):
                    for j in cutlass.range_constexpr(QUAD):
                        everything[j] += loaded[j, i]
                        if first + i * parts < block:
                            before[j] += loaded[j, i]
            for j in cutlass.range_constexpr(QUAD):
                sums[thread * QUAD + j, 0] = before[j]
                sums[thread * QUAD + j, 1] = everything[j]

    @cute.jit
    def scan(self, sums: cute.Tensor, bases: cute.Tensor, totals: cute.Tensor, offs: cute.Tensor, rows: Int32) -> Int32:
        """Write the first row of every expert in this chunk to ``bases``; block 0 writes the ends. Return the last one.

        An end is at most ``rows``; ``bases`` and the returned value are not clamped.
        """
        groups = Int32(cute.size(offs))
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        end = Int32(0)
        for first in cutlass.range(0, groups, THREADS, unroll=1):
            group = first + thread
            before, own = Int32(0), Int32(0)
            if group < groups:
                quads = cute.ceil_div(groups, QUAD)
                for part in cutlass.range(THREADS // quads, unroll=1):
                    before += sums[part * quads * QUAD + group, 0]
                    own += sums[part * quads * QUAD + group, 1]
            # Two sets of totals alternate: a warp may be a round ahead of one that still reads, never two.
            value, end = self.sum_up(own, end, totals[None, (first // THREADS) % 2])
            if group < groups:
                bases[group] = value - own + before
                if block == 0:
                    offs[group] = cutlass.min(value, rows)
        return end
