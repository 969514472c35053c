"""``tgl::grouped_gemm_row_scaled`` and its weight gradient: FP8 operands with one scale per row."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import debug
from ..meta import row_scaled
from ._define import define
from ._library import autocast_nothing

NAME, WGRAD = row_scaled.OP, row_scaled.WGRAD
_SCHEMA = "(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor offs, *, ScalarType? out_dtype=None) -> Tensor"
ADVICE = "quantised operands have no gradient; use torch.no_grad()"

_op = define(
    f"{NAME}{_SCHEMA}",
    row_scaled.grouped_gemm_row_scaled,
    rows={"a": "rows", "a_scale": "vector"},
    no_derivative=ADVICE,
    autocast=autocast_nothing,
)
_op_wgrad = define(
    f"{WGRAD}{_SCHEMA}",
    row_scaled.grouped_gemm_row_scaled_wgrad,
    rows={"a": "transposed", "b": "transposed"},
    values=lambda op, a, a_scale, b, b_scale, offs, **_: debug.check_offs(op, offs, a.shape[1]),
    no_derivative=ADVICE,
    autocast=autocast_nothing,
)


def grouped_gemm_row_scaled(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, offs: Tensor, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Multiply every group of FP8 rows by its own FP8 matrix, where each row of both has a scale.

    For row ``t`` of group ``g``: ``out[t, n] = (a[t] @ b[g, n]) * a_scale[t] * b_scale[g, n]``, accumulated in float32
    and rounded once. Rows past ``offs[-1]`` come out as zeros and are never read, nor are their scales.

    Equals ``torch.nn.functional.scaled_grouped_mm`` with ``ScalingType.RowWise``, which takes ``b`` transposed;
    ``tgl.integrations.torch`` implements that function by this op. Not differentiable.

    Args:
        a: ``[T, K]`` float8_e4m3fn or float8_e5m2, at any strides; kernels read row-major ones without a copy.
        a_scale: ``[T]`` float32: factor of a row's elements.
        b: ``[G, N, K]``, like ``a``; its elements may be of the other type.
        b_scale: ``[G, N]`` float32.
        offs: int32 ``[G]``: cumulative group ends.
        out_dtype: bfloat16 (default), float16 or float32.

    Returns:
        ``[T, N]``.

    Raises:
        TypeError: dtypes that do not fit.
        ValueError: shapes, layouts or devices that do not fit.
        RuntimeError: an argument requires grad while grad mode is on.
    """
    return _op(a, a_scale, b, b_scale, offs, out_dtype=out_dtype)


def grouped_gemm_row_scaled_wgrad(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, offs: Tensor, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Multiply the groups of columns of two FP8 matrices, where each row of a group has a scale.

    ``out[g, m, n] = (a[m] @ b[n] over the columns of g) * a_scale[g, m] * b_scale[g, n]``, accumulated in float32 and
    rounded once; zeros for an empty group. Columns past ``offs[-1]`` are never read. It is the weight gradient of
    ``grouped_gemm_row_scaled``, for operands that were transposed and then quantised per group. Not differentiable.

    Args:
        a: ``[M, T]`` float8_e4m3fn or float8_e5m2, at any strides; kernels read row-major ones with rows aligned to 16
            bytes without a copy. Groups may start anywhere.
        a_scale: ``[G, M]`` float32: factor of a group's elements in a row.
        b: ``[N, T]``, like ``a``; its elements may be of the other type.
        b_scale: ``[G, N]`` float32.
        offs: int32 ``[G]``: cumulative group ends.
        out_dtype: bfloat16 (default), float16 or float32.

    Returns:
        ``[G, M, N]``.

    Raises:
        TypeError: dtypes that do not fit.
        ValueError: shapes, layouts or devices that do not fit.
        RuntimeError: an argument requires grad while grad mode is on.
    """
    return _op_wgrad(a, a_scale, b, b_scale, offs, out_dtype=out_dtype)
