"""Operands and results of a quantisation launch."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Int32, Int64, cute

from ..scheduler.groups import slot_of
from .tiles import BLOCKS, QuantizeGrid, RowTile, launch_grid


class QuantizeSource(NamedTuple):
    """Operands of a quantisation launch.

    Attributes:
        x: ``[T, K]``, or ``[G N, K]`` of stacked matrices; unless element by element, rows on 16 bytes, K a multiple
            of 8.
        offs: int32 ``[G]``, or None for matrices.
        order: int32 or None. For rows in groups ``[T]``: ``x`` is ``[S, K]``, and row t is its row ``order[t]``.
            For matrices ``[G]``: ``x`` is ``[S, N, K]``, and group g has the matrix ``order[g]``.
        row_scale: ``[T]``, the factors by which rows are multiplied first, or None.
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
        """``x`` in the shape of the quantised rows, which has no memory of its own if an order is given.

        These are the rows that the order names, or the matrices, one below the other.
        """
        if self.order is None:
            return self.x
        by_rows = len(self.x.shape) == 2
        rows = Int32(cute.size(self.order)) * (1 if by_rows else self.matrix_rows)
        return cute.make_tensor(self.x.iterator, cute.make_layout((rows, self.x.shape[-1]), stride=self.x.stride[-2:]))

    @property
    def rows(self) -> Int32:
        """The number of quantised rows, over all matrices."""
        return Int32(self.stack.shape[0])

    def stopped(self) -> Boolean:
        """Whether nothing is to be written."""
        return Boolean(False) if self.noop is None else self.noop[0] != self.noop.element_type(0)

    def grid(self, columns: int, most: int = 1, blocks: int = BLOCKS) -> QuantizeGrid:
        """Return ``launch_grid`` for the whole source."""
        return launch_grid(self.stack, columns, self.offs, self.matrix_rows, most, blocks)


class Destinations(NamedTuple):
    """Results in both directions; None if the direction is not requested, and where the format has none."""

    data: cute.Tensor | None
    scale: Any
    amax: Any
    columnwise_data: cute.Tensor | None
    columnwise_scale: Any
    columnwise_amax: Any


@cute.jit
def source_of(source: QuantizeSource, matrix: Int32, tile: RowTile):
    """Return the tensor in which the rows of a tile are read, and their row tile: the tile's own if there is no order.

    With an order of matrices these are rows of ``QuantizeSource.stack`` relative to the matrix at its slot; for a slot
    out of range no row is read, and values that are not read count as zeros. An order of rows is kept in the tile.
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
