"""``tgl::grouped_gemm``: multiply every group of rows by its own matrix (forward and input gradient)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import debug
from ..meta import specs
from ..meta.slots import gather
from ._bias import bias_gradients, save_bias_dtypes
from ._define import Casts, Out, define
from ._library import CASTS, Formula
from ._rows import given, sum_by_index
from ._signature import OpSignature

NAME = "grouped_gemm"
_ARGS = (
    "Tensor a, Tensor b, Tensor offs, Tensor? bias=None, Tensor? bias_scale=None, Tensor? slots=None, Tensor? rows=None"
)

_NO_GRADIENT = (
    f"tgl::{NAME}: `b` must not require grad when `slots` is given, since its slots may overlap; pass b.detach() and "
    "form its gradient with grouped_gemm_wgrad"
)


def _save(
    ctx: Any,
    needs: tuple[bool, ...],
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    bias: Tensor | None,
    bias_scale: Tensor | None,
    slots: Tensor | None,
    rows: Tensor | None,
    *,
    output: Tensor,
    out_dtype: torch.dtype | None,
) -> None:
    if slots is not None and needs[1]:
        raise RuntimeError(_NO_GRADIENT)
    scaled = bias_scale is not None and (needs[3] or needs[4])
    ctx.save_for_backward(
        a if needs[1] else None,
        b if needs[0] else None,
        offs,
        bias if scaled else None,
        bias_scale if scaled else None,
        slots if needs[0] else None,
        rows,
    )
    ctx.dtype, ctx.tokens = a.dtype, a.shape[0]
    # The gradient of b is formed in b's own memory order, so that accumulating it into a weight does not copy it.
    ctx.transposed_b = b.stride(1) == 1 and b.stride(2) != 1
    save_bias_dtypes(ctx, bias, bias_scale)


def _backward(ctx: Any, needs: tuple[bool, ...], dy: Tensor) -> tuple[Tensor | None, ...]:
    """Return da = dy b^T, db = a^T dy, dbias = sum of dy (times bias_scale) per group, dbias_scale = dy . bias per row.

    With ``rows``, the gradient of a row of ``a`` is the sum over the rows that read it.
    """
    a, b, offs, bias, bias_scale, slots, rows = ctx.saved_tensors
    da = db = None
    operand = dy.to(ctx.dtype)
    if needs[1]:
        if ctx.transposed_b:
            db = torch.ops.tgl.grouped_gemm_wgrad(operand, a, offs, **given(b_rows=rows)).transpose(1, 2)
        else:
            db = torch.ops.tgl.grouped_gemm_wgrad(a, operand, offs, **given(a_rows=rows))
    # Unless a second backward follows, ``a`` is not needed any more: da may reuse its memory.
    ctx.maybe_clear_saved_tensors()
    del a
    if needs[0]:
        da = torch.ops.tgl.grouped_gemm(operand, b.transpose(1, 2), offs, **given(slots=slots))
        da = da if rows is None else sum_by_index(da, rows, ctx.tokens)
    dbias, dscale = bias_gradients(ctx, needs[3:5], dy, operand, offs, bias, bias_scale)
    return da, db, None, dbias, dscale, None, None


_casts = Casts(("a", "b", "bias"), "bias_scale").rule(OpSignature.of(f"{NAME}({_ARGS}) -> Tensor").names)


def _autocast(
    dtype: torch.dtype, a: Tensor, b: Tensor, offs: Tensor, *more: Tensor | None, **keywords: Any
) -> tuple[tuple, dict]:
    """Cast the operands; of a ``b`` with ``slots``, which may overlap, only the groups' matrices."""
    slots = more[2] if len(more) > 2 else None
    if slots is not None and b.dtype != dtype and b.dtype in CASTS:
        if b.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(_NO_GRADIENT)
        b, more = gather(b, slots), (*more[:2], None, *more[3:])
    return _casts(dtype, a, b, offs, *more, **keywords)


def _values(op: str, a: Tensor, b: Tensor, offs: Tensor, *more: Tensor | None, **_: Any) -> None:
    slots, rows = more[-2:]
    debug.check_offs(op, offs, (a if rows is None else rows).shape[0])
    debug.check_slots(op, slots, "b", b, written=False)
    debug.check_rows(op, "rows", rows, offs, a)


