"""``tgl::grouped_gemm_packed``: multiply every group of rows by its own frozen, quantised matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..meta import packed
from ..meta.packed import PackedCall
from ._bias import bias_gradients, save_bias_dtypes
from ._define import Casts, define
from ._library import Formula

NAME = packed.OP
_ARGS = (
    "Tensor a, Tensor b, Tensor b_scale, Tensor offs, Tensor? b_amax=None, Tensor? bias=None, Tensor? bias_scale=None"
)


def _save(
    ctx: Any, needs: tuple[bool, ...], *operands: Any, output: Tensor, format: str, over_rows: bool, **_: Any
) -> None:
    call, asked = PackedCall(*operands), PackedCall(*needs)  # type: ignore[arg-type]
    for name in ("b", "b_scale", "b_amax"):
        if getattr(asked, name):
            raise RuntimeError(f"tgl::{NAME}: `{name}` must not require grad: packed matrices are frozen")
    scaled = call.bias_scale is not None and (asked.bias or asked.bias_scale)
    matrices = call.matrices if asked.a else (None, None, None)
    ctx.save_for_backward(*matrices, call.offs, *((call.bias, call.bias_scale) if scaled else (None, None)))
    ctx.dtype, ctx.options = call.a.dtype, {"format": format, "over_rows": not over_rows}
    save_bias_dtypes(ctx, call.bias, call.bias_scale)


def _backward(ctx: Any, needs: tuple[bool, ...], dy: Tensor) -> tuple[Tensor | None, ...]:
    """Return da, the op itself over the other dimension, and dbias and dbias_scale as in ``grouped_gemm``."""
    b, b_scale, b_amax, offs, bias, bias_scale = ctx.saved_tensors
    da = None
    operand = dy.to(ctx.dtype)
    if needs[0]:
        da = torch.ops.tgl.grouped_gemm_packed(operand, b, b_scale, offs, b_amax, **ctx.options)
    dbias, dscale = bias_gradients(ctx, needs[5:7], dy, operand, offs, bias, bias_scale)
    return da, None, None, None, None, dbias, dscale


_op = define(
    f"{NAME}({_ARGS}, *, str format, bool over_rows=False, ScalarType? out_dtype=None) -> Tensor",
    packed.grouped_gemm_packed,
    rows={"a": "rows", "bias_scale": "vector"},
    formula=Formula(_save, _backward),
    autocast=Casts(("a", "bias"), "bias_scale"),
)


def grouped_gemm_packed(
    a: Tensor,
    b: Tensor,
    b_scale: Tensor,
    offs: Tensor,
    b_amax: Tensor | None = None,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
    *,
    format: str,
    over_rows: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiply every group of dense rows by its own quantised matrix, decoding at most a bounded part of the matrices.

    Let ``w [G, N, K]`` be ``group_dequantize`` of the rowwise components ``b``, ``b_scale`` and ``b_amax``, rounded to
    the dtype of ``a`` (float32 for float64). For row ``t`` of group ``g``, ``out[t] = a[t] @ w[g].T + bias[g] *
    bias_scale[t]`` or, with ``over_rows``, ``a[t] @ w[g] + ...``, accumulated in float32 (float64 for float64) and
    rounded once, as by ``grouped_gemm`` with ``w``. So values of ``w`` beyond the range of ``a``'s dtype are infinite,
    those below its subnormal numbers are rounded, and a block whose scale is NaN is NaN: E2M1 elements times E8M0
    scales are in the range of bfloat16 except for scales of ``2^126`` and more, and in that of float16 up to ``2^13``.
    Rows past ``offs[-1]`` come out as zeros and are never read.

    It is the forward of a layer whose weight is frozen, and ``over_rows`` is its input gradient: both read the same
    components. A kernel decodes them on the way to the tensor cores. Without one, a CPU decodes one matrix at a time,
    and a GPU as many as fit 256 MiB, at least one. ``tgl.explain`` reports which applies, and why.

    Differentiable in ``a``, ``bias`` and ``bias_scale``, twice.

    Args:
        a: ``[T, K]``, or ``[T, N]`` with ``over_rows``: float64, float32, bfloat16 or float16, at any strides.
        b: data of matrices ``[G, N, K]``, contiguous, from ``group_quantize`` or from a checkpoint by
            ``tgl.nn.layouts.mxfp4_from_gpt_oss``: E2M1 formats ``[G, N, K/2]`` uint8.
        b_scale: its compact scales: ``[G, N, ceil(K/block)]``; for ``"fp8_block"`` ``[G, ceil(N/128), ceil(K/128)]``,
            for ``"fp8_tensor"`` ``[G]``.
        offs: int32 ``[G]``: cumulative group ends.
        b_amax: float32 ``[G]``, only for ``"nvfp4"``.
        bias: ``[G, N]``, or ``[G, K]`` with ``over_rows``: dtype of ``a`` or float32.
        bias_scale: ``[T]``, dtype of ``a`` or float32; only with ``bias``.
        format: format of ``b``: ``"mxfp8"``, ``"nvfp4"``, ``"mxfp4"``, ``"fp8_tensor"`` or ``"fp8_block"``.
        over_rows: whether the contraction runs over the rows N of the matrices.
        out_dtype: dtype of the result; default that of ``a``. float64 does not mix with the others.

    Returns:
        ``[T, N]``, or ``[T, K]`` with ``over_rows``.

    Raises:
        TypeError: dtypes that do not fit.
        ValueError: shapes, layouts or devices that do not fit.
        RuntimeError: ``b``, ``b_scale`` or ``b_amax`` requires grad, or a forward-mode derivative is requested.
    """
    operands = (a, b, b_scale, offs, b_amax, bias, bias_scale)
    return _op(*operands, format=format, over_rows=over_rows, out_dtype=out_dtype)
