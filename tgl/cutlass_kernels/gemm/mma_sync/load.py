"""Copies of 16 bytes from global memory into the stages of a ring in shared memory, tile after tile.

All threads copy, except for operands that are ``mapped``: one lane loads the same lines by TMA. A stage holds
both operands as lines of 128 bytes, in one or more blocks:

=================  ==============================  ===============  =============================
an operand is      a line is                       lines per block  blocks
=================  ==============================  ===============  =============================
along the depth    a k tile of a row (or column)   ``extent``       1
across the depth   64 rows (or columns) of one k   ``tile_k``       one per 64 rows (or columns)
=================  ==============================  ===============  =============================

Where the columns of B are the gate's and, after them, those of the linear half, a tile takes equally many of both: the
lines of the gate come first.

Eight threads copy a line. Piece ``c`` of line ``r`` is stored at piece ``c ^ r % 8``, so the eight lines of a matrix
that ``ldmatrix`` reads are in different banks. Zeros are written, and nothing is read, past the end of a group or of an
operand.

The copies of a k tile are a ``cp.async`` group of every thread, issued ``stages - 1`` k tiles before it is multiplied,
across the end of a tile: the next tile's operands arrive during this one's epilogue. So a warp has a search of its own
for the tiles to copy. When no tile is left, zeros are copied: the number of groups still says which k tile has arrived,
and no branch keeps the assembler from placing copies between MMAs.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, cute

from ...config import VARLEN_M
from ...scheduler import Tile, ceil_div
from ...scheduler.groups import clamp
from ...scheduler.problem import Problem
from ..copies import LANES_OF_LINE, LINE, PIECE, copy_piece
from ..gather_call import find_rows, read_index
from .factors import begin_factors, copy_factors
from .mapped import StageAddress, barrier, begin_spot, load_boxes, mapped_bytes, next_spot
from .scales import begin_scales, copy_scales


class GemmOperands(NamedTuple):
    """Both in global memory: ``[rows, depth]``, or ``[rows, depth, matrices]``; and what is gathered, if anything.

    ``found`` are a thread's registers for the index of its lines: of the tile's where the operand's rows are the
    tile's, else of the next k tile's, so that they are on their way while this one is copied. ``scales`` are those of
    blocks of A and of B, see ``factors`` and ``scales``.
    """

    a: cute.Tensor
    b: cute.Tensor
    source: Any = None  # a Gathered
    found: Any = None
    scales: Any = None
    maps: Any = (None, None)  # of A and of B where they are mapped, see ``mapped``


@dataclass(frozen=True)
class StageLayout:
    """Layout of an operand in a stage; known at trace time.

    Attributes:
        along: whether it is contiguous along the depth.
        extent: rows of a tile, of each half.
        offset: where its lines begin, in bytes.
        halves: how many it has, side by side.
        bits: of an element.
    """

    along: bool
    extent: int
    offset: int
    halves: int = 1
    bits: int = 16

    @property
    def elements(self) -> int:
        """Return the number of elements of a line."""
        return LINE * 8 // self.bits


def parts_of(gemm: Any, operands: Any) -> tuple[StageLayout, StageLayout]:
    """Return the layouts of A and of B, one after the other; or of decoded B, in a buffer of its own."""
    if gemm.decoded is not None:
        return StageLayout(True, gemm.config.tile_m, 0), gemm.decoded
    a, b = (isinstance(t.stride[1], int) and t.stride[1] == 1 for t in (operands.a, operands.b))
    config, bits = gemm.config, gemm.element.width
    columns = StageLayout(b, config.tile_n // gemm.halves, config.tile_m * LINE, gemm.halves, bits)
    return StageLayout(a, config.tile_m, 0, bits=bits), columns


class Lines(NamedTuple):
    """A thread's copies of an operand's next k tile.

    ``start`` is the address of its piece of its first line; ``lines`` from there on are inside the operand, with
    ``left``
    bytes each from its piece on.
    """

    start: Int64
    lines: Int32
    left: Int32


class PieceCopy(NamedTuple):
    """One copy of a thread: addresses of 16 bytes and of their place in shared memory, and how many of them exist."""

    source: Int64
    target: Int32
    count: Int32


class LoadState(NamedTuple):
    """State of a warp's copies: its search, the index of the tile after the one being copied, and the rest of it."""

    search: Any
    index: Int32
    a: Any  # Lines, or a Spot where the operand is mapped
    b: Any
    left: Int32  # k tiles, at least 1; negative behind the last tile, and in a warp that copies nothing
    row: Int32  # of the grouped order, of a thread's first line, where lines are gathered in a k tile
    sources: Any = None  # of what scales blocks of the next k tile


