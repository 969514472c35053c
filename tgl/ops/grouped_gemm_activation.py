"""``tgl::grouped_gemm_activation``: the expert's first GEMM and the activation of its result, as one op."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..meta import specs
from ._define import Casts, define
from ._library import Formula
from ._rows import given, sum_by_index
from .grouped_activation import SCHEMA, activation_options

NAME = "grouped_gemm_activation"
_ARGS = "Tensor a, Tensor b, Tensor offs, Tensor? bias=None, Tensor? probs=None, Tensor? rows=None"


def _save(
    ctx: Any,
    needs: tuple[bool, ...],
    *operands: Any,
    output: tuple[Tensor, Tensor],
    out_dtype: torch.dtype | None,
    **params: Any,
) -> None:
    a, b, offs, bias, probs, rows = operands
    ctx.set_materialize_grads(False)  # usually only this backward uses h, so dh is None
    ctx.save_for_backward(a if needs[1] else None, b if needs[0] else None, offs, probs, rows, output[1])
    ctx.params, ctx.dtype, ctx.tokens = params, a.dtype, a.shape[0]
    # The gradient of b is formed in b's own memory order, so that accumulating it into a weight does not copy it.
    ctx.transposed_b = b.stride(1) == 1 and b.stride(2) != 1
    ctx.bias_dtype = bias.dtype if bias is not None else None


def _backward(ctx: Any, needs: tuple[bool, ...], dy: Tensor | None, dh: Tensor | None) -> tuple[Tensor | None, ...]:
    """Add the activation backward to dh; return da = dh b^T, db = a^T dh, dbias = sum of dh per group and dprobs.

    With ``rows``, the gradient of a row of ``a`` is the sum over the rows that read it.
    """
    a, b, offs, probs, rows, h = ctx.saved_tensors
    da = db = dbias = dprobs = None
    if dy is not None:
        through, dprobs = torch.ops.tgl.grouped_activation_backward(dy, h, offs, probs, **ctx.params)
        dh = through if dh is None else dh + through
        dprobs = dprobs.to(probs.dtype) if probs is not None and needs[4] else None
    if dh is None:
        return None, None, None, None, None, None
    operand = dh.to(ctx.dtype)
    if needs[1]:
        if ctx.transposed_b:
            db = torch.ops.tgl.grouped_gemm_wgrad(operand, a, offs, **given(b_rows=rows)).transpose(1, 2)
        else:
            db = torch.ops.tgl.grouped_gemm_wgrad(a, operand, offs, **given(a_rows=rows))
    # Unless a second backward follows, ``a`` and ``h`` are not needed any more: da may reuse their memory.
    ctx.maybe_clear_saved_tensors()
    del a, h
    if needs[0]:
        da = torch.ops.tgl.grouped_gemm(operand, b.transpose(1, 2), offs)
        da = da if rows is None else sum_by_index(da, rows, ctx.tokens)
    if needs[3]:
        dbias = torch.ops.tgl.grouped_dbias(dh, offs).to(ctx.bias_dtype)
    return da, db, None, dbias, dprobs, None


_op = define(
    f"{NAME}({_ARGS}, *, {SCHEMA}, ScalarType? out_dtype=None) -> (Tensor y, Tensor h)",
    specs.grouped_gemm_activation,
    rows={"a": "rows", "probs": "vector"},
    indexed={"a": "tokens", "probs": "tokens", "rows": "tokens"},
    tables=("rows",),
    options=activation_options,
    formula=Formula(_save, _backward),
    autocast=Casts(("a", "b", "bias"), "probs", like_result=True),
)


def grouped_gemm_activation(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    bias: Tensor | None = None,
    probs: Tensor | None = None,
    rows: Tensor | None = None,
    *,
    kind: str = "swiglu",
    interleaved: bool = False,
    limit: float | None = None,
    alpha: float | None = None,
    offset: float | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Multiply every group of rows of ``a`` by its own matrix and apply the expert's activation to the result.

    Equal to the bit to ``h = grouped_gemm(a, b, offs, bias, rows=rows, out_dtype=out_dtype)`` and then ``y =
    grouped_activation(h, offs, probs, ...)``. As one op, a kernel need not read ``h`` back from memory. Rows past
    ``offs[-1]`` come out as zeros in both and are never read.

    Differentiable in ``a``, ``b``, ``bias`` and ``probs`` through both results, twice.

    Args:
        a, b, offs, bias, rows, out_dtype: see ``grouped_gemm``; ``b`` is ``[G, K, 2 I]`` for the gated kinds and
            ``[G, K, I]`` for the others, with its columns ordered like those of ``x`` in ``grouped_activation``.
        probs, kind, interleaved, limit, alpha, offset: see ``grouped_activation``; ``probs`` in the dtype of the result
            or float32.

    Returns:
        ``y [T, I]`` and ``h [T, 2 I]`` (not gated, ``[T, I]``), which the backward needs.

    Raises:
        TypeError, ValueError: arguments that do not fit.
        RuntimeError: a forward-mode derivative is requested.
    """
    options: dict[str, Any] = {"kind": kind, "interleaved": interleaved, "out_dtype": out_dtype}
    # None rather than a float default, which would make Dynamo compile twice under dynamic=True.
    constants = {"limit": limit, "alpha": alpha, "offset": offset}
    options |= {name: value for name, value in constants.items() if value is not None}
    return _op(a, b, offs, bias, probs, rows, **options)
