"""Copies of 16 bytes from global memory into the stages of a ring in shared memory, tile after tile.

All threads copy. A stage holds both operands as lines of 128 bytes, in one or more blocks:

=================  ==============================  ===============  =============================
an operand is      a line is                       lines per block  blocks
=================  ==============================  ===============  =============================
along the depth    a k tile of a row (or column)   ``extent``       1
across the depth   64 rows (or columns) of one k   ``tile_k``       one per 64 rows (or columns)
=================  ==============================  ===============  =============================

Eight threads copy a line. Piece ``c`` of line ``r`` lies at piece ``c ^ r % 8``, so the eight lines of a matrix that
``ldmatrix`` reads lie in different banks. Zeros are written, and nothing is read, for what is behind the end of a group
or of an operand.

The copies of a k tile are a group of ``cp.async`` of every thread, issued ``stages - 1`` k tiles before that one is
multiplied, whichever tile it belongs to: the next tile's operands come while this one is finished. So a warp looks for
tiles to copy by a search of its own. When no tile is left, zeros are copied: the number of groups still tells which k
tile has arrived, and no branch keeps the assembler from placing copies between MMAs.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, cute

from ...config import VARLEN_M
from ...tiles import Tile, ceil_div
from ...tiles.groups import clamp
from ...tiles.policy import Problem
from ..copies import LANES_OF_LINE, LINE, PIECE, copy_piece

SIZE = 2  # bytes of an element


class Operands(NamedTuple):
    """Both in global memory: ``[rows, depth]``, or ``[rows, depth, matrices]``."""

    a: cute.Tensor
    b: cute.Tensor


@dataclass(frozen=True)
class Part:
    """How an operand lies in a stage; known while a kernel is traced.

    Attributes:
        along: whether it is contiguous along the depth.
        extent: rows of a tile.
        offset: where its lines begin, in bytes.
    """

    along: bool
    extent: int
    offset: int


def parts_of(gemm: Any, operands: Operands) -> tuple[Part, Part]:
    """Those of A and of B, one behind the other."""
    a, b = (isinstance(t.stride[1], int) and t.stride[1] == 1 for t in operands)
    config = gemm.config
    return Part(a, config.tile_m, 0), Part(b, config.tile_n, config.tile_m * LINE)


class Lines(NamedTuple):
    """What a thread copies of an operand's next k tile.

    ``start`` is the address of its piece of its first line. Of the lines from there on ``lines`` are inside the
    operand, and of these the bytes from its piece on ``left``.
    """

    start: Int64
    lines: Int32
    left: Int32


class Feed(NamedTuple):
    """Where a warp's copies stand: its search, the index of the tile behind the one it copies, and that one's rest."""

    search: Any
    index: Int32
    a: Lines
    b: Lines
    left: Int32  # k tiles, at least 1; negative behind the last tile


def thread_place() -> tuple[Int32, Int32]:
    """The first line and the piece that a thread copies."""
    thread, _, _ = cute.arch.thread_idx()
    return thread // LANES_OF_LINE, thread % LANES_OF_LINE


def begin_lines(part: Part, matrix: cute.Tensor, first: Int32, rows: Int32, depth: Int32) -> Lines:
    """Those of a tile's first k tile.

    Args:
        matrix: ``[rows, depth]`` of the tile's group.
        first: the tile's first row.
        rows, depth: how many there are.
    """
    line, piece = thread_place()
    element = piece * (PIECE // SIZE)
    row, k = (first + line, element) if part.along else (first + element, line)
    start = matrix.iterator.toint() + (Int64(row) * matrix.stride[0] + Int64(k) * matrix.stride[1]) * SIZE
    lines, left = (rows - row, depth - k) if part.along else (depth - k, rows - row)
    return Lines(start, lines, left * SIZE)


def next_lines(part: Part, values: cute.Tensor, lines: Lines, tile_k: int) -> Lines:
    """Those of the next k tile."""
    start = lines.start + Int64(values.stride[1]) * (tile_k * SIZE)
    if part.along:
        return Lines(start, lines.lines, lines.left - tile_k * SIZE)
    return Lines(start, lines.lines - tile_k, lines.left)


@cute.jit
def copy_lines(
    part: cutlass.Constexpr,
    values: cute.Tensor,
    lines: Lines,
    stage: Int32,
    tile_k: cutlass.Constexpr,
    threads: cutlass.Constexpr,
):
    """Start a thread's copies of its ``lines`` to the stage at the address ``stage``."""
    line, piece = thread_place()
    count, step = (part.extent if part.along else tile_k), threads // LANES_OF_LINE
    target = stage + part.offset + line * LINE + (piece ^ line % LANES_OF_LINE) * PIECE
    pitch = Int64(values.stride[0 if part.along else 1]) * (step * SIZE)
    for block in cutlass.range_constexpr(part.extent * tile_k * SIZE // (count * LINE)):
        inside, source = clamp(lines.left - block * LINE, Int32(0), Int32(PIECE)), lines.start + block * LINE
        for i in cutlass.range_constexpr(count // step):
            found = inside
            if lines.lines <= i * step:
                found = Int32(0)
            copy_piece(source, target + (block * count + i * step) * LINE, found)
            source += pitch


@cute.jit
def columns_of(tile: Tile, problem: Problem) -> Int32:
    """How many columns B has for the tile's group: none where a table names no matrix of it."""
    columns = problem.columns
    slot: Any = tile.slot
    if cutlass.const_expr(slot is not None):  # noqa: SIM102 - the first is decided while tracing
        if slot >= problem.matrices:
            columns = Int32(0)
    return columns


def tile_lines(gemm: Any, operands: Operands, tile: Tile, problem: Problem) -> tuple[Lines, Lines]:
    """The lines of a tile's first k tile, of both operands."""
    a, b = parts_of(gemm, operands)
    row, column = tile.m * gemm.config.tile_m, tile.n * gemm.config.tile_n
    if gemm.policy.kind == VARLEN_M:
        rows = cute.domain_offset((tile.start, 0), operands.a)
        matrix = gemm.policy.matrix(operands.b, tile)
        return (
            begin_lines(a, rows, row, tile.length, problem.depth),
            begin_lines(b, matrix, column, columns_of(tile, problem), problem.depth),
        )
    a_rows, b_rows = (cute.domain_offset((0, tile.start), values) for values in operands)
    return (
        begin_lines(a, a_rows, row, Int32(operands.a.shape[0]), tile.length),
        begin_lines(b, b_rows, column, problem.columns, tile.length),
    )


@cute.jit
def next_tile(
    gemm: cutlass.Constexpr, operands: Operands, search: Any, index: Int32, problem: Problem, step: Int32
) -> Feed:
    """The feed of the first tile from ``index`` on that has anything to be copied."""
    policy = gemm.policy
    search, tile = policy.find(search, index, problem)
    index += step
    if cutlass.const_expr(policy.kind != VARLEN_M):
        while tile.valid and policy.depth(tile, problem) == 0:
            search, tile = policy.find(search, index, problem)
            index += step
    a, b = tile_lines(gemm, operands, tile, problem)
    left = ceil_div(policy.depth(tile, problem), gemm.config.tile_k)
    if not tile.valid:
        a, b, left = Lines(a.start, Int32(0), Int32(0)), Lines(b.start, Int32(0), Int32(0)), Int32(-1)
    return Feed(search, index, a, b, left)


def copy_next(gemm: Any, operands: Operands, feed: Feed, stage: Int32) -> Feed:
    """Start the copies of the next k tile to the stage at the address ``stage``, which nobody may still read.

    All warps call it, once per k tile that is multiplied, and ``follow`` before they call it again.
    """
    tile_k = gemm.config.tile_k
    a, b = parts_of(gemm, operands)
    copy_lines(a, operands.a, feed.a, stage, tile_k, gemm.threads)
    copy_lines(b, operands.b, feed.b, stage, tile_k, gemm.threads)
    cute.arch.cp_async_commit_group()
    a_next, b_next = next_lines(a, operands.a, feed.a, tile_k), next_lines(b, operands.b, feed.b, tile_k)
    return Feed(feed.search, feed.index, a_next, b_next, feed.left - 1)


@cute.jit
def follow(gemm: cutlass.Constexpr, operands: Operands, feed: Feed, problem: Problem, step: Int32) -> Feed:
    """Go on to the next tile if nothing is left of this one."""
    if feed.left == 0:
        feed = next_tile(gemm, operands, feed.search, feed.index, problem, step)
    return feed