def in_bytes(count: Any, values: cute.Tensor) -> Any:
    """Return the bytes that ``count`` elements of ``values`` take; ``count`` is even where two are a byte."""
    bits = values.element_type.width
    return count * (bits // 8) if bits >= 8 else count >> 1


def thread_place() -> tuple[Int32, Int32]:
    """Return the first line and the piece that a thread copies."""
    thread, _, _ = cute.arch.thread_idx()
    return thread // LANES_OF_LINE, thread % LANES_OF_LINE


def begin_lines(part: StageLayout, matrix: cute.Tensor, first: Int32, rows: Int32, depth: Int32) -> Lines:
    """Return the lines of a tile's first k tile.

    Args:
        matrix: ``[rows, depth]`` of the tile's group.
        first: the tile's first row.
        rows, depth: size of the matrix.
    """
    line, piece = thread_place()
    element = piece * (PIECE * 8 // matrix.element_type.width)
    row, k = (first + line, element) if part.along else (first + element, line)
    place = Int64(row) * matrix.stride[0] + Int64(k) * matrix.stride[1]
    lines, left = (rows - row, depth - k) if part.along else (depth - k, rows - row)
    return Lines(matrix.iterator.toint() + in_bytes(place, matrix), lines, in_bytes(left, matrix))


def next_lines(part: StageLayout, values: cute.Tensor, lines: Lines, tile_k: int) -> Lines:
    """Return the lines of the next k tile."""
    start = lines.start + Int64(values.stride[1]) * in_bytes(tile_k, values)
    if part.along:
        return Lines(start, lines.lines, lines.left - in_bytes(tile_k, values))
    return Lines(start, lines.lines - tile_k, lines.left)


def target_of(part: StageLayout, stage: Int32) -> Int32:
    """Return where in a stage a thread's first piece goes."""
    line, piece = thread_place()
    return stage + part.offset + line * LINE + (piece ^ line % LANES_OF_LINE) * PIECE


@cute.jit
def pieces_of(
    part: cutlass.Constexpr,
    values: cute.Tensor,
    lines: Lines,
    stage: Int32,
    tile_k: cutlass.Constexpr,
    step: cutlass.Constexpr,
) -> tuple:
    """Return a thread's copies of its ``lines``, every ``step``-th one, to the stage at the address ``stage``."""
    count, target = (part.extent if part.along else tile_k), target_of(part, stage)
    pitch = Int64(values.stride[0 if part.along else 1]) * in_bytes(step, values)
    blocks = in_bytes(part.extent * tile_k, values) // (count * LINE)
    pieces: tuple = ()
    for number in cutlass.range_constexpr(part.halves * blocks):
        half, block = number // blocks, number % blocks
        inside, source = clamp(lines.left - block * LINE, Int32(0), Int32(PIECE)), lines.start + block * LINE
        if cutlass.const_expr(half > 0):
            source += in_bytes(Int64(values.shape[0] // part.halves) * values.stride[0], values)
        for i in cutlass.range_constexpr(count // step):
            found = inside
            if lines.lines <= i * step:
                found = Int32(0)
            pieces += (PieceCopy(source, target + (number * count + i * step) * LINE, found),)
            source += pitch
    return pieces


@cute.jit
def copy_rows(
    gemm: cutlass.Constexpr, part: cutlass.Constexpr, operands: GemmOperands, lines: Lines, row: Int32, stage: Int32
) -> Lines:
    """Copy lines of an operand whose rows are gathered by an index; return the lines of the next k tile."""
    source, found, step, tile_k = operands.source, operands.found, gemm.line_step, gemm.config.tile_k
    rows = found
    if cutlass.const_expr(not part.along):
        rows = cute.make_rmem_tensor(found.shape, Int32)
        find_rows(source, found, row, step, row + lines.lines, rows)
        read_index(source, row + tile_k, step, found)
    target, pitch = target_of(part, stage), in_bytes(Int64(source.values.stride[0]), source.values)
    count, bytes_of_line = step * cute.size(found), in_bytes(tile_k, source.values)
    for block in cutlass.range_constexpr(part.extent * bytes_of_line // (count * LINE)):
        for i in cutlass.range_constexpr(cute.size(found)):
            inside, at = clamp(lines.left - block * LINE, Int32(0), Int32(PIECE)), rows[i]
            if at < 0:
                inside, at = Int32(0), Int32(0)
            copy_piece(lines.start + block * LINE + at * pitch, target + (block * count + i * step) * LINE, inside)
    if cutlass.const_expr(part.along):
        return Lines(lines.start + bytes_of_line, lines.lines, lines.left - bytes_of_line)
    return Lines(lines.start, lines.lines - tile_k, lines.left)


@cute.jit
def columns_of(gemm: cutlass.Constexpr, tile: Tile, problem: Problem) -> Int32:
    """Return the columns of B, or of a half of it, for the tile's group: none if its slot names no matrix."""
    columns = problem.columns
    slot: Any = tile.slot
    if cutlass.const_expr(slot is not None):  # noqa: SIM102 - the first is decided while tracing
        if slot >= problem.matrices:
            columns = Int32(0)
    return columns // gemm.halves


def tile_lines(gemm: Any, operands: GemmOperands, tile: Tile, problem: Problem) -> tuple:
    """Return the lines of a tile's first k tile, of both operands; of a mapped one its ``MapCoordinates``.

    Those of a gathered operand begin where its row 0 would.
    """
    found: tuple = ordered_lines(gemm, operands, tile, problem)
    for which, name in enumerate("ab"):
        if name in gemm.mapped:
            spot = begin_spot(gemm, which, parts_of(gemm, operands)[which], tile, problem)
            found = (spot, found[1]) if which == 0 else (found[0], spot)
    if gemm.gathered is None:
        return found
    which = "ab".index(gemm.gathered)
    part = parts_of(gemm, operands)[which]
    _, piece = thread_place()
    values = operands.source.values
    column = piece * (PIECE * 8 // values.element_type.width)
    if not part.along:
        column += (tile.m, tile.n)[which] * part.extent
    start = values.iterator.toint() + in_bytes(Int64(column), values)
    lines = found[which]._replace(start=start)
    return (lines, found[1]) if which == 0 else (found[0], lines)


def ordered_lines(gemm: Any, operands: GemmOperands, tile: Tile, problem: Problem) -> tuple[Lines, Lines]:
    """Return ``tile_lines`` of operands whose rows are in order."""
    a, b = parts_of(gemm, operands)
    row, column = tile.m * a.extent, tile.n * b.extent
    if gemm.policy.kind == VARLEN_M:
        rows = cute.domain_offset((tile.start, 0), operands.a)
        matrix = gemm.policy.matrix(operands.b, tile)
        return (
            begin_lines(a, rows, row, tile.length, problem.depth),
            begin_lines(b, matrix, column, columns_of(gemm, tile, problem), problem.depth),
        )
    place, whole = gemm.policy.place(tile), gemm.policy.whole
    a_rows, b_rows = (cute.domain_offset((0, place), values) for values in (operands.a, operands.b))
    depth = gemm.policy.depth(tile, problem)
    depth = cutlass.min(ceil_div(depth, whole) * whole, problem.rows - place)  # the first, if offsets are in order
    return (
        begin_lines(a, a_rows, row, Int32(operands.a.shape[0]), depth),
        begin_lines(b, b_rows, column, problem.columns, depth),
    )


@cute.jit
def next_tile(
    gemm: cutlass.Constexpr, operands: GemmOperands, search: Any, index: Int32, problem: Problem, step: Int32
) -> LoadState:
    """Return the feed of the first tile from ``index`` on that has anything to be copied."""
    policy = gemm.policy
    search, tile = policy.find(search, index, problem)
    index += step
    if cutlass.const_expr(policy.kind != VARLEN_M):
        while tile.valid and policy.depth(tile, problem) == 0:
            search, tile = policy.find(search, index, problem)
            index += step
    a, b = tile_lines(gemm, operands, tile, problem)
    left = ceil_div(policy.depth(tile, problem), gemm.config.tile_k)
    sources = begin_sources(gemm, operands.scales, tile, problem)
    if not tile.valid:
        a, b, left = nothing_of(a), nothing_of(b), Int32(-1)
        if cutlass.const_expr(sources is not None):
            sources = sources.none()
    if cutlass.const_expr(not gemm.copies):  # noqa: SIM102 - the first is decided while tracing
        if not leads():
            left = Int32(-1)
    row = tile.start
    if cutlass.const_expr(gemm.gathered is not None):
        line, _ = thread_place()
        row += line
        if cutlass.const_expr(policy.kind == VARLEN_M):
            row += tile.m * gemm.config.tile_m
        read_index(operands.source, row, gemm.line_step, operands.found)
        if cutlass.const_expr(policy.kind == VARLEN_M):
            end = tile.start + tile.length
            find_rows(operands.source, operands.found, row, gemm.line_step, end, operands.found)
    return LoadState(search, index, a, b, left, row, sources)


def nothing_of(lines: Any) -> Any:
    """Return lines with nothing to copy; ``MapCoordinates`` are unchanged, since nothing is loaded from there then."""
    return Lines(lines.start, Int32(0), Int32(0)) if isinstance(lines, Lines) else lines


def leads() -> cutlass.Boolean:
    """Return whether this is the warp that issues TMA loads."""
    return cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0


@cute.jit
def load_next(gemm: cutlass.Constexpr, operands: GemmOperands, feed: LoadState, stage: StageAddress):
    """Issue TMA loads of the next k tile of the mapped operands, if there is one."""
    asks = feed.left > 0
    if cutlass.const_expr(gemm.copies):
        asks = feed.left > 0 and leads()
    if asks:
        parts = parts_of(gemm, operands)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier(stage.full), mapped_bytes(gemm, parts))
        for which in cutlass.range_constexpr(2):
            if cutlass.const_expr("ab"[which] in gemm.mapped):
                load_boxes(gemm, operands.maps[which], parts[which], (feed.a, feed.b)[which], stage)


def begin_sources(gemm: Any, scales: Any, tile: Tile, problem: Problem) -> Any:
    """Return a thread's copies of the block scales of a tile's first k tile; None without block scales."""
    if scales is None:
        return None
    return begin_scales(gemm, scales, tile, problem) if gemm.form.vector else begin_factors(gemm, scales, tile)


def copy_sources(gemm: Any, scales: Any, sources: Any, stage: Int32) -> Any:
    """Start a thread's copies of the block scales of the next k tile."""
    if scales is None:
        return None
    return copy_scales(gemm, sources, stage) if gemm.form.vector else copy_factors(gemm, scales, sources, stage)


def copy_next(gemm: Any, operands: GemmOperands, feed: LoadState, stage: StageAddress) -> LoadState:
    """Start the copies of the next k tile to a stage that no warp may still read.

    All warps call it (or ``begin_copies`` and the two functions after it) once per k tile that is multiplied, and
    ``follow`` before they do so again.
    """
    feed, pieces = begin_copies(gemm, operands, feed, stage)
    copy_pieces(pieces)
    end_copies(gemm)
    return feed


def begin_copies(gemm: Any, operands: GemmOperands, feed: LoadState, stage: StageAddress) -> tuple[LoadState, tuple]:
    """Start the copies of ``copy_next`` except for the pieces that are returned, which a thread must still copy."""
    tile_k = gemm.config.tile_k
    a, b = parts_of(gemm, operands)
    copied: dict[str, Any] = {}
    pieces: tuple = ()
    if gemm.mapped:
        load_next(gemm, operands, feed, stage)
    for name, part, values, lines in (("a", a, operands.a, feed.a), ("b", b, operands.b, feed.b)):
        if gemm.gathered == name:
            copied[name] = copy_rows(gemm, part, operands, lines, feed.row, stage.address)
        elif name in gemm.mapped:
            copied[name] = next_spot(lines, tile_k)
        else:
            pieces += pieces_of(part, values, lines, stage.address, tile_k, gemm.line_step)
            copied[name] = next_lines(part, values, lines, tile_k)
    sources = copy_sources(gemm, operands.scales, feed.sources, stage.address)
    return LoadState(
        feed.search, feed.index, copied["a"], copied["b"], feed.left - 1, feed.row + tile_k, sources
    ), pieces


def copy_pieces(pieces: tuple, turn: int = 0, turns: int = 1) -> None:
    """Copy the pieces of one of ``turns``, over which they are spread evenly."""
    for number, piece in enumerate(pieces):
        if number * turns // len(pieces) == turn:
            copy_piece(*piece)


def end_copies(gemm: Any) -> None:
    """Close the group of copies of a k tile."""
    if gemm.copies:
        cute.arch.cp_async_commit_group()


@cute.jit
def follow(
    gemm: cutlass.Constexpr, operands: GemmOperands, feed: LoadState, problem: Problem, step: Int32
) -> LoadState:
    """Go on to the next tile if this one has nothing left to copy."""
    if feed.left == 0:
        feed = next_tile(gemm, operands, feed.search, feed.index, problem, step)
    return feed
