"""The producer warp: TMA loads of A and B into the stages of a ring in shared memory.

Two mbarriers per stage: ``full`` says that a stage may be multiplied; it gets one arrival and the bytes of both tiles,
and one more arrival from every thread that loads block scales or gathered rows. ``empty`` says that the stage may be
overwritten; it gets one arrival per consumer warp.

The CTAs of a cluster work on neighbouring tiles of the same rows, or in a gradient of the same columns. Each loads its
own tile of one operand and an equal part of the other one's, which it multicasts to all of them; so a stage is empty
only when the consumers of every CTA have released it.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync

from ...scheduler import Tile, ceil_div
from ...scheduler.problem import Share
from ..ring import RingBarriers, advance


class TmaOperand(NamedTuple):
    """An operand of the MMA: its tensor map and its buffers in shared memory."""

    map: cute.CopyAtom  # TMA load
    coords: cute.Tensor  # the coordinate tensor of the map
    buffers: cute.Tensor  # shared memory [rows, tile_k, stages]


Operands = tuple[TmaOperand, TmaOperand]
"""A and B, in this order."""


@cute.jit
def load_tiles(gemm: cutlass.Constexpr, operands: Operands, pair: Operands, ring: RingBarriers, share: Share):
    """Load the k tiles of every tile of a share; one warp calls it.

    Args:
        gemm: the GEMM kernel.
        operands: A and B.
        pair: the second pair of operands where ``gemm`` is ``paired``, see ``gemm.two_products_call``.
        ring: its barriers.
        share: the CTA's share of the problem.
    """
    policy = gemm.policy
    problem, rank, first, step = share
    stage, phase = Int32(0), Int32(0)
    search = policy.start(problem)
    search, tile = policy.find(search, first, problem)
    tile = own_tile(gemm, tile, rank)
    while tile.valid:
        if cutlass.const_expr(gemm.paired):
            stage, phase = load_tile(gemm, operands, ring, tile, k_tiles(gemm, extent(operands)), rank, (stage, phase))
            stage, phase = load_tile(gemm, pair, ring, tile, k_tiles(gemm, extent(pair)), rank, (stage, phase))
        else:
            part = k_tiles(gemm, policy.depth(tile, problem))
            stage, phase = load_tile(gemm, operands, ring, tile, part, rank, (stage, phase))
        first += step
        search, tile = policy.find(search, first, problem)
        tile = own_tile(gemm, tile, rank)


def k_tiles(gemm: Any, depth: Int32) -> tuple[Int32, Int32]:
    """Return the range of k tiles over ``depth`` elements of the contraction: the first one and the end."""
    return Int32(0), ceil_div(depth, gemm.config.tile_k)


@cute.jit
def load_tile(
    gemm: cutlass.Constexpr,
    operands: Operands,
    ring: RingBarriers,
    tile: Tile,
    part: tuple[Int32, Int32],
    rank: Int32,
    state: tuple[Int32, Int32],
) -> tuple[Int32, Int32]:
    """Load k tiles of a tile.

    Args:
        part: the first k tile and the end.
        state: stage and phase of the ring; their values after the tile are returned.
    """
    a, b = operands
    stage, phase = state
    a_to, a_from, b_to, b_from = ways(gemm, operands, tile, rank)
    for k in cutlass.range(part[0], part[1], unroll=1):
        # ``phase`` counts rounds of the ring: a stage is empty once the round before has been multiplied, and
        # immediately in the first round, since a new barrier counts as past a phase of odd parity.
        cute.arch.mbarrier_wait(ring.empty + stage, phase ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(ring.full + stage, gemm.stage_bytes)
        load_box(gemm, "a", a.map, a_from[None, k], a_to[None, stage], ring.full + stage)
        load_box(gemm, "b", b.map, b_from[None, k], b_to[None, stage], ring.full + stage)
        stage, phase = advance(stage, phase, gemm.stages)
    return stage, phase


def ways(gemm: Any, operands: Operands, tile: Tile, rank: Int32) -> tuple[cute.Tensor, ...]:
    """Return destinations ``[box, stage]`` and sources ``[box, k]`` of a tile's loads, of A and of B."""
    (a, b), policy = operands, gemm.policy
    tile_m, _, tile_k = gemm.tiler
    a_tile = cute.local_tile(policy.a(a.coords, tile), (tile_m, tile_k), (tile.m, None))
    b_tile = cute.local_tile(policy.b(b.coords, tile), gemm.b_tile, (tile.n, None))
    return *boxes(a, a_tile, *part_of(gemm, "a", rank)), *boxes(b, b_tile, *part_of(gemm, "b", rank))


def own_tile(gemm: Any, tile: Tile, rank: Int32) -> Tile:
    """Return the tile of the CTA ``rank`` in the cluster's ``tile``."""
    if gemm.shares("a") > 1:
        return tile._replace(n=tile.n * gemm.shares("a") + rank)
    if gemm.shares("b") > 1:
        return tile._replace(m=tile.m * gemm.shares("b") + rank)
    return tile


def part_of(gemm: Any, name: str, rank: Int32) -> tuple[Int32 | int, int]:
    """Return which part of an operand's tile a CTA loads, and the number of parts."""
    parts = gemm.shares(name)
    return (rank, parts) if parts > 1 else (0, 1)


@cute.jit
def load_box(
    gemm: cutlass.Constexpr,
    name: cutlass.Constexpr,
    tma: cute.CopyAtom,
    source: cute.Tensor,
    target: cute.Tensor,
    full: cute.Pointer,
):
    """Load the CTA's part of a tile of the operand ``name``, and multicast it if the cluster shares the tile."""
    if cutlass.const_expr(gemm.shares(name) > 1):
        everyone = cutlass.Int16((1 << gemm.shares(name)) - 1)
        cute.copy(tma, source, target, tma_bar_ptr=full, mcast_mask=everyone)
    else:
        cute.copy(tma, source, target, tma_bar_ptr=full)


def extent(operands: Operands) -> Int32:
    """Return the extent of the contraction of operands whose groups share it."""
    return Int32(operands[0].coords.shape[1])


def boxes(operand: TmaOperand, part: cute.Tensor, index: Int32 | int, parts: int) -> tuple[cute.Tensor, cute.Tensor]:
    """Return destination ``[box, stage]`` and source ``[box, k]`` of load ``index`` of ``parts``."""
    ring, box = cute.group_modes(operand.buffers, 0, 2), cute.group_modes(part, 0, 2)
    return cpasync.tma_partition(operand.map, index, cute.make_layout(parts), ring, box)
