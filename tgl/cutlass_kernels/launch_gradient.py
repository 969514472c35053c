"""From tensors to a launch of a GEMM that goes back through the activation; see ``launch`` for how plans are found."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .. import backends
from ..meta.placement import ceil_div
from . import config, host, plans
from .activation.spec import ActivationSpec, spec_of
from .config import VARLEN_M, GemmConfig
from .host import ALIGNMENT
from .plans import Plan, power_of_two, scratch
from .requirements import dense_reason, matrices_reason, unit_dimension

if TYPE_CHECKING:
    from ..ops.grouped_activation import Params

OP = "grouped_gemm_dactivation"


class GradientPlanKey(NamedTuple):
    """What a compiled kernel depends on."""

    arch: str
    emulated: bool
    element: str
    b_unit: int  # which dimension of B is contiguous
    activation: ActivationSpec
    probs: str | None
    config: GemmConfig


def grouped_gemm_dactivation_supports(
    dy: Tensor,
    b: Tensor,
    h: Tensor,
    offs: Tensor,
    probs: Tensor | None,
    *,
    params: Params,
    dh: Tensor,
    dprobs: Tensor,
) -> str | None:
    """Why ``grouped_gemm_dactivation`` below cannot serve a call, or None."""
    reason = dense_reason(dy, dh)
    if reason is not None or dh.numel() == 0:
        return reason
    if dy.shape[1] == 0:
        return "does not take K = 0"
    for name, t in (("dy", dy), ("h", h)):
        if t.stride(1) != 1:
            return f"needs `{name}` row-major (groups begin anywhere along its rows), got strides {t.stride()}"
    side_by_side = params.gated and not params.interleaved
    step = ALIGNMENT // h.element_size()
    columns = b.shape[2] if side_by_side else h.shape[1]
    if columns % step:
        return f"needs {'halves' if side_by_side else 'rows'} of `h` of a multiple of {step} columns, got {columns}"
    return matrices_reason(dy=dy, b=b, h=h, dh=dh)


def grouped_gemm_dactivation(
    dy: Tensor,
    b: Tensor,
    h: Tensor,
    offs: Tensor,
    probs: Tensor | None,
    *,
    params: Params,
    dh: Tensor,
    dprobs: Tensor,
) -> None:
    """The product and back through the activation, with zero tails.

    A row's sum for ``dprobs`` is that of its tiles across I in order of ``torch.sum``, each that of its columns.
    """
    if dh.numel() == 0 or b.shape[0] == 0:
        dh.zero_()
        dprobs.zero_()
        return
    _run(_plan(dy, b, h, probs, params), dy, b, h, offs, probs, dh, dprobs)


def _run(
    plan: Plan, dy: Tensor, b: Tensor, h: Tensor, offs: Tensor, probs: Tensor | None, dh: Tensor, dprobs: Tensor
) -> None:
    if probs is None:
        plan.run(dy, b, offs, dh, h, None, None)
        return
    columns = b.shape[2]
    if columns <= plan.tile_n:
        plan.run(dy, b, offs, dh, h, probs, dprobs.unsqueeze(0))
        return
    sums = dprobs.new_empty(ceil_div(columns, plan.tile_n), dprobs.shape[0])
    plan.run(dy, b, offs, dh, h, probs, sums)
    torch.sum(sums, 0, out=dprobs)


def attempt_grouped_gemm_dactivation(
    dy: Tensor,
    b: Tensor,
    h: Tensor,
    offs: Tensor,
    probs: Tensor | None,
    *,
    params: Params,
    dh: Tensor,
    dprobs: Tensor,
) -> str | None:
    """``grouped_gemm_dactivation`` if it can serve the call, else why not; one look-up for a call like one before."""
    rows, shape, strides = dy.shape[0], b.shape, (dy.stride(), b.stride(), h.stride(), dh.stride())
    dtypes, size = (dy.dtype, probs is None or probs.dtype), plans.rows_class(rows, shape[0])
    key = (OP, backends.emulated_arch, dy.device, dtypes, params, shape, strides, size)
    plan = plans.known(key, rows, dy.data_ptr() | b.data_ptr() | h.data_ptr() | dh.data_ptr())
    if plan is not None:
        _run(plan, dy, b, h, offs, probs, dh, dprobs)
        return None
    reason = grouped_gemm_dactivation_supports(dy, b, h, offs, probs, params=params, dh=dh, dprobs=dprobs)
    if reason is None:
        grouped_gemm_dactivation(dy, b, h, offs, probs, params=params, dh=dh, dprobs=dprobs)
        if dh.numel() and shape[0]:
            plans.remember(key, strides, _plan(dy, b, h, probs, params))
    return reason


def prepare_grouped_gemm_dactivation(
    dy: Tensor,
    b: Tensor,
    h: Tensor,
    offs: Tensor,
    probs: Tensor | None,
    *,
    params: Params,
    dh: Tensor,
    dprobs: Tensor,
) -> None:
    """Compile and load what ``grouped_gemm_dactivation`` with these arguments needs, by a launch on a small problem."""
    if dh.numel() == 0 or b.shape[0] == 0:
        return
    plan = _plan(dy, b, h, probs, params)
    offs = torch.zeros(1, dtype=torch.int32, device=dy.device)
    hidden = torch.zeros(8, 16 if params.gated else 8, dtype=h.dtype, device=h.device)
    factor = sums = None
    if probs is not None:
        factor, sums = probs.new_zeros(8), dprobs.new_zeros(1, 8, device=dy.device)
    operands = scratch(dy, 8, 8), scratch(b, 1, 8, 8)
    plan.run(*operands, offs, hidden.clone(), hidden, factor, sums)


def _plan(dy: Tensor, b: Tensor, h: Tensor, probs: Tensor | None, params: Params) -> Plan:
    groups, depth, columns = b.shape
    arch = backends.device_arch(dy.device)
    tiling = config.choose(arch, VARLEN_M, columns, depth, power_of_two(dy.shape[0] // groups))
    names, unit = (host.name(dy), host.name(probs)), unit_dimension(b.stride())
    key = GradientPlanKey(arch, not dy.is_cuda, names[0], unit, spec_of(params), names[1], tiling)
    return plans.fetch(OP, key, dy, build)


def build(key: GradientPlanKey) -> Callable:
    """Compile the kernel for ``key``. Needs no GPU."""
    import cutlass

    from .compiling import compiled, matrix, strided
    from .elements import TYPES

    if key.arch == "sm_100":
        from .gemm.sm100.gradient import GradientGroupedGemm
    else:
        from .gemm.sm90.gradient import GradientGroupedGemm  # type: ignore[assignment]
    element = TYPES[key.element]
    halves = 2 if key.activation.gated and not key.activation.interleaved else 1
    columns = halves * ALIGNMENT * 8 // element.width
    return compiled(
        key.arch,
        GradientGroupedGemm(key.config, element, key.element, key.activation),
        matrix(key.element),
        matrix(key.element, 3, unit=key.b_unit),
        strided("int32"),
        matrix(key.element, columns=columns),
        matrix(key.element, columns=columns),
        strided(key.probs),
        None if key.probs is None else matrix("float32", pitch=4, align=4),
        cutlass.Int32(1),
    )
