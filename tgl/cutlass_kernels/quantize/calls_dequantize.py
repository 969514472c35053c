"""From components to a launch of a dequantising kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ... import backends
from ...meta.quantized import DequantizeOptions
from .. import host
from ..plans import known, remember
from . import plans
from .spec import DequantizeSpec

RUN = 16  # rows of transposed data that a lane loads


def group_dequantize_supports(
    data: Tensor, scale: Tensor, offs: Tensor | None, amax: Tensor | None, *, options: DequantizeOptions, out: Tensor
) -> str | None:
    """Why ``group_dequantize`` below cannot serve a call, or None."""
    reason = host.packages_reason()
    if reason is None and out.numel() and out.numel() // out.shape[-1] > host.MAX_ROWS:
        reason = f"takes up to {host.MAX_ROWS} rows, got {out.numel() // out.shape[-1]}"
    return reason


def group_dequantize(
    data: Tensor, scale: Tensor, offs: Tensor | None, amax: Tensor | None, *, options: DequantizeOptions, out: Tensor
) -> None:
    """Write the values of components to ``out``: one launch."""
    if out.numel() == 0:
        return
    if offs is not None and offs.shape[0] == 0:
        out.zero_()
        return
    _plan(data, offs, options, out)(*_arguments(aligned(data), aligned(scale), offs, amax, options, out))


def attempt_group_dequantize(
    data: Tensor, scale: Tensor, offs: Tensor | None, amax: Tensor | None, *, options: DequantizeOptions, out: Tensor
) -> str | None:
    """``group_dequantize`` if it can serve the call, else why not; one look-up for a call like one before."""
    if offs is None:
        rows, columns = out.shape[0] * out.shape[1], out.shape[2]
    else:
        rows, columns = out.shape
    dtypes, groups = (data.dtype, out.dtype), None if offs is None else offs.shape[0]
    key = ("group_dequantize", backends.emulated_arch, data.device, dtypes, options, groups, columns, data.shape[-1])
    launch = known(key, rows, data.data_ptr() | scale.data_ptr())
    if launch is not None:
        launch(*_arguments(data, scale, offs, amax, options, out))
        return None
    reason = group_dequantize_supports(data, scale, offs, amax, options=options, out=out)
    if reason is None:
        group_dequantize(data, scale, offs, amax, options=options, out=out)
        if out.numel() and (offs is None or offs.shape[0]):
            remember(key, (), _plan(data, offs, options, out))
    return reason


def _arguments(
    data: Tensor, scale: Tensor, offs: Tensor | None, amax: Tensor | None, options: DequantizeOptions, out: Tensor
) -> tuple:
    elements = data if data.dtype == torch.uint8 else data.view(torch.uint8)
    if offs is not None:
        return elements, scale, offs, amax, out, 0
    scales = scale if scale.dim() == 1 else scale.view(-1) if options.blocked else scale.view(-1, scale.shape[-1])
    rows = out.view(-1, out.shape[-1])
    return elements.view(-1, elements.shape[-1]), scales, offs, amax, rows, out.shape[1]


def prepare_group_dequantize(
    data: Tensor, scale: Tensor, offs: Tensor | None, amax: Tensor | None, *, options: DequantizeOptions, out: Tensor
) -> None:
    """Compile and load what ``group_dequantize`` with these arguments needs."""
    if out.numel() and (offs is None or offs.shape[0]):
        _plan(data, offs, options, out)


def aligned(t: Tensor) -> Tensor:
    """``t``, or a copy if it begins at an address that no access of 16 bytes may have."""
    return t.clone() if host.address(t) % host.ALIGNMENT else t


def divisor(size: int, most: int) -> int:
    """The largest power of two up to ``most`` that divides ``size``."""
    return min(size & -size, most)


def _plan(data: Tensor, offs: Tensor | None, options: DequantizeOptions, out: Tensor) -> Callable:
    arch = backends.device_arch(data.device)
    form = options.description
    transposed = options.columnwise and form.transposed_columnwise
    spec = DequantizeSpec(
        format=options.format,
        element="float4_e2m1" if form.per_byte == 2 else host.name(data.dtype),
        out=host.name(out.dtype),
        columnwise=options.columnwise,
        blocked=options.blocked,
        square=options.block_2d and options.format == "fp8_block",
        rht=options.rht,
        grouped=offs is not None,
        vector=divisor(out.shape[-1], host.ALIGNMENT // out.element_size()),
        run=divisor(data.shape[-1], RUN // form.per_byte) if transposed else 0,
    )
    return plans.fetch((arch, not data.is_cuda, spec), data, lambda: build(arch, spec), "group_dequantize")


def build(arch: str, spec: DequantizeSpec) -> Callable:
    """Compile the kernel for ``spec``. Needs no GPU."""
    import cutlass

    from ..compiling import compiled, matrix, strided, vector
    from .decode import FP4
    from .dequantize import DequantizeRows
    from .dequantize_transposed import DequantizeTransposed

    def scales() -> Any:
        if spec.format == "fp8_tensor":
            return vector("float32")
        if spec.format == "fp8_block":
            return strided("float32", 2) if spec.grouped and not spec.columnwise else matrix("float32", pitch=4)
        if spec.blocked:
            return vector("uint8", host.ALIGNMENT)
        return matrix("uint8", pitch=spec.vector if spec.columnwise and not spec.run else 1)

    pitch = spec.run or (spec.vector // 2 if spec.element == FP4 else spec.vector)
    return compiled(
        arch,
        (DequantizeTransposed if spec.run else DequantizeRows)(spec),
        matrix("uint8", pitch=pitch),
        scales(),
        vector("int32") if spec.grouped else None,
        vector("float32") if spec.format == "nvfp4" else None,
        matrix(spec.out, pitch=spec.vector * (4 if spec.out == "float32" else 2)),
        cutlass.Int32(1),
    )
