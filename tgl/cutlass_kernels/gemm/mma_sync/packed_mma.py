"""The mainloop of GEMMs whose B is packed: decode the next k tile, multiply this one.

While a k tile is multiplied, the threads decode their pieces of the next one to the other of two buffers, between the
MMAs. After one barrier per k tile this buffer is full, all warps have read the other one and the stage before, and the
lines of A have arrived. Decoding continues across the end of a tile with the next tile.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, cute

from ...epilogue.vectors import EpilogueArgs
from ...scheduler.problem import Problem, Share
from .mma import (
    BLOCK,
    MMA,
    STEP,
    RingAddresses,
    advance,
    behind,
    finish_tile,
    make_own,
    multiply_columns,
    read_columns,
    read_rows,
)
from .packed_decode import decode_piece
from .packed_load import PackedLoadState, PackedOperands, copy_next, follow, next_tile
from .packed_tilings import pieces
from .store import GlobalOutput


class Stand(NamedTuple):
    """State of a warp between tiles: its copies, the ring, and the buffer of the next k tile's decoded columns."""

    feed: PackedLoadState
    ring: RingAddresses
    buffer: Int32


def other(gemm: Any, ring: RingAddresses, buffer: Int32) -> Int32:
    """Return the one of the two buffers of decoded columns that ``buffer`` is not."""
    first = ring.first + gemm.config.stages * gemm.stage_bytes
    return first + first + gemm.decoded_bytes - buffer


@cute.jit
def multiply(
    gemm: cutlass.Constexpr,
    operands: PackedOperands,
    own: Any,
    acc: cute.Tensor,
    stand: Stand,
    problem: Problem,
    step: Int32,
) -> Stand:
    """Add ``A B`` of a tile to ``acc``; return the state for the next tile."""
    steps, blocks = gemm.config.tile_k // STEP, gemm.warp_tile[1] // BLOCK
    turns, many = steps * blocks, pieces(gemm.packed, gemm.config) // gemm.decoders
    feed, ring, buffer = stand
    extent = problem.depth
    while extent > 0:
        following, filled = advance(gemm, ring), other(gemm, ring, buffer)
        cute.arch.cp_async_wait_group(gemm.config.stages - 3)
        cute.arch.sync_threads()
        read_rows(gemm, operands, own, ring.read, 0, 0)
        read_columns(gemm, operands, own, buffer, 0, 0, 0)
        for turn in cutlass.range_constexpr(turns):
            i, block = turn // blocks, turn % blocks
            if cutlass.const_expr(block == 0 and i + 1 < steps):
                read_rows(gemm, operands, own, ring.read, i + 1, (i + 1) % 2)
            if cutlass.const_expr(turn + 1 < turns):
                after = (turn + 1) // blocks, (turn + 1) % blocks
                read_columns(gemm, operands, own, buffer, after[0], after[1], (turn + 1) % 2)
            if cutlass.const_expr(turn == 0):
                feed = copy_next(gemm, operands, feed, behind(gemm, ring).address)
            multiply_columns(gemm, own, acc, block, i % 2, turn % 2)
            for number in cutlass.range_constexpr(many):
                if cutlass.const_expr(turn == turns * number // many):
                    decode_piece(gemm, number, following.read, filled)
        feed = follow(gemm, operands, feed, problem, step)
        ring, buffer = following, filled
        extent -= gemm.config.tile_k
    return Stand(feed, ring, buffer)


@cute.jit
def multiply_tiles(
    gemm: cutlass.Constexpr,
    operands: PackedOperands,
    buffers: Int32,
    output: GlobalOutput,
    args: EpilogueArgs,
    share: Share,
):
    """Do as ``mma.multiply_tiles``, with the same arguments. The buffers of decoded columns are after the ring."""
    policy, config = gemm.policy, gemm.config
    problem, _, first, step = share
    own = make_own(gemm, operands)
    feed = next_tile(gemm, operands, policy.start(problem), first, problem, step)
    for stage in cutlass.range(config.stages - 1, unroll=1):
        feed = copy_next(gemm, operands, feed, buffers + stage * gemm.stage_bytes)
        feed = follow(gemm, operands, feed, problem, step)
    ring, buffer = RingAddresses(buffers, buffers), buffers + config.stages * gemm.stage_bytes
    cute.arch.cp_async_wait_group(config.stages - 2)
    for number in cutlass.range_constexpr(pieces(gemm.packed, config) // gemm.decoders):
        decode_piece(gemm, number, buffers, buffer)
    stand, search = Stand(feed, ring, buffer), policy.start(problem, True)
    search, tile = policy.find(search, first, problem, True)
    while tile.valid:
        product = policy.is_product(tile, problem)
        rows, columns = gemm.warp_tile
        acc = cute.make_rmem_tensor(((2, 2), rows // MMA[0], columns // MMA[1]), Float32)
        acc.fill(0.0)
        if product:
            stand = multiply(gemm, operands, own, acc, stand, problem, step)
        finish_tile(gemm, acc, output, args, tile, problem, product)
        first += step
        search, tile = policy.find(search, first, problem, True)
    cute.arch.cp_async_wait_group(0)
