"""Rows of a pre-activation: where the halves of its columns are that belong to columns ``[T, I]`` of the output."""

from cutlass import cute

from . import Tile
from .problem import VarlenM
from .ragged import ragged_coord, ragged_tensor


def ragged_halves(tensor: cute.Tensor, side_by_side: bool) -> cute.Tensor:
    """Return ``[T, columns]`` as ``[T, columns of a half, halves, shift, start]``, ragged along T.

    Halves side by side become a mode of their own, so that columns outside one half are out of bounds instead of in the
    other. Interleaved or ungated columns are one half.
    """
    rows, columns = tensor.shape
    pitch, unit = tensor.stride
    half = columns // 2 if side_by_side else columns
    layout = cute.make_layout((rows, half, 2 if side_by_side else 1), stride=(pitch, unit, half))
    return ragged_tensor(cute.make_tensor(tensor.iterator, layout), 0)


class HalvesVarlenM(VarlenM):
    """``VarlenM`` whose output is ``[T, 2 I]`` or ``[T, I]``, for a product ``[T, I]``."""

    def __init__(self, tile_m: int, tile_n: int, band: int, tail: bool, side_by_side: bool):
        super().__init__(tile_m, tile_n, band, tail)
        self.side_by_side = side_by_side

    def views(self, a: cute.Tensor, b: cute.Tensor, out: cute.Tensor) -> tuple[cute.Tensor, cute.Tensor, cute.Tensor]:
        """Return the views of ``VarlenM``, with the output as ``ragged_halves``."""
        a, b, _ = super().views(a, b, out)
        return a, b, ragged_halves(out, self.side_by_side)

    def out(self, out: cute.Tensor, tile: Tile) -> cute.Tensor:
        """Return ``[rows, columns of a half, halves]``."""
        row, column, shift, start = ragged_coord(0, tile.start, tile.length, 0)
        return cute.domain_offset((row, column, 0, shift, start), out)[None, None, None, 0, 0]
