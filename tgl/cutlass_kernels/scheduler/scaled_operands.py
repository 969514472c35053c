"""The two problem kinds on quantised operands, with scales in the blocked layout.

An atom of 128 rows x 4 scales is 512 bytes. The scales of a group begin with an atom of their own, so groups never
share one: the first is ``start // unit + g`` (see ``tgl.meta.placement``), where tokens run along the rows of atoms
(``varlen_m``, unit 128) or along their columns (``varlen_k``, unit ``4 * vector``).
"""

from typing import Any

import cutlass
from cutlass import Int32, cute

from ..gemm.operand_formats import ATOM_COLUMNS, ATOM_ROWS, OperandFormat
from . import Tile, ceil_div, quotient
from .gated import GatedVarlenM
from .problem import Problem, VarlenK, VarlenM

BOUNDARY = 16  # bytes: tensor maps and ``cp.async`` read from multiples of it


def _atoms(scales: cute.Tensor, vector: int, down: Int32, across: Int32) -> cute.Tensor:
    """Return blocked scales ``[bytes]`` or ``[G, bytes]`` of ``down x across`` atoms as ``[rows, depth(, group)]``.

    Within an atom, rows of a run of 32 are 16 bytes apart, the four runs 4 bytes, and neighbouring scales 1 byte.
    """
    size = ATOM_ROWS * ATOM_COLUMNS
    shape: tuple = (((32, 4), down), ((vector, 4), across))
    stride: tuple = (((16, 4), across * size), ((0, 1), size))
    if len(scales.shape) == 2:
        shape, stride = (*shape, scales.shape[0]), (*stride, scales.stride[0])
    return cute.make_tensor(scales.iterator, cute.make_layout(shape, stride=stride))


class ScaledVarlenM(VarlenM):
    """``a [T, K] x b [G, K, N]``: tokens are the rows of A's atoms, every matrix of B has atoms of its own."""

    def __init__(self, *tiling: Any, form: OperandFormat):
        super().__init__(*tiling)
        self.form = form

    def scale_views(self, a: cute.Tensor, b: cute.Tensor, problem: Problem) -> tuple[cute.Tensor, cute.Tensor]:
        """Return the scales of A and B as ``[rows, depth]`` and ``[columns, depth, group]``."""
        vector = self.form.vector
        across = ceil_div(problem.depth, vector * ATOM_COLUMNS)
        places = ceil_div(problem.rows, ATOM_ROWS) + Int32(cute.size(problem.offs)) - 1
        columns = ceil_div(problem.columns, ATOM_ROWS)
        return _atoms(a, vector, places, across), _atoms(b, vector, columns, across)

    def a_scale(self, scales: cute.Tensor, tile: Tile) -> cute.Tensor:
        """Return ``[rows, depth]`` of the tile's group, given the coordinate tensor of a map."""
        return cute.domain_offset(((quotient(tile.start, ATOM_ROWS) + tile.group) * ATOM_ROWS, 0), scales)

    def b_scale(self, scales: cute.Tensor, tile: Tile) -> cute.Tensor:
        """Return ``[columns, depth]``."""
        return scales[None, None, tile.group]


class GatedScaledVarlenM(ScaledVarlenM, GatedVarlenM):
    """``ScaledVarlenM`` with halves side by side: scales of the linear half must begin with their own atom."""

    def scale_views(self, a: cute.Tensor, b: cute.Tensor, problem: Problem) -> tuple[cute.Tensor, cute.Tensor]:
        """Return the scales of A and B as ``[rows, depth]`` and ``[(columns, half), depth, group]``."""
        a, b = super().scale_views(a, b, problem)
        (atom, down), *shape = b.shape
        (inner, step), *stride = b.stride
        half = down // 2
        layout = cute.make_layout((((atom, half), 2), *shape), stride=(((inner, step), half * step), *stride))
        return a, cute.make_tensor(b.iterator, layout)


