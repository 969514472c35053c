"""What a launch of a quantisation reads and writes."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Int32, Int64, cute

from ..scheduler.groups import slot_of
from .tiles import BLOCKS, QuantizeGrid, RowTile, launch_grid


class QuantizeSource(NamedTuple):
    """What a launch quantises.

    Attributes:
        x: ``[T, K]``, or ``[G N, K]`` of stacked matrices; unless element by element, rows on 16 bytes, K a multiple
            of 8.
        offs: int32 ``[G]``, or None for matrices.
        order: int32 or None. Of rows in groups ``[T]``: ``x`` is ``[S, K]``, and its row ``order[t]`` stands in row t.
            Of matrices ``[G]``: ``x`` is ``[S, N, K]``, and that of group g is ``order[g]``.
        row_scale: ``[T]``, what a row is multiplied by first, or None.
        noop: one element; if not zero, nothing is written. None writes always.
        matrix_rows: N of matrices.
    """

    x: cute.Tensor
    offs: cute.Tensor | None
    order: cute.Tensor | None
    row_scale: cute.Tensor | None
    noop: Any
    matrix_rows: Int32

    @property
    def stack(self) -> cute.Tensor:
        """``x`` in the shape of what is quantised, which has no such memory if an order is given.

        These are the rows that it names, or the matrices, one below the other.
        """
        if self.order is None:
            return self.x
        by_rows = len(self.x.shape) == 2
        rows = Int32(cute.size(self.order)) * (1 if by_rows else self.matrix_rows)
        return cute.make_tensor(self.x.iterator, cute.make_layout((rows, self.x.shape[-1]), stride=self.x.stride[-2:]))

    @property
    def rows(self) -> Int32:
        """How many rows are quantised, all matrices together."""
        return Int32(self.stack.shape[0])

    def stopped(self) -> Boolean:
        """Whether nothing is to be written."""
        return Boolean(False) if self.noop is None else self.noop[0] != self.noop.element_type(0)

    def grid(self, columns: int, most: int = 1, blocks: int = BLOCKS) -> QuantizeGrid:
        """``launch_grid`` for all of it."""
        return launch_grid(self.stack, columns, self.offs, self.matrix_rows, most, blocks)


class Destinations(NamedTuple):
    """Both directions of what is written; None without the direction, and where the format has none."""

    data: cute.Tensor | None
    scale: Any
    amax: Any
    columnwise_data: cute.Tensor | None
    columnwise_scale: Any
    columnwise_amax: Any


@cute.jit
def source_of(source: QuantizeSource, matrix: Int32, tile: RowTile):
    """Where the rows of a tile are to be read, and which of them: the tile's if there is no order.

    With one of matrices, rows of ``QuantizeSource.stack`` as seen from the matrix at its slot. Of a number that is no
    slot's no row is read, and what is not read counts as zeros. One of rows goes with the tile.
    """
    x, order = source.x, source.order
    if cutlass.const_expr(order is None):
        return x, tile
    if cutlass.const_expr(len(x.shape) == 2):
        return source.stack, RowTile(tile.first, tile.count, tile.tail, order, Int32(x.shape[0]))
    slot = slot_of(order, Int32(x.shape[0]), matrix)
    before = Int64(slot) * x.stride[0] - Int64(matrix) * source.matrix_rows * x.stride[1]
    layout = source.stack.layout
    count = cutlass.select_(slot < x.shape[0], tile.count, Int32(0))
    return cute.make_tensor(x.iterator + before, layout), RowTile(tile.first, count, tile.tail)
