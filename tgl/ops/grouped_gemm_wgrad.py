"""``tgl::grouped_gemm_wgrad`` and its accumulating form: one outer-product GEMM per group (weight gradient)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import backends, debug
from ..meta import memory, specs
from ..meta.remembered import remembered, remembered_out
from . import _batched_cpu, _gemm_cpu
from ._library import Formula, autocast_operand, define
from ._segments import below_autograd, segment_sizes
from .allocate_wgrad import aligned
from .grouped_gemm import aten_operand_reason

NAME = "grouped_gemm_wgrad"
ACCUMULATE = "grouped_gemm_wgrad_accumulate_"

# --- kernels ----------------------------------------------------------------------------------------------------------


_spec = remembered(specs.grouped_gemm_wgrad)
_checked_out = remembered_out(specs.grouped_gemm_wgrad_out)
_checked_accumulate = remembered(specs.grouped_gemm_wgrad_accumulate_)


def _kernel(
    a: Tensor, b: Tensor, offs: Tensor, *, out_dtype: torch.dtype | None = None, alignment: int | None = None
) -> Tensor:
    if _direct.active and a.is_cpu and alignment is None and not debug.active and _direct.work(a, b, offs, out_dtype):
        return torch.nn.functional.grouped_mm(a.t(), b, offs=offs)
    spec = _spec(a, b, offs, out_dtype=out_dtype, alignment=alignment)
    if debug.active:
        debug.check_offs(NAME, offs, a.shape[0])
    if alignment is None:
        return backends.produce(NAME, a.device, spec, [a, b, offs])
    out = aligned(spec, alignment)
    backends.run(NAME, a.device, a, b, offs, out=out)
    return out


def _kernel_out(a: Tensor, b: Tensor, offs: Tensor, *, out: Tensor) -> None:
    _checked_out(a, b, offs, out=out)
    memory.writable(NAME, "out", out, a=a, b=b, offs=offs)
    debug.check_offs(NAME, offs, a.shape[0])
    backends.run(NAME, a.device, a, b, offs, out=out)


def _kernel_accumulate(a: Tensor, b: Tensor, offs: Tensor, main_grad: Tensor, *, overwrite: bool = False) -> None:
    _checked_accumulate(a, b, offs, main_grad)
    memory.writable(ACCUMULATE, "main_grad", main_grad, a=a, b=b, offs=offs)
    debug.check_offs(ACCUMULATE, offs, a.shape[0])
    backends.run(NAME if overwrite else ACCUMULATE, a.device, a, b, offs, out=main_grad)


def _parts(a: Tensor, b: Tensor, sizes: tuple[int, ...], out: Tensor) -> zip:
    """Size, rows of ``a`` transposed, rows of ``b`` and slot of every group."""
    return zip(sizes, torch.split_with_sizes(a.t(), sizes, 1), torch.split_with_sizes(b, sizes), out.unbind())


def _loop(a: Tensor, b: Tensor, offs: Tensor, *, out: Tensor) -> None:
    """One matrix product per group (small ones in batches); an empty group's slot is zeroed."""
    ways = _gemm_cpu.ways(a, b, columns=b.shape[1], dtype=out.dtype)
    work = _gemm_cpu.work(tuple(offs.tolist()), ways)
    _products(a, b, ways, work, out)


def _produce(spec: specs.TensorSpec, operands: list) -> Tensor:
    """The same, with the loop in ATen where that takes the operands and there is no batch to be made."""
    a, b, offs = operands
    ways = spec.kept or _gemm_cpu.ways_to(spec, a, b)
    work = _gemm_cpu.work(tuple(offs.tolist()), ways)
    if work.in_aten and not (a.data_ptr() | b.data_ptr()) % _gemm_cpu.ALIGNMENT:
        return torch.nn.functional.grouped_mm(a.t(), b, offs=offs)
    out = spec.empty()
    _products(a, b, ways, work, out)
    return out


def _products(a: Tensor, b: Tensor, ways: _gemm_cpu.Ways, work: _gemm_cpu.Work, out: Tensor) -> None:
    acc, sizes = specs.accumulator(a.dtype), work.sizes
    done = _batched_cpu.wgrad(a, b, sizes, work.batches, out) if work.batches else set()
    if len(done) == out.shape[0]:
        return
    with below_autograd():
        for g, (size, xt, y, slot) in enumerate(_parts(a, b, sizes, out)):
            if not size:
                slot.zero_()
            elif g in done:
                continue
            elif ways.direct:
                torch.mm(xt, y, out=slot)
            else:
                slot.copy_(torch.mm(xt.to(acc), y.to(acc)))


def _loop_accumulate(a: Tensor, b: Tensor, offs: Tensor, *, out: Tensor) -> None:
    """The same added to ``out`` in the accumulator's dtype, then rounded once; an empty group's slot is not touched."""
    acc = specs.accumulator(a.dtype)
    with below_autograd():
        for size, xt, y, slot in _parts(a, b, segment_sizes(offs, a.shape[0]), out):
            if not size:
                continue
            if slot.dtype == acc:
                slot.addmm_(xt.to(acc), y.to(acc))
            else:
                slot.copy_(torch.addmm(slot.to(acc), xt.to(acc), y.to(acc)))


