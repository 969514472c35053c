"""Quantisation kernels of MXFP8."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...meta.quantized import Options
from ..activation.activation_spec import ActivationSpec
from ..archs import Arch, arch_of
from ..quantize.quantize_spec import MXFP8Spec
from ..runtime.names import dtype, name
from .format_quantizer import QuantizeCall, Quantizer, by_rows, flag, rows_of_a_matrix, source

VECTOR = 8  # columns per lane


class MXFP8Quantizer(Quantizer):
    """Quantises MXFP8 in one launch."""

    def spec(self, c: QuantizeCall, arch: Arch, activation: ActivationSpec | None, elementwise: bool) -> MXFP8Spec:
        """Return what a kernel for the call depends on besides the architecture."""
        dtypes = (c.x.dtype, dtype(c.row_scale), dtype(c.noop))
        order = (c.offs is not None, c.slots is not None, c.rows is not None)
        return _spec(dtypes, order, c.options, activation, elementwise)

    def arguments(self, c: QuantizeCall) -> tuple:
        """Return the arguments of the kernel."""
        options, out = c.options, c.out

        def scales(t: Tensor) -> Tensor:
            if c.offs is not None:
                return t
            return t.view(-1) if options.blocked else t.view(-1, t.shape[-1])

        row = (by_rows(out.data), scales(out.scale)) if options.rowwise else (None, None)
        column = (by_rows(out.columnwise_data), scales(out.columnwise_scale)) if options.columnwise else (None, None)
        return source(c), c.offs, c.order, c.row_scale, flag(c.noop), *row, *column, rows_of_a_matrix(c)

    def build(self, arch: str, spec: MXFP8Spec) -> Callable:
        """Compile the kernel for ``spec``. Needs no GPU."""
        import cutlass

        from ..quantize.activation_values import ActivationQuantizeMXFP8Kernel
        from ..quantize.decoded_values import RequantizeMXFP8Kernel
        from ..quantize.mxfp8 import QuantizeMXFP8Kernel
        from ..runtime.compiling import compiled, matrix, order_of, scales_of, source_of, strided, vector

        def side(present: bool) -> tuple[Any, Any]:
            if not present:
                return None, None
            scales = vector("uint8", 16) if spec.blocked else matrix("uint8", pitch=1)
            return matrix(spec.element, pitch=1 if spec.elementwise else VECTOR), scales

        kernel = QuantizeMXFP8Kernel if spec.activation is None else ActivationQuantizeMXFP8Kernel
        x, factors = source_of(spec), strided(spec.row_scale)
        if spec.codes is not None:
            kernel, x, factors = RequantizeMXFP8Kernel, source_of(spec, "uint8"), scales_of(spec.codes)
        return compiled(
            arch,
            kernel(spec, arch_of(arch).spares_registers),
            x,
            vector("int32") if spec.grouped else None,
            order_of(spec),
            factors,
            strided(spec.noop),
            *side(spec.rowwise),
            *side(spec.columnwise),
            cutlass.Int32(1),
        )


@functools.lru_cache(maxsize=256)
def _spec(
    dtypes: tuple[torch.dtype | None, ...],
    order: tuple[bool, bool, bool],
    options: Options,
    activation: ActivationSpec | None,
    elementwise: bool,
) -> MXFP8Spec:
    source, row_scale, noop = map(name, dtypes)
    grouped, slots, rows = order
    return MXFP8Spec(
        source=source,
        element=name(options.dtype),
        rowwise=options.rowwise,
        columnwise=options.columnwise,
        scaling=options.scaling,
        blocked=options.blocked,
        grouped=grouped,
        slots=slots,
        rows=rows,
        row_scale=row_scale,
        noop=noop,
        activation=activation,
        elementwise=elementwise,
    )
