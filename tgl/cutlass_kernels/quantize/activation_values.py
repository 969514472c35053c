"""Quantisation of an activation that is computed in registers and never written to memory."""

import cutlass
from cutlass import Float32, cute

from ..activation.activation_spec import ActivationSpec
from ..activation.kernel import activated, load_halves
from .fp8 import QuantizeFP8Kernel
from .lane_tile import STEPS, VECTOR, LaneValues
from .mxfp8 import QuantizeMXFP8Kernel
from .quantize_spec import FP8Spec, MXFP8Spec


class ActivationValues(LaneValues):
    """Mixin that quantises ``p A(g) L(u)``, rounded to the dtype of x, instead of x.

    ``row_scale`` are the rows' probabilities. In the kernel, ``x`` is ``[T, I]``: the first I columns of the halves.
    """

    blocks_per_sm: int
    quantizer: type  # the kernel; not ``super``, which means another class to the DSL than to Python

    def activate(self, activation: ActivationSpec | None, probs: str | None):
        """Set it up for an activation, and a dtype of probabilities or None."""
        assert activation is not None
        self.activation = activation
        self.blocks_per_sm = min(self.blocks_per_sm, 3 if self.packed else 2)
        # Rows of a lane whose loads are in flight: as many as the registers hold.
        self.at_once = 2 if self.packed and not activation.interleaved and probs is None else 1

    @cute.jit
    def __call__(self, x: cute.Tensor, *arguments):
        """Launch; ``x`` is ``[T, 2 I]``, or ``[T, I]`` if not gated, the rest as without the activation."""
        if cutlass.const_expr(self.activation.gated):
            x = cute.make_tensor(x.iterator, cute.make_layout((x.shape[0], x.shape[1] // 2), stride=x.stride))
        self.quantizer.__call__(self, x, *arguments)

    @cute.jit
    def read_tile(self, x, row_scale, values, spot, thread):
        """Compute the activation of a warp's part of a tile; out-of-range rows and columns read others again."""
        tile, k = spot.read, spot.k
        if tile.count > 0 and not tile.tail:
            top, column = self.corner(k, thread)
            column = cutlass.min(column, x.shape[1] - VECTOR)
            # Not unrolled: the registers would not hold the inputs of all rows at once.
            for turn in cutlass.range(STEPS // self.at_once, unroll=1):
                for i in cutlass.range_constexpr(STEPS - self.at_once):
                    values[None, i].store(values[None, i + self.at_once].load())
                self.activate_rows(x, row_scale, values, tile, top + turn * (self.at_once * self.step), column)
        if not self.whole(x, tile, k):
            self.clear_outside(x, values, tile, k, thread)

    @cute.jit
    def activate_rows(self, x, probs, values, tile, top, column):
        """Compute ``at_once`` rows of a lane from ``top`` on, into the last of ``values``."""
        spec = self.activation
        halves = cute.make_rmem_tensor((VECTOR, 2 if spec.gated else 1, self.at_once), self.source)
        for i in cutlass.range_constexpr(self.at_once):
            row = tile.first + cutlass.min(top + self.step * i, tile.count - 1)
            load_halves(spec, x, row, column, x.shape[1], halves[None, None, i])
        for i in cutlass.range_constexpr(self.at_once):
            factor = None
            if cutlass.const_expr(probs is not None):
                factor = probs[tile.first + cutlass.min(top + self.step * i, tile.count - 1)].to(Float32)
            rounded = activated(spec, halves[None, None, i], factor).load().to(self.source)
            values[None, STEPS - self.at_once + i].store(rounded)


class ActivationQuantizeMXFP8Kernel(ActivationValues, QuantizeMXFP8Kernel):
    """The kernel for one ``MXFP8Spec`` with an activation."""

    quantizer = QuantizeMXFP8Kernel

    def __init__(self, spec: MXFP8Spec, spares_registers: bool = True):
        super().__init__(spec, spares_registers)
        self.activate(spec.activation, spec.row_scale)


class ActivationQuantizeFP8Kernel(ActivationValues, QuantizeFP8Kernel):
    """The kernel for one ``FP8Spec`` with an activation."""

    quantizer = QuantizeFP8Kernel

    def __init__(self, spec: FP8Spec):
        super().__init__(spec)
        self.activate(spec.activation, spec.row_scale)
