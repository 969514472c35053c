"""``tgl::grouped_gemm``: every group of rows times its own matrix (forward and input gradient)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import backends, debug
from ..meta import memory, specs
from ..meta.remembered import remembered, remembered_out
from . import _batched_cpu, _gemm_cpu
from ._library import Formula, autocast_operand, define
from ._segments import below_autograd

NAME = "grouped_gemm"
_ARGS = "Tensor a, Tensor b, Tensor offs, Tensor? bias=None, Tensor? bias_scale=None"

# --- kernels ----------------------------------------------------------------------------------------------------------


_spec = remembered(specs.grouped_gemm)
_checked_out = remembered_out(specs.grouped_gemm_out)


def _kernel(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    if _direct.active and a.is_cpu and bias is bias_scale is None and not debug.active:
        work = _direct.work(a, b, offs, out_dtype)
        if work is not None:
            return _in_aten(a, b, offs, work, zero_tail=True)
    spec = _spec(a, b, offs, bias, bias_scale, out_dtype=out_dtype)
    if debug.active:
        debug.check_offs(NAME, offs, a.shape[0])
    return backends.produce(NAME, a.device, spec, [a, b, offs, bias, bias_scale], zero_tail=True)


def _kernel_out(
    a: Tensor, b: Tensor, offs: Tensor, bias: Tensor | None = None, bias_scale: Tensor | None = None, *, out: Tensor
) -> None:
    _checked_out(a, b, offs, bias, bias_scale, out=out)
    memory.writable(NAME, "out", out, a=a, b=b, offs=offs, bias=bias, bias_scale=bias_scale)
    debug.check_offs(NAME, offs, a.shape[0])
    backends.run(NAME, a.device, a, b, offs, bias, bias_scale, out=out, zero_tail=False)


def _loop(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    bias: Tensor | None,
    bias_scale: Tensor | None,
    *,
    out: Tensor,
    zero_tail: bool,
) -> None:
    """One matrix product per group (small ones in batches), fp32 accumulation, one rounding."""
    ways = _gemm_cpu.ways(a, b, bias, columns=out.shape[1], dtype=out.dtype, scaled=bias_scale is not None)
    work = _gemm_cpu.work(tuple(offs.tolist()), ways)
    _products(a, b, ways, work, bias, bias_scale, out, zero_tail)


def _produce(spec: specs.TensorSpec, operands: list, *, zero_tail: bool) -> Tensor:
    """The same, with the loop in ATen where that takes the operands and there is no batch to be made."""
    a, b, offs, bias, bias_scale = operands
    ways = spec.kept or _gemm_cpu.ways_to(spec, a, b, bias, scaled=bias_scale is not None)
    work = _gemm_cpu.work(tuple(offs.tolist()), ways)
    if work.in_aten and not (a.data_ptr() | b.data_ptr()) % _gemm_cpu.ALIGNMENT:
        return _in_aten(a, b, offs, work, zero_tail=zero_tail)
    out = spec.empty()
    _products(a, b, ways, work, bias, bias_scale, out, zero_tail)
    return out


def _in_aten(a: Tensor, b: Tensor, offs: Tensor, work: _gemm_cpu.Work, *, zero_tail: bool) -> Tensor:
    out = torch.nn.functional.grouped_mm(a, b, offs=offs)
    if zero_tail and work.sizes[-1]:
        out[-work.sizes[-1] :].zero_()
    return out


def _products(
    a: Tensor,
    b: Tensor,
    ways: _gemm_cpu.Ways,
    work: _gemm_cpu.Work,
    bias: Tensor | None,
    bias_scale: Tensor | None,
    out: Tensor,
    zero_tail: bool,
) -> None:
    sizes = work.sizes
    done = _batched_cpu.gemm(a, b, sizes, work.batches, bias, out) if work.batches else set()
    if zero_tail and sizes[-1]:
        out[out.shape[0] - sizes[-1] :].zero_()
    if len(done) == b.shape[0]:
        return
    with below_autograd():
        *a_parts, _ = torch.split_with_sizes(a, sizes)  # Tensor.split is Python and costs twice as much
        *out_parts, _ = torch.split_with_sizes(out, sizes)
        if not ways.direct:
            _loop_widened(a_parts, b, sizes, bias, bias_scale, out_parts)
        elif bias is None:
            for g, (x, w, y) in enumerate(zip(a_parts, b.unbind(), out_parts)):
                if sizes[g] and g not in done:
                    torch.mm(x, w, out=y)
        else:
            for g, (x, w, y, row) in enumerate(zip(a_parts, b.unbind(), out_parts, bias.unbind())):
                if sizes[g] and g not in done:
                    torch.addmm(row, x, w, out=y)


def _loop_widened(
    a_parts: list[Tensor],
    b: Tensor,
    sizes: tuple[int, ...],
    bias: Tensor | None,
    bias_scale: Tensor | None,
    out_parts: list[Tensor],
) -> None:
    """The same with operands widened to the accumulator's dtype, for what torch.mm cannot do in one rounding."""
    acc = specs.accumulator(b.dtype)
    scales = bias_scale.split(sizes) if bias_scale is not None else None
    for g, (x, w, y) in enumerate(zip(a_parts, b.unbind(), out_parts)):
        if not x.shape[0]:
            continue
        x, w = x.to(acc), w.to(acc)
        if bias is None:
            value = torch.mm(x, w)
        elif scales is None:
            value = torch.addmm(bias[g].to(acc), x, w)
        else:
            value = torch.addmm(torch.outer(scales[g].to(acc), bias[g].to(acc)), x, w)
        y.copy_(value)


