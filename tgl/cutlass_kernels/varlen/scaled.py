"""The two problem kinds with scales along the contraction, in the blocked layout.

An atom of 128 rows x 4 scales is 512 bytes. A group's scales begin with an atom of their own, so an atom is never
shared: the first is ``start // unit + g`` (see ``tgl.meta.placement``), where tokens run along the rows of atoms
(``varlen_m``, unit 128) or along their columns (``varlen_k``, unit ``4 * vector``).
"""

from typing import Any

from cutlass import Int32, cute

from ..gemm.scaling import ATOM_COLUMNS, ATOM_ROWS, BlockScaling
from ..schedule import Tile, ceil_div
from .policy import Problem, VarlenK, VarlenM


def _atoms(scales: cute.Tensor, vector: int, down: Int32, across: Int32) -> cute.Tensor:
    """Blocked scales ``[bytes]`` or ``[G, bytes]`` of ``down x across`` atoms as ``[rows, depth(, group)]``.

    Within an atom rows of 32 are 16 bytes apart, these runs 4 bytes, and neighbouring scales one.
    """
    size = ATOM_ROWS * ATOM_COLUMNS
    shape: tuple = (((32, 4), down), ((vector, 4), across))
    stride: tuple = (((16, 4), across * size), ((0, 1), size))
    if len(scales.shape) == 2:
        shape, stride = (*shape, scales.shape[0]), (*stride, scales.stride[0])
    return cute.make_tensor(scales.iterator, cute.make_layout(shape, stride=stride))


class ScaledVarlenM(VarlenM):
    """``a [T, K] x b [G, K, N]``: tokens are the rows of A's atoms, every matrix of B has atoms of its own."""

    def __init__(self, *tiling: Any, scaling: BlockScaling):
        super().__init__(*tiling)
        self.scaling = scaling

    def scale_views(self, a: cute.Tensor, b: cute.Tensor, problem: Problem) -> tuple[cute.Tensor, cute.Tensor]:
        """Scales of A and B as ``[rows, depth]`` and ``[columns, depth, group]``."""
        vector = self.scaling.vector
        across = ceil_div(problem.depth, vector * ATOM_COLUMNS)
        places = ceil_div(problem.rows, ATOM_ROWS) + Int32(cute.size(problem.offs)) - 1
        columns = ceil_div(problem.columns, ATOM_ROWS)
        return _atoms(a, vector, places, across), _atoms(b, vector, columns, across)

    def a_scale(self, scales: cute.Tensor, tile: Tile) -> cute.Tensor:
        """``[rows, depth]`` of the tile's group, given the coordinate tensor of a map."""
        return cute.domain_offset(((tile.start // ATOM_ROWS + tile.group) * ATOM_ROWS, 0), scales)

    def b_scale(self, scales: cute.Tensor, tile: Tile) -> cute.Tensor:
        """``[columns, depth]``."""
        return scales[None, None, tile.group]


class ScaledVarlenK(VarlenK):
    """``a [T, M]^T x b [T, N]``: tokens are the columns of the atoms of both."""

    def __init__(self, *tiling: Any, scaling: BlockScaling):
        super().__init__(*tiling)
        self.scaling = scaling

    def scale_views(self, a: cute.Tensor, b: cute.Tensor, problem: Problem) -> tuple[cute.Tensor, cute.Tensor]:
        """Scales of A and B as ``[rows, depth]`` and ``[columns, depth]``."""
        vector = self.scaling.vector
        places = ceil_div(problem.rows, vector * ATOM_COLUMNS) + Int32(cute.size(problem.offs)) - 1
        bytes_across = places * (ATOM_ROWS * ATOM_COLUMNS)
        a, b = (_atoms(t, vector, Int32(t.shape[0]) // bytes_across, places) for t in (a, b))
        return a, b

    def _place(self, scales: cute.Tensor, tile: Tile) -> cute.Tensor:
        tokens = self.scaling.vector * ATOM_COLUMNS
        return cute.domain_offset((0, (tile.start // tokens + tile.group) * tokens), scales)

    def a_scale(self, scales: cute.Tensor, tile: Tile) -> cute.Tensor:
        """``[rows, depth]`` of the tile's group, given the coordinate tensor of a map."""
        return self._place(scales, tile)

    def b_scale(self, scales: cute.Tensor, tile: Tile) -> cute.Tensor:
        """``[columns, depth]``."""
        return self._place(scales, tile)
