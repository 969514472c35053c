"""From tensors to a launch: which kernel serves a call, compiled at most once, called on the current stream.

See ``plans`` for how a call finds its kernel.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .. import backends
from . import config, host, plans
from .config import VARLEN_K, VARLEN_M
from .epilogue.spec import EpilogueSpec
from .plans import Plan, PlanKey, power_of_two, scratch
from .requirements import dense_reason, matrices_reason, unit_dimension

# --- what the kernels take --------------------------------------------------------------------------------------------


def grouped_gemm_supports(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    bias: Tensor | None,
    bias_scale: Tensor | None,
    *,
    out: Tensor,
    zero_tail: bool,
) -> str | None:
    """Why ``grouped_gemm`` below cannot serve a call, or None."""
    reason = dense_reason(a, out)
    if reason is not None or out.numel() == 0:
        return reason
    if a.shape[1] == 0:
        return "does not take K = 0"
    if a.stride(1) != 1:
        # TMA wants the coordinate along the contiguous dimension on 16 bytes: else the device stops with an illegal
        # instruction, and a group may begin at any row.
        return f"needs `a` row-major (groups begin anywhere along its rows), got strides {a.stride()}"
    return matrices_reason(a=a, b=b, out=out)


def grouped_gemm_wgrad_supports(a: Tensor, b: Tensor, offs: Tensor, *, out: Tensor) -> str | None:
    """Why ``grouped_gemm_wgrad`` and its accumulating form below cannot serve a call, or None."""
    reason = dense_reason(a, out)
    if reason is not None or out.numel() == 0 or a.shape[0] == 0:
        return reason
    for name, t in (("a", a), ("b", b)):
        if t.stride(1) != 1:
            return f"needs `{name}` row-major (groups are bounded along its rows), got strides {t.stride()}"
    return matrices_reason(a=a, b=b, out=out)


# --- calls ------------------------------------------------------------------------------------------------------------


def grouped_gemm(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    bias: Tensor | None,
    bias_scale: Tensor | None,
    *,
    out: Tensor,
    zero_tail: bool,
) -> None:
    """``out[t] = a[t] @ b[g] + bias[g] * bias_scale[t]`` for the rows ``t`` of every group ``g``."""
    if out.numel() == 0:
        return
    if b.shape[0] == 0:
        if zero_tail:
            out.zero_()
        return
    plan = _gemm_plan(a, b, bias, bias_scale, out, zero_tail)
    plan.run(a, b, offs, out, bias, bias_scale)


def grouped_gemm_wgrad(a: Tensor, b: Tensor, offs: Tensor, *, out: Tensor) -> None:
    """``out[g] = a[rows of g]^T @ b[rows of g]``."""
    if out.numel() == 0:
        return
    if a.shape[0] == 0:
        out.zero_()
        return
    _wgrad_plan(a, b, out, False).run(a, b, offs, out, None, None)


def grouped_gemm_wgrad_accumulate(a: Tensor, b: Tensor, offs: Tensor, *, out: Tensor) -> None:
    """``out[g] += a[rows of g]^T @ b[rows of g]``."""
    if out.numel() == 0 or a.shape[0] == 0:
        return
    _wgrad_plan(a, b, out, True).run(a, b, offs, out, None, None)


def attempt_grouped_gemm(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    bias: Tensor | None,
    bias_scale: Tensor | None,
    *,
    out: Tensor,
    zero_tail: bool,
) -> str | None:
    """``grouped_gemm`` if it can serve the call, else why not; one look-up for a call like one before."""
    rows, shape, strides = a.shape[0], b.shape, (a.stride(), b.stride(), out.stride())
    dtypes = (a.dtype, out.dtype, bias is None or bias.dtype, bias_scale is None or bias_scale.dtype)
    size = plans.rows_class(rows, shape[0])
    key = ("grouped_gemm", backends.emulated_arch, a.device, dtypes, zero_tail, shape, strides, size)
    plan = plans.known(key, rows, a.data_ptr() | b.data_ptr() | out.data_ptr())
    if plan is not None:
        plan.run(a, b, offs, out, bias, bias_scale)
        return None
    reason = grouped_gemm_supports(a, b, offs, bias, bias_scale, out=out, zero_tail=zero_tail)
    if reason is None:
        grouped_gemm(a, b, offs, bias, bias_scale, out=out, zero_tail=zero_tail)
        if out.numel() and shape[0]:
            plans.remember(key, strides, _gemm_plan(a, b, bias, bias_scale, out, zero_tail))
    return reason


def _attempt_wgrad(a: Tensor, b: Tensor, offs: Tensor, *, out: Tensor, accumulate: bool) -> str | None:
    rows, shape, strides = a.shape[0], out.shape, (a.stride(), b.stride(), out.stride())
    dtypes, size = (a.dtype, out.dtype), plans.rows_class(rows, shape[0])
    key = ("grouped_gemm_wgrad", backends.emulated_arch, a.device, dtypes, accumulate, shape, strides, size)
    plan = plans.known(key, rows, a.data_ptr() | b.data_ptr() | out.data_ptr())
    if plan is not None:
        plan.run(a, b, offs, out, None, None)
        return None
    reason = grouped_gemm_wgrad_supports(a, b, offs, out=out)
    if reason is None:
        (grouped_gemm_wgrad_accumulate if accumulate else grouped_gemm_wgrad)(a, b, offs, out=out)
        if out.numel() and rows:
            plans.remember(key, strides, _wgrad_plan(a, b, out, accumulate))
    return reason


def attempt_grouped_gemm_wgrad(a: Tensor, b: Tensor, offs: Tensor, *, out: Tensor) -> str | None:
    """``grouped_gemm_wgrad`` likewise."""
    return _attempt_wgrad(a, b, offs, out=out, accumulate=False)


def attempt_grouped_gemm_wgrad_accumulate(a: Tensor, b: Tensor, offs: Tensor, *, out: Tensor) -> str | None:
    """``grouped_gemm_wgrad_accumulate`` likewise."""
    return _attempt_wgrad(a, b, offs, out=out, accumulate=True)


# --- plans ------------------------------------------------------------------------------------------------------------


def _gemm_plan(
    a: Tensor, b: Tensor, bias: Tensor | None, bias_scale: Tensor | None, out: Tensor, zero_tail: bool
) -> Plan:
    groups, depth, columns = b.shape
    arch = backends.device_arch(a.device)
    tiling = config.choose(arch, VARLEN_M, columns, depth, power_of_two(a.shape[0] // groups))
    spec = EpilogueSpec(host.name(out), host.name(bias), host.name(bias_scale), tail=zero_tail)
    key = PlanKey(VARLEN_M, arch, not a.is_cuda, host.name(a), unit_dimension(b.stride()), spec, tiling)
    return plans.fetch("grouped_gemm", key, a, build)


def _wgrad_plan(a: Tensor, b: Tensor, out: Tensor, accumulate: bool) -> Plan:
    groups, rows, columns = out.shape
    arch = backends.device_arch(a.device)
    tiling = config.choose(arch, VARLEN_K, columns, power_of_two(a.shape[0] // groups), rows)
    spec = EpilogueSpec(host.name(out), accumulate=accumulate)
    key = PlanKey(VARLEN_K, arch, not a.is_cuda, host.name(a), 1, spec, tiling)
    return plans.fetch("grouped_gemm_wgrad_accumulate_" if accumulate else "grouped_gemm_wgrad", key, a, build)


def build(key: PlanKey) -> Callable:
    """Compile the kernel for ``key``. Needs no GPU."""
    import cutlass

    from .compiling import compiled, matrix, strided
    from .elements import TYPES

    if key.arch == "sm_100":
        from .gemm.sm100.kernel import GroupedGemm
    else:
        from .gemm.sm90.kernel import GroupedGemm  # type: ignore[assignment]
    out_dims, b_dims = (2, 3) if key.kind == VARLEN_M else (3, 2)
    return compiled(
        key.arch,
        GroupedGemm(key.kind, key.config, key.spec, TYPES[key.element]),
        matrix(key.element),
        matrix(key.element, b_dims, unit=key.b_unit),
        strided("int32"),
        matrix(key.spec.out, out_dims),
        strided(key.spec.bias, 2),
        strided(key.spec.bias_scale),
        cutlass.Int32(1),
    )


# --- warming up -------------------------------------------------------------------------------------------------------


def prepare_grouped_gemm(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    bias: Tensor | None,
    bias_scale: Tensor | None,
    *,
    out: Tensor,
    zero_tail: bool,
) -> None:
    """Compile and load what ``grouped_gemm`` with these arguments needs, by a launch on a scratch problem."""
    if out.numel() == 0 or b.shape[0] == 0:
        return
    plan = _gemm_plan(a, b, bias, bias_scale, out, zero_tail)
    offs = torch.zeros(1, dtype=torch.int32, device=a.device)
    result = torch.zeros(8, 8, dtype=out.dtype, device=a.device)
    row = bias.new_zeros(1, 8) if bias is not None else None
    factor = bias_scale.new_zeros(8) if bias_scale is not None else None
    plan.run(scratch(a, 8, 8), scratch(b, 1, 8, 8), offs, result, row, factor)


def prepare_grouped_gemm_wgrad(a: Tensor, b: Tensor, offs: Tensor, *, out: Tensor, accumulate: bool = False) -> None:
    """Compile and load what ``grouped_gemm_wgrad`` with these arguments needs, by a launch on a scratch problem."""
    if out.numel() == 0 or a.shape[0] == 0:
        return
    plan = _wgrad_plan(a, b, out, accumulate)
    offs = torch.zeros(1, dtype=torch.int32, device=a.device)
    result = torch.zeros(1, 8, 8, dtype=out.dtype, device=a.device)
    plan.run(scratch(a, 8, 8), scratch(b, 8, 8), offs, result, None, None)