def _aten(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    bias: Tensor | None,
    bias_scale: Tensor | None,
    *,
    out: Tensor,
    zero_tail: bool,
) -> None:
    """``torch.nn.functional.grouped_mm``, whose rows past ``offs[-1]`` are uninitialised and must be masked here."""
    value = torch.nn.functional.grouped_mm(a, b, offs=offs)
    past = torch.arange(a.shape[0], device=a.device) >= (offs[-1] if offs.shape[0] else 0)
    torch.where(past[:, None], torch.zeros_like(out) if zero_tail else out, value, out=out)


def _aten_supports(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    bias: Tensor | None,
    bias_scale: Tensor | None,
    *,
    out: Tensor,
    zero_tail: bool,
) -> backends.Reason:
    if bias is not None:
        return "has no bias epilogue (adding it afterwards would round twice)"
    return aten_operand_reason(a, b, out)


def aten_operand_reason(a: Tensor, b: Tensor, out: Tensor) -> backends.Reason:
    """Why the kernel behind ``torch.nn.functional.grouped_mm`` that does not synchronise cannot take these operands."""
    if a.dtype != torch.bfloat16 or out.dtype != torch.bfloat16:
        return f"takes bfloat16 only, got {a.dtype} -> {out.dtype}"
    if out.numel() == 0 or a.numel() == 0 or b.numel() == 0:
        return "does not take empty operands"
    for name, t in (("a", a), ("b", b)):
        strides = sorted(t.stride()[-2:])
        if strides[0] != 1 or any(s * t.element_size() % 16 for s in t.stride() if s != 1):
            return f"needs `{name}` with one unit stride and all others multiples of 16 bytes, got strides {t.stride()}"
        if t.data_ptr() % 16:
            return f"needs `{name}` aligned to 16 bytes"
    return None


# --- autograd ---------------------------------------------------------------------------------------------------------


def _save(
    ctx: Any,
    needs: tuple[bool, ...],
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    bias: Tensor | None,
    bias_scale: Tensor | None,
    *,
    output: Tensor,
    out_dtype: torch.dtype | None,
) -> None:
    scaled = bias_scale is not None and (needs[3] or needs[4])
    ctx.save_for_backward(
        a if needs[1] else None, b if needs[0] else None, offs, bias if scaled else None, bias_scale if scaled else None
    )
    ctx.dtype = a.dtype
    # The gradient of b is formed in b's own memory order, so that accumulating it into a weight does not copy it.
    ctx.transposed_b = b.stride(1) == 1 and b.stride(2) != 1
    ctx.bias_dtype = bias.dtype if bias is not None else None
    ctx.scale_dtype = bias_scale.dtype if bias_scale is not None else None


