"""``tgl::group_dequantize``: the values of a quantised operand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import debug
from ..meta import quantized
from ..meta.quantized import DequantizeOptions
from ..meta.remembered import remembered
from ..meta.specs import Dim
from ._define import define

NAME = "group_dequantize"


def _options(
    *, out_dtype: torch.dtype | None = None, rows: Dim | None = None, **keywords: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    options = DequantizeOptions(**keywords)
    return {"options": options, "out_dtype": out_dtype, "rows": rows}, {"options": options}


_with_offs = remembered(
    quantized.group_dequantize,
    {"data": "contiguous rows", "scale": "tokens"},
    quantized.group_dequantize_moves,
    split=_options,
    op=NAME,
)
_of_matrices = remembered(quantized.group_dequantize, split=_options, op=NAME)


def _checked(
    data: Tensor,
    scale: Tensor,
    offs: Tensor | None,
    amax: Tensor | None = None,
    *,
    rows: int | None = None,
    **keywords: Any,
) -> Any:
    if rows is not None:  # T does not follow from `data`, so the call is not remembered
        for_rule, given = _options(rows=rows, **keywords)
        return quantized.group_dequantize(data, scale, offs, amax, **for_rule), given, None
    check = _with_offs if offs is not None else _of_matrices
    return check(data, scale, offs, amax, **keywords)


def _values(op: str, data: Tensor, scale: Tensor, offs: Tensor | None, amax: Tensor | None, **keywords: Any) -> None:
    if offs is not None:
        rows = quantized.group_dequantize(data, scale, offs, amax, **_options(**keywords)[0]).shape[0]
        debug.check_offs(op, offs, int(rows))


_op = define(
    f"{NAME}(Tensor data, Tensor scale, Tensor? offs, Tensor? amax=None, *, str format, bool columnwise=False, "
    'str scale_layout="compact", ScalarType? out_dtype=None, SymInt? rows=None, bool block_2d=False, '
    "bool rht=False) -> Tensor",
    quantized.group_dequantize,
    checked=_checked,
    options=_options,
    values=_values,
    no_derivative="tgl.quantize makes a GroupedTensor through which gradients pass; or use torch.no_grad()",
)


def group_dequantize(
    data: Tensor,
    scale: Tensor,
    offs: Tensor | None = None,
    amax: Tensor | None = None,
    *,
    format: str,
    columnwise: bool = False,
    scale_layout: str = "compact",
    out_dtype: torch.dtype | None = None,
    rows: int | None = None,
    block_2d: bool = False,
    rht: bool = False,
) -> Tensor:
    """Decode the rowwise or the columnwise components of ``group_quantize`` to values, in x's order.

    In float32, then one rounding: the element times ``2^(e - 127)`` (mxfp8, mxfp4), times ``scale * S_dec`` with
    ``S_dec = 1 / min(2688 / amax, FLT_MAX)`` (nvfp4), or times ``scale_inv`` (the FP8 formats). Rows past ``offs[-1]``
    are zero.

    Args:
        data: ``data`` or ``columnwise_data``.
        scale: the scales of ``data``; rowwise ones of fp8_block rows in any layout.
        offs: int32 ``[G]``, cumulative group ends; None for matrices ``[G, N, K]``.
        amax: the amax of ``data``; for nvfp4 only.
        format: ``"mxfp8"``, ``"nvfp4"``, ``"mxfp4"``, ``"fp8_tensor"`` or ``"fp8_block"``.
        columnwise: whether ``data`` and ``scale`` are columnwise components.
        scale_layout: ``"compact"`` or ``"blocked"``.
        out_dtype: float32, bfloat16 (the default) or float16.
        rows: T, which does not follow from transposed columnwise data (all formats but mxfp8); only with ``offs``.
        block_2d: one scale per square block, as in ``group_quantize``.
        rht: columnwise nvfp4 data is Hadamard transformed, which is inverted.

    Returns:
        ``[T, K]`` or ``[G, N, K]``.

    Raises:
        TypeError, ValueError: components that are not those of the format, the layout and ``offs``.
        RuntimeError: an argument requires grad.
    """
    options: dict[str, Any] = {
        "format": format,
        "columnwise": columnwise,
        "scale_layout": scale_layout,
        "out_dtype": out_dtype,
        "rows": rows,
        "block_2d": block_2d,
        "rht": rht,
    }
    return _op(data, scale, offs, amax, **options)
