"""The consumer warpgroups: wgmma over the stages of the ring, then the epilogue."""

from typing import Any

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import warpgroup

from ...epilogue.vectors import TileVectors, alpha, load_vectors
from ...scheduler import ceil_div
from ...scheduler.problem import Problem
from ..ring import RingBarriers, advance, release
from .activation_epilogue import store_activated
from .dactivation_epilogue import begin_tile, finish_tile
from .load import own_tile
from .mirror import load_added, store_symmetric
from .ping_pong import give_turn, wait_turn
from .promote import PromotionBuffers, multiply_promoted
from .store import OutputTarget, store_tile

VECTORS_BARRIER = 2  # named barrier of the first team


@cute.jit
def multiply(
    gemm: cutlass.Constexpr,
    tiled_mma: cute.TiledMma,
    acc: cute.Tensor,
    a: cute.Tensor,
    b: cute.Tensor,
    ring: RingBarriers,
    stage: Int32,
    phase: Int32,
    depth: Int32,
    left: Int32,
    team: Int32,
    following: Any,
) -> tuple:
    """``acc = A B`` over ``depth`` k tiles, zero if there is none.

    The MMAs of one k tile stay in flight while those of the next are issued, so a stage is released one turn late; not
    so in a tiling of ``decode_kernels``, which waits for memory. A k tile in which the contraction ends is multiplied
    after the loop, because a condition inside would serialise all MMAs. The accumulator is cleared instead of
    overwritten by the first MMA: if it were set on two paths (an MMA, or zeros where there is nothing to multiply), the
    compiler would copy it through local memory and wait for every MMA.

    Args:
        gemm: the GEMM kernel.
        tiled_mma: the MMA of a team of warpgroups.
        acc: float32 registers ``((2, 2, N / 8), M, 1)``.
        a, b: descriptors of the operands, ``[MMA, M or N, K, stage]``.
        ring, stage, phase: the ring, and its current stage and phase.
        depth: number of whole k tiles.
        left: elements of the contraction in one more k tile, of which no more is multiplied; at most 0 if there is
            none.
        team: which of the ``gemm.teams`` this warpgroup belongs to.
        following: arguments of the policy's look-up of the next tile, done while the last MMAs run; None: it is known.

    Returns:
        stage, phase, and the search with the next tile, or None.
    """
    ctas = gemm.config.ctas
    acc.fill(Float32(0))
    tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
    if cutlass.const_expr(gemm.teams > 1):
        # This keeps the MMAs of a tile together, and makes waiting for a stage sound: the barrier shows only whether
        # the number of rounds is even or odd, so no team may be two rounds ahead of it.
        wait_turn(team)
    previous = Int32(0)
    for k in cutlass.range(depth, unroll=1):
        wait_full(gemm, ring, stage, phase)
        warpgroup.fence()
        for block in cutlass.range_constexpr(cute.size(a, mode=[2])):
            cute.gemm(tiled_mma, acc, a[None, None, block, stage], b[None, None, block, stage], acc)
        warpgroup.commit_group()
        if cutlass.const_expr(gemm.config.few):
            warpgroup.wait_group(0)
            release(ring, stage, ctas)
        else:
            warpgroup.wait_group(1)
            if k > 0:
                release(ring, previous, ctas)
            previous = stage
        stage, phase = advance(stage, phase, gemm.stages)
    if cutlass.const_expr(gemm.policy.trims):  # noqa: SIM102 - decided while tracing
        if left > 0:
            wait_full(gemm, ring, stage, phase)
            warpgroup.fence()
            for block in cutlass.range(ceil_div(left, gemm.config.tile_k // cute.size(a, mode=[2])), unroll=1):
                cute.gemm(tiled_mma, acc, a[None, None, block, stage], b[None, None, block, stage], acc)
            warpgroup.commit_group()
    if cutlass.const_expr(gemm.teams > 1):
        give_turn(1 - team)
    found: Any = None
    if cutlass.const_expr(following is not None):
        found = gemm.policy.find(*following, True)  # while the last MMAs run
    if cutlass.const_expr(not gemm.config.few):
        warpgroup.wait_group(0)
        if depth > 0:
            release(ring, previous, ctas)
    if cutlass.const_expr(gemm.policy.trims):  # noqa: SIM102 - decided while tracing
        if left > 0:
            release(ring, stage, ctas)
            stage, phase = advance(stage, phase, gemm.stages)
    return stage, phase, found


@cute.jit
def wait_full(gemm: cutlass.Constexpr, ring: RingBarriers, stage: Int32, phase: Int32):
    """Wait until a stage has been loaded."""
    cute.arch.mbarrier_wait(ring.full + stage, phase)
    if cutlass.const_expr(gemm.gathered is not None):
        cute.arch.fence_view_async_shared()  # cp.async wrote a part of it, see ``gather_load``


@cute.jit
def consume_tiles(
    gemm: cutlass.Constexpr,
    tiled_mma: cute.TiledMma,
    a_buffers: cute.Tensor,
    b_buffers: cute.Tensor,
    factors: Any,
    ring: RingBarriers,
    output: OutputTarget,
    vectors: TileVectors,
    args: Any,
    hidden: Any,
    problem: Problem,
    rank: Int32,
    first: Int32,
    step: Int32,
):
    """Multiply, finish and store every tile from ``first`` on in steps of ``step``, the tail's included.

    Args:
        gemm: the GEMM kernel.
        tiled_mma: the MMA of all consumer warpgroups.
        a_buffers, b_buffers: the ring, ``[rows, tile_k, stages]``.
        factors: block scales, in shared memory ``[factors, stages]``, or None.
        ring: its barriers.
        output: destination of results.
        vectors, args: bias, row scale and factors in shared and in global memory; ``Terms`` where ``symmetric``.
        hidden: operands that the dactivation epilogue reads, else None.
        problem: sizes and offsets.
        rank: rank of this CTA in its cluster.
    """
    policy, spec, config = gemm.policy, gemm.spec, gemm.config
    thread, _, _ = cute.arch.thread_idx()
    which = cute.arch.make_warp_uniform(thread // 128)
    team, member = which // gemm.sharing, which % gemm.sharing
    team_threads = gemm.sharing * 128
    thread_mma = tiled_mma.get_slice(member * 128)
    a = tiled_mma.make_fragment_A(thread_mma.partition_A(a_buffers))
    b = tiled_mma.make_fragment_B(thread_mma.partition_B(b_buffers))
    shared = PromotionBuffers(a_buffers, b_buffers, factors)
    own = team_vectors(vectors, team, gemm.tiler[:2])
    stage, phase, turn, count = Int32(0), Int32(0), Int32(0), Int32(0)
    search = policy.start(problem, True)
    search, tile = policy.find(search, first, problem, True)
    tile = own_tile(gemm, tile, rank)
    if cutlass.const_expr(gemm.teams > 1 or gemm.alternates):  # noqa: SIM102 - decided while tracing
        if which == 1:
            give_turn(Int32(0))
    while tile.valid:
        first += step
        following = tile
        if cutlass.const_expr(not gemm.finds_late):
            search, following = policy.find(search, first, problem, True)
        product = policy.is_product(tile, problem)
        depth, whole, left = Int32(0), Int32(0), Int32(0)
        if product:
            extent = policy.depth(tile, problem)
            depth = whole = ceil_div(extent, config.tile_k)
            if cutlass.const_expr(policy.trims):
                span = config.tile_k // cute.size(a, mode=[2])
                whole = (extent + span - 1) // config.tile_k  # including a last one that needs all its MMAs
                left = extent - whole * config.tile_k
        if count % gemm.teams == team:
            column = tile.n * config.tile_n
            if cutlass.const_expr(spec.vectors):
                # First barrier: no warp still reads the vectors of the previous tile. Second: those of this tile are
                # there.
                cute.arch.barrier(barrier_id=VECTORS_BARRIER + team, number_of_threads=team_threads)
                if product:
                    row, end = policy.span(tile, tile.m * config.tile_m, output.coords)
                    load_vectors(spec, own, args, tile.group, row, end, column, thread % team_threads, team_threads)
                cute.arch.barrier(barrier_id=VECTORS_BARRIER + team, number_of_threads=team_threads)
            if cutlass.const_expr(gemm.gradient is not None):  # noqa: SIM102 - decided while tracing
                if product:
                    begin_tile(gemm, output, hidden, tile, column, problem.columns, which, thread % 128, turn)
            held: Any = None
            if cutlass.const_expr(gemm.symmetric):
                held = load_added(gemm, args, tile)
            acc = cute.make_rmem_tensor(tiled_mma.partition_shape_C(gemm.tiler[:2]), Float32)
            if cutlass.const_expr(gemm.a_element.width > 8):
                later = (search, first, problem) if cutlass.const_expr(gemm.finds_late) else None
                stage, phase, found = multiply(gemm, tiled_mma, acc, a, b, ring, stage, phase, whole, left, team, later)
                if cutlass.const_expr(found is not None):
                    search, following = found
            else:
                stage, phase = multiply_promoted(
                    gemm, tiled_mma, acc, a, b, shared, ring, stage, phase, depth, tile, problem
                )
            factor = Float32(1)
            if cutlass.const_expr(spec.group_factor):  # noqa: SIM102 - decided while tracing
                if product:
                    factor = alpha(spec, args, tile.group)
            if cutlass.const_expr(gemm.gradient is not None):
                at = (tile, column, problem.columns, product, which, thread % 128, turn)
                turn = finish_tile(gemm, acc, output, hidden, *at)
            elif cutlass.const_expr(gemm.symmetric):
                turn = store_symmetric(gemm, acc, output, args, tile, held, turn)
            elif cutlass.const_expr(spec.accumulate):
                if product:
                    turn = store_tile(gemm, acc, output, own, factor, tile, column, product, which, thread % 128, turn)
            elif cutlass.const_expr(spec.activation is not None):
                turn = store_activated(gemm, acc, output, own, tile, column, product, which, thread % 128, turn)
            else:
                turn = store_tile(gemm, acc, output, own, factor, tile, column, product, which, thread % 128, turn)
        else:
            if cutlass.const_expr(gemm.finds_late):
                search, following = policy.find(search, first, problem, True)
            # The other team's tile: skip its stages without waiting for them.
            stage += depth
            phase = (phase + stage // gemm.stages) % 2
            stage = stage % gemm.stages
        count += 1
        tile = own_tile(gemm, following, rank)
    if cutlass.const_expr(gemm.teams > 1):  # noqa: SIM102 - decided while tracing
        if count % gemm.teams == team:
            wait_turn(team)  # takes the last turn given, so that no barrier is left half full
    if cutlass.const_expr(gemm.alternates):  # noqa: SIM102 - decided while tracing
        if which == 0:
            wait_turn(which)
    with cute.arch.elect_one():
        cute.arch.cp_async_bulk_wait_group(0, read=True)  # shared memory must outlive the stores that read it


def team_vectors(vectors: TileVectors, team: Int32, tile: tuple[int, int]) -> TileVectors:
    """Return one team's part of the vectors, which are kept for a tile per team."""

    def own(vector: Any, by_row: bool) -> Any:
        if vector is None:
            return None
        size, stride = (tile[0], (1, 0)) if by_row else (tile[1], (0, 1))
        return cute.make_tensor(vector.iterator + team * size, cute.make_layout(tile, stride=stride))

    return TileVectors(
        own(vectors.bias, False),
        own(vectors.bias_scale, True),
        own(vectors.probs, True),
        own(vectors.a_factor, True),
        own(vectors.b_factor, False),
    )
