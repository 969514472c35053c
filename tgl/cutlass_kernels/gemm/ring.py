"""Barriers of a ring of buffers in shared memory, between warps that fill the buffers and warps that read them.

Every user counts stages and phases on its own. A barrier shows only whether the number of rounds is even or odd; the
first wait for an ``empty`` barrier succeeds at once, since a new barrier counts as past a phase of odd parity.
"""

from typing import NamedTuple

import cutlass
from cutlass import Int32, Int64, cute


class RingBarriers(NamedTuple):
    """The barriers of the ring, ``stages`` of each."""

    full: cute.Pointer
    empty: cute.Pointer


def allocate_ring(allocator, stages: int) -> RingBarriers:
    """Allocate shared memory for the barriers."""
    pointer = allocator.allocate_array(Int64, num_elems=2 * stages)
    return RingBarriers(pointer, pointer + stages)


@cute.jit
def open_ring(
    ring: RingBarriers, stages: cutlass.Constexpr, producers: cutlass.Constexpr, consumer_warps: cutlass.Constexpr
):
    """Initialise the barriers; one thread calls it, then the cluster synchronises.

    Args:
        producers: arrivals that fill a stage.
        consumer_warps: number of consumer warps of all CTAs of the cluster.
    """
    for stage in cutlass.range_constexpr(stages):
        cute.arch.mbarrier_init(ring.full + stage, producers)
        cute.arch.mbarrier_init(ring.empty + stage, consumer_warps)
    cute.arch.mbarrier_init_fence()


@cute.jit
def advance(stage: Int32, phase: Int32, stages: cutlass.Constexpr) -> tuple[Int32, Int32]:
    """Return the stage after ``stage``, and the phase of its barriers."""
    stage += 1
    if stage == stages:
        stage = Int32(0)
        phase ^= 1
    return stage, phase


@cute.jit
def release(ring: RingBarriers, stage: Int32, ctas: cutlass.Constexpr):
    """Give a stage back to the producers of all CTAs of the cluster, once per warp."""
    lane = cute.arch.lane_idx()
    if lane < ctas:
        if cutlass.const_expr(ctas > 1):
            cute.arch.mbarrier_arrive(ring.empty + stage, lane)
        else:
            cute.arch.mbarrier_arrive(ring.empty + stage)
