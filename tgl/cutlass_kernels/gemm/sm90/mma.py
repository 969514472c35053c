"""The consumer warpgroups' mainloop: wgmma over the stages of the ring."""

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import warpgroup

from .load import Ring, advance


@cute.jit
def release(ring: Ring, stage: Int32):
    """Give a stage back to the producer, once per warp."""
    if cute.arch.lane_idx() == 0:
        cute.arch.mbarrier_arrive(ring.empty + stage)


@cute.jit
def multiply(
    tiled_mma: cute.TiledMma,
    acc: cute.Tensor,
    a: cute.Tensor,
    b: cute.Tensor,
    ring: Ring,
    stage: Int32,
    phase: Int32,
    depth: Int32,
    stages: cutlass.Constexpr,
) -> tuple[Int32, Int32]:
    """``acc = A B`` over ``depth`` k tiles (zero if there is none); returns where the ring stands after them.

    One k tile's MMAs stay in flight while the next one's are issued, so a stage is given back one turn late.

    Args:
        tiled_mma: the warpgroups' MMA.
        acc: float32 registers ``((2, 2, N / 8), M, N)``.
        a, b: descriptors of the operands, ``[MMA, M or N, K, stage]``.
        ring, stage, phase, stages: the ring and where it stands.
        depth: k tiles.
    """
    previous = Int32(0)
    for k in cutlass.range(depth, unroll=1):
        cute.arch.mbarrier_wait(ring.full + stage, phase)
        warpgroup.fence()
        for block in cutlass.range_constexpr(cute.size(a, mode=[2])):
            tiled_mma.set(warpgroup.Field.ACCUMULATE, True if block else k != 0)
            cute.gemm(tiled_mma, acc, a[None, None, block, stage], b[None, None, block, stage], acc)
        warpgroup.commit_group()
        warpgroup.wait_group(1)
        if k > 0:
            release(ring, previous)
        previous = stage
        stage, phase = advance(stage, phase, stages)
    warpgroup.wait_group(0)
    if depth > 0:
        release(ring, previous)
    else:
        acc.fill(0.0)
    return stage, phase
