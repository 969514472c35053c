"""The producer warp: TMA loads of A and B into the stages of a ring in shared memory.

Two mbarriers per stage: ``full`` (one arrival and the bytes of both boxes) says that a stage may be multiplied,
``empty`` (one arrival per consumer warp) that it may be overwritten.
"""

from typing import NamedTuple

import cutlass
from cutlass import Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync

from ...varlen import ragged_coord


class Operand(NamedTuple):
    """One operand of the MMA, on its way from global to shared memory."""

    atom: cute.CopyAtom  # TMA load
    source: cute.Tensor  # coordinates: [rows, K, groups] or, ragged along K, [rows, K, shift, start]
    ring: cute.Tensor  # shared memory [tile rows, tile_k, stages]


class Ring(NamedTuple):
    """The barriers of the ring, ``stages`` of each."""

    full: cute.Pointer
    empty: cute.Pointer


def allocate_ring(allocator, stages: int) -> Ring:
    """Take shared memory for the barriers."""
    pointer = allocator.allocate_array(Int64, num_elems=2 * stages)
    return Ring(pointer, pointer + stages)


@cute.jit
def open_ring(ring: Ring, stages: cutlass.Constexpr, consumer_warps: cutlass.Constexpr):
    """Initialise the barriers; one thread calls it, then the CTA synchronises."""
    for stage in cutlass.range_constexpr(stages):
        cute.arch.mbarrier_init(ring.full + stage, 1)
        cute.arch.mbarrier_init(ring.empty + stage, consumer_warps)
    cute.arch.mbarrier_init_fence()


@cute.jit
def advance(stage: Int32, phase: Int32, stages: cutlass.Constexpr) -> tuple[Int32, Int32]:
    """The stage after ``stage``, and the phase of its barriers."""
    stage += 1
    if stage == stages:
        stage = Int32(0)
        phase ^= 1
    return stage, phase


@cute.jit
def boxes(
    operand: Operand, matrix: cute.Tensor, block: Int32, tile: cutlass.Constexpr
) -> tuple[cute.Tensor, cute.Tensor]:
    """Source and destination of the loads of one tile: ``[box, k]`` in ``matrix``, ``[box, stage]`` in the ring."""
    part = cute.local_tile(matrix, tile, (block, None))
    ring, source = cpasync.tma_partition(
        operand.atom, 0, cute.make_layout(1), cute.group_modes(operand.ring, 0, 2), cute.group_modes(part, 0, 2)
    )
    return source, ring


@cute.jit
def rows_from(source: cute.Tensor, row: Int32) -> cute.Tensor:
    """``[T, K]`` from ``row`` on. Rows past a group's end are a neighbour's and reach no row that is stored."""
    return cute.domain_offset((row, 0), source)


@cute.jit
def depth_of(source: cute.Tensor, start: Int32, length: Int32) -> cute.Tensor:
    """A group's rows as the K of a ragged ``[rows, K, shift, start]``; past its end everything loads as zero."""
    moved = cute.domain_offset(ragged_coord(1, start, length, Int32(0)), source)
    return moved[None, None, 0, 0]


@cute.jit
def load_tile(
    a: Operand,
    b: Operand,
    a_boxes: tuple[cute.Tensor, cute.Tensor],
    b_boxes: tuple[cute.Tensor, cute.Tensor],
    ring: Ring,
    stage: Int32,
    phase: Int32,
    depth: Int32,
    stages: cutlass.Constexpr,
    stage_bytes: cutlass.Constexpr,
) -> tuple[Int32, Int32]:
    """Load the ``depth`` k tiles of one output tile; returns where the ring stands after them.

    ``phase`` is the consumers': a stage is empty once the phase before it has ended, at once in the first round.
    """
    a_source, a_ring = a_boxes
    b_source, b_ring = b_boxes
    for k in cutlass.range(depth, unroll=1):
        cute.arch.mbarrier_wait(ring.empty + stage, phase ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(ring.full + stage, stage_bytes)
        cute.copy(a.atom, a_source[None, k], a_ring[None, stage], tma_bar_ptr=ring.full + stage)
        cute.copy(b.atom, b_source[None, k], b_ring[None, stage], tma_bar_ptr=ring.full + stage)
        stage, phase = advance(stage, phase, stages)
    return stage, phase
