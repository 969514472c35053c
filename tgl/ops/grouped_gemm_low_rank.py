"""``tgl::grouped_gemm_low_rank``: the sum of two grouped products, such as those of a frozen weight and an adapter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..meta import low_rank
from ..meta.low_rank import LowRankCall
from ._bias import bias_gradients, save_bias_dtypes
from ._define import Casts, Out, define
from ._library import Formula

NAME = "grouped_gemm_low_rank"
_ARGS = "Tensor a, Tensor b, Tensor low, Tensor up, Tensor offs, Tensor? bias=None, Tensor? bias_scale=None"


def transposed(t: Tensor) -> bool:
    """Return whether the matrices of ``t`` are column-major."""
    return t.stride(1) == 1 and t.stride(2) != 1


def _save(ctx: Any, needs: tuple[bool, ...], *operands: Any, output: Tensor, **_: Any) -> None:
    call, asked = LowRankCall(*operands), LowRankCall(*needs)  # type: ignore[arg-type]
    scaled = call.bias_scale is not None and (asked.bias or asked.bias_scale)
    ctx.save_for_backward(
        call.a if asked.b else None,
        call.b if asked.a else None,
        call.low if asked.up else None,
        call.up if asked.low else None,
        call.offs,
        *((call.bias, call.bias_scale) if scaled else (None, None)),
    )
    ctx.dtype = call.a.dtype
    # The gradients of b and up are formed in their own memory order, so that accumulating them copies nothing.
    ctx.transposed = transposed(call.b), transposed(call.up)
    save_bias_dtypes(ctx, call.bias, call.bias_scale)


def wgrad(rows: Tensor, dy: Tensor, offs: Tensor, transposed: bool) -> Tensor:
    """Return ``rows^T dy`` for every group, column-major if ``transposed``."""
    if transposed:
        return torch.ops.tgl.grouped_gemm_wgrad(dy, rows, offs).transpose(1, 2)
    return torch.ops.tgl.grouped_gemm_wgrad(rows, dy, offs)


def _backward(ctx: Any, needs: tuple[bool, ...], dy: Tensor) -> tuple[Tensor | None, ...]:
    """Return da = dy b^T, db = a^T dy, dlow = dy up^T, dup = low^T dy, and bias gradients as in ``grouped_gemm``."""
    a, b, low, up, offs, bias, bias_scale = ctx.saved_tensors
    da = db = dlow = dup = None
    operand = dy.to(ctx.dtype)
    if needs[1]:
        db = wgrad(a, operand, offs, ctx.transposed[0])
    if needs[3]:
        dup = wgrad(low, operand, offs, ctx.transposed[1])
    # Unless a second backward follows, ``a`` and ``low`` are not needed any more: da may reuse their memory.
    ctx.maybe_clear_saved_tensors()
    del a, low
    if needs[0]:
        da = torch.ops.tgl.grouped_gemm(operand, b.transpose(1, 2), offs)
    if needs[2]:
        dlow = torch.ops.tgl.grouped_gemm(operand, up.transpose(1, 2), offs)
    dbias, dscale = bias_gradients(ctx, needs[5:7], dy, operand, offs, bias, bias_scale)
    return da, db, dlow, dup, None, dbias, dscale


_op = define(
    f"{NAME}({_ARGS}, *, ScalarType? out_dtype=None) -> Tensor",
    low_rank.grouped_gemm_low_rank,
    rows={"a": "rows", "low": "rows", "bias_scale": "vector"},
    zero_tail=True,
    out=Out(low_rank.grouped_gemm_low_rank_out),
    formula=Formula(_save, _backward),
    autocast=Casts(("a", "b", "low", "up", "bias"), "bias_scale"),
)
_op_out = torch.ops.tgl.grouped_gemm_low_rank.out


def grouped_gemm_low_rank(
    a: Tensor,
    b: Tensor,
    low: Tensor,
    up: Tensor,
    offs: Tensor,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply every group of rows by its own matrix, and add the product of a second pair of operands.

    For row ``t`` of group ``g``: ``out[t] = a[t] @ b[g] + low[t] @ up[g] + bias[g] * bias_scale[t]``. With ``low = s *
    grouped_gemm(a, down, offs)`` it is the product with ``b + s * down @ up``, which is never formed: LoRA on experts.
    R may be any number, despite the name.

    A kernel accumulates both products in one float32 accumulator and rounds once, and so does a CPU (float64 for
    float64). If a GPU has no such kernel, which ``tgl.explain`` reports, both products are formed and added, and in 16
    bits each of them and their sum is rounded. The tail is as in ``grouped_gemm``: never read, and zeros in the result.

    Differentiable in all floating arguments, twice; without ``out``.

    Args:
        a, b, offs, bias, bias_scale, out_dtype, out: see ``grouped_gemm``; without ``slots`` and ``rows``.
        low: ``[T, R]`` in the dtype of ``a``, at any strides.
        up: ``[G, R, N]`` in that dtype, at any strides. A kernel copies an ``up`` whose major dimension is not that of
            ``b``. It needs no copy for R in multiples of 8.

    Returns:
        ``[T, N]``; ``out`` itself if given.

    Raises:
        TypeError: dtypes that do not fit.
        ValueError: shapes, layouts or devices that do not fit.
        RuntimeError: ``out`` is given and an argument requires grad, or a forward-mode derivative is requested.
    """
    if out is None:
        return _op(a, b, low, up, offs, bias, bias_scale, out_dtype=out_dtype)
    if out_dtype is not None and out_dtype != out.dtype:
        raise TypeError(f"tgl::{NAME}: `out_dtype` must be {out.dtype} like `out`, but got {out_dtype}")
    _op_out(a, b, low, up, offs, bias, bias_scale, out=out)
    return out
