"""Quantisation kernels of FP8 with float32 scales, per group or per block."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ... import backends
from ...meta.formats import ELEMENTS
from ...meta.quantized import Options
from ..activation.activation_spec import ActivationSpec
from ..archs import Arch
from ..quantize import l2_chunks
from ..quantize.quantize_spec import FP8Spec
from ..runtime.device import multiprocessors
from ..runtime.names import dtype, name
from .format_quantizer import QuantizeCall, Quantizer, by_rows, cleared, flag, rows_of_a_matrix, source

NO_ACTIVATION = "does not take {}, whose scales follow from the largest magnitude of a whole group"


class FP8Quantizer(Quantizer):
    """Quantises FP8 in one launch.

    Args:
        whole: one scale and amax per group instead of per block; with a given scale, amax is cleared first.
    """

    def __init__(self, *, whole: bool) -> None:
        self.whole = whole

    def spec(self, c: QuantizeCall, arch: Arch, activation: ActivationSpec | None, elementwise: bool) -> FP8Spec:
        """Return what a kernel for the call depends on besides the architecture."""
        dtypes = (c.x.dtype, dtype(c.row_scale), dtype(c.noop))
        blocks = None if self.whole else "2d" if c.options.block_2d else "1d"
        order = (c.offs is not None, c.slots is not None, c.rows is not None)
        return _spec(dtypes, blocks, order, c.scale is not None, c.options, activation, elementwise)

    def zero_outputs(self, c: QuantizeCall) -> None:
        """Write scale and amax of groups that hold no values."""
        if self.whole and (c.offs is None or c.x.shape[-1] == 0):
            without_values(c)

    def activation_reason(self, c: QuantizeCall) -> backends.Reason:
        """Return why no activation can precede: a scale per group that is not given depends on its result."""
        if self.whole and c.scale is None:
            return NO_ACTIVATION.format(f"{c.options.format} without `scale`")
        return None

    def arguments(self, c: QuantizeCall) -> tuple:
        """Return the arguments of the kernel; amax tensors that it raises are cleared."""
        options, out = c.options, c.out

        def maxima(amax: Tensor) -> Tensor | None:
            if not self.whole:
                return None
            return amax.view(torch.int32) if c.scale is None else cleared(amax, c.noop)

        row: tuple[Tensor | None, ...] = (None, None, None)
        column = row
        if options.rowwise:
            row = (by_rows(out.data), by_rows(out.scale), maxima(out.amax))
        if options.columnwise:
            column = (by_rows(out.columnwise_data), by_rows(out.columnwise_scale), maxima(out.columnwise_amax))
        x, stop, rows = source(c), flag(c.noop), rows_of_a_matrix(c)
        if self.whole and c.scale is None:
            words = l2_chunks.words_shared(rows or c.num_rows, c.x.shape[-1], c.offs, c.matrices)
            shared = torch.empty(words, dtype=torch.int32, device=c.x.device)
            count = multiprocessors(c.x.device)
            return x, c.offs, c.order, c.row_scale, stop, *row, *column, shared, rows, count
        return x, c.offs, c.order, c.scale, c.row_scale, stop, *row, *column, rows

    def build(self, arch: str, spec: FP8Spec) -> Callable:
        """Compile the kernel for ``spec``. Needs no GPU."""
        import cutlass

        from ..quantize.activation_values import ActivationQuantizeFP8Kernel
        from ..quantize.decoded_values import RequantizeFP8Kernel
        from ..quantize.fp8 import QuantizeFP8Kernel
        from ..quantize.fp8_groups import QuantizeFP8GroupsKernel
        from ..runtime.compiling import compiled, matrix, order_of, scales_of, source_of, strided, vector

        def side(present: bool, pitch: int, *, by_columns: bool = False) -> tuple[Any, Any, Any]:
            if not present:
                return None, None, None
            pitch = 1 if spec.elementwise else pitch
            if spec.blocks is None:
                return matrix(spec.element, pitch=pitch), vector("float32"), vector("int32")
            return matrix(spec.element, pitch=pitch), matrix("float32", unit=0 if by_columns else -1, pitch=4), None

        order = source_of(spec), vector("int32") if spec.grouped else None, order_of(spec)
        factors = (strided(spec.row_scale), strided(spec.noop))
        sides = (*side(spec.rowwise, 8, by_columns=spec.blocks == "1d" and spec.grouped), *side(spec.columnwise, 16))
        rows = cutlass.Int32(1)
        if spec.blocks is None and not spec.given:
            shared, count = vector("int32"), cutlass.Int32(1)
            return compiled(arch, QuantizeFP8GroupsKernel(spec), *order, *factors, *sides, shared, rows, count)
        given = vector("float32") if spec.given else None
        if spec.codes is not None:
            order, factors = (source_of(spec, "uint8"), *order[1:]), (scales_of(spec.codes), None)
            return compiled(arch, RequantizeFP8Kernel(spec), *order, given, *factors, *sides, rows)
        kernel = (QuantizeFP8Kernel if spec.activation is None else ActivationQuantizeFP8Kernel)(spec)
        return compiled(arch, kernel, *order, given, *factors, *sides, rows)


def without_values(c: QuantizeCall) -> None:
    """Write scale and amax of ``fp8_tensor`` for groups that hold no values, which no kernel visits."""
    scale, noop, options, out = c.scale, c.noop, c.options, c.out
    if scale is None:
        assert options.dtype is not None
        made = torch.ones(1, dtype=torch.float32, device="cpu")
        if options.eps:
            largest = torch.tensor([ELEMENTS[options.dtype].max], dtype=torch.float32, device="cpu")
            made = (largest / options.eps).clamp_(max=torch.finfo(torch.float32).max)
            if options.power_of_two:
                made.view(torch.int32).bitwise_and_(-0x800000)
        inverse: Any = float(made.reciprocal())
    else:
        inverse = scale.reciprocal()
    row = (out.scale, out.amax) if options.rowwise else None
    column = (out.columnwise_scale, out.columnwise_amax) if options.columnwise else None
    for pair in filter(None, (row, column)):
        for t, value in zip(pair, (inverse, 0.0)):
            if noop is None:
                t.fill_(value) if isinstance(value, float) else t.copy_(value)
            else:
                t.copy_(torch.where(noop == 0, value, t))


@functools.lru_cache(maxsize=256)
def _spec(
    dtypes: tuple[torch.dtype | None, ...],
    blocks: str | None,
    order: tuple[bool, bool, bool],
    given: bool,
    options: Options,
    activation: ActivationSpec | None,
    elementwise: bool,
) -> FP8Spec:
    source, row_scale, noop = map(name, dtypes)
    grouped, slots, rows = order
    return FP8Spec(
        source=source,
        element=name(options.dtype),
        rowwise=options.rowwise,
        columnwise=options.columnwise,
        blocks=blocks,
        power_of_two=bool(options.power_of_two),
        eps=struct.unpack("<i", struct.pack("<f", options.eps))[0],
        grouped=grouped,
        slots=slots,
        rows=rows,
        given=given,
        row_scale=row_scale,
        noop=noop,
        activation=activation,
        elementwise=elementwise,
    )
