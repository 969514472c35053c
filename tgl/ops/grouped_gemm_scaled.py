"""``tgl::grouped_gemm_scaled``: multiply every group of quantised rows by its own quantised matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..meta import scaled
from ._define import Out, define
from ._library import autocast_nothing

NAME = "grouped_gemm_scaled"
_ARGS = (
    "Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor offs, Tensor? a_amax=None, Tensor? b_amax=None, "
    "Tensor? bias=None, Tensor? bias_scale=None"
)
_OPTIONS = 'str format, str b_direction="rowwise", str scale_layout="compact"'
ADVICE = "GroupedLinear(recipe=...) is the layer that gradients pass through; or use torch.no_grad()"

_op = define(
    f"{NAME}({_ARGS}, *, {_OPTIONS}, ScalarType? out_dtype=None, bool zero_tail=True) -> Tensor",
    scaled.grouped_gemm_scaled,
    rows={"a": "contiguous rows", "a_scale": "tokens", "bias_scale": "vector"},
    moves=scaled.grouped_gemm_scaled_moves,
    out=Out(scaled.grouped_gemm_scaled_out),
    no_derivative=ADVICE,
    autocast=autocast_nothing,
)
_op_out = torch.ops.tgl.grouped_gemm_scaled.out


def grouped_gemm_scaled(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    offs: Tensor,
    a_amax: Tensor | None = None,
    b_amax: Tensor | None = None,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
    *,
    format: str,
    b_direction: str = "rowwise",
    scale_layout: str = "compact",
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    zero_tail: bool = True,
) -> Tensor:
    """Multiply every group of quantised rows by its own quantised matrix.

    For row ``t`` of group ``g``: ``out[t] = a[t] @ b[g] + bias[g] * bias_scale[t]`` of the dequantised operands,
    accumulated in float32 and rounded once. The operands are components of ``group_quantize``: rowwise ones of rows
    ``[T, K]``, and ones of either direction of a weight. Rows past ``offs[-1]`` come out as zeros and are never read.

    MXFP8 and FP8 blockwise operands have the values that ``group_dequantize`` returns in float32. For NVFP4 and FP8
    tensor-wise operands the group's factor (``S_decA * S_decB``, or the product of both ``scale_inv``, rounded to
    float32) multiplies the sum over elements times block scales.

    Not differentiable; ``GroupedLinear(recipe=...)`` is.

    Args:
        a: ``[T, K]`` float8_e4m3fn or float8_e5m2, or for NVFP4 ``[T, K/2]`` uint8.
        a_scale: scales of ``a``: MXFP8 ``[T, ceil(K/32)]`` and NVFP4 ``[T, ceil(K/16)]`` uint8, or blocked; FP8
            tensor-wise ``[G]`` and FP8 blockwise ``[T, ceil(K/128)]`` float32, in any layout (column-major, as from
            ``group_quantize``, is fastest).
        b: with ``b_direction="rowwise"`` the data ``[G, N, K]`` of a weight (NVFP4 ``[G, N, K/2]``); with
            ``"columnwise"`` its columnwise data, for a contraction over the weight's rows: ``K`` is then the weight's
            first dimension and ``N`` its second. The data is transposed, ``[G, N, K]``, but ``[G, K, N]`` for MXFP8.
            The element type may differ from that of ``a``.
        b_scale: scales of ``b``: MXFP8 ``[G, N, ceil(K/32)]`` (columnwise ``[G, ceil(K/32), N]``), NVFP4
            ``[G, N, ceil(K/16)]``, or blocked ``[G, bytes]``; FP8 tensor-wise ``[G]``; FP8 blockwise
            ``[G, ceil(N/128), ceil(K/128)]``, blocks of 128 x 128.
        offs: int32 ``[G]``: cumulative group ends.
        a_amax, b_amax: float32 ``[G]``, the amax of each group, only for NVFP4.
        bias: ``[G, N]``, float32, bfloat16 or float16.
        bias_scale: ``[T]``, float32, bfloat16 or float16; only with ``bias``.
        format: ``"mxfp8"``, ``"nvfp4"``, ``"mxfp4"``, ``"fp8_tensor"`` or ``"fp8_block"``, of both operands.
        b_direction: direction of the components ``b`` and ``b_scale``.
        scale_layout: ``"compact"``, or ``"blocked"`` for scales laid out for tensor cores (MXFP8, NVFP4).
        out_dtype: bfloat16 (default), float16 or float32.
        out: buffer ``[T, N]`` of such a dtype, row-major, 16-byte aligned, sharing no memory with an operand. Its rows
            past ``offs[-1]`` are not written.
        zero_tail: False: rows past ``offs[-1]`` are not written and undefined, possibly NaN. For results whose tail is
            unused, this saves a GPU the bandwidth for those rows.

    Returns:
        ``[T, N]``; ``out`` itself if given.

    Raises:
        TypeError: dtypes that do not fit.
        ValueError: shapes, layouts or devices that do not fit.
        RuntimeError: an argument requires grad while grad mode is on.
    """
    operands = (a, a_scale, b, b_scale, offs, a_amax, b_amax, bias, bias_scale)
    options: dict[str, Any] = {"format": format, "b_direction": b_direction, "scale_layout": scale_layout}
    if out is None:
        return _op(*operands, **options, out_dtype=out_dtype, zero_tail=zero_tail)
    if not isinstance(out, Tensor):
        raise TypeError(f"tgl::{NAME}: `out` must be a tensor or None, but got a {type(out).__name__}")
    if out_dtype is not None and out_dtype != out.dtype:
        raise TypeError(f"tgl::{NAME}: `out_dtype` must be {out.dtype} like `out`, but got {out_dtype}")
    _op_out(*operands, **options, out=out)
    return out
