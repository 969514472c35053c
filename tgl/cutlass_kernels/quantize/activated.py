"""MXFP8 quantisation of an activation that is computed on the way and never written."""

import cutlass
from cutlass import Float32, cute

from ..activation.kernel import activated, load_halves
from .mxfp8 import STEPS, VECTOR, QuantizeMXFP8

AT_ONCE = 4  # rows of a lane whose loads are in flight: registers hold no more beside the values


class ActivateQuantizeMXFP8(QuantizeMXFP8):
    """As ``QuantizeMXFP8``, of ``p A(g) L(u)`` rounded to the dtype of x.

    ``x`` is the view ``[T, I]`` of the first I columns of the halves, and ``row_scale`` the rows' probabilities.
    """

    @cute.jit
    def load_tile(self, x, parts, tile, k, thread):
        """Nothing ahead of time: a tile has twice as many inputs as outputs."""

    @cute.jit
    def widen(self, x, row_scale, parts, tile, k, thread):
        """The activation in float32, rounded to the dtype of x; zero where there is none."""
        values = cute.make_rmem_tensor((VECTOR, STEPS), Float32)
        values.fill(0.0)
        if tile.count > 0 and not tile.tail:
            self.activate_tile(x, row_scale, values, tile, k, thread)
        return values

    @cute.jit
    def activate_tile(self, x, probs, values, tile, k, thread):
        """The activation of a warp's 32 x 64 of a tile that has rows, rounded to the dtype of x."""
        spec = self.spec.activation
        top, column = self.corner(k, thread)
        inside = column < x.shape[1]
        column = cutlass.min(column, x.shape[1] - VECTOR)
        for first in cutlass.range_constexpr(0, STEPS, AT_ONCE):
            cute.arch.sync_warp()  # keeps the loads of the next rows behind the work on these
            halves = cute.make_rmem_tensor((VECTOR, 2 if spec.gated else 1, AT_ONCE), self.source)
            for i in cutlass.range_constexpr(AT_ONCE):
                row = tile.first + cutlass.min(top + 4 * (first + i), tile.count - 1)
                load_halves(spec, x, row, column, x.shape[1], halves[None, None, i])
            for i in cutlass.range_constexpr(AT_ONCE):
                row = top + 4 * (first + i)
                factor = None
                if cutlass.const_expr(probs is not None):
                    factor = probs[tile.first + cutlass.min(row, tile.count - 1)].to(Float32)
                rounded = activated(spec, halves[None, None, i], factor).load().to(self.source)
                values[None, first + i].store(rounded.to(values.element_type))
                there = inside and row < tile.count
                for j in cutlass.range_constexpr(VECTOR):
                    values[j, first + i] = values[j, first + i] if there else values.element_type(0)
