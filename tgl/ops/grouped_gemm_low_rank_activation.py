"""``tgl::grouped_gemm_low_rank_activation``: the sum of two grouped products and its activation, as one op."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..meta import low_rank
from ..meta.low_rank import LowRankActivationCall
from ._define import Casts, define
from ._library import Formula
from .grouped_activation import SCHEMA, activation_options
from .grouped_gemm_low_rank import transposed, wgrad

NAME = "grouped_gemm_low_rank_activation"
_ARGS = "Tensor a, Tensor b, Tensor low, Tensor up, Tensor offs, Tensor? bias=None, Tensor? probs=None"


def _save(
    ctx: Any,
    needs: tuple[bool, ...],
    *operands: Any,
    output: tuple[Tensor, Tensor],
    out_dtype: torch.dtype | None,
    **params: Any,
) -> None:
    call, asked = LowRankActivationCall(*operands), LowRankActivationCall(*needs)  # type: ignore[arg-type]
    ctx.set_materialize_grads(False)  # usually only this backward uses h, so dh is None
    ctx.save_for_backward(
        call.a if asked.b else None,
        call.b if asked.a else None,
        call.low if asked.up else None,
        call.up if asked.low else None,
        call.offs,
        call.probs,
        output[1],
    )
    ctx.params, ctx.dtype = params, call.a.dtype
    # The gradients of b and up are formed in their own memory order, so that accumulating them copies nothing.
    ctx.transposed = transposed(call.b), transposed(call.up)
    ctx.bias_dtype = call.bias.dtype if call.bias is not None else None


def _backward(ctx: Any, needs: tuple[bool, ...], dy: Tensor | None, dh: Tensor | None) -> tuple[Tensor | None, ...]:
    """Add the activation backward to dh; return the gradients of ``grouped_gemm_low_rank`` from dh, and dprobs."""
    a, b, low, up, offs, probs, h = ctx.saved_tensors
    da = db = dlow = dup = dbias = dprobs = None
    if dy is not None:
        through, dprobs = torch.ops.tgl.grouped_activation_backward(dy, h, offs, probs, **ctx.params)
        dh = through if dh is None else dh + through
        dprobs = dprobs.to(probs.dtype) if probs is not None and needs[6] else None
    if dh is None:
        return (None,) * 7
    operand = dh.to(ctx.dtype)
    if needs[1]:
        db = wgrad(a, operand, offs, ctx.transposed[0])
    if needs[3]:
        dup = wgrad(low, operand, offs, ctx.transposed[1])
    # Unless a second backward follows, these are not needed any more: da may reuse their memory.
    ctx.maybe_clear_saved_tensors()
    del a, low, h
    if needs[0]:
        da = torch.ops.tgl.grouped_gemm(operand, b.transpose(1, 2), offs)
    if needs[2]:
        dlow = torch.ops.tgl.grouped_gemm(operand, up.transpose(1, 2), offs)
    if needs[5]:
        dbias = torch.ops.tgl.grouped_dbias(dh, offs).to(ctx.bias_dtype)
    return da, db, dlow, dup, None, dbias, dprobs


_op = define(
    f"{NAME}({_ARGS}, *, {SCHEMA}, ScalarType? out_dtype=None) -> (Tensor y, Tensor h)",
    low_rank.grouped_gemm_low_rank_activation,
    rows={"a": "rows", "low": "rows", "probs": "vector"},
    options=activation_options,
    formula=Formula(_save, _backward),
    autocast=Casts(("a", "b", "low", "up", "bias"), "probs", like_result=True),
)


def grouped_gemm_low_rank_activation(
    a: Tensor,
    b: Tensor,
    low: Tensor,
    up: Tensor,
    offs: Tensor,
    bias: Tensor | None = None,
    probs: Tensor | None = None,
    *,
    kind: str = "swiglu",
    interleaved: bool = False,
    limit: float | None = None,
    alpha: float | None = None,
    offset: float | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Add the products of two pairs of operands for every group, and apply the expert's activation to the sum.

    Equal to the bit to ``h = grouped_gemm_low_rank(a, b, low, up, offs, bias, out_dtype=out_dtype)`` and then ``y =
    grouped_activation(h, offs, probs, ...)``: an expert's first layer with a LoRA adapter. As one op, a kernel need not
    read ``h`` back from memory. Rows past ``offs[-1]`` come out as zeros in both and are never read.

    Differentiable in all floating arguments through both results, twice.

    Args:
        a, b, low, up, offs, bias, out_dtype: see ``grouped_gemm_low_rank``; ``b`` is ``[G, K, 2 I]`` and ``up``
            ``[G, R, 2 I]`` for the gated kinds, ``[G, K, I]`` and ``[G, R, I]`` for the others, with columns ordered
            like those of ``x`` in ``grouped_activation``.
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
    return _op(a, b, low, up, offs, bias, probs, **options)
