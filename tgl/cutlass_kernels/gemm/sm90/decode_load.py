"""The producer warp of the second GEMM of ``decode_kernels``: ``load`` with weights prefetched to L2.

Nothing waits for the prefetches: the ring then only has to cover the latency of L2, and memory always has enough
requests. The next launch may begin when this one has issued the loads of its last bytes. If it began earlier, its own
requests would come before these, and L2 might evict what they brought before it is used.
"""

from typing import Any

import cutlass
from cutlass import Int32, cute

from ... import instructions
from ...scheduler import Tile
from ...scheduler.problem import Share
from ..ring import RingBarriers, advance
from .load import Operands, k_tiles, load_box, own_tile, ways

LINE_BYTES = 128  # of a row in a stage
AHEAD_BYTES = 64 * 1024  # of B per CTA that are prefetched to L2 ahead of the ring
EARLY_BYTES = 128 * 1024  # the same for a first tile, before the previous launch has ended


@cute.jit
def load_few_tiles(gemm: cutlass.Constexpr, operands: Operands, ring: RingBarriers, share: Share, settled: Int32):
    """Load the k tiles of every tile of a share; one warp calls it.

    Args:
        gemm: the GEMM kernel.
        operands: A and B.
        ring: its barriers.
        share: the CTA's share of the problem.
        settled: whether everything except A was ready before the previous launch began. B then does not wait for the
            end of that launch: the ring is filled with it, and L2 prefetches the tiles after these.
    """
    policy = gemm.policy
    problem, rank, first, step = share
    if settled == 0:
        instructions.wait()
    search = policy.start(problem)
    search, tile = policy.find(search, first, problem)
    tile = own_tile(gemm, tile, rank)
    stage, phase, asked, seen = Int32(0), Int32(0), Int32(0), Int32(0)
    if settled != 0:
        if tile.valid:
            _, end = k_tiles(gemm, policy.depth(tile, problem))
            asked = cutlass.min(end, Int32(gemm.stages))
            seen = cutlass.min(end, asked + EARLY_BYTES // line_bytes(gemm))
            ask_early(gemm, operands, ring, tile, rank, (asked, seen))
        instructions.wait()
    while tile.valid:
        first += step
        search, following = policy.find(search, first, problem)
        _, end = k_tiles(gemm, policy.depth(tile, problem))
        stage, phase = load_few_tile(
            gemm, operands, ring, tile, (asked, seen, end, following.valid), rank, (stage, phase)
        )
        asked, seen = Int32(0), Int32(0)
        tile = own_tile(gemm, following, rank)


@cute.jit
def ask_early(
    gemm: cutlass.Constexpr, operands: Operands, ring: RingBarriers, tile: Tile, rank: Int32, ends: tuple[Int32, Int32]
):
    """Issue loads of the first k tiles of B into the ring, and L2 prefetches of more, up to the ends in ``ends``."""
    _, b = operands
    _, _, b_to, b_from = ways(gemm, operands, tile, rank)
    for k in cutlass.range(ends[0], unroll=1):
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(ring.full + k, gemm.stage_bytes)
        cute.copy(b.map, b_from[None, k], b_to[None, k], tma_bar_ptr=ring.full + k)
    ask_l2(b, b_from, *ends)


@cute.jit
def load_few_tile(
    gemm: cutlass.Constexpr,
    operands: Operands,
    ring: RingBarriers,
    tile: Tile,
    extent: tuple,
    rank: Int32,
    state: tuple[Int32, Int32],
) -> tuple[Int32, Int32]:
    """Load a tile.

    Args:
        extent: k tiles of B already loaded into the ring, k tiles prefetched to L2, number of k tiles, and whether
            another tile follows.
        state: stage and phase of the ring; their values after the tile are returned.
    """
    a, b = operands
    asked, seen, end, follows = extent
    stage, phase = state
    a_to, a_from, b_to, b_from = ways(gemm, operands, tile, rank)
    ahead = ahead_of(gemm)
    ask_l2(b, b_from, seen, cutlass.min(end, Int32(ahead)))
    for k in cutlass.range(end, unroll=1):
        ask_l2(b, b_from, cutlass.max(seen, k + ahead), cutlass.min(end, k + ahead + 1))
        if k >= asked:
            cute.arch.mbarrier_wait(ring.empty + stage, phase ^ 1)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(ring.full + stage, gemm.stage_bytes)
            load_box(gemm, "b", b.map, b_from[None, k], b_to[None, stage], ring.full + stage)
        load_box(gemm, "a", a.map, a_from[None, k], a_to[None, stage], ring.full + stage)
        if k == cutlass.max(end - 1 - ahead, 0) and not follows:
            instructions.launch_dependents()
        stage, phase = advance(stage, phase, gemm.stages)
    return stage, phase


@cute.jit
def ask_l2(operand: Any, source: cute.Tensor, first: Int32, end: Int32):
    """Prefetch the k tiles ``[first, end)`` of ``source [box, k]`` to L2."""
    for k in cutlass.range(first, end, unroll=1):
        cute.prefetch(operand.map, source[None, k])


def line_bytes(gemm: Any) -> int:
    """Return the bytes of B in a k tile."""
    return int(gemm.config.tile_n) * LINE_BYTES


def ahead_of(gemm: Any) -> int:
    """Return for how many k tiles L2 is prefetched ahead of the ring."""
    return AHEAD_BYTES // line_bytes(gemm)
