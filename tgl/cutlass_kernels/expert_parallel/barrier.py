"""A barrier of the ranks of a group, in which they tell each other how many rows they are about to send.

Rank r counts its barriers. It writes the count into the memory of every rank, at the place of r, and waits until its
own memory holds a count as high of every rank: stores and loads alone, and nothing to reset, so that a captured graph
of any number of barriers may be replayed. What the rank's earlier launches wrote anywhere comes before its count
(release and acquire of the whole system), and what its later launches read comes behind those of the others.

An exchange is a barrier, writes to the memory of others, a wait for theirs and reads of the own memory. So no rank
writes before all have read what the exchange before has brought. What is waited for is a second barrier, or flags of
rows (``exchange``). In the first barrier, rank r tells every other one how many rows it sends there. A rank may be one
barrier ahead when it tells, so that there are two places to tell in.

=========  =============================================================================================================
warp d     tells rank d, and waits for it
lanes      of a warp find how many rows go to rank d: they stand at the beginning of its ``token``, and 32 lanes that
           ask at equal distances leave a 32nd of the range
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
    """Of ``Peers``, what a barrier leaves behind."""

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
            token: int32 ``[W P]``, of every rank's P the used ones first, -1 behind them.
            watch: int64 ``[2]``, a row of that of ``Peers``.
            rank: this one.
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
        """One block."""
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
        """A block's part."""
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
        """How many of ``rows`` numbers are not negative, from ``first`` on, where those come before all others."""
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
    """Until ``counts[peer, at]`` of this rank's memory is ``now``, or no less in arithmetic that wraps around.

    What has waited in vain says so to the host, which can ask nothing of a device that has stopped. It does so for all
    ranks whose first count has not come, since the first trap stops all.
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
    """Whether a count has not come yet."""
    return seen != now if exactly else seen - now < 0


def place_of(counts: cute.Tensor, peer: Int32, at: Int32) -> Any:
    """The address of a count."""
    return (counts.iterator + cute.crd2idx((peer, at), counts.layout)).llvm_ptr
