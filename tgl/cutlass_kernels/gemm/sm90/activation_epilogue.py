"""Epilogue with an activation as a second output: pre-activation and activation are stored chunk by chunk.

Where the pre-activation is not kept, it is still rounded, and only the activation is staged and stored.

A thread's accumulators hold the gate of a result and, half a tile further, its linear half. They are rounded first, and
the activation is computed from the rounded values. The chunks of both outputs alternate in the same buffers.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from ...epilogue.fragments import activated
from ...epilogue.vectors import TileVectors
from ...scheduler import Tile
from .store import CHUNK_ROWS, MMA_ROWS, OutputTarget, add_vectors, next_buffer, send_chunk, write_chunk


@cute.jit
def store_activated(
    gemm: cutlass.Constexpr,
    acc: cute.Tensor,
    output: OutputTarget,
    vectors: TileVectors,
    tile: Tile,
    first_column: Int32,
    product: cutlass.Boolean,
    which: Int32,
    thread: Int32,
    turn: Int32,
) -> Int32:
    """Store a tile and its activation; arguments and result as in ``store.store_tile``."""
    spec, config, element, columns = gemm.spec, gemm.config, gemm.out_element, gemm.chunk[1]
    halves = 2 if spec.gated else 1
    chunks = config.tile_n // halves // columns
    target: Any = None
    if cutlass.const_expr(spec.keeps):
        target = gemm.policy.out(output.coords, tile)
    second_map, second_coords = output.second
    second = gemm.policy.rows(second_coords, tile)
    height = tile.length
    warp = cute.arch.make_warp_uniform(thread // 32)
    owner, lane = which * 4 + warp, thread % 32
    thread_row, thread_column = lane // 4, lane % 4 * 2
    for block in cutlass.range_constexpr(cute.size(acc, mode=[1])):
        first_row = (block * gemm.sharing + which % gemm.sharing) * MMA_ROWS + warp * CHUNK_ROWS
        row = tile.m * config.tile_m + first_row
        factors: Any = None
        if cutlass.const_expr(spec.probs):
            factors = tuple(vectors.probs[first_row + thread_row + 8 * half, 0] for half in range(2))
        for chunk in cutlass.range_constexpr(chunks):
            rounded = tuple(
                _rounded(
                    gemm,
                    acc,
                    block,
                    half * chunks + chunk,
                    vectors,
                    (first_row + thread_row, thread_column),
                    product,
                )
                for half in range(halves)
            )
            column = first_column // halves + chunk * columns
            if cutlass.const_expr(spec.keeps):
                turn = _store_rounded(gemm, rounded, output, target, (row, column, height), (owner, lane), turn)
            values = activated(spec.activation, rounded, factors, product)
            buffer = next_buffer(gemm, output, owner, turn)
            turn = (turn + 1) % gemm.buffers
            write_chunk(values, buffer, element, lane)
            send_chunk(second_map, buffer, second, row, column, height, False)
    return turn


@cute.jit
def _store_rounded(
    gemm: cutlass.Constexpr,
    rounded: tuple,
    output: OutputTarget,
    target: cute.Tensor,
    at: tuple[Int32, Int32, Int32],
    by: tuple[Int32, Int32],
    turn: Int32,
) -> Int32:
    """Store chunks of the pre-activation, interleaved if the halves are; return the next turn of the buffers.

    Args:
        rounded: registers of the chunk of every half.
        target: the part of the output that the tile is in.
        at: row and column, within a half, of the chunks, and rows of the group.
        by: the warp, which owns the buffers, and the lane.
    """
    spec, columns = gemm.spec, gemm.chunk[1]
    (row, column, height), (owner, lane) = at, by
    for half in cutlass.range_constexpr(len(rounded)):
        buffer = next_buffer(gemm, output, owner, turn)
        turn = (turn + 1) % gemm.buffers
        if cutlass.const_expr(spec.gated and spec.activation.interleaved):
            write_alternating(*rounded, half, buffer, lane)
            send_chunk(output.map, buffer, target, row, 2 * column + half * columns, height, False)
        else:
            write_chunk(rounded[half], buffer, gemm.out_element, lane)
            to = target
            if cutlass.const_expr(spec.gated):
                to = target[None, None, half]
            send_chunk(output.map, buffer, to, row, column, height, False)
    return turn


@cute.jit
def _rounded(
    gemm: cutlass.Constexpr,
    acc: cute.Tensor,
    block: cutlass.Constexpr,
    chunk: cutlass.Constexpr,
    vectors: TileVectors,
    at: tuple[Int32, Int32],
    product: cutlass.Boolean,
) -> cute.Tensor:
    """Return a chunk's registers with their bias, ``(2, 2, columns / 8)`` of the output's dtype.

    Args:
        acc: float32 registers ``((2, 2, N / 8), M, 1)``.
        block, chunk: which 64 rows and which columns.
        at: row and column of the thread's first element in a chunk at the tile's left edge.
    """
    row, column = at
    columns = gemm.chunk[1]
    pieces = columns // 8
    values = cute.make_rmem_tensor((2, 2, pieces), Float32)
    for i in cutlass.range_constexpr(4 * pieces):
        values[i] = acc[(i % 2, i // 2 % 2, chunk * pieces + i // 4), block, 0]
    if cutlass.const_expr(gemm.spec.bias):
        add_vectors(values, vectors, row, chunk * columns + column, product)
    rounded = cute.make_rmem_tensor((2, 2, pieces), gemm.out_element)
    rounded.store(values.load().to(gemm.out_element))
    return rounded


@cute.jit
def write_alternating(
    gate: cute.Tensor, linear: cute.Tensor, part: cutlass.Constexpr, buffer: cute.Tensor, lane: Int32
):
    """Write half of a chunk's columns to ``buffer``, gate and linear half interleaved.

    Args:
        gate, linear: ``(2, 2, columns / 8)``: two neighbours of a thread make four of the output.
        part: which half of the columns.
        buffer: shared memory, swizzled.
        lane: index in the warp.
    """
    pieces = cute.size(gate, mode=[2]) // 2
    row, place = lane // 4, lane % 4
    for piece in cutlass.range_constexpr(pieces):
        for half in cutlass.range_constexpr(2):
            four = cute.make_rmem_tensor(4, gate.element_type)
            for i in cutlass.range_constexpr(4):
                four[i] = (gate, linear)[i % 2][i // 2, half, part * pieces + piece]
            target = cute.local_tile(buffer, (1, 4), (row + 8 * half, 4 * piece + place))
            cute.autovec_copy(four, cute.make_tensor(target.iterator, 4))
