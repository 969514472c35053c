"""Placement of a rank's tokens: places and counts, the exchange of top-k slots, and the index of arrived rows.

A token's place is the number of tokens before it that go to the same rank, in the order of tokens: a sum over the
counts of warps in order, independent of thread scheduling. The counts of experts are integer sums, so the order of
atomics does not matter.

=======  ===============================================================================================================
Places   a thread per token, 256 in a block. More than one block take two launches: the first counts the rows of every
         block, and in the second a block adds up the counts of those before it. It starts while the first one runs
         (programmatic dependent launch). A single block took 50 us for 8,192 tokens of 8 slots
Choices  a lane for each slot of each place: 32 bytes a row beside the 14,336 of a token of 7,168 columns
Settle   every block adds up all counts, 8 ranks of 256 experts in 8 loads a thread, then does its share of the rows
=======  ===============================================================================================================
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.memory import SmemAllocator

from .. import instructions
from .put import beyond, spread
from .sizes import TOKENS

LANES = 32
WARPS = TOKENS // LANES
THREADS = 1024  # per block of the other kernels
SHARE = 8  # elements per thread of the kernels with many blocks


class PlacementKernel:
    """Compute ``position``, ``token`` and the counts of a rank.

    Args:
        ranks: W, at most 32.
        top_k: k.
        bits: bits of E: shared memory holds ``2^bits`` counts.
        invariant: a place per top-k slot instead of per rank.
        alone: whether one block has all tokens.
    """

    def __init__(self, ranks: int, top_k: int, bits: int, invariant: bool, alone: bool):
        self.ranks, self.top_k, self.invariant, self.alone = ranks, top_k, invariant, alone
        self.experts = 1 << bits

    @cute.jit
    def __call__(
        self,
        top_k_index: cute.Tensor,
        position: cute.Tensor,
        token: cute.Tensor,
        counts: cute.Tensor,
        table: Any,
        stream,
    ):
        """Launch.

        Args:
            top_k_index: ``[S, k]``, any integer dtype and strides.
            position: int32 ``[S c]``.
            token: int32 ``[W P]``.
            counts: int32 ``[E + W]``: top-k slots of every expert, rows for every rank.
            table: int32 ``[blocks, E + W]``, a workspace for counts per ``TOKENS`` tokens; None for one block.
            stream: CUDA stream.
        """
        blocks = 1
        if cutlass.const_expr(not self.alone):
            blocks = table.shape[0]
            self.count(top_k_index, table).launch(grid=(blocks, 1, 1), block=(TOKENS, 1, 1), stream=stream)
        self.kernel(top_k_index, position, token, counts, table).launch(
            grid=(blocks, 1, 1),
            block=(TOKENS, 1, 1),
            stream=stream,
            use_pdl=not self.alone and instructions.overlaps(),
        )

    @cute.kernel
    def count(self, top_k_index: cute.Tensor, table: cute.Tensor):
        """Count the slots of every expert and the rows for every rank, of a block's tokens."""
        instructions.launch_dependents()
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        experts = Int32(table.shape[1]) - self.ranks
        smem = SmemAllocator()
        totals = smem.allocate_tensor(Int32, cute.make_layout(self.experts), byte_alignment=16)
        sums = smem.allocate_tensor(Int32, cute.make_layout((WARPS, self.ranks)), byte_alignment=16)
        chosen = self.chosen(top_k_index, block * TOKENS + thread, experts)
        self.scan(self.owners(chosen, experts), sums)
        self.tell(chosen, sums, totals, table[block, None], experts)

    @cute.kernel
    def kernel(
        self, top_k_index: cute.Tensor, position: cute.Tensor, token: cute.Tensor, counts: cute.Tensor, table: Any
    ):
        """Write the places of a block's tokens, and its share of the unused places and of the counts."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        tokens, places = Int32(top_k_index.shape[0]), Int32(cute.size(token))
        experts, pair_rows = Int32(cute.size(counts)) - self.ranks, places // self.ranks
        smem = SmemAllocator()
        sums = smem.allocate_tensor(Int32, cute.make_layout((WARPS, self.ranks)), byte_alignment=16)
        starts = smem.allocate_tensor(Int32, cute.make_layout(self.ranks), byte_alignment=16)
        ends = smem.allocate_tensor(Int32, cute.make_layout(self.ranks), byte_alignment=16)
        number = block * TOKENS + thread
        chosen = self.chosen(top_k_index, number, experts)
        owners = self.owners(chosen, experts)
        before = self.scan(owners, sums)
        if cutlass.const_expr(self.alone):
            totals = smem.allocate_tensor(Int32, cute.make_layout(self.experts), byte_alignment=16)
            self.tell(chosen, sums, totals, counts, experts)
            if thread < self.ranks:
                starts[thread], ends[thread] = Int32(0), sum_of(sums, thread)
        else:
            instructions.wait()
            for column in cutlass.range(block * WARPS + warp, experts + self.ranks, blocks * WARPS, unroll=1):
                total = add_blocks(table, column, blocks)
                if lane == 0:
                    counts[column] = total
            for peer in cutlass.range(warp, self.ranks, WARPS, unroll=1):
                start, end = add_blocks(table, experts + peer, block), add_blocks(table, experts + peer, blocks)
                if lane == 0:
                    starts[peer], ends[peer] = start, end
        cute.arch.sync_threads()
        for peer in cutlass.range_constexpr(self.ranks):
            before[peer] += starts[peer]
        self.take(owners, before, number, position, token, pair_rows, tokens)
        for at in cutlass.range(number, places, blocks * TOKENS, unroll=1):
            peer = at // pair_rows
            if at - peer * pair_rows >= ends[peer]:
                token[at] = Int32(-1)

    @cute.jit
    def chosen(self, top_k_index: cute.Tensor, number: Int32, experts: Int32) -> cute.Tensor:
        """Return the experts of a token's top-k slots, -1 for a dropped slot."""
        chosen = cute.make_rmem_tensor(self.top_k, Int32)
        for j in cutlass.range_constexpr(self.top_k):
            chosen[j] = expert_of(top_k_index, number, j, experts)
        return chosen

    @cute.jit
    def owners(self, chosen: cute.Tensor, experts: Int32) -> cute.Tensor:
        """Return the rank of every top-k slot of a token, -1 for a dropped slot."""
        owners = cute.make_rmem_tensor(self.top_k, Int32)
        for j in cutlass.range_constexpr(self.top_k):
            owners[j] = Int32(-1)
            if chosen[j] >= 0:
                owners[j] = chosen[j] // (experts // self.ranks)
        return owners

    @cute.jit
    def tell(self, chosen: cute.Tensor, sums: cute.Tensor, totals: cute.Tensor, counts: cute.Tensor, experts: Int32):
        """Write a block's slots per expert, accumulated in ``totals``, and rows per rank to ``counts``."""
        thread, _, _ = cute.arch.thread_idx()
        for expert in cutlass.range(thread, experts, TOKENS, unroll=1):
            totals[expert] = Int32(0)
        cute.arch.sync_threads()
        for j in cutlass.range_constexpr(self.top_k):
            if chosen[j] >= 0:
                cute.arch.atomic_add((totals.iterator + chosen[j]).llvm_ptr, Int32(1), sem="relaxed", scope="cta")
        cute.arch.sync_threads()
        for expert in cutlass.range(thread, experts, TOKENS, unroll=1):
            counts[expert] = totals[expert]
        if thread < self.ranks:
            counts[experts + thread] = sum_of(sums, thread)

    @cute.jit
    def rows(self, owners: cute.Tensor, peer: int) -> Int32:
        """Return how many rows a token sends to a rank."""
        count = Int32(0)
        for j in cutlass.range_constexpr(self.top_k):
            if owners[j] == peer:
                count += 1
        if cutlass.const_expr(not self.invariant):
            count = cutlass.min(count, Int32(1))
        return count

    @cute.jit
    def scan(self, owners: cute.Tensor, sums: cute.Tensor) -> cute.Tensor:
        """Return every rank's rows from the block's tokens before this thread's; warp totals go to ``sums``."""
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        before = cute.make_rmem_tensor(self.ranks, Int32)
        for peer in cutlass.range_constexpr(self.ranks):
            own = self.rows(owners, peer)
            value = running(own)
            before[peer] = value - own
            if lane == LANES - 1:
                sums[warp, peer] = value
        cute.arch.sync_threads()
        for peer in cutlass.range_constexpr(self.ranks):
            for other in cutlass.range_constexpr(WARPS - 1):
                if other < warp:
                    before[peer] += sums[other, peer]
        return before

    @cute.jit
    def take(
        self,
        owners: cute.Tensor,
        before: cute.Tensor,
        number: Int32,
        position: cute.Tensor,
        token: cute.Tensor,
        pair_rows: Int32,
        tokens: Int32,
    ):
        """Write the places of a token."""
        if number < tokens:
            if cutlass.const_expr(self.invariant):
                for j in cutlass.range_constexpr(self.top_k):
                    at = Int32(-1)
                    for peer in cutlass.range_constexpr(self.ranks):
                        if owners[j] == peer:
                            at = self.put(token, number, peer, before[peer], pair_rows)
                            before[peer] += 1
                    position[number * self.top_k + j] = at
            else:
                for peer in cutlass.range_constexpr(self.ranks):
                    at = Int32(-1)
                    if self.rows(owners, peer) > 0:
                        at = self.put(token, number, peer, before[peer], pair_rows)
                    position[number * self.ranks + peer] = at

    @cute.jit
    def put(self, token: cute.Tensor, number: Int32, peer: int, row: Int32, pair_rows: Int32) -> Int32:
        """Write the place of a row and return it, -1 for one beyond the pair's capacity."""
        at = Int32(-1)
        if row < pair_rows:
            at = peer * pair_rows + row
            token[at] = number
        return at