def _backward(ctx: Any, needs: tuple[bool, ...], dy: Tensor) -> tuple[Tensor | None, ...]:
    """da = dy b^T;  db = a^T dy;  dbias = sum of dy (times bias_scale) per group;  dbias_scale = dy . bias per row."""
    a, b, offs, bias, bias_scale = ctx.saved_tensors
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
        da = torch.ops.tgl.grouped_gemm(operand, b.transpose(1, 2), offs)
    if needs[3] or needs[4]:
        if bias_scale is None:
            dbias = torch.ops.tgl.grouped_dbias(dy, offs).to(ctx.bias_dtype)
        else:
            dbias, dscale = torch.ops.tgl.grouped_dbias_dscales(operand, bias, bias_scale, offs)
            dbias, dscale = dbias.to(ctx.bias_dtype), dscale.to(ctx.scale_dtype)
    return da, db, None, dbias if needs[3] else None, dscale if needs[4] else None


def _autocast(
    dtype: torch.dtype,
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
    **kwargs: Any,
) -> tuple[tuple, dict]:
    """Operands and bias in the autocast dtype; ``bias_scale`` (routing probabilities) keeps its own."""
    a, b = autocast_operand(dtype, a), autocast_operand(dtype, b)
    bias = autocast_operand(dtype, bias) if bias is not None else None
    if bias_scale is not None and bias_scale.dtype not in (a.dtype, torch.float32):
        bias_scale = bias_scale.float()
    return (a, b, offs, bias, bias_scale), kwargs


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
    *,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> tuple[torch.device, tuple, dict[str, Any]]:
    functional = out is None
    if out is not None:
        specs.grouped_gemm_out(a, b, offs, bias, bias_scale, out=out)
    else:
        out = specs.grouped_gemm(a, b, offs, bias, bias_scale, out_dtype=out_dtype).meta()
    return a.device, (a, b, offs, bias, bias_scale), {"out": out, "zero_tail": functional}


backends.describe_op(NAME, _call)
_direct = _gemm_cpu.Direct(
    backends.add(backends.Implementation(NAME, "loop of mm", "cpu", _loop, produce=_produce, note=_gemm_cpu.NOTE)),
    specs.grouped_gemm,
)
backends.add(
    backends.Implementation(
        NAME, "loop of mm", "cuda", _loop, priority=-10, syncs=True, note="reads offs on the host; one GEMM per group"
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
        note="torch.nn.functional.grouped_mm, then a masked copy for the tail",
    )
)


def grouped_gemm(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply every group of rows of ``a`` by its own matrix.

    For row ``t`` of group ``g``: ``out[t] = a[t] @ b[g] + bias[g] * bias_scale[t]``, accumulated in float32 (float64
    for float64) and rounded once. Group ``g`` holds the rows ``offs[g-1] <= t < offs[g]``; groups may be empty and of
    any number. Rows past ``offs[-1]`` come out as zeros and are never read, so NaN there goes nowhere.

    Differentiable in ``a``, ``b``, ``bias`` and ``bias_scale``, twice; without ``out``.

    Args:
        a: ``[T, K]``, float64, float32, bfloat16 or float16, row- or column-major (or expanded).
        b: ``[G, K, N]`` of the same dtype, either major.
        offs: int32 ``[G]`` on the same device: cumulative group ends, as in ``torch.nn.functional.grouped_mm``. Values
            are not read on the host; see ``tgl.debug_checks``.
        bias: ``[G, N]``, dtype of ``a`` or float32.
        bias_scale: ``[T]``, dtype of ``a`` or float32; only with ``bias``.
        out_dtype: dtype of the result; default that of ``a``. float64 does not mix with the others.
        out: buffer ``[T, N]``, row-major (rows may be padded), 16-byte aligned, sharing no memory with an operand and
            requiring no grad. Its rows past ``offs[-1]`` are left as they are. Its dtype is the output dtype.

    Returns:
        ``[T, N]``; ``out`` itself if given.

    Raises:
        TypeError: dtypes that do not fit.
        ValueError: shapes, layouts or devices that do not fit.
        RuntimeError: ``out`` is given and an argument requires grad, or a forward-mode derivative is asked for.
    """
    if out is None:
        return _op(a, b, offs, bias, bias_scale, out_dtype=out_dtype)
    if out_dtype is not None and out_dtype != out.dtype:
        raise TypeError(f"tgl::{NAME}: `out_dtype` must be {out.dtype} like `out`, but got {out_dtype}")
    _op_out(a, b, offs, bias, bias_scale, out=out)
    return out
