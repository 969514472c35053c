"""From quantised operands to a launch; see ``plans`` for how a call finds its kernel.

``operands`` are those of the ops in their order: ``a, a_scale, b, b_scale, offs, a_amax, b_amax``, and of
``grouped_gemm_scaled`` also ``bias, bias_scale``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import backends
from ..meta.placement import ceil_div
from ..meta.quantized import Options, component_specs
from . import host, plans
from .config import VARLEN_K, VARLEN_M, GemmConfig
from .epilogue.spec import EpilogueSpec
from .gemm.scaling import FORMATS, OperandFormat
from .host import MAX_ROWS
from .plans import Plan, power_of_two
from .requirements import address_reason, matrices_reason


class ScaledPlanKey(NamedTuple):
    """What a compiled kernel depends on."""

    kind: str
    arch: str
    emulated: bool
    format: str
    a_element: str
    b_element: str
    b_rows_first: bool
    spec: EpilogueSpec
    config: GemmConfig


# --- what the kernels take --------------------------------------------------------------------------------------------


def _call_reason(format: str, scale_layout: str, a: Tensor, out: Tensor) -> str | None:
    """Why there is no kernel for a call, wherever its tensors lie."""
    reason = host.packages_reason()
    if reason is not None:
        return reason
    if format not in FORMATS:
        return f"takes {', '.join(FORMATS)}, got {format}"
    if FORMATS[format].vector and scale_layout != "blocked":
        return f'needs scale_layout="blocked", got "{scale_layout}"'
    arch = backends.device_arch(a.device)
    if arch not in FORMATS[format].archs:
        return f"takes {format} on {', '.join(FORMATS[format].archs)}, not on {arch}"
    if max(a.shape) > MAX_ROWS:
        return f"takes up to {MAX_ROWS} rows, got {max(a.shape)}"
    wgrad = out.dim() == 3
    if wgrad and format == "fp8_block" and out.shape[2] % 2:
        return f"takes an even number of columns in {format}, got {out.shape[2]}"
    if not wgrad and a.shape[1] == 0 and out.numel():
        return "does not take K = 0"
    return None


def supports_copies_of(*operands: Any, format: str, scale_layout: str, out: Tensor, **_: Any) -> str | None:
    """Why neither op below can serve a call, wherever copies of its tensors lie, or None."""
    return _call_reason(format, scale_layout, operands[0], out)


def supports(*operands: Any, format: str, scale_layout: str, out: Tensor, **_: Any) -> str | None:
    """Why neither op below can serve a call where its tensors lie, or None."""
    a, a_scale, b, b_scale, *_others = operands
    return (
        _call_reason(format, scale_layout, a, out)
        or matrices_reason(a=a, b=b, out=out)
        or address_reason("a_scale", a_scale)
        or address_reason("b_scale", b_scale)
    )


# --- calls ------------------------------------------------------------------------------------------------------------


def grouped_gemm_scaled(
    *operands: Any, format: str, b_direction: str, scale_layout: str, out: Tensor, zero_tail: bool
) -> None:
    """``out[t] = a[t] @ b[g] + bias[g] * bias_scale[t]`` for the rows ``t`` of every group ``g``."""
    if out.numel() == 0:
        return
    if operands[2].shape[0] == 0:
        if zero_tail:
            out.zero_()
        return
    _gemm_plan(operands, format, b_direction, out, zero_tail).run(*operands[:7], out, *operands[7:])


def grouped_gemm_scaled_wgrad(*operands: Any, format: str, scale_layout: str, out: Tensor, accumulate: bool) -> None:
    """``out[g] = a[rows of g]^T @ b[rows of g]``, or the same added to ``out``."""
    if out.numel() == 0:
        return
    if operands[0].numel() == 0:
        if not accumulate:
            out.zero_()
        return
    _wgrad_plan(operands, format, out, accumulate).run(*operands, out, None, None)


def attempt_grouped_gemm_scaled(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    offs: Tensor,
    a_amax: Tensor | None,
    b_amax: Tensor | None,
    bias: Tensor | None,
    bias_scale: Tensor | None,
    *,
    format: str,
    b_direction: str,
    scale_layout: str,
    out: Tensor,
    zero_tail: bool,
) -> str | None:
    """``grouped_gemm_scaled`` if it can serve the call, else why not; one look-up for a call like one before."""
    rows, shape, strides = a.shape[0], b.shape, (a.stride(), b.stride(), out.stride())
    dtypes = (a.dtype, b.dtype, out.dtype, bias is None or bias.dtype, bias_scale is None or bias_scale.dtype)
    meant, size = (format, b_direction, scale_layout, zero_tail), plans.rows_class(rows, shape[0])
    key = ("grouped_gemm_scaled", backends.emulated_arch, a.device, dtypes, meant, shape, strides, size)
    addresses = a.data_ptr() | a_scale.data_ptr() | b.data_ptr() | b_scale.data_ptr() | out.data_ptr()
    plan = plans.known(key, rows, addresses)
    if plan is not None:
        plan.run(a, a_scale, b, b_scale, offs, a_amax, b_amax, out, bias, bias_scale)
        return None
    operands = (a, a_scale, b, b_scale, offs, a_amax, b_amax, bias, bias_scale)
    options: dict[str, Any] = {"format": format, "b_direction": b_direction, "scale_layout": scale_layout}
    reason = supports(*operands, **options, out=out)
    if reason is None:
        grouped_gemm_scaled(*operands, **options, out=out, zero_tail=zero_tail)
        if out.numel() and shape[0]:
            plans.remember(key, strides, _gemm_plan(operands, format, b_direction, out, zero_tail))
    return reason


def attempt_grouped_gemm_scaled_wgrad(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    offs: Tensor,
    a_amax: Tensor | None,
    b_amax: Tensor | None,
    *,
    format: str,
    scale_layout: str,
    out: Tensor,
    accumulate: bool,
) -> str | None:
    """``grouped_gemm_scaled_wgrad`` likewise."""
    (a_pitch, a_step), (b_pitch, b_step), shape = a.stride(), b.stride(), out.shape
    strides, tokens = (out.stride(), (a_step, b_step)), _tokens(a, shape[1])
    dtypes, size = (a.dtype, b.dtype, out.dtype), plans.rows_class(tokens, shape[0])
    meant = (format, scale_layout, accumulate)
    key = ("grouped_gemm_scaled_wgrad", backends.emulated_arch, a.device, dtypes, meant, shape, strides, size)
    addresses = a.data_ptr() | a_scale.data_ptr() | b.data_ptr() | b_scale.data_ptr() | out.data_ptr()
    # The pitch of columnwise data may be that of its tokens, so it is no part of the key; its elements are bytes.
    plan = plans.known(key, tokens, addresses | a_pitch | b_pitch)
    if plan is not None:
        plan.run(a, a_scale, b, b_scale, offs, a_amax, b_amax, out, None, None)
        return None
    operands = (a, a_scale, b, b_scale, offs, a_amax, b_amax)
    reason = supports(*operands, format=format, scale_layout=scale_layout, out=out)
    if reason is None:
        grouped_gemm_scaled_wgrad(*operands, format=format, scale_layout=scale_layout, out=out, accumulate=accumulate)
        if out.numel() and a.numel():
            plans.remember(key, strides, _wgrad_plan(operands, format, out, accumulate))
    return reason


def _tokens(data: Tensor, features: int) -> int:
    """How many tokens columnwise ``data`` has room for."""
    return data.numel() // (features or 1) * (2 if data.dtype == torch.uint8 else 1)


# --- plans ------------------------------------------------------------------------------------------------------------


def choose(arch: str, kind: str, form: OperandFormat, columns: int, depth: int, rows: int) -> GemmConfig:
    """The tiling for ``columns``, ``depth`` (contraction) and ``rows`` per group, on average.

    On sm_100, not measured: wide tiles leave room in tensor memory for one accumulator and its scales, so their
    epilogue does not overlap the next tile: they are for long contractions, where it weighs least.
    """
    if arch == "sm_90":
        return _choose_sm90(kind, form, columns, rows)
    wide = columns > 128 and depth >= 16 * form.tile_k
    return GemmConfig(
        tile_m=256 if rows >= 256 else 128, tile_n=256 if wide else 128, tile_k=form.tile_k, two_cta=rows >= 256
    )


def _choose_sm90(kind: str, form: OperandFormat, columns: int, rows: int) -> GemmConfig:
    """High or wide tiles, which move the fewest bytes through L2 and shared memory per MMA (``benchmarks/NOTES.md``).

    In weight gradients 256 x 128 by two CTAs that share A is 4 % ahead of 128 x 192 with one factor per group, and 1 %
    ahead of 128 x 128 with factors of blocks. Where groups are rows, 256 of them leave more of a group's last tile
    empty: with factors of blocks they are 3-6 % ahead once groups are long; with one factor per group 128 x 192 is as
    good. 128 x 128 remains where rows are few, or 192 columns would leave more than 4 % empty.
    """
    pair = kind == VARLEN_K and columns > 128
    high = rows >= 1024 if pair else form.block > 0 and kind == VARLEN_M and columns > 64 and rows >= 2048
    if high:
        return GemmConfig(256, 128, form.tile_k, cluster_n=2 if pair else 1)
    wide = not form.block and columns > 128 and ceil_div(columns, 192) * 192 <= 1.04 * ceil_div(columns, 128) * 128
    return GemmConfig(
        tile_m=64 if rows <= 64 else 128,
        tile_n=192 if wide else 128 if columns > 64 else 64,
        tile_k=form.tile_k,
        cluster_n=2 if pair else 1,
    )


def tiling_reason(form: OperandFormat, kind: str, tiling: GemmConfig) -> str | None:
    """None if there is a kernel of this tiling on sm_90 for operands of ``form``, else why not."""
    reason = tiling.supports("sm_90", kind, bits=1024 // form.tile_k)
    if reason is None and form.block and tiling.tile_n > form.block:
        return "columns of a tile share a scale of B"
    return reason


def _gemm_plan(operands: tuple, format: str, b_direction: str, out: Tensor, zero_tail: bool) -> Plan:
    a, _, b, *_, bias, bias_scale = operands
    form = FORMATS[format]
    depth = a.shape[1] * (2 if a.dtype == torch.uint8 else 1)
    rows = power_of_two(a.shape[0] // b.shape[0])
    tiling = choose(backends.device_arch(a.device), VARLEN_M, form, out.shape[1], depth, rows)
    rows_first = b_direction == "rowwise" or form.placed
    names = (host.name(out), host.name(bias), host.name(bias_scale))
    spec = EpilogueSpec(*names, tail=zero_tail, alpha=form.alpha)
    return _plan("grouped_gemm_scaled", VARLEN_M, a, b, format, rows_first, spec, tiling)


def _wgrad_plan(operands: tuple, format: str, out: Tensor, accumulate: bool) -> Plan:
    a, b = operands[0], operands[2]
    form = FORMATS[format]
    groups, rows, columns = out.shape
    arch = backends.device_arch(a.device)
    tiling = choose(arch, VARLEN_K, form, columns, power_of_two(_tokens(a, rows) // groups), rows)
    spec = EpilogueSpec(host.name(out), accumulate=accumulate, alpha=form.alpha)
    return _plan("grouped_gemm_scaled_wgrad", VARLEN_K, a, b, format, False, spec, tiling)


def _plan(
    op: str, kind: str, a: Tensor, b: Tensor, format: str, rows_first: bool, spec: EpilogueSpec, tiling: GemmConfig
) -> Plan:
    arch = backends.device_arch(a.device)
    key = ScaledPlanKey(kind, arch, not a.is_cuda, format, host.name(a), host.name(b), rows_first, spec, tiling)
    return plans.fetch(op, key, a, build)


def build(key: ScaledPlanKey) -> Callable:
    """Compile the kernel for ``key``. Needs no GPU."""
    import cutlass

    from .compiling import compiled, matrix, strided
    from .elements import TYPES
    from .gemm.sm90.scaled import ScaledGroupedGemm as Sm90
    from .gemm.sm100.scaled import ScaledGroupedGemm as Sm100

    form, spec = FORMATS[key.format], key.spec
    out_dims, b_dims = (2, 3) if key.kind == VARLEN_M else (3, 2)
    if form.block:
        rows = strided("float32", 2) if key.kind == VARLEN_M else matrix("float32", pitch=4)
        scales = [rows, matrix("float32", b_dims, pitch=4)]
    elif form.vector:
        scales = [matrix("uint8", dims) for dims in (1, b_dims - 1)]
    else:
        scales = [strided("float32") for _ in range(2)]
    amax = "float32" if spec.alpha == "amax" else None
    # FP4 data crosses as bytes, and so do scales: the kernel knows what they hold.
    a_type, b_type = (cutlass.Float4E2M1FN if e == "uint8" else TYPES[e] for e in (key.a_element, key.b_element))
    traits = (key.kind, key.config, spec, a_type, b_type, form)
    return compiled(
        key.arch,
        Sm90(*traits) if key.arch == "sm_90" else Sm100(*traits, key.b_rows_first),
        matrix(key.a_element),
        scales[0],
        matrix(key.b_element, b_dims),
        scales[1],
        strided("int32"),
        strided(amax),
        strided(amax),
        matrix(spec.out, out_dims),
        strided(spec.bias, 2),
        strided(spec.bias_scale),
        cutlass.Int32(1),
    )


# --- warming up -------------------------------------------------------------------------------------------------------

_SIDE = 128  # of a scratch problem: a whole block of every format


def scratch_square(
    like: Tensor, amax: Tensor | None, format: str, scale_layout: str, columnwise: bool, weights: bool
) -> Any:
    """Data, scale and amax of a square of zeros, as rows of one group or as one matrix."""
    options = Options(
        format,
        rowwise=not columnwise,
        columnwise=columnwise,
        dtype=like.dtype,
        scale_layout=scale_layout,
        block_2d=weights and format == "fp8_block",
    ).resolved("grouped_gemm_scaled")
    shape = (1, _SIDE, _SIDE) if weights else (_SIDE, _SIDE)
    specs = component_specs(options, shape, 1, like.device, grouped=not weights)
    data, scale, made = (spec.empty().zero_() for spec in (specs[3:6] if columnwise else specs[:3]))
    return data, scale, None if amax is None else made


def prepare_grouped_gemm_scaled(
    *operands: Any, format: str, b_direction: str, scale_layout: str, out: Tensor, zero_tail: bool
) -> None:
    """Compile and load what ``grouped_gemm_scaled`` with these arguments needs, by a launch on a scratch problem."""
    a, _, b, _, _, a_amax, b_amax, bias, bias_scale = operands
    if out.numel() == 0 or b.shape[0] == 0:
        return
    plan = _gemm_plan(operands, format, b_direction, out, zero_tail)
    x, x_scale, x_amax = scratch_square(a, a_amax, format, scale_layout, False, False)
    w, w_scale, w_amax = scratch_square(b, b_amax, format, scale_layout, b_direction == "columnwise", True)
    plan.run(
        *(x, x_scale, w, w_scale, torch.zeros(1, dtype=torch.int32, device=a.device), x_amax, w_amax),
        torch.zeros(_SIDE, _SIDE, dtype=out.dtype, device=a.device),
        None if bias is None else bias.new_zeros(1, _SIDE),
        None if bias_scale is None else bias_scale.new_zeros(_SIDE),
    )


def prepare_grouped_gemm_scaled_wgrad(
    *operands: Any, format: str, scale_layout: str, out: Tensor, accumulate: bool
) -> None:
    """Compile and load what ``grouped_gemm_scaled_wgrad`` with these arguments needs, by a launch on a scratch one."""
    a, _, b, _, _, a_amax, b_amax = operands
    if out.numel() == 0 or a.numel() == 0:
        return
    plan = _wgrad_plan(operands, format, out, accumulate)
    x, x_scale, x_amax = scratch_square(a, a_amax, format, scale_layout, True, False)
    y, y_scale, y_amax = scratch_square(b, b_amax, format, scale_layout, True, False)
    plan.run(
        *(x, x_scale, y, y_scale, torch.zeros(1, dtype=torch.int32, device=a.device), x_amax, y_amax),
        torch.zeros(1, _SIDE, _SIDE, dtype=out.dtype, device=a.device),
        None,
        None,
    )