class ScaledVarlenK(VarlenK):
    """``a [T, M]^T x b [T, N]``: tokens are the columns of the atoms of both.

    Placed data is contiguous along the contraction, where no tensor map can end at a group. Nothing of the next group
    is multiplied only because the mainloop stops at the unit of the placement, which is the depth of one MMA.
    """

    def __init__(self, *tiling: Any, form: OperandFormat):
        super().__init__(*tiling)
        self.form = form
        # A transform over the tokens of a block may have written the padding of the last one.
        self.whole = form.vector if form.placed and form.vector else 1

    def views(self, a: cute.Tensor, b: cute.Tensor, out: cute.Tensor) -> tuple[cute.Tensor, cute.Tensor, cute.Tensor]:
        """Return views for tensor maps: (rows, depth), (columns, depth), (rows, columns)."""
        if not self.form.placed:
            return super().views(a, b, out)
        a, b = (cute.make_tensor(t.iterator, cute.select(t.layout, [1, 0])) for t in (a, b))
        return a, b, cute.make_tensor(out.iterator, cute.select(out.layout, [1, 2, 0]))

    def scale_views(self, a: cute.Tensor, b: cute.Tensor, problem: Problem) -> tuple[cute.Tensor, cute.Tensor]:
        """Return the scales of A and B as ``[rows, depth]`` and ``[columns, depth]``."""
        places = self.places(problem)
        across = places * (ATOM_ROWS * ATOM_COLUMNS)
        a, b = (_atoms(t, self.form.vector, Int32(t.shape[0]) // across, places) for t in (a, b))
        return a, b

    def places(self, problem: Problem) -> Int32:
        """Return the number of placement units: atoms that the scales of either operand have side by side."""
        if self.form.placed:
            return problem.rows // self.form.unit  # of Tp
        return ceil_div(problem.rows, self.form.unit) + Int32(cute.size(problem.offs)) - 1

    def first_place(self, tile: Tile) -> Int32:
        """Return the unit that the tile's group begins with."""
        return quotient(tile.start, self.form.unit) + tile.group

    def place(self, tile: Tile) -> Int32:
        """Return where the tile's group begins along the contraction, in operands as they are in memory."""
        return self.first_place(tile) * self.form.unit if self.form.placed else tile.start

    def _place(self, tensor: cute.Tensor, tile: Tile) -> cute.Tensor:
        """Return ``tensor`` from the tile's group on."""
        return cute.domain_offset((0, self.first_place(tile) * self.form.unit), tensor)

    def a(self, a: cute.Tensor, tile: Tile) -> cute.Tensor:
        """Return ``[rows, depth]`` of the tile's group, given the coordinate tensor of a map of A."""
        return self._place(a, tile) if self.form.placed else super().a(a, tile)

    def b(self, b: cute.Tensor, tile: Tile) -> cute.Tensor:
        """Return ``[columns, depth]``."""
        return self._place(b, tile) if self.form.placed else super().b(b, tile)

    def a_scale(self, scales: cute.Tensor, tile: Tile) -> cute.Tensor:
        """Return ``[rows, depth]``, given the coordinate tensor of a map of A's scales."""
        return self._place(scales, tile)

    def b_scale(self, scales: cute.Tensor, tile: Tile) -> cute.Tensor:
        """Return ``[columns, depth]``."""
        return self._place(scales, tile)


class AnywhereVarlenK(ScaledVarlenK):
    """``a [M, T] x b [N, T]^T``, both contiguous along the contraction, in which groups begin anywhere.

    Loads along the contraction start at multiples of 16 bytes, so a group's contraction begins up to 15 bytes before
    it.
    """

    clears = True

    def before(self, tile: Tile) -> Int32:
        """Return the bytes of the contraction before the group."""
        return tile.start % BOUNDARY

    def depth(self, tile: Tile, problem: Problem) -> Int32:
        """Return the extent of the contraction, including the bytes before the group; 0 for an empty group."""
        return cutlass.min(tile.length, Int32(1)) * self.before(tile) + tile.length

    def place(self, tile: Tile) -> Int32:
        """Return where this contraction begins."""
        return tile.start - self.before(tile)

    def _place(self, tensor: cute.Tensor, tile: Tile) -> cute.Tensor:
        return cute.domain_offset((0, self.place(tile)), tensor)
