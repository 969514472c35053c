"""Sort of few top-k slots by expert: one block, in which a thread looks at every pair (token, slot).

A pair's row is the number of pairs before it, by expert and then by number, and an expert's end is the number of pairs
with its or a lower number. Both are counted pair by pair from shared memory, in no more steps than there are pairs. The
kernel for more pairs, ``route_kernel``, has eight times the instructions, which are fetched from memory once other data
has evicted them from L2.
"""

import cutlass
from cutlass import Int32, cute
from cutlass.memory import SmemAllocator

from .. import instructions
from .route_kernel import expert_of

THREADS = 128


class RouteFewKernel:
    """``RouteKernel`` for at most ``most`` pairs, up to ``THREADS``."""

    def __init__(self, most: int):
        self.most = most

    @cute.jit
    def __call__(self, top_k_index: cute.Tensor, places: tuple, offs: cute.Tensor, table: None, overlap: Int32, stream):
        """Launch; the arguments are those of ``RouteKernel`` with a single block."""
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
        """Sort all pairs; those of no expert count as an expert after the last."""
        instructions.follow()
        pair, _, _ = cute.arch.thread_idx()
        top_k, pairs = Int32(top_k_index.shape[1]), Int32(cute.size(position))
        groups, rows = Int32(cute.size(offs)), Int32(cute.size(source))
        experts = SmemAllocator().allocate_tensor(Int32, cute.make_layout(self.most), byte_alignment=16)
        own, row = groups, pair // top_k
        if pair < pairs:
            own = expert_of(top_k_index[row, pair - row * top_k], cutlass.Boolean(True), groups)
            experts[pair] = own
        cute.arch.sync_threads()
        before, routed = Int32(0), Int32(0)
        for other in cutlass.range(pairs, unroll=4):
            expert = experts[other]
            if expert < groups:
                routed += 1
            if expert < own or (expert == own and other < pair):
                before += 1
        if pair < pairs:
            place = Int32(-1)
            if own < groups and before < rows:
                place = before
                source[place] = pair
                token[place] = row
            position[pair] = place
        for group in cutlass.range(pair, groups, THREADS, unroll=1):
            end = Int32(0)
            for other in cutlass.range(pairs, unroll=4):
                if experts[other] <= group:
                    end += 1
            offs[group] = cutlass.min(end, rows)
        for tail in cutlass.range(routed + pair, rows, THREADS, unroll=1):
            source[tail] = Int32(-1)
            token[tail] = Int32(-1)
