"""Copies of packed matrices from global memory into the stages of a ring, tile after tile; ``load`` copies A.

A stage has the lines of A, then B's elements in pieces of 16 bytes, then words beside each piece. A thread decodes
exactly the pieces that it has copied, so it waits for its own copies only. Pieces are numbered along lines of 64
elements, as in ``load.StageLayout``: a k tile of a row of B where the contraction runs along rows, else 64 elements of
one row of a k tile.

A one-byte scale is copied with the word around it, since no copy is smaller, and rows of scales begin anywhere: the
scale's position in the word is stored beside it. Past the end of an operand elements and scales are zeros.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, cute

from ...config import LINE
from ...scheduler import Tile, ceil_div
from ...scheduler.groups import clamp
from ...scheduler.problem import Problem
from ..copies import PIECE, WORD, copy_piece, copy_word
from .load import Lines, StageLayout, begin_lines, copy_pieces, next_lines, pieces_of
from .packed_tilings import PackedSpec, pieces


class Matrices(NamedTuple):
    """B in global memory."""

    data: cute.Tensor  # bytes [G, N, K / per_byte]
    scale: cute.Tensor  # bytes or float32 [G, rows, columns]; of whole groups [G]
    amax: Any  # float32 [G], or None


class PackedOperands(NamedTuple):
    """Both in global memory."""

    a: cute.Tensor  # [rows, depth]
    b: Matrices


class PackedTileStart(NamedTuple):
    """Start of a k tile in B: its matrix, the first of the tile's columns, and its depth."""

    matrix: Int32
    column: Int32
    depth: Int32


class PackedLoadState(NamedTuple):
    """State of a warp's copies: its search, the index of the tile after the one being copied, and the rest of it."""

    search: Any
    index: Int32
    a: Lines
    b: PackedTileStart
    left: Int32  # k tiles, at least 1; negative behind the last tile


class PiecePlace(NamedTuple):
    """Place of a piece in a stage: its block of lines, its line in the block, and its number in the line."""

    block: Int32
    line: Int32
    number: Int32


def part_of_a(gemm: Any) -> StageLayout:
    """Return the layout of A in a stage."""
    return StageLayout(True, gemm.config.tile_m, 0)


def piece_of(gemm: Any, turn: int) -> tuple[Int32, PiecePlace]:
    """Return the number of a thread's piece of a turn in a stage, and where it is."""
    spec, part = gemm.packed, gemm.decoded
    thread, _, _ = cute.arch.thread_idx()
    index, across = thread % gemm.decoders + turn * gemm.decoders, LINE // spec.elements
    lines = part.extent if part.along else gemm.config.tile_k
    line = divided(index, across)
    return index, PiecePlace(divided(line, lines), line & lines - 1, index & across - 1)


def divided(number: Int32, by: int) -> Int32:
    """Divide by a power of two; a division would have to handle negative numbers."""
    return number >> by.bit_length() - 1


def scale_address(spec: PackedSpec, scale: cute.Tensor, matrix: Int32, row: Int32, column: Int32) -> Int64:
    """Return where the scale of an element is in global memory."""
    block, offset = spec.decoding.block, Int64(matrix) * scale.stride[0]
    if block:
        offset += Int64(divided(row, spec.rows_of_scale)) * scale.stride[1] + divided(column, block)
    return scale.iterator.toint() + offset * spec.scale_bytes


