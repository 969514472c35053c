"""Scan of group sizes to cumulative ends, by one thread block.

========  ====================================================================
threads   role
========  ====================================================================
all 256   take one size each per round, scan it over the warp by shuffles
warp 0    (all warps, redundantly) adds up the totals of the warps before it
========  ====================================================================

A round covers 256 groups; the sum so far is carried to the next, so any number of groups works.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.memory import SmemAllocator

THREADS = 256
WARPS = THREADS // 32


class SplitsToOffsetsKernel:
    """The kernel for ``offs[g] = m_splits[0] + ... + m_splits[g]``; wider sizes are truncated to int32 first."""

    @cute.jit
    def __call__(self, m_splits: cute.Tensor, offs: cute.Tensor, stream):
        """Launch the scan.

        Args:
            m_splits: ``[G]``, any integer dtype and stride; G > 0.
            offs: int32 ``[G]``.
            stream: CUDA stream.
        """
        self.kernel(m_splits, offs).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, m_splits: cute.Tensor, offs: cute.Tensor):
        """Scan the sizes."""
        tid, _, _ = cute.arch.thread_idx()
        lane = cute.arch.lane_idx()
        warp = cute.arch.warp_idx()
        groups = cute.size(m_splits)
        totals = SmemAllocator().allocate_tensor(Int32, cute.make_layout((WARPS, 2)), byte_alignment=8)
        carry = Int32(0)
        for base in cutlass.range(0, groups, THREADS, unroll=1):
            group = base + tid
            value = Int32(0)
            if group < groups:
                value = m_splits[group].to(Int32)
            for step in cutlass.range_constexpr(5):
                before = cute.arch.shuffle_sync_up(value, 1 << step)
                if lane >= (1 << step):
                    value += before
            # Two sets of totals alternate: a warp may be a round ahead of one that still reads, never two.
            turn = (base // THREADS) % 2
            if lane == 31:
                totals[warp, turn] = value
            cute.arch.sync_threads()
            for other in cutlass.range_constexpr(WARPS):
                total = totals[other, turn]
                if other < warp:
                    value += total
                # `value` is this thread's; `carry` must stay the same in every thread.
            value += carry
            for other in cutlass.range_constexpr(WARPS):
                carry += totals[other, turn]
            if group < groups:
                offs[group] = value
