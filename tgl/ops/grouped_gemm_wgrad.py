"""``tgl::grouped_gemm_wgrad`` and its accumulating form: one outer-product GEMM per group (weight gradient)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import backends, debug
from ..meta import memory, specs
from ..meta.remembered import remembered
from ._library import Formula, autocast_operand, define
from .allocate_wgrad import aligned

NAME = "grouped_gemm_wgrad"
ACCUMULATE = "grouped_gemm_wgrad_accumulate_"

# --- kernels ----------------------------------------------------------------------------------------------------------


_ROWS = {"a": "rows", "b": "rows"}
_spec = remembered(specs.grouped_gemm_wgrad, _ROWS)
_checked_out = remembered(specs.grouped_gemm_wgrad_out, _ROWS)
_checked_accumulate = remembered(specs.grouped_gemm_wgrad_accumulate_, _ROWS)


def _kernel(
    a: Tensor, b: Tensor, offs: Tensor, *, out_dtype: torch.dtype | None = None, alignment: int | None = None
) -> Tensor:
    spec = _spec(a, b, offs, out_dtype=out_dtype, alignment=alignment)
    if debug.active:
        debug.check_offs(NAME, offs, a.shape[0])
    if alignment is None:
        return backends.produce(NAME, a.device, spec, [a, b, offs])
    out = aligned(spec, alignment)
    backends.run(NAME, a.device, a, b, offs, out=out)
    return out


def _kernel_out(a: Tensor, b: Tensor, offs: Tensor, slots: Tensor | None = None, *, out: Tensor) -> None:
    if slots is None:
        _checked_out(a, b, offs, out=out)
        memory.writable(NAME, "out", out, a=a, b=b, offs=offs)
        debug.check_offs(NAME, offs, a.shape[0])
        backends.run(NAME, a.device, a, b, offs, out=out)
        return
    _checked_out(a, b, offs, slots, out=out)
    memory.writable(NAME, "out", out, a=a, b=b, offs=offs, slots=slots)
    debug.check_offs(NAME, offs, a.shape[0])
    debug.check_slots(NAME, slots, "out", out, written=True)
    backends.run(NAME, a.device, a, b, offs, out=out, slots=slots)


def _kernel_accumulate(
    a: Tensor, b: Tensor, offs: Tensor, main_grad: Tensor, slots: Tensor | None = None, *, overwrite: bool = False
) -> None:
    if slots is None:
        _checked_accumulate(a, b, offs, main_grad)
        memory.writable(ACCUMULATE, "main_grad", main_grad, a=a, b=b, offs=offs)
        debug.check_offs(ACCUMULATE, offs, a.shape[0])
        backends.run(NAME if overwrite else ACCUMULATE, a.device, a, b, offs, out=main_grad)
        return
    _checked_accumulate(a, b, offs, main_grad, slots)
    memory.writable(ACCUMULATE, "main_grad", main_grad, a=a, b=b, offs=offs, slots=slots)
    debug.check_offs(ACCUMULATE, offs, a.shape[0])
    debug.check_slots(ACCUMULATE, slots, "main_grad", main_grad, written=True)
    backends.run(NAME if overwrite else ACCUMULATE, a.device, a, b, offs, out=main_grad, slots=slots)


# --- autograd ---------------------------------------------------------------------------------------------------------


def _save(
    ctx: Any,
    needs: tuple[bool, ...],
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    *,
    output: Tensor,
    out_dtype: torch.dtype | None,
    alignment: int | None,
) -> None:
    ctx.save_for_backward(a if needs[1] else None, b if needs[0] else None, offs)
    ctx.dtype = a.dtype


def _backward(ctx: Any, needs: tuple[bool, ...], dw: Tensor) -> tuple[Tensor | None, ...]:
    """da[t] = b[t] dw[g]^T;  db[t] = a[t] dw[g]."""
    a, b, offs = ctx.saved_tensors
    dw = dw.to(ctx.dtype)
    da = torch.ops.tgl.grouped_gemm(b, dw.transpose(1, 2), offs) if needs[0] else None
    db = torch.ops.tgl.grouped_gemm(a, dw, offs) if needs[1] else None
    return da, db, None


def _autocast(dtype: torch.dtype, a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> tuple[tuple, dict]:
    return (autocast_operand(dtype, a), autocast_operand(dtype, b), *args), kwargs


# --- registration -----------------------------------------------------------------------------------------------------

_op = define(
    f"{NAME}(Tensor a, Tensor b, Tensor offs, *, ScalarType? out_dtype=None, int? alignment=None) -> Tensor",
    _kernel,
    lambda *args, **kwargs: specs.grouped_gemm_wgrad(*args, **kwargs).empty(),
    formula=Formula(_save, _backward),
    autocast=_autocast,
)
_op_out = define(
    f"{NAME}.out(Tensor a, Tensor b, Tensor offs, Tensor? slots=None, *, Tensor(a!) out) -> ()",
    _kernel_out,
    specs.grouped_gemm_wgrad_out,
)
_op_accumulate = define(
    f"{ACCUMULATE}(Tensor a, Tensor b, Tensor offs, Tensor(a!) main_grad, Tensor? slots=None, *, "
    "bool overwrite=False) -> ()",
    _kernel_accumulate,
    lambda *args, overwrite=False: specs.grouped_gemm_wgrad_accumulate_(*args),
    autocast=_autocast,
)


def _call(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    slots: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    alignment: int | None = None,
    out: Tensor | None = None,
) -> tuple[torch.device, tuple, dict[str, Any]]:
    if out is not None:
        specs.grouped_gemm_wgrad_out(a, b, offs, slots, out=out)
    else:
        out = specs.grouped_gemm_wgrad(a, b, offs, out_dtype=out_dtype, alignment=alignment).meta()
    return a.device, (a, b, offs), {"out": out} if slots is None else {"out": out, "slots": slots}


def _call_accumulate(
    a: Tensor, b: Tensor, offs: Tensor, main_grad: Tensor, slots: Tensor | None = None, *, overwrite: bool = False
) -> tuple[torch.device, tuple, dict[str, Any]]:
    specs.grouped_gemm_wgrad_accumulate_(a, b, offs, main_grad, slots)
    return a.device, (a, b, offs), {"out": main_grad} if slots is None else {"out": main_grad, "slots": slots}


backends.describe_op(NAME, _call)
backends.describe_op(ACCUMULATE, _call_accumulate)


def grouped_gemm_wgrad(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    slots: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    alignment: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """For every group, the product of its rows of ``a`` transposed and its rows of ``b``.

    ``out[g] = a[rows of g]^T @ b[rows of g]``, accumulated in float32 (float64 for float64) and rounded once; exactly
    zero for an empty group. Rows past ``offs[-1]`` are never read. Differentiable in ``a`` and ``b``, twice; without
    ``out``.

    Args:
        a: ``[T, M]``, float64, float32, bfloat16 or float16, row- or column-major (or expanded).
        b: ``[T, N]`` of the same dtype.
        offs: int32 ``[G]`` on the same device: cumulative group ends.
        slots: only with ``out``: int32 ``[G]`` on the device of ``a``, as in ``grouped_gemm``: group ``g`` writes
            ``out[slots[g]]``, and ``out`` is ``[S, M, N]``. Slots in the table must not overlap; other slots are not
            written, and a group whose number is not in ``[0, S)`` writes nothing.
        out_dtype: dtype of the result; default that of ``a``. float64 does not mix with the others.
        alignment: bytes, a power of two: every slot ``[g]`` of the result starts on a multiple of it, the slots padded
            if need be as ``allocate_wgrad`` does; default: contiguous. Not with ``out``.
        out: buffer ``[G, M, N]``, row-major, 16-byte aligned; slots and rows may be padded, as ``allocate_wgrad`` makes
            them.

    Returns:
        ``[G, M, N]``, contiguous without ``alignment``; ``out`` itself if given.

    Raises:
        TypeError: dtypes that do not fit.
        ValueError: shapes, layouts or devices that do not fit.
        RuntimeError: ``out`` is given and an argument requires grad, or a forward-mode derivative is requested.
    """
    if out is None:
        if slots is not None:
            raise ValueError(f"tgl::{NAME}: `slots` must be None when there is no `out`, but got a tensor")
        return _op(a, b, offs, out_dtype=out_dtype, alignment=alignment)
    if alignment is not None:
        raise ValueError(f"tgl::{NAME}: `alignment` must be None when `out` is given, but got {alignment}")
    if out_dtype is not None and out_dtype != out.dtype:
        raise TypeError(f"tgl::{NAME}: `out_dtype` must be {out.dtype} like `out`, but got {out_dtype}")
    _op_out(a, b, offs, slots, out=out)
    return out


def grouped_gemm_wgrad_accumulate_(
    a: Tensor, b: Tensor, offs: Tensor, main_grad: Tensor, slots: Tensor | None = None, *, overwrite: bool = False
) -> None:
    """Add the weight gradient of every group to ``main_grad``, in place.

    ``main_grad[g] += a[rows of g]^T @ b[rows of g]``, computed in float32 (float64 for float64) and rounded once to the
    dtype of ``main_grad``; the slot of an empty group keeps its bytes. Rows past ``offs[-1]`` are never read. Not
    differentiable.

    Args:
        a: ``[T, M]``, float64, float32, bfloat16 or float16, row- or column-major (or expanded).
        b: ``[T, N]`` of the same dtype.
        offs: int32 ``[G]`` on the same device: cumulative group ends.
        main_grad: ``[G, M, N]``, float32 or the dtype of ``a``, row-major (slots and rows may be padded), 16-byte
            aligned, sharing no memory with an operand and requiring no grad.
        slots: int32 ``[G]`` on the device of ``a``, as in ``grouped_gemm``: group ``g`` adds to
            ``main_grad[slots[g]]``, and ``main_grad`` is ``[S, M, N]``. Slots in the table must not overlap; other
            slots may, and are not written. A group whose number is not in ``[0, S)`` adds nothing.
        overwrite: replace the content of ``main_grad`` instead of adding; the slot of an empty group becomes zero.

    Raises:
        TypeError: dtypes that do not fit.
        ValueError: shapes, layouts or devices that do not fit.
        RuntimeError: an argument requires grad while grad mode is on.
    """
    _op_accumulate(a, b, offs, main_grad, slots, overwrite=overwrite)
