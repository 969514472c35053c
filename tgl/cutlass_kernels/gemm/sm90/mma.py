"""The consumer warpgroups: wgmma over the stages of the ring, then the epilogue."""

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import warpgroup

from ...epilogue.vectors import EpilogueArgs, TileVectors, load_vectors
from ...schedule import ceil_div
from ...varlen.policy import Problem
from .load import Ring, advance
from .store import Output, store_tile

VECTORS_BARRIER = 1  # named barrier of all consumers


@cute.jit
def release(ring: Ring, stage: Int32, ctas: cutlass.Constexpr):
    """Give a stage back to the producers of all CTAs of the cluster, once per warp."""
    lane = cute.arch.lane_idx()
    if lane < ctas:
        if cutlass.const_expr(ctas > 1):
            cute.arch.mbarrier_arrive(ring.empty + stage, lane)
        else:
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
    ctas: cutlass.Constexpr,
) -> tuple[Int32, Int32]:
    """``acc = A B`` over ``depth`` k tiles, zero if there is none; returns where the ring stands after them.

    One k tile's MMAs stay in flight while the next one's are issued, so a stage is given back one turn late. The
    accumulator is cleared rather than overwritten by the first MMA: were it set on two ways (an MMA, or zeros where
    there is nothing to multiply), the compiler would copy it through local memory and wait for every single MMA.

    Args:
        tiled_mma: the MMA of all consumer warpgroups.
        acc: float32 registers ``((2, 2, N / 8), M, 1)``.
        a, b: descriptors of the operands, ``[MMA, M or N, K, stage]``.
        ring, stage, phase, stages: the ring and where it stands.
        depth: k tiles.
        ctas: CTAs of the cluster.
    """
    acc.fill(Float32(0))
    tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
    previous = Int32(0)
    for k in cutlass.range(depth, unroll=1):
        cute.arch.mbarrier_wait(ring.full + stage, phase)
        warpgroup.fence()
        for block in cutlass.range_constexpr(cute.size(a, mode=[2])):
            cute.gemm(tiled_mma, acc, a[None, None, block, stage], b[None, None, block, stage], acc)
        warpgroup.commit_group()
        warpgroup.wait_group(1)
        if k > 0:
            release(ring, previous, ctas)
        previous = stage
        stage, phase = advance(stage, phase, stages)
    warpgroup.wait_group(0)
    if depth > 0:
        release(ring, previous, ctas)
    return stage, phase


@cute.jit
def consume_tiles(
    gemm: cutlass.Constexpr,
    tiled_mma: cute.TiledMma,
    a_buffers: cute.Tensor,
    b_buffers: cute.Tensor,
    ring: Ring,
    output: Output,
    vectors: TileVectors,
    args: EpilogueArgs,
    problem: Problem,
    rank: Int32,
    first: Int32,
    step: Int32,
):
    """Multiply, finish and store every tile from ``first`` on in steps of ``step``, the tail's included.

    Args:
        gemm: the ``GroupedGemm``.
        tiled_mma: the MMA of all consumer warpgroups.
        a_buffers, b_buffers: the ring, ``[rows, tile_k, stages]``.
        ring: its barriers.
        output: where results go.
        vectors, args: bias and row scale in shared and in global memory.
        problem: sizes and offsets.
        rank: of this CTA in its cluster.
    """
    policy, spec, config = gemm.policy, gemm.spec, gemm.config
    thread, _, _ = cute.arch.thread_idx()
    which = cute.arch.make_warp_uniform(thread // 128)
    thread_mma = tiled_mma.get_slice(which * 128)
    a = tiled_mma.make_fragment_A(thread_mma.partition_A(a_buffers))
    b = tiled_mma.make_fragment_B(thread_mma.partition_B(b_buffers))
    stage, phase, turn = Int32(0), Int32(0), Int32(0)
    search = policy.start(problem, True)
    search, tile = policy.find(search, first, problem, True)
    while tile.valid:
        product = policy.is_product(tile, problem)
        column = (tile.n * config.ctas + rank) * config.tile_n
        if cutlass.const_expr(spec.bias):
            # Before: no warp reads the vectors of the tile before. After: those of this tile are there.
            cute.arch.barrier(barrier_id=VECTORS_BARRIER, number_of_threads=gemm.consumers)
            if product:
                row, end = tile.start + tile.m * config.tile_m, tile.start + tile.length
                load_vectors(vectors, args, tile.group, row, end, column, thread, gemm.consumers)
            cute.arch.barrier(barrier_id=VECTORS_BARRIER, number_of_threads=gemm.consumers)
        depth = Int32(0)
        if product:
            depth = ceil_div(policy.depth(tile, problem), config.tile_k)
        acc = cute.make_rmem_tensor(tiled_mma.partition_shape_C(gemm.tiler[:2]), Float32)
        stage, phase = multiply(tiled_mma, acc, a, b, ring, stage, phase, depth, gemm.stages, config.ctas)
        if cutlass.const_expr(spec.accumulate):
            if product:
                turn = store_tile(gemm, acc, output, vectors, tile, column, product, which, thread % 128, turn)
        else:
            turn = store_tile(gemm, acc, output, vectors, tile, column, product, which, thread % 128, turn)
        first += step
        search, tile = policy.find(search, first, problem, True)
    with cute.arch.elect_one():
        cute.arch.cp_async_bulk_wait_group(0, read=True)  # shared memory must outlive the stores that read it
