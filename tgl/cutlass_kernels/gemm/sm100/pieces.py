"""Stores of one piece of a tile, from a warp's registers through shared memory to any output."""

from typing import Any

import cutlass
from cutlass import Int32, cute, pipeline
from cutlass.cute.nvgpu import cpasync

WARP_ROWS = 32


def piece_stores(
    tma: cute.CopyAtom,
    buffers: cute.Tensor,
    target: cute.Tensor,
    warp: Int32,
    corner: tuple,
    piece: int,
    columns: int,
) -> tuple[cute.Tensor, cute.Tensor]:
    """Return ``(from [box, buffer], to [box, 1, piece])`` of a warp's stores.

    Args:
        tma: the store.
        buffers: shared memory ``[rows, columns of a piece, buffers]``.
        target: coordinates of the matrix.
        warp: which.
        corner: row and column of its first element in the matrix.
        piece, columns: of a piece and of all of them.
    """
    matrix = cute.local_tile(cute.domain_offset(corner, target), (WARP_ROWS, columns), (0, 0))
    return cpasync.tma_partition(
        tma,
        0,
        cute.make_layout(1),
        cute.group_modes(cute.local_tile(buffers, (WARP_ROWS, piece), (warp, 0, None)), 0, 2),
        cute.group_modes(cute.flat_divide(matrix, (WARP_ROWS, piece)), 0, 2),
    )


def accumulator_of(gemm: Any, made: pipeline.PipelineState) -> Int32:
    """Return the accumulator to read: of two that share columns, the even one comes with the even phase."""
    return made.phase if gemm.overlap else made.index


def in_turn(gemm: Any, made: pipeline.PipelineState, step: int, steps: int) -> Int32 | int:
    """Return the piece of an accumulator to process in ``step``: shared columns come first, see ``kernel``."""
    if not gemm.overlap:
        return step
    return cutlass.select_(made.phase == 0, Int32(steps - 1 - step), Int32(step))


@cute.jit
def send_piece(gemm: cutlass.Constexpr, *copies):
    """Store a buffer that the lanes of a warp have written; after the warp's barrier, the next buffer is free as well.

    The lane that stores waits before the barrier and not after its store, so the store reads shared memory while the
    next piece is computed.

    Args:
        gemm: the GEMM kernel.
        copies: ``(map, from, to)`` of each store.
    """
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.cp_async_bulk_wait_group(gemm.epi_stages - 2, read=True)
    cute.arch.sync_warp()
    # A plain store does not elect a lane itself; a reducing one does, like loads, and an election by one lane alone
    # would never end. The elected lane is always the same.
    if cutlass.const_expr(gemm.spec.reduces):
        for tma, source, sink in copies:
            cute.copy(tma, source, sink)
        with cute.arch.elect_one():
            cute.arch.cp_async_bulk_commit_group()
    else:
        with cute.arch.elect_one():
            for tma, source, sink in copies:
                cute.copy(tma, source, sink)
            cute.arch.cp_async_bulk_commit_group()
