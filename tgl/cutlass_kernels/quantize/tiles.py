"""Tiles of 128 rows that belong to one group, numbered as the placement of ``tgl.meta.placement`` numbers units.

Unit v of group g holds its rows from ``start + 128 (v - start // 128 - g)`` on. The rows past the last group are one
more group, so with ``ceil(T / 128) + G`` tiles every row is in one, and so is every unit of the scales.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Int32, Int64, cute

from ..tiles import ceil_div
from ..tiles.groups import clamp, group_range, slot_of

ROWS = 128
LANES = 32
BLOCKS = 2048  # by default
AHEAD = 4  # ends of a lane that are loaded before the first is looked at


class RowTile(NamedTuple):
    """Rows ``[first, first + count)``; ``count`` may be 0 or less. ``tail``: past the last group, to be zero.

    Where numbers say what stands in them: ``order`` has that of every row, and those below ``tokens`` are some row's.
    """

    first: Int32
    count: Int32
    tail: Boolean
    order: Any = None
    tokens: Any = None


def tiles_at_most(rows: Int32, groups: Int32) -> Int32:
    """How many tiles cover ``rows`` rows in ``groups`` groups."""
    return ceil_div(rows, ROWS) + groups


class Grid(NamedTuple):
    """Blocks that each walk over ``chunk`` of the ``across`` tiles of columns of a tile of rows."""

    shape: tuple[Int32, int, int]
    across: Int32
    chunk: Int32


def launch_grid(
    matrix: cute.Tensor,
    columns: int,
    offs: cute.Tensor | None,
    matrix_rows: Int32,
    most: int = 1,
    blocks: int = BLOCKS,
) -> Grid:
    """The blocks for tiles of 128 rows and ``columns`` columns of ``matrix``, up to ``most`` side by side to a block.

    Args:
        matrix: ``[T, K]``, or stacked matrices of ``matrix_rows`` rows each if ``offs`` is None.
        blocks: with fewer, blocks walk over fewer tiles.
    """
    rows, across = Int32(matrix.shape[0]), ceil_div(Int32(matrix.shape[1]), columns)
    if offs is None:
        units = rows // matrix_rows * ceil_div(matrix_rows, ROWS)
    else:
        units = tiles_at_most(rows, Int32(cute.size(offs)))
    chunk = cutlass.min(cutlass.max(Int64(units) * across // blocks, 1), most).to(Int32)
    return Grid((units * ceil_div(across, chunk), 1, 1), across, chunk)


@cute.jit
def group_of_unit(offs: cute.Tensor, rows: Int32, unit: Int32) -> Int32:
    """The group of tile ``unit``, the number of groups for the tail; all 32 lanes of a warp call it."""
    groups = Int32(cute.size(offs))
    lane = cute.arch.lane_idx()
    # How many groups, the tail included, begin at this unit or before: one less than the group after the one sought.
    before = Int32(0)
    for first in cutlass.range(0, groups, AHEAD * LANES, unroll=1):
        ahead = [cutlass.min(first + i * LANES + lane, groups - 1) for i in range(AHEAD)]
        found = [(group, offs[cutlass.max(group - 1, 0)], offs[group]) for group in ahead]
        for i in cutlass.range_constexpr(AHEAD):
            group, start, end = found[i]
            start = cutlass.select_(group > 0, clamp(start, Int32(0), rows), Int32(0))
            begins = (clamp(end, start, rows) >> 7) + group + 1 <= unit and first + i * LANES + lane < groups
            before += cute.arch.popc(cute.arch.vote_ballot_sync(begins))
    return before


@cute.jit
def group_tile(offs: cute.Tensor, rows: Int32, unit: Int32, group: Int32) -> RowTile:
    """Tile ``unit`` of rows in groups, of the group ``group``."""
    start, end = group_range(offs, rows, group, True)
    first = start + (unit - start // ROWS - group) * ROWS
    return RowTile(first, cutlass.min(end - first, Int32(ROWS)), group == Int32(cute.size(offs)))


class Place(NamedTuple):
    """Where a tile lies in a placement of a smaller unit, ``places`` coordinates from ``first`` on (none if negative).

    The tiles of all groups together have every coordinate once, also those that no row maps to. ``group``: the tile's;
    ``leads``: it is the first of the group.
    """

    first: Int32
    places: Int32
    group: Int32
    leads: Boolean


@cute.jit
def group_place(offs: cute.Tensor, rows: Int32, unit: Int32, group: Int32, u: cutlass.Constexpr) -> Place:
    """The place of tile ``unit``, of the group ``group``, under the placement of unit ``u``, which divides 128."""
    groups = Int32(cute.size(offs))
    start, end = group_range(offs, rows, group, True)
    ordinal = unit - start // ROWS - group
    first = (start // u + group) * u + ordinal * ROWS
    past = cutlass.max(ceil_div(rows, u) + groups - 1, 0) * u
    if group < groups:
        past = cutlass.min((end // u + group + 1) * u, past)
    return Place(first, cutlass.min(past - first, Int32(ROWS)), group, ordinal == 0)


def stack_of(x: cute.Tensor, order: cute.Tensor | None, matrix_rows: Int32) -> cute.Tensor:
    """``x`` in the shape of what is quantised, which has no such memory if an order is given.

    These are the rows that it names, or the matrices, one below the other.
    """
    if order is None:
        return x
    by_rows = len(x.shape) == 2
    rows = Int32(cute.size(order)) * (1 if by_rows else matrix_rows)
    return cute.make_tensor(x.iterator, cute.make_layout((rows, x.shape[-1]), stride=x.stride[-2:]))


@cute.jit
def source_of(x: cute.Tensor, order: cute.Tensor | None, matrix_rows: Int32, matrix: Int32, tile: RowTile):
    """Where the rows of a tile are to be read, and which of them: the tile's if there is no order.

    With one of matrices, rows of ``stack_of`` as seen from the matrix at its slot. Of a number that is no slot's no row
    is read, and what is not read counts as zeros. One of rows goes with the tile.
    """
    if cutlass.const_expr(order is None):
        return x, tile
    if cutlass.const_expr(len(x.shape) == 2):
        named = RowTile(tile.first, tile.count, tile.tail, order, Int32(x.shape[0]))
        return stack_of(x, order, matrix_rows), named
    slot = slot_of(order, Int32(x.shape[0]), matrix)
    before = Int64(slot) * x.stride[0] - Int64(matrix) * matrix_rows * x.stride[1]
    layout = stack_of(x, order, matrix_rows).layout
    count = cutlass.select_(slot < x.shape[0], tile.count, Int32(0))
    return cute.make_tensor(x.iterator + before, layout), RowTile(tile.first, count, tile.tail)


@cute.jit
def matrix_tile(rows: Int32, unit: Int32) -> RowTile:
    """Tile ``unit`` of matrices of ``rows`` rows each, stacked."""
    across = ceil_div(rows, ROWS)
    matrix = unit // across
    inside = (unit - matrix * across) * ROWS
    return RowTile(matrix * rows + inside, cutlass.min(rows - inside, Int32(ROWS)), Boolean(False))


@cute.jit
def matrix_place(rows: Int32, unit: Int32) -> Place:
    """The place of tile ``unit`` in a matrix of ``rows`` columns, the transposed one."""
    across = ceil_div(rows, ROWS)
    matrix = unit // across
    inside = (unit - matrix * across) * ROWS
    return Place(inside, cutlass.min(rows - inside, Int32(ROWS)), matrix, inside == 0)
