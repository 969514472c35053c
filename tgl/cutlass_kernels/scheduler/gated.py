"""``VarlenM`` for a matrix whose columns are gate and linear half, arranged side by side in each tile.

The halves of B are a mode of their own. A tile of ``tile_n`` columns loads ``tile_n / 2`` of each half, so the
accumulator of a row holds both partners of ``tile_n / 2`` results, whatever the column order of the matrix; a tile that
reaches past a half loads zeros and stores nothing there, as at the edge of any matrix.
"""

from cutlass import Int32, cute

from ..epilogue import EpilogueSpec
from . import Tile
from .problem import VarlenM
from .ragged import ragged_coord, ragged_tensor


def halves(size: Int32, stride: Int32, interleaved: bool) -> tuple[tuple, tuple]:
    """Return shape and stride ``(I, 2)`` of a mode of ``2 I`` columns, split into gate and linear half."""
    half = size // 2
    return (half, 2), ((2 * stride, stride) if interleaved else (stride, half * stride))


class GatedVarlenM(VarlenM):
    """``a [T, K] x b [G, K, 2 I] -> out [T, 2 I]``.

    A tensor map can separate interleaved halves of B only along a mode that is not contiguous, and never those of the
    output, which therefore keeps its ``2 I`` columns in one mode.
    """

    def __init__(self, tile_m: int, tile_n: int, band: int, tail: bool, interleaved: bool):
        super().__init__(tile_m, tile_n, band, tail)
        self.interleaved = interleaved

    def views(self, a: cute.Tensor, b: cute.Tensor, out: cute.Tensor | None) -> tuple:
        """Return views for tensor maps: (rows, depth), ((columns, half), depth), (rows, columns[, half])."""
        groups, depth, columns = b.shape
        shape, stride = halves(columns, b.stride[2], self.interleaved)
        layout = cute.make_layout((shape, depth, groups), stride=(stride, b.stride[1], b.stride[0]))
        b = cute.make_tensor(b.iterator, layout)
        if out is None:
            return a, b, None
        if not self.interleaved:
            (columns, two), (step, apart) = halves(out.shape[1], out.stride[1], False)
            layout = cute.make_layout((out.shape[0], columns, two), stride=(out.stride[0], step, apart))
            out = cute.make_tensor(out.iterator, layout)
        return a, b, ragged_tensor(out, 0)

    def out(self, out: cute.Tensor, tile: Tile) -> cute.Tensor:
        """Return ``[rows, columns, half]``, or ``[rows, columns]`` of interleaved halves."""
        if self.interleaved:
            return super().out(out, tile)
        return cute.domain_offset(ragged_coord(0, tile.start, tile.length, 0, 3), out)[None, None, None, 0, 0]


def varlen_m(spec: EpilogueSpec, tile_m: int, tile_n: int, band: int) -> VarlenM:
    """Return the problem kind for an epilogue."""
    if spec.gated:
        return GatedVarlenM(tile_m, tile_n, band, spec.tail, spec.activation.interleaved)  # type: ignore[union-attr]
    return VarlenM(tile_m, tile_n, band, spec.tail)
