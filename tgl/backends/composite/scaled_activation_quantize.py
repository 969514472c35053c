"""``grouped_gemm_scaled_activation_quantize`` as two ops: the product, then its quantised activation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from ... import backends
from ...meta.components import Components
from ...meta.quantized import Options

if TYPE_CHECKING:
    from ...ops.grouped_activation import Params

Steps = tuple[tuple[str, tuple, dict[str, Any]], ...]


def _steps(*args: Any, b_direction: str, params: Params, options: Options, h: Tensor, out: Components) -> Steps:
    """Return the name, arguments and keywords of both ops."""
    *operands, probs, scale = args
    names = {"format": options.format, "b_direction": b_direction, "scale_layout": options.scale_layout}
    return (
        ("grouped_gemm_scaled", (*operands, None), {**names, "out": h, "zero_tail": True}),
        (
            "grouped_activation_quantize",
            (h, operands[4], probs, scale),
            {"params": params, "options": options, "out": out},
        ),
    )


def run(a: Tensor, *args: Any, **keywords: Any) -> None:
    for op, given, options in _steps(a, *args, **keywords):
        backends.run(op, a.device, *given, **options)


def supports(a: Tensor, *args: Any, **keywords: Any) -> backends.Reason:
    """Return why one of the two ops is unsupported for a call, or None."""
    steps = _steps(a, *args, **keywords)
    reasons = (backends.reason_against(op, a.device, *given, **options) for op, given, options in steps)
    return next(filter(None, reasons), None)
