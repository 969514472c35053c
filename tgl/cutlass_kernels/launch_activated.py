"""From tensors to a launch of a GEMM with an activation as second output; the counterpart of ``launch``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import backends
from . import config, host, launch, plans
from .activation.spec import spec_of
from .config import VARLEN_M
from .epilogue.spec import EpilogueSpec
from .host import ALIGNMENT
from .plans import Plan, PlanKey, power_of_two, scratch
from .requirements import matrix_reason, unit_dimension

if TYPE_CHECKING:
    from ..ops.grouped_activation import Params

OP = "grouped_gemm_activation"


def grouped_gemm_activation_supports(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    bias: Tensor | None,
    probs: Tensor | None,
    *,
    params: Params,
    y: Tensor,
    h: Tensor,
) -> str | None:
    """Why ``grouped_gemm_activation`` below cannot serve a call, or None."""
    reason = launch.grouped_gemm_supports(a, b, offs, bias, None, out=h, zero_tail=True)
    if reason is not None or h.numel() == 0:
        return reason
    step = ALIGNMENT // y.element_size()
    if y.shape[1] % step:
        return f"needs a multiple of {step} columns of the result, got {y.shape[1]}"
    across = b.stride(2) == 1
    if params.gated and params.interleaved and across:
        return "needs `b` contiguous along K when gate and linear half alternate: a tensor map skips no elements"
    half = b.shape[2] // 2 * b.element_size()
    if params.gated and across and half % ALIGNMENT:
        return f"needs halves of `b` on {ALIGNMENT} bytes, got {half} bytes from one to the other"
    return matrix_reason("y", y)


def grouped_gemm_activation(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    bias: Tensor | None,
    probs: Tensor | None,
    *,
    params: Params,
    y: Tensor,
    h: Tensor,
) -> None:
    """``h = a[t] @ b[g] + bias[g]`` for the rows ``t`` of every group ``g``, ``y`` its activation, and zero tails."""
    if h.numel() == 0:
        return
    if b.shape[0] == 0:
        h.zero_()
        y.zero_()
        return
    _plan(a, b, bias, probs, params, h).run(a, b, offs, h, y, bias, probs)


def attempt_grouped_gemm_activation(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    bias: Tensor | None,
    probs: Tensor | None,
    *,
    params: Params,
    y: Tensor,
    h: Tensor,
) -> str | None:
    """``grouped_gemm_activation`` if it can serve the call, else why not; one look-up for a call like one before."""
    rows, shape, strides = a.shape[0], b.shape, (a.stride(), b.stride(), h.stride(), y.stride())
    dtypes = (a.dtype, h.dtype, bias is None or bias.dtype, probs is None or probs.dtype)
    size = plans.rows_class(rows, shape[0])
    key = (OP, backends.emulated_arch, a.device, dtypes, params, shape, strides, size)
    plan = plans.known(key, rows, a.data_ptr() | b.data_ptr() | h.data_ptr() | y.data_ptr())
    if plan is not None:
        plan.run(a, b, offs, h, y, bias, probs)
        return None
    reason = grouped_gemm_activation_supports(a, b, offs, bias, probs, params=params, y=y, h=h)
    if reason is None:
        grouped_gemm_activation(a, b, offs, bias, probs, params=params, y=y, h=h)
        if h.numel() and shape[0]:
            plans.remember(key, strides, _plan(a, b, bias, probs, params, h))
    return reason


def prepare_grouped_gemm_activation(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    bias: Tensor | None,
    probs: Tensor | None,
    *,
    params: Params,
    y: Tensor,
    h: Tensor,
) -> None:
    """Compile and load what ``grouped_gemm_activation`` with these arguments needs, by a launch on scratch tensors."""
    if h.numel() == 0 or b.shape[0] == 0:
        return
    width = 16 if params.gated else 8
    ends = torch.zeros(1, dtype=torch.int32, device=a.device)
    results = (torch.zeros(8, columns, dtype=h.dtype, device=a.device) for columns in (width, 8))
    row = bias.new_zeros(1, width) if bias is not None else None
    factor = probs.new_zeros(8) if probs is not None else None
    plan = _plan(a, b, bias, probs, params, h)
    plan.run(scratch(a, 8, 8), scratch(b, 1, 8, width), ends, *results, row, factor)


def _plan(a: Tensor, b: Tensor, bias: Tensor | None, probs: Tensor | None, params: Params, h: Tensor) -> Plan:
    groups, depth, columns = b.shape
    arch = backends.device_arch(a.device)
    rows = power_of_two(a.shape[0] // groups)
    tiling = config.choose(arch, VARLEN_M, columns, depth, rows, halves=params.gated)
    spec = EpilogueSpec(host.name(h), host.name(bias), tail=True, activation=spec_of(params), probs=host.name(probs))
    key = PlanKey(VARLEN_M, arch, not a.is_cuda, host.name(a), unit_dimension(b.stride()), spec, tiling)
    return plans.fetch(OP, key, a, build)


def build(key: PlanKey) -> Callable:
    """Compile the kernel for ``key``. Needs no GPU."""
    import cutlass

    from .compiling import compiled, matrix, strided
    from .elements import TYPES

    if key.arch == "sm_100":
        from .gemm.sm100.kernel import ActivatedGroupedGemm
    else:
        from .gemm.sm90.kernel import ActivatedGroupedGemm  # type: ignore[assignment]
    return compiled(
        key.arch,
        ActivatedGroupedGemm(key.kind, key.config, key.spec, TYPES[key.element]),
        matrix(key.element),
        matrix(key.element, 3, unit=key.b_unit),
        strided("int32"),
        matrix(key.spec.out),
        matrix(key.spec.out),
        strided(key.spec.bias, 2),
        strided(key.spec.probs),
        cutlass.Int32(1),
    )
