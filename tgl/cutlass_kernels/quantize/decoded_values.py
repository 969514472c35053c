"""Columnwise quantisation of rowwise quantised data: codes are decoded as they are read, never written decoded."""

import cutlass
from cutlass import Float32, Uint8, cute

from ..instructions import widened_fp8
from ..runtime.elements import TYPES
from .decode import scale_of_row
from .fp8 import QuantizeFP8Kernel
from .lane_tile import STEPS, VECTOR, LaneValues
from .mxfp8 import QuantizeMXFP8Kernel
from .quantize_spec import DequantizeSpec, FP8Spec, MXFP8Spec


class DecodedValues(LaneValues):
    """Mixin that quantises codes times their scales, in float32, instead of x.

    ``x`` is bytes, and ``row_scale`` the scales of their rows.
    """

    blocks_per_sm: int

    def decode(self, codes: DequantizeSpec | None):
        """Set it up for codes."""
        assert codes is not None
        self.codes = codes
        compact_bytes = codes.decoding.scale == "float8_e8m0fnu" and not codes.blocked
        self.blocks_per_sm = 1 if self.elementwise or compact_bytes else 2  # limited by registers

    @cute.jit
    def read_tile(self, x, row_scale, values, spot, thread):
        """Decode a warp's part of a tile; out-of-range rows and columns read others again."""
        tile, k = spot.read, spot.k
        row, column = self.corner(k, thread)
        held = cute.make_rmem_tensor((VECTOR, STEPS), Uint8)
        self.load_tile(x, held, tile, k, thread)
        factors = cute.make_rmem_tensor(STEPS, Float32)
        column = cutlass.min(column, x.shape[1] - 1)
        for i in cutlass.range_constexpr(STEPS):
            at = cutlass.min(row + self.step * i, tile.count - 1)
            factors[i] = scale_of_row(self.codes, row_scale, Float32(1.0), spot, at, column, x.shape[1])
        for i in cutlass.range_constexpr(STEPS):
            values[None, i].store(widened_fp8(held[None, i], TYPES[self.codes.element]) * factors[i])
        if not self.whole(x, tile, k):
            self.clear_outside(x, values, tile, k, thread)


class RequantizeMXFP8Kernel(DecodedValues, QuantizeMXFP8Kernel):
    """The kernel for one ``MXFP8Spec`` of codes."""

    def __init__(self, spec: MXFP8Spec, spares_registers: bool = True):
        super().__init__(spec, spares_registers)
        self.decode(spec.codes)


class RequantizeFP8Kernel(DecodedValues, QuantizeFP8Kernel):
    """The kernel for one ``FP8Spec`` of codes."""

    def __init__(self, spec: FP8Spec):
        super().__init__(spec)
        self.decode(spec.codes)
