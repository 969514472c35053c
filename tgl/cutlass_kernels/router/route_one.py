"""Sort of up to 4,096 top-k slots by expert, by one block in one launch.

The sort is that of ``route_kernel`` without a table. Rows are put in order in shared memory before they are stored: a
warp's 32 adjacent pairs have rows all over memory, each of which would be a separate transaction.

========  ==============================================================================================
threads   role
========  ==============================================================================================
warp w    ranks the w-th run of up to 256 pairs, 32 in a round
thread t  has experts t and t + 512: adds up their counts over warps, and takes part in the scan over
          experts; stores every 512-th row
========  ==============================================================================================

With 32 warps of half as many rounds it takes 0.2 to 0.7 us more on an H100.
"""

import cutlass
from cutlass import Int16, Int32, cute
from cutlass.memory import SmemAllocator

from .. import instructions
from .route_kernel import LANES, WARPS, Ranking, expert_of
from .sizes import ROUNDS, THREADS, TILE


class RouteOneKernel(Ranking):
    """``RouteKernel`` for at most ``TILE`` pairs."""

    def __init__(self, bits: int):
        super().__init__(bits, ROUNDS)

    @cute.jit
    def __call__(self, top_k_index: cute.Tensor, places: tuple, offs: cute.Tensor, table: None, overlap: Int32, stream):
        """Launch; arguments of ``RouteKernel``, and whether it overlaps the launch before, see ``overlap``."""
        self.sort(top_k_index, *places, offs).launch(
            grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=instructions.attribute(overlap)
        )

    @cute.kernel
    def sort(
        self,
        top_k_index: cute.Tensor,
        source: cute.Tensor,
        position: cute.Tensor,
        token: cute.Tensor,
        offs: cute.Tensor,
    ):
        """Sort all pairs."""
        instructions.follow()
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        groups, rows = Int32(cute.size(offs)), Int32(cute.size(source))
        top_k, pairs = Int32(top_k_index.shape[1]), Int32(cute.size(position))
        smem = SmemAllocator()
        # A warp has up to 256 pairs of an expert, and all warps together 4,096.
        counts = smem.allocate_tensor(Int16, cute.make_layout((self.experts, WARPS)), byte_alignment=16)
        bases = smem.allocate_tensor(Int32, cute.make_layout(self.experts), byte_alignment=16)
        totals = smem.allocate_tensor(Int32, cute.make_layout((WARPS, 2)), byte_alignment=16)
        held = smem.allocate_tensor(Int32, cute.make_layout(TILE), byte_alignment=16)
        rounds = cute.ceil_div(pairs, THREADS)
        run = warp * rounds * LANES + cute.arch.lane_idx()
        chosen, _ = self.load(top_k_index, run, LANES)
        experts, ranks = cute.make_rmem_tensor(self.rounds, Int32), cute.make_rmem_tensor(self.rounds, Int32)
        for i in cutlass.range_constexpr(self.rounds):
            experts[i] = expert_of(chosen[i], run + i * LANES < pairs, groups)
        self.rank(counts[None, warp], experts, ranks, rounds, groups)
        cute.arch.sync_threads()
        routed = Int32(0)
        for first in cutlass.range(0, groups, THREADS, unroll=1):
            group, own = first + thread, Int32(0)
            if group < groups:
                for other in cutlass.range(0, WARPS, 1, unroll=8):
                    count = counts[group, other].to(Int32)
                    counts[group, other] = own.to(Int16)
                    own += count
            # Two sets of totals alternate: a warp may be a round ahead of one that still reads, never two.
            end, routed = self.sum_up(own, routed, totals[None, (first // THREADS) % 2])
            if group < groups:
                bases[group] = end - own
                offs[group] = cutlass.min(end, rows)
        cute.arch.sync_threads()
        for i in cutlass.range_constexpr(self.rounds):
            pair = run + i * LANES
            if i < rounds and pair < pairs:
                row = rows
                if experts[i] < groups:
                    row = bases[experts[i]] + counts[experts[i], warp].to(Int32) + ranks[i]
                if row < rows:
                    held[row] = pair
                else:
                    row = Int32(-1)
                position[pair] = row
        cute.arch.sync_threads()
        for row in cutlass.range(thread, rows, THREADS, unroll=1):
            pair, own = Int32(-1), Int32(-1)
            if row < routed:
                pair = held[row]
                own = pair // top_k
            source[row] = pair
            token[row] = own
