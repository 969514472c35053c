"""Quantisation kernels of NVFP4."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ... import backends
from ...meta.quantized import Options
from ..activation.activation_spec import ActivationSpec
from ..archs import Arch, arch_of
from ..quantize.quantize_spec import NVFP4Spec
from ..runtime.names import dtype, name
from .format_quantizer import QuantizeCall, Quantizer, cleared, flag, rows_of_a_matrix, source
from .quantize_fp8 import NO_ACTIVATION

PIECE = 32  # rows of a 16-byte piece of transposed data


class NVFP4Quantizer(Quantizer):
    """Quantises NVFP4 in two passes: amax of groups, then elements and scales."""

    def spec(self, c: QuantizeCall, arch: Arch, activation: ActivationSpec | None, elementwise: bool) -> NVFP4Spec:
        """Return what a kernel for the call depends on besides the architecture."""
        assert activation is None
        dtypes = (c.x.dtype, dtype(c.row_scale), dtype(c.noop))
        order = (c.offs is not None, c.slots is not None, c.rows is not None)
        chip = backends.device_arch(c.x.device)
        draws = chip if c.rng is not None and chip in arch.draws_to_fp4 else None
        return _spec(arch, dtypes, order, c.rng is not None, c.options, elementwise, draws)

    def zero_outputs(self, c: QuantizeCall) -> None:
        """Zero the amax, that of no values."""
        for amax in (c.out.amax, c.out.columnwise_amax):
            cleared(amax, c.noop)

    def activation_reason(self, c: QuantizeCall) -> backends.Reason:
        """Return why no activation can precede: scales depend on whole groups."""
        return NO_ACTIVATION.format(c.options.format)

    def arguments(self, c: QuantizeCall) -> tuple:
        """Return the arguments of the kernel."""
        options, out = c.options, c.out

        def data(t: Tensor) -> Tensor:
            flat = t.view(torch.uint8) if t.dim() == 2 else t.view(torch.uint8).flatten(0, 1)
            return flat if flat.numel() else flat.as_strided(flat.shape, (PIECE, 1))  # empty

        def scales(t: Tensor) -> Tensor:
            return t.view(torch.uint8).view(-1) if options.blocked else data(t)

        row: tuple[Tensor | None, ...] = (None, None, None)
        column = row
        if options.rowwise:
            row = (data(out.data), scales(out.scale), out.amax)
        if options.columnwise:
            column = (data(out.columnwise_data), scales(out.columnwise_scale), out.columnwise_amax)
        words = None if c.rng is None else c.rng.contiguous().view(torch.int32)
        return source(c), c.offs, c.order, c.row_scale, words, flag(c.noop), *row, *column, rows_of_a_matrix(c)

    def build(self, arch: str, spec: NVFP4Spec) -> Callable:
        """Compile the kernel for ``spec``. Needs no GPU."""
        import cutlass

        from ..quantize.nvfp4 import QuantizeNVFP4Kernel
        from ..runtime.compiling import compiled, matrix, order_of, source_of, strided, vector

        def side(present: bool, pitch: int) -> tuple[Any, Any, Any]:
            if not present:
                return None, None, None
            scales = vector("uint8", 16) if spec.blocked else matrix("uint8", pitch=1)
            return matrix("uint8", pitch=1 if spec.elementwise else pitch), scales, vector("float32")

        return compiled(
            arch,
            QuantizeNVFP4Kernel(spec, arch_of(arch).spares_registers),
            source_of(spec),
            vector("int32") if spec.grouped else None,
            order_of(spec),
            strided(spec.row_scale),
            vector("int32") if spec.stochastic else None,
            strided(spec.noop),
            *side(spec.rowwise, 4),
            *side(spec.columnwise, 16),
            cutlass.Int32(1),
            chip=spec.chip,
        )


@functools.lru_cache(maxsize=256)
def _spec(
    arch: Arch,
    dtypes: tuple[torch.dtype | None, ...],
    order: tuple[bool, bool, bool],
    stochastic: bool,
    options: Options,
    elementwise: bool,
    draws: str | None,
) -> NVFP4Spec:
    source, row_scale, noop = map(name, dtypes)
    grouped, slots, rows = order
    return NVFP4Spec(
        source=source,
        rowwise=options.rowwise,
        columnwise=options.columnwise,
        blocks_2d=options.block_2d,
        blocked=options.blocked,
        grouped=grouped,
        slots=slots,
        rows=rows,
        rht=options.rht,
        stochastic=stochastic,
        converts=arch.rounds_to_fp4,
        row_scale=row_scale,
        noop=noop,
        elementwise=elementwise,
        chip=draws,
    )
