"""``tgl::grouped_gemm``: every group of rows times its own matrix (forward and input gradient)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import backends, debug
from ..meta import memory, specs
from ..meta.remembered import remembered
from ..meta.slots import gather
from ._library import CASTS, Formula, autocast_operand, define

NAME = "grouped_gemm"
_ARGS = "Tensor a, Tensor b, Tensor offs, Tensor? bias=None, Tensor? bias_scale=None, Tensor? slots=None"

# --- kernels ----------------------------------------------------------------------------------------------------------


_ROWS = {"a": "rows", "bias_scale": "vector"}
_spec = remembered(specs.grouped_gemm, _ROWS)
_checked_out = remembered(specs.grouped_gemm_out, {**_ROWS, "out": "destination"})


def _kernel(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
    slots: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    if slots is not None:
        return _kernel_slots(a, b, offs, bias, bias_scale, slots, out_dtype=out_dtype)
    spec = _spec(a, b, offs, bias, bias_scale, out_dtype=out_dtype)
    if debug.active:
        debug.check_offs(NAME, offs, a.shape[0])
    return backends.produce(NAME, a.device, spec, [a, b, offs, bias, bias_scale], zero_tail=True)


def _kernel_slots(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    bias: Tensor | None,
    bias_scale: Tensor | None,
    slots: Tensor,
    *,
    out_dtype: torch.dtype | None,
) -> Tensor:
    spec = _spec(a, b, offs, bias, bias_scale, slots, out_dtype=out_dtype)
    debug.check_offs(NAME, offs, a.shape[0])
    debug.check_slots(NAME, slots, "b", b, written=False)
    operands: list = [a, b, offs, bias, bias_scale]
    return backends.produce(NAME, a.device, spec, operands, zero_tail=True, slots=slots)


def _kernel_out(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
    slots: Tensor | None = None,
    *,
    out: Tensor,
) -> None:
    if slots is None:
        _checked_out(a, b, offs, bias, bias_scale, out=out)
        memory.writable(NAME, "out", out, a=a, b=b, offs=offs, bias=bias, bias_scale=bias_scale)
        debug.check_offs(NAME, offs, a.shape[0])
        backends.run(NAME, a.device, a, b, offs, bias, bias_scale, out=out, zero_tail=False)
        return
    _checked_out(a, b, offs, bias, bias_scale, slots, out=out)
    memory.writable(NAME, "out", out, a=a, b=b, offs=offs, bias=bias, bias_scale=bias_scale, slots=slots)
    debug.check_offs(NAME, offs, a.shape[0])
    debug.check_slots(NAME, slots, "b", b, written=False)
    backends.run(NAME, a.device, a, b, offs, bias, bias_scale, out=out, zero_tail=False, slots=slots)


# --- autograd ---------------------------------------------------------------------------------------------------------

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
    )
    ctx.dtype = a.dtype
    # The gradient of b is formed in b's own memory order, so that accumulating it into a weight does not copy it.
    ctx.transposed_b = b.stride(1) == 1 and b.stride(2) != 1
    ctx.bias_dtype = bias.dtype if bias is not None else None
    ctx.scale_dtype = bias_scale.dtype if bias_scale is not None else None


def _backward(ctx: Any, needs: tuple[bool, ...], dy: Tensor) -> tuple[Tensor | None, ...]:
    """da = dy b^T;  db = a^T dy;  dbias = sum of dy (times bias_scale) per group;  dbias_scale = dy . bias per row."""
    a, b, offs, bias, bias_scale, slots = ctx.saved_tensors
    da = db = dbias = dscale = None
    operand = dy.to(ctx.dtype)
    if needs[1]:
        if ctx.transposed_b:
            db = torch.ops.tgl.grouped_gemm_wgrad(operand, a, offs).transpose(1, 2)
        else:
            db = torch.ops.tgl.grouped_gemm_wgrad(a, operand, offs)
    # Without a second backward to come, nobody needs ``a`` any more: da may take its memory.
    ctx.maybe_clear_saved_tensors()
    del a
    if needs[0]:
        table = {} if slots is None else {"slots": slots}
        da = torch.ops.tgl.grouped_gemm(operand, b.transpose(1, 2), offs, **table)
    if needs[3] or needs[4]:
        if bias_scale is None:
            dbias = torch.ops.tgl.grouped_dbias(dy, offs).to(ctx.bias_dtype)
        else:
            dbias, dscale = torch.ops.tgl.grouped_dbias_dscales(operand, bias, bias_scale, offs)
            dbias, dscale = dbias.to(ctx.bias_dtype), dscale.to(ctx.scale_dtype)
    return da, db, None, dbias if needs[3] else None, dscale if needs[4] else None, None


def _autocast(
    dtype: torch.dtype,
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
    slots: Tensor | None = None,
    **kwargs: Any,
) -> tuple[tuple, dict]:
    """Operands and bias in the autocast dtype; ``bias_scale`` (routing probabilities) keeps its own.

    Of a ``b`` with ``slots``, which may overlap, the groups' matrices alone are cast.
    """
    if slots is not None and b.dtype != dtype and b.dtype in CASTS:
        if b.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(_NO_GRADIENT)
        b, slots = gather(b, slots), None
    a, b = autocast_operand(dtype, a), autocast_operand(dtype, b)
    bias = autocast_operand(dtype, bias) if bias is not None else None
    if bias_scale is not None and bias_scale.dtype not in (a.dtype, torch.float32):
        bias_scale = bias_scale.float()
    return (a, b, offs, bias, bias_scale, slots), kwargs


# --- registration -----------------------------------------------------------------------------------------------------

_op = define(
    f"{NAME}({_ARGS}, *, ScalarType? out_dtype=None) -> Tensor",
    _kernel,
    lambda *args, **kwargs: specs.grouped_gemm(*args, **kwargs).empty(),
    formula=Formula(_save, _backward),
    autocast=_autocast,
)
_op_out = define(f"{NAME}.out({_ARGS}, *, Tensor(a!) out) -> ()", _kernel_out, specs.grouped_gemm_out)


def _call(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
    slots: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> tuple[torch.device, tuple, dict[str, Any]]:
    functional = out is None
    if out is not None:
        specs.grouped_gemm_out(a, b, offs, bias, bias_scale, slots, out=out)
    else:
        out = specs.grouped_gemm(a, b, offs, bias, bias_scale, slots, out_dtype=out_dtype).meta()
    table = {} if slots is None else {"slots": slots}
    return a.device, (a, b, offs, bias, bias_scale), {"out": out, "zero_tail": functional, **table}


backends.describe_op(NAME, _call)


def grouped_gemm(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
    slots: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply every group of rows of ``a`` by its own matrix.

    For row ``t`` of group ``g``: ``out[t] = a[t] @ b[g] + bias[g] * bias_scale[t]``, accumulated in float32 (float64
    for float64) and rounded once. Group ``g`` holds the rows ``offs[g-1] <= t < offs[g]``; groups may be empty and of
    any number. Rows past ``offs[-1]`` come out as zeros and are never read, so NaN there goes nowhere.

    Differentiable in ``a``, ``b`` (without ``slots``), ``bias`` and ``bias_scale``, twice; without ``out``.

    Args:
        a: ``[T, K]``, float64, float32, bfloat16 or float16, row- or column-major (or expanded).
        b: ``[G, K, N]`` of the same dtype, either major.
        offs: int32 ``[G]`` on the same device: cumulative group ends, as in ``torch.nn.functional.grouped_mm``. Values
            are not read on the host; see ``tgl.debug_checks``.
        bias: ``[G, N]``, dtype of ``a`` or float32.
        bias_scale: ``[T]``, dtype of ``a`` or float32; only with ``bias``.
        slots: int32 ``[G]`` on the device of ``a``: group ``g`` takes ``b[slots[g]]``, and ``b`` is ``[S, K, N]`` with
            any number of slots (fewer than 2^31), in any order. Matrices at uneven distances are slots of a strided
            view whose slot stride is a common divisor of the distances. Slots of ``b`` may overlap, and a slot that is
            not in the table is not read. Values are not read on the host; a number outside ``[0, S)`` reads a matrix of
            zeros. With ``slots``, ``b`` must not require grad.
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
        return _op(a, b, offs, bias, bias_scale, slots, out_dtype=out_dtype)
    if out_dtype is not None and out_dtype != out.dtype:
        raise TypeError(f"tgl::{NAME}: `out_dtype` must be {out.dtype} like `out`, but got {out_dtype}")
    _op_out(a, b, offs, bias, bias_scale, slots, out=out)
    return out