def _aten(a: Tensor, b: Tensor, offs: Tensor, *, out: Tensor) -> None:
    """``torch.nn.functional.grouped_mm`` on two matrices, whose empty groups are zero."""
    out.copy_(torch.nn.functional.grouped_mm(a.t(), b, offs=offs))


def _aten_supports(a: Tensor, b: Tensor, offs: Tensor, *, out: Tensor) -> backends.Reason:
    return aten_operand_reason(a, b, out)


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
    f"{NAME}.out(Tensor a, Tensor b, Tensor offs, *, Tensor(a!) out) -> ()", _kernel_out, specs.grouped_gemm_wgrad_out
)
_op_accumulate = define(
    f"{ACCUMULATE}(Tensor a, Tensor b, Tensor offs, Tensor(a!) main_grad, *, bool overwrite=False) -> ()",
    _kernel_accumulate,
    lambda a, b, offs, main_grad, *, overwrite=False: specs.grouped_gemm_wgrad_accumulate_(a, b, offs, main_grad),
    autocast=_autocast,
)


def _call(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    alignment: int | None = None,
    out: Tensor | None = None,
) -> tuple[torch.device, tuple, dict[str, Any]]:
    if out is not None:
        specs.grouped_gemm_wgrad_out(a, b, offs, out=out)
    else:
        out = specs.grouped_gemm_wgrad(a, b, offs, out_dtype=out_dtype, alignment=alignment).meta()
    return a.device, (a, b, offs), {"out": out}


def _call_accumulate(
    a: Tensor, b: Tensor, offs: Tensor, main_grad: Tensor, *, overwrite: bool = False
) -> tuple[torch.device, tuple, dict[str, Any]]:
    specs.grouped_gemm_wgrad_accumulate_(a, b, offs, main_grad)
    return a.device, (a, b, offs), {"out": main_grad}


backends.describe_op(NAME, _call)
backends.describe_op(ACCUMULATE, _call_accumulate)
_direct = _gemm_cpu.Direct(
    backends.add(backends.Implementation(NAME, "loop of mm", "cpu", _loop, produce=_produce, note=_gemm_cpu.NOTE)),
    specs.grouped_gemm_wgrad,
)
backends.add(backends.Implementation(ACCUMULATE, "loop of mm", "cpu", _loop_accumulate))
for _name, _run in ((NAME, _loop), (ACCUMULATE, _loop_accumulate)):
    backends.add(
        backends.Implementation(
            _name,
            "loop of mm",
            "cuda",
            _run,
            priority=-10,
            syncs=True,
            note="reads offs on the host; one GEMM per group",
        )
    )
backends.add(
    backends.Implementation(
        NAME,
        "aten grouped_mm",
        "cuda",
        _aten,
        _aten_supports,
        archs=frozenset({"sm_90", "sm_100", "sm_103"}),
        note="torch.nn.functional.grouped_mm, then a copy",
    )
)


def grouped_gemm_wgrad(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
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
        RuntimeError: ``out`` is given and an argument requires grad, or a forward-mode derivative is asked for.
    """
    if out is None:
        return _op(a, b, offs, out_dtype=out_dtype, alignment=alignment)
    if alignment is not None:
        raise ValueError(f"tgl::{NAME}: `alignment` must be None when `out` is given, but got {alignment}")
    if out_dtype is not None and out_dtype != out.dtype:
        raise TypeError(f"tgl::{NAME}: `out_dtype` must be {out.dtype} like `out`, but got {out_dtype}")
    _op_out(a, b, offs, out=out)
    return out


def grouped_gemm_wgrad_accumulate_(
    a: Tensor, b: Tensor, offs: Tensor, main_grad: Tensor, *, overwrite: bool = False
) -> None:
    """Add the weight gradient of every group to ``main_grad``, in place.

    ``main_grad[g] += a[rows of g]^T @ b[rows of g]``, formed in float32 (float64 for float64) and rounded once to the
    dtype of ``main_grad``; the slot of an empty group keeps its bytes. Rows past ``offs[-1]`` are never read. Not
    differentiable.

    Args:
        a: ``[T, M]``, float64, float32, bfloat16 or float16, row- or column-major (or expanded).
        b: ``[T, N]`` of the same dtype.
        offs: int32 ``[G]`` on the same device: cumulative group ends.
        main_grad: ``[G, M, N]``, float32 or the dtype of ``a``, row-major (slots and rows may be padded), 16-byte
            aligned, sharing no memory with an operand and requiring no grad.
        overwrite: replace what ``main_grad`` holds instead of adding to it; the slot of an empty group becomes zero.

    Raises:
        TypeError: dtypes that do not fit.
        ValueError: shapes, layouts or devices that do not fit.
        RuntimeError: an argument requires grad while grad mode is on.
    """
    _op_accumulate(a, b, offs, main_grad, overwrite=overwrite)
