"""Tiles of 128 rows that belong to one group, numbered as the placement of ``tgl.meta.placement`` numbers units.

Unit v of group g holds its rows from ``start + 128 (v - start // 128 - g)`` on. The rows past the last group are one
more group, so with ``ceil(T / 128) + G`` tiles every row is in one, and so is every unit of the scales.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Int32, Int64, cute

from ..scheduler import ceil_div
from ..scheduler.groups import clamp, group_range

ROWS = 128
LANES = 32
BLOCKS = 2048  # by default
AHEAD = 4  # group ends that a lane loads before it uses the first


class RowTile(NamedTuple):
    """Rows ``[first, first + count)``; ``count`` may be 0 or less. ``tail``: past the last group, to be zeroed.

    For rows by an index, ``order`` has the source of every row; only values below ``tokens`` are valid.
    """

    first: Int32
    count: Int32
    tail: Boolean
    order: Any = None
    tokens: Any = None


def tiles_at_most(rows: Int32, groups: Int32) -> Int32:
    """Return how many tiles cover ``rows`` rows in ``groups`` groups, at most."""
    return ceil_div(rows, ROWS) + groups


class QuantizeGrid(NamedTuple):
    """A launch grid: blocks that each walk over ``chunk`` of the ``across`` tiles of columns of a tile of rows."""

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
) -> QuantizeGrid:
    """Return the grid for tiles of 128 rows and ``columns`` columns of ``matrix``, up to ``most`` per block.

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
    return QuantizeGrid((units * ceil_div(across, chunk), 1, 1), across, chunk)


@cute.jit
def group_of_unit(offs: cute.Tensor, rows: Int32, unit: Int32) -> Int32:
    """Return the group of tile ``unit``, the number of groups for the tail; all 32 lanes of a warp call it."""
    groups = Int32(cute.size(offs))
    lane = cute.arch.lane_idx()
    # Count the groups, the tail included, that begin at this unit or before; the group sought is one less.
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
    """Return tile ``unit`` of rows in groups, in the group ``group``."""
    start, end = group_range(offs, rows, group, True)
    first = start + (unit - start // ROWS - group) * ROWS
    return RowTile(first, cutlass.min(end - first, Int32(ROWS)), group == Int32(cute.size(offs)))


class Place(NamedTuple):
    """A tile's position in a placement of a smaller unit, ``places`` coordinates from ``first`` on (none if negative).

    Together the tiles of all groups cover every coordinate once, also those that no row maps to. ``group`` is the
    tile's; ``leads``: it is the first of the group.
    """

    first: Int32
    places: Int32
    group: Int32
    leads: Boolean


class ColumnTile(NamedTuple):
    """A tile of 128 columns.

    Attributes:
        tile: its rows.
        read: the rows to read.
        group: its group or matrix.
        unit: its number along rows.
        units: number of units along rows that have scales, of a matrix or of all groups.
        k: its number along columns, of ``across``.
        place: its rows' position in transposed data, if there is any.
    """

    tile: RowTile
    read: RowTile
    group: Int32
    unit: Int32
    units: Int32
    k: Int32
    across: Int32
    place: Any = None


@cute.jit
def group_place(offs: cute.Tensor, rows: Int32, unit: Int32, group: Int32, u: cutlass.Constexpr) -> Place:
    """Return the place of tile ``unit``, in ``group``, under the placement of unit ``u``, which divides 128."""
    groups = Int32(cute.size(offs))
    start, end = group_range(offs, rows, group, True)
    ordinal = unit - start // ROWS - group
    first = (start // u + group) * u + ordinal * ROWS
    past = cutlass.max(ceil_div(rows, u) + groups - 1, 0) * u
    if group < groups:
        past = cutlass.min((end // u + group + 1) * u, past)
    return Place(first, cutlass.min(past - first, Int32(ROWS)), group, ordinal == 0)


@cute.jit
def matrix_tile(rows: Int32, unit: Int32) -> RowTile:
    """Return tile ``unit`` of stacked matrices of ``rows`` rows each."""
    across = ceil_div(rows, ROWS)
    matrix = unit // across
    inside = (unit - matrix * across) * ROWS
    return RowTile(matrix * rows + inside, cutlass.min(rows - inside, Int32(ROWS)), Boolean(False))


@cute.jit
def matrix_place(rows: Int32, unit: Int32) -> Place:
    """Return the place of tile ``unit`` in a matrix of ``rows`` columns, the transposed one."""
    across = ceil_div(rows, ROWS)
    matrix = unit // across
    inside = (unit - matrix * across) * ROWS
    return Place(inside, cutlass.min(rows - inside, Int32(ROWS)), matrix, inside == 0)