_op = define(
    f"{NAME}({_ARGS}, *, ScalarType? out_dtype=None) -> Tensor",
    specs.grouped_gemm,
    rows={"a": "rows", "bias_scale": "vector"},
    indexed={"a": "tokens", "bias_scale": "tokens", "rows": "tokens"},
    tables=("slots", "rows"),
    values=_values,
    zero_tail=True,
    out=Out(specs.grouped_gemm_out),
    formula=Formula(_save, _backward),
    autocast=_autocast,
)
_op_out = torch.ops.tgl.grouped_gemm.out


def grouped_gemm(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
    slots: Tensor | None = None,
    rows: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply every group of rows of ``a`` by its own matrix.

    For row ``t`` of group ``g``: ``out[t] = a[t] @ b[g] + bias[g] * bias_scale[t]``, accumulated in float32 (float64
    for float64) and rounded once. Group ``g`` holds the rows ``offs[g-1] <= t < offs[g]``; groups may be empty and of
    any number. Rows past ``offs[-1]`` come out as zeros and are never read, so NaN there has no effect.

    With ``rows``, row ``rows[t]`` of ``a`` is read instead of ``a[t]``: a kernel that supports this gathers tokens
    while it reads them, without a ``[T, K]`` in memory (``tgl.explain`` reports the copies of others).

    Differentiable in ``a``, ``b`` (without ``slots``), ``bias`` and ``bias_scale``, twice; without ``out``. With
    ``rows``, the gradient of ``a`` takes a ``[T, K]`` and a stable sort of ``rows``: the gradient of a row is the sum
    over all ``t`` that read it, rounded once and deterministic. If the rows of every token are known
    (``tgl.Routing.position``), ``tgl.dispatch`` before the op computes that gradient without a sort.

    Args:
        a: ``[T, K]``, float64, float32, bfloat16 or float16, at any strides. With ``rows``, ``[S, K]`` with any number
            of rows.
        b: ``[G, K, N]`` of the same dtype, at any strides.
        offs: int32 ``[G]`` on the same device: cumulative group ends, as in ``torch.nn.functional.grouped_mm``. Values
            are not read on the host; see ``tgl.debug_checks``.
        bias: ``[G, N]``, dtype of ``a`` or float32.
        bias_scale: ``[T]``, dtype of ``a`` or float32; only with ``bias``.
        slots: int32 ``[G]`` on the device of ``a``: group ``g`` takes ``b[slots[g]]``, and ``b`` is ``[S, K, N]`` with
            any number of slots (fewer than 2^31), in any order. Matrices at uneven distances are slots of a strided
            view whose slot stride is a common divisor of the distances. Slots of ``b`` may overlap, and a slot that is
            not in the table is not read. Values are not read on the host; an index outside ``[0, S)`` reads a matrix of
            zeros. With ``slots``, ``b`` must not require grad.
        rows: int32 ``[T]`` on the device of ``a``, contiguous: the row of ``a`` for every row of the groups, such as
            ``tgl.Routing.token``. Indices may repeat, and rows of ``a`` without an index are not read. From
            ``offs[-1]`` on, indices are ignored. Values are not read on the host; before the tail, an index outside
            ``[0, S)`` reads a row of zeros, and is an error inside ``tgl.debug_checks()``.
        out_dtype: dtype of the result; default that of ``a``. float64 does not mix with the others.
        out: buffer ``[T, N]``, row-major (rows may be padded), 16-byte aligned, sharing no memory with an operand and
            requiring no grad. Its rows past ``offs[-1]`` are not written. Its dtype is the output dtype.

    Returns:
        ``[T, N]``; ``out`` itself if given.

    Raises:
        TypeError: dtypes that do not fit.
        ValueError: shapes, layouts or devices that do not fit.
        RuntimeError: ``out`` is given and an argument requires grad, ``slots`` is given and ``b`` requires grad, or a
            forward-mode derivative is requested.
    """
    if out is None:
        return _op(a, b, offs, bias, bias_scale, slots, rows, out_dtype=out_dtype)
    if out_dtype is not None and out_dtype != out.dtype:
        raise TypeError(f"tgl::{NAME}: `out_dtype` must be {out.dtype} like `out`, but got {out_dtype}")
    _op_out(a, b, offs, bias, bias_scale, slots, rows, out=out)
    return out
