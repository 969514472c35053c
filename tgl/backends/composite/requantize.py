"""``group_requantize`` through float32: ``group_dequantize``, then ``group_quantize``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ... import backends
from ...meta import quantized
from ...meta.components import Components
from ...meta.quantized import DequantizeOptions, Options
from ...meta.specs import TensorSpec

Steps = tuple[tuple[str, tuple, dict[str, Any]], ...]


def _steps(
    data: Tensor,
    scale: Tensor,
    offs: Tensor | None,
    amax: Tensor | None,
    options: Options,
    out: Components,
    allocate: Callable[[TensorSpec], Tensor],
) -> Steps:
    """Return the name, arguments and keywords of both ops."""
    read = DequantizeOptions(options.format, False, options.scale_layout, options.block_2d)
    spec = quantized.group_dequantize(
        data, scale, offs, amax, options=read, out_dtype=torch.float32, op="group_requantize"
    )
    wide = allocate(spec)
    return (
        ("group_dequantize", (data, scale, offs, amax), {"options": read, "out": wide}),
        ("group_quantize", (wide, offs, None, None, None, None), {"options": options, "out": out}),
    )


def run(
    data: Tensor, scale: Tensor, offs: Tensor | None, amax: Tensor | None, *, options: Options, out: Components
) -> None:
    for op, args, keywords in _steps(data, scale, offs, amax, options, out, TensorSpec.empty):
        backends.run(op, data.device, *args, **keywords)


def supports(
    data: Tensor, scale: Tensor, offs: Tensor | None, amax: Tensor | None, *, options: Options, out: Components
) -> backends.Reason:
    """Return why one of the two ops is unsupported for a call, or None."""
    steps = _steps(data, scale, offs, amax, options, out, TensorSpec.meta)
    reasons = (backends.reason_against(op, data.device, *args, **keywords) for op, args, keywords in steps)
    return next(filter(None, reasons), None)