@cute.jit
def running(value: Int32) -> Int32:
    """Return the inclusive prefix sum of a value over the lanes of a warp."""
    lane = cute.arch.lane_idx()
    for i in cutlass.range_constexpr(5):
        left = cute.arch.shuffle_sync_up(value, 1 << i)
        if lane >= (1 << i):
            value += left
    return value


@cute.jit
def sum_of(sums: cute.Tensor, peer: Int32) -> Int32:
    """Return the rows for a rank, summed over all warps."""
    total = Int32(0)
    for warp in cutlass.range_constexpr(WARPS):
        total += sums[warp, peer]
    return total


@cute.jit
def add_blocks(table: cute.Tensor, column: Int32, blocks: Int32) -> Int32:
    """Return the sum of a column over the first blocks, in all lanes of a warp."""
    total = Int32(0)
    for block in cutlass.range(cute.arch.lane_idx(), blocks, LANES, unroll=1):
        total += table[block, column]
    return cute.arch.warp_redux_sync(total, "add")


@cute.jit
def expert_of(top_k_index: cute.Tensor, number: Int32, choice: Any, experts: Int32) -> Int32:
    """Return the expert of a token's top-k slot, -1 if it is out of range or the token does not exist."""
    found = Int32(-1)
    if number < top_k_index.shape[0]:
        chosen = top_k_index[number, choice]
        if cutlass.const_expr(chosen.width < Int32.width):
            chosen = chosen.to(Int32)
        if chosen >= 0 and chosen < experts:
            found = chosen.to(Int32)
    return found


