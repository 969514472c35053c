"""MXFP8 quantisation of an activation that is computed on the way and never written."""

import cutlass
from cutlass import Boolean, Float32, cute

from ..activation.kernel import activated, load_halves
from .mxfp8 import STEPS, VECTOR, QuantizeMXFP8


class ActivateQuantizeMXFP8(QuantizeMXFP8):
    """As ``QuantizeMXFP8``, of ``p A(g) L(u)`` rounded to the dtype of x.

    ``x`` is the view ``[T, I]`` of the first I columns of the halves, and ``row_scale`` the rows' probabilities.
    """

    @cute.jit
    def load_tile(self, x, parts, tile, k, thread):
        """Nothing ahead of time: a tile has twice as many inputs as outputs, more than registers would hold."""

    @cute.jit
    def widen(self, x, row_scale, parts, tile, k, thread):
        """The activation in float32, rounded to the dtype of x; zero where there is none."""
        spec = self.spec.activation
        values = cute.make_rmem_tensor((VECTOR, STEPS), Float32)
        values.fill(0.0)
        top, column = self.corner(k, thread)
        inside = Boolean(column < x.shape[1])
        if tile.count > 0 and not tile.tail:
            column = cutlass.min(column, x.shape[1] - VECTOR)
            halves = cute.make_rmem_tensor((VECTOR, 2 if spec.gated else 1, STEPS), self.source)
            for i in cutlass.range_constexpr(STEPS):
                row = tile.first + cutlass.min(top + 4 * i, tile.count - 1)
                load_halves(spec, x, row, column, x.shape[1], halves[None, None, i])
            for i in cutlass.range_constexpr(STEPS):
                factor = None
                if cutlass.const_expr(row_scale is not None):
                    factor = row_scale[tile.first + cutlass.min(top + 4 * i, tile.count - 1)].to(Float32)
                rounded = activated(spec, halves[None, None, i], factor).load().to(self.source)
                values[None, i].store(rounded.to(Float32))
                for j in cutlass.range_constexpr(VECTOR):
                    values[j, i] = values[j, i] if inside and top + 4 * i < tile.count else Float32(0)
        return values
