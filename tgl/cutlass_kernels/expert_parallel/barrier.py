"""A barrier of the ranks of a group, which also signals how many rows each rank is about to send.

Rank r counts its barriers. It writes the count into every rank's memory, in slot r, and waits until every slot of its
own memory holds a count at least as high: loads and stores only, and nothing to reset, so that a captured graph with
any number of barriers can be replayed. Everything that the rank's earlier launches wrote is ordered before its count
(release and acquire at system scope), and everything that its later launches read after those of the others.

An exchange is a barrier, writes to other ranks' memory, a wait for theirs, and reads of the own memory. So no rank
writes before all have read the data of the previous exchange. The wait is a second barrier, or flags of rows
(``exchange``). In the first barrier, rank r signals to every other rank how many rows it sends there. A rank may be one
barrier ahead when it does, so that there are two slots for the counts.

=========  =============================================================================================================
warp d     signals rank d, and waits for it
lanes      of a warp count the rows for rank d: they come first in its part of ``token``, and 32 lanes that probe at
           equal distances leave a 32nd of the range
=========  =============================================================================================================
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass._mlir.dialects import llvm

from ...meta.symmetric_memory import SLOTS

LANES = 32


class Told(NamedTuple):
    """Fields of ``Peers`` that a barrier writes."""

    epoch: cute.Tensor
    arrived: cute.Tensor
    leaving: cute.Tensor


class BarrierKernel:
    """The barrier; the first of an exchange with ``token``, the second without.

    Args:
        ranks: W, at most 32.
    """

    def __init__(self, ranks: int):
        self.ranks = ranks

    @cute.jit
    def __call__(
        self,
        table: cute.Tensor,
        control: cute.Tensor,
        told: Told,
        token: cute.Tensor | None,
        watch: cute.Tensor,
        rank: Int32,
        stream,
    ):
        """Launch.

        Args:
            table, control: of ``Peers``.
            told: likewise.
            token: int32 ``[W P]``, for every rank P entries, the used ones first, then -1.
            watch: int64 ``[2]``, a row of ``watch`` of ``Peers``.
            rank: this rank.
            stream: CUDA stream.
        """
        self.kernel(table, control, told, token, watch, rank).launch(
            grid=(1, 1, 1), block=(LANES * self.ranks, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        table: cute.Tensor,
        control: cute.Tensor,
        told: Told,
        token: cute.Tensor | None,
        watch: cute.Tensor,
        rank: Int32,
    ):
        """Run the barrier in one block."""
        self.meet(table, control, told, token, watch, rank)

    @cute.jit
    def meet(
        self,
        table: cute.Tensor,
        control: cute.Tensor,
        told: Told,
        token: Any,
        watch: cute.Tensor,
        rank: Int32,
    ):
        """Signal all ranks and wait for them, by the threads of the block."""
        thread, _, _ = cute.arch.thread_idx()
        peer = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        now = told.epoch[0] + 1
        cute.arch.sync_threads()
        if thread == 0:
            told.epoch[0] = now
            told.epoch[1] = Int32(0)
        slot = self.ranks * (1 + (now & (SLOTS - 1)))
        count = Int32(0)
        if cutlass.const_expr(token is not None):
            rows = Int32(cute.size(token)) // self.ranks
            count = self.used(token, peer * rows, rows)
        if cute.arch.lane_idx() == 0:
            theirs = cute.make_ptr(Int32, table[peer], cute.AddressSpace.gmem, assumed_align=4)
            if cutlass.const_expr(token is not None):
                told.leaving[peer] = count
                cute.arch.store((theirs + slot + rank).llvm_ptr, count, sem="relaxed", scope="sys")
            cute.arch.fence_acq_rel_sys()
            cute.arch.store((theirs + rank).llvm_ptr, now, sem="release", scope="sys")
            barrier = 0 if cutlass.const_expr(token is not None) else 1
            counts = cute.make_tensor(control.iterator, cute.make_layout((self.ranks, 1)))
            wait(counts, peer, Int32(0), now, watch, barrier, exactly=False)
            if cutlass.const_expr(token is not None):
                here = (control.iterator + slot + peer).llvm_ptr
                told.arrived[peer] = cute.arch.load(here, Int32, sem="relaxed", scope="sys")

    @cute.jit
    def used(self, token: cute.Tensor, first: Int32, rows: Int32) -> Int32:
        """Return how many of ``rows`` entries from ``first`` on are not negative; those come before all others."""
        low, high = Int32(0), rows
        while low < high:
            step = (high - low + LANES - 1) // LANES
            last = low + (cute.arch.lane_idx() + 1) * step - 1
            full = Int32(0)
            if last < high:
                full = Int32(token[first + last] >= 0)
            steps = cute.arch.popc(cute.arch.vote_ballot_sync(full != 0))
            low += steps * step
            high = cutlass.min(high, low + step - 1)
        return low


@cute.jit
def wait(
    counts: cute.Tensor,
    peer: Int32,
    at: Int32,
    now: Int32,
    watch: cute.Tensor,
    barrier: int,
    exactly: cutlass.Constexpr,
):
    """Wait until ``counts[peer, at]`` of this rank's memory is ``now``, or at least that in wrap-around arithmetic.

    A wait that times out is reported to the host before the trap, because nothing can be read from a stopped device. It
    reports all ranks whose first count is missing, since the first trap stops all.
    """
    seen = cute.arch.load(place_of(counts, peer, at), Int32, sem="acquire", scope="sys")
    if missing(seen, now, exactly):
        begin = cute.arch.globaltimer()
        while missing(seen, now, exactly):
            if cute.arch.globaltimer() - begin > watch[0]:
                ranks = Int32(counts.shape[0])
                missed = cute.make_ptr(Int32, watch[1], cute.AddressSpace.gmem, assumed_align=4) + barrier * ranks
                for other in cutlass.range(ranks, unroll=1):
                    count = cute.arch.load(place_of(counts, other, Int32(0)), Int32, sem="relaxed", scope="sys")
                    if other == peer or missing(count, now, exactly):
                        cute.arch.store((missed + other).llvm_ptr, Int32(1), sem="relaxed", scope="sys")
                cute.arch.fence_acq_rel_sys()
                llvm.inline_asm(None, [], "trap;", "", has_side_effects=True)
            seen = cute.arch.load(place_of(counts, peer, at), Int32, sem="acquire", scope="sys")


def missing(seen: Int32, now: Int32, exactly: bool) -> Any:
    """Return whether a count has not arrived yet."""
    return seen != now if exactly else seen - now < 0


def place_of(counts: cute.Tensor, peer: Int32, at: Int32) -> Any:
    """Return the address of a count."""
    return (counts.iterator + cute.crd2idx((peer, at), counts.layout)).llvm_ptr