class SlotExchangeKernel:
    """Send to every place's rank its token's experts there, in local numbers, -1 for other slots.

    Args:
        invariant: a place has only its own slot.
    """

    def __init__(self, invariant: bool):
        self.invariant = invariant

    @cute.jit
    def __call__(
        self,
        top_k_index: cute.Tensor,
        position: cute.Tensor,
        token: cute.Tensor,
        table: cute.Tensor,
        counts: cute.Tensor,
        part: cute.Tensor,
        rank: Int32,
        stream,
    ):
        """Launch; S is at least 1.

        Args:
            top_k_index, position, token, counts: as for ``PlacementKernel``.
            table: of ``Peers``.
            part: int32 ``[W P, k]`` of this rank's memory.
            rank: this rank.
            stream: CUDA stream.
        """
        elements = Int32(part.shape[0]) * Int32(part.shape[1])
        self.kernel(top_k_index, position, token, table, counts, part, rank).launch(
            grid=(cute.ceil_div(elements, THREADS), 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        top_k_index: cute.Tensor,
        position: cute.Tensor,
        token: cute.Tensor,
        table: cute.Tensor,
        counts: cute.Tensor,
        part: cute.Tensor,
        rank: Int32,
    ):
        """Send one slot of a place per lane."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        ranks, places, top_k = Int32(cute.size(table)), Int32(part.shape[0]), Int32(part.shape[1])
        experts, pair_rows = Int32(cute.size(counts)) - ranks, places // ranks
        number = (block * THREADS + thread) // top_k
        choice = block * THREADS + thread - number * top_k
        if number < places:
            peer, at = spread(number, ranks, rank)
            owner = token[peer * pair_rows + at]
            if owner >= 0:
                local = experts // ranks
                chosen = expert_of(top_k_index, owner, choice, experts) - peer * local
                if chosen < 0 or chosen >= local:
                    chosen = Int32(-1)
                if cutlass.const_expr(self.invariant):  # noqa: SIM102 (one is known while tracing, the other is not)
                    if position[owner * top_k + choice] != peer * pair_rows + at:
                        chosen = Int32(-1)
                target = beyond(part, table, peer, rank)
                target[rank * pair_rows + at, choice] = chosen


class ArrivalKernel:
    """Compute ``index`` and ``needed`` from arrived slots; a step over capacity gets slots that spoil its results."""

    @cute.jit
    def __call__(
        self,
        counts: cute.Tensor,
        choices: cute.Tensor,
        arrived: cute.Tensor,
        position: cute.Tensor,
        index: cute.Tensor,
        needed: cute.Tensor,
        expert_rows: Int32,
        stream,
    ):
        """Launch.

        Args:
            counts: int32 ``[W, E + W]``, those of all ranks.
            choices: int32 ``[W P, k]``, of which the first ones from every rank have arrived.
            arrived: of ``Peers``.
            position: of ``PlacementKernel``; 0 where a step does not fit.
            index: int32 ``[W P, k]``, see ``tgl.meta.expert_parallel``.
            needed: int32 ``[2]``.
            expert_rows: capacity of the experts' rows.
            stream: CUDA stream.
        """
        elements = Int32(index.shape[0]) * Int32(index.shape[1])
        self.kernel(counts, choices, arrived, position, index, needed, expert_rows).launch(
            grid=(cute.ceil_div(elements, THREADS * SHARE), 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        counts: cute.Tensor,
        choices: cute.Tensor,
        arrived: cute.Tensor,
        position: cute.Tensor,
        index: cute.Tensor,
        needed: cute.Tensor,
        expert_rows: Int32,
    ):
        """Process a share of the rows."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        smem = SmemAllocator()
        most = smem.allocate_tensor(Int32, cute.make_layout(2), byte_alignment=16)
        sums = smem.allocate_tensor(Int32, cute.make_layout(LANES), byte_alignment=16)
        ranks, places, top_k = Int32(counts.shape[0]), Int32(index.shape[0]), Int32(index.shape[1])
        pair_rows, local = places // ranks, (Int32(counts.shape[1]) - ranks) // ranks
        self.add(counts, sums, most, local)
        full = most[0] > pair_rows or most[1] > expert_rows
        for n in cutlass.range(block * THREADS + thread, places * top_k, blocks * THREADS, unroll=1):
            row = n // top_k
            source = row // pair_rows
            chosen = Int32(-1)
            if full:
                if n < local:
                    chosen = n
                if row == source * pair_rows and n == row * top_k:
                    chosen = n % local
            elif row - source * pair_rows < arrived[source]:
                chosen = choices[row, n - row * top_k]
            index[row, n - row * top_k] = chosen
        if full:
            for n in cutlass.range(block * THREADS + thread, cute.size(position), blocks * THREADS, unroll=1):
                position[n] = Int32(0)
        if block == 0 and thread < 2:
            needed[thread] = most[thread]

    @cute.jit
    def add(self, counts: cute.Tensor, sums: cute.Tensor, most: cute.Tensor, local: Int32):
        """Update ``most`` with the rows of the largest pair, and of the rank whose experts get the most."""
        thread, _, _ = cute.arch.thread_idx()
        ranks = Int32(counts.shape[0])
        experts = local * ranks
        if thread < LANES:
            sums[thread] = Int32(0)
        if thread < 2:
            most[thread] = Int32(0)
        cute.arch.sync_threads()
        for n in cutlass.range(thread, ranks * experts, THREADS, unroll=1):
            source = n // experts
            expert = n - source * experts
            cute.arch.atomic_add(
                (sums.iterator + expert // local).llvm_ptr, counts[source, expert], sem="relaxed", scope="cta"
            )
        for n in cutlass.range(thread, ranks * ranks, THREADS, unroll=1):
            source = n // ranks
            count = counts[source, experts + n - source * ranks]
            cute.arch.atomic_max(most.iterator.llvm_ptr, count, sem="relaxed", scope="cta")
        cute.arch.sync_threads()
        if thread < ranks:
            cute.arch.atomic_max((most.iterator + 1).llvm_ptr, sums[thread], sem="relaxed", scope="cta")
        cute.arch.sync_threads()