@cute.jit
def copy_matrices(gemm: cutlass.Constexpr, b: Matrices, spot: PackedTileStart, stage: Int32):
    """Start a thread's copies of B's next k tile to the stage at the address ``stage``."""
    spec, total = gemm.packed, pieces(gemm.packed, gemm.config)
    height, width = b.data.shape[1], b.data.shape[2] * spec.per_byte
    scale_end = b.scale.iterator.toint() + Int64(b.scale.shape[0]) * b.scale.stride[0] * spec.scale_bytes
    for turn in cutlass.range_constexpr(total // gemm.decoders):
        index, piece = piece_of(gemm, turn)
        along = piece.number * spec.elements
        row, column = spot.column + piece.line, spot.depth + along
        if cutlass.const_expr(spec.over_rows):
            row, column = spot.depth + piece.line, spot.column + piece.block * LINE + along
        inside = row < height and column < width
        count = Int32(0)
        if inside:
            count = Int32(PIECE)
        source = Int64(spot.matrix) * b.data.stride[0] + Int64(row) * b.data.stride[1] + divided(column, spec.per_byte)
        copy_piece(b.data.iterator.toint() + source, stage + gemm.pieces_at + index * PIECE, count)
        word = stage + gemm.words_at + index * WORD
        address = scale_address(spec, b.scale, spot.matrix, row, column)
        start = Int32(address) & WORD - 1
        left = clamp(Int32(cutlass.min(scale_end - (address - start), Int64(WORD))), Int32(0), count)
        copy_word(address - start, word, left)
        if cutlass.const_expr(spec.scale_bytes < WORD):
            word += total * WORD
            store_word(word, start * 8)
        if cutlass.const_expr(spec.decoding.amax):
            copy_word(b.amax.iterator.toint() + Int64(spot.matrix) * WORD, word + total * WORD, clamp(count, 0, WORD))


def store_word(target: Int32, value: Int32):
    """Store a word to shared memory."""
    place = cute.make_ptr(Int32, target, cute.AddressSpace.smem, assumed_align=WORD)
    cute.make_tensor(place, cute.make_layout(1))[0] = value


def load_word(source: Int32) -> Int32:
    """Return a word from shared memory."""
    place = cute.make_ptr(Int32, source, cute.AddressSpace.smem, assumed_align=WORD)
    return cute.make_tensor(place, cute.make_layout(1))[0]


@cute.jit
def next_tile(
    gemm: cutlass.Constexpr, operands: PackedOperands, search: Any, index: Int32, problem: Problem, step: Int32
) -> PackedLoadState:
    """Return the feed of the tile ``index``."""
    policy, config = gemm.policy, gemm.config
    search, tile = policy.find(search, index, problem)
    a = tile_rows(gemm, operands, tile, problem)
    spot, left = PackedTileStart(tile.group, tile.n * config.tile_n, Int32(0)), ceil_div(problem.depth, config.tile_k)
    if not tile.valid:
        a = Lines(a.start, Int32(0), Int32(0))
        spot, left = PackedTileStart(Int32(0), problem.columns, problem.depth), Int32(-1)
    return PackedLoadState(search, index + step, a, spot, left)


def tile_rows(gemm: Any, operands: PackedOperands, tile: Tile, problem: Problem) -> Lines:
    """Return the lines of A of a tile's first k tile."""
    rows = cute.domain_offset((tile.start, 0), operands.a)
    return begin_lines(part_of_a(gemm), rows, tile.m * gemm.config.tile_m, tile.length, problem.depth)


def copy_next(gemm: Any, operands: PackedOperands, feed: PackedLoadState, stage: Int32) -> PackedLoadState:
    """Start the copies of the next k tile to the stage at the address ``stage``, which no warp may still read.

    All warps call it, once per k tile that is multiplied, and ``follow`` before they call it again.
    """
    tile_k, part = gemm.config.tile_k, part_of_a(gemm)
    copy_pieces(pieces_of(part, operands.a, feed.a, stage, tile_k, gemm.line_step))
    copy_matrices(gemm, operands.b, feed.b, stage)
    cute.arch.cp_async_commit_group()
    spot = feed.b._replace(depth=feed.b.depth + tile_k)
    return PackedLoadState(feed.search, feed.index, next_lines(part, operands.a, feed.a, tile_k), spot, feed.left - 1)


@cute.jit
def follow(
    gemm: cutlass.Constexpr, operands: PackedOperands, feed: PackedLoadState, problem: Problem, step: Int32
) -> PackedLoadState:
    """Go on to the next tile if nothing is left of this one."""
    if feed.left == 0:
        feed = next_tile(gemm, operands, feed.search, feed.index, problem, step)
    return feed
