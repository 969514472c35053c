"""From tensors to a launch of a GEMM that goes back through the activation; see ``launch`` for how plans are found."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import backends
from ..meta.placement import ceil_div
from . import config, host, launch
from .activation.spec import ActivationSpec, spec_of
from .config import VARLEN_M, GemmConfig
from .host import ALIGNMENT, GPU_ARCH
from .launch import Plan

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


_plans: dict[tuple, Plan] = {}


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
    reason = launch.common_reason(dy, dh)
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
    return (
        launch._matrix_reason("dy", dy)
        or launch._matrix_reason("b", b)
        or launch._matrix_reason("h", h)
        or launch._matrix_reason("dh", dh)
    )


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
    plan, tile_n = _plan(dy, b, h, probs, params)
    sums = None
    if probs is not None:
        tiles = ceil_div(b.shape[2], tile_n)
        sums = dprobs[None] if tiles == 1 else dprobs.new_empty(tiles, dprobs.shape[0])
    plan.run(dy, b, offs, dh, h, probs, sums)
    if sums is not None and sums.shape[0] > 1:
        torch.sum(sums, 0, out=dprobs)


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
    plan, _ = _plan(dy, b, h, probs, params)
    offs = torch.zeros(1, dtype=torch.int32, device=dy.device)
    hidden = torch.zeros(8, 16 if params.gated else 8, dtype=h.dtype, device=h.device)
    factor = sums = None
    if probs is not None:
        factor, sums = probs.new_zeros(8), dprobs.new_zeros(1, 8, device=dy.device)
    operands = launch._scratch(dy, 8, 8), launch._scratch(b, 1, 8, 8)
    plan.run(*operands, offs, hidden.clone(), hidden, factor, sums)


def _plan(dy: Tensor, b: Tensor, h: Tensor, probs: Tensor | None, params: Params) -> tuple[Plan, int]:
    """The plan for a call, and how many columns its tiles have."""
    groups, depth, columns = b.shape
    arch = backends.device_arch(dy.device)
    tiling = config.choose(arch, VARLEN_M, columns, depth, launch._power_of_two(dy.shape[0] // groups))
    activation = spec_of(params)
    known = (arch, dy.device, dy.dtype, b.stride(2) == 1, activation, host.name(probs), tiling)
    plan = _plans.get(known)
    if plan is None:
        unit = launch._unit(b.stride())
        key = GradientPlanKey(arch, not dy.is_cuda, host.name(dy.dtype), unit, activation, host.name(probs), tiling)
        function = host.compiled(OP, key, dy, lambda: build(key))
        plan = _plans[known] = Plan(function, launch._clusters(dy.device, tiling.ctas))
    return plan, tiling.tile_n


def build(key: GradientPlanKey) -> Callable:
    """Compile the kernel for ``key``. Needs no GPU."""
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    if key.arch == "sm_100":
        from .gemm.sm100.gradient import GradientGroupedGemm
    else:
        from .gemm.sm90.gradient import GradientGroupedGemm  # type: ignore[assignment]
    types = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16, "float32": cutlass.Float32}
    element = types[key.element]

    def matrix(dims: int, unit: int) -> Any:
        """A tensor map's tensor: one unit stride, all else a multiple of 16 bytes."""
        step = ALIGNMENT * 8 // element.width
        strides = (1 if i == unit else cute.sym_int64(divisibility=step) for i in range(dims))
        return make_fake_tensor(element, _sizes(dims), tuple(strides), assumed_align=ALIGNMENT)

    def hidden() -> Any:
        step = ALIGNMENT * 8 // element.width
        half = step * (2 if key.activation.gated and not key.activation.interleaved else 1)
        shape = (cute.sym_int32(), cute.sym_int32(divisibility=half))
        return make_fake_tensor(element, shape, (cute.sym_int64(divisibility=step), 1), assumed_align=ALIGNMENT)

    def vector(element: Any) -> Any:
        return make_fake_tensor(element, _sizes(1), (cute.sym_int64(),))

    def _sizes(dims: int) -> tuple:
        return tuple(cute.sym_int32() for _ in range(dims))

    return cute.compile[cute.GPUArch(GPU_ARCH[key.arch]), cute.EnableTVMFFI(True)](
        GradientGroupedGemm(key.config, element, key.element, key.activation),
        matrix(2, 1),
        matrix(3, key.b_unit),
        vector(cutlass.Int32),
        hidden(),
        hidden(),
        None if key.probs is None else vector(types[key.probs]),
        None if key.probs is None else make_fake_tensor(cutlass.Float32, _sizes(2), (cute.sym_int64(), 1)),
        cutlass.Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
