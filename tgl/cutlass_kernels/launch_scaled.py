"""From quantised operands to a launch; see ``launch`` for how plans are found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import backends
from ..meta.placement import ceil_div
from ..meta.quantized import Options, component_specs
from . import host, launch
from .config import VARLEN_K, VARLEN_M, GemmConfig
from .epilogue.spec import EpilogueSpec
from .gemm.scaling import FORMATS, OperandFormat
from .host import ALIGNMENT, GPU_ARCH, MAX_ROWS
from .launch import Plan


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


_plans: dict[tuple, Plan] = {}

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


def matrix_reason(name: str, t: Tensor) -> str | None:
    """Why a tensor map cannot describe data or output ``t``."""
    return launch._matrix_reason(name, t) if t.numel() else None


def scale_reason(name: str, t: Tensor) -> str | None:
    """Why scales cannot be loaded from where they lie."""
    return f"needs `{name}` aligned to {ALIGNMENT} bytes" if t.numel() and host.address(t) % ALIGNMENT else None


def _place_reason(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> str | None:
    return (
        matrix_reason("a", a)
        or matrix_reason("b", b)
        or matrix_reason("out", out)
        or scale_reason("a_scale", a_scale)
        or scale_reason("b_scale", b_scale)
    )


def supports_copies_of(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    *_: Any,
    format: str,
    scale_layout: str,
    out: Tensor,
    **__: Any,
) -> str | None:
    """Why neither op below can serve a call, wherever copies of its tensors lie, or None."""
    return _call_reason(format, scale_layout, a, out)


def supports(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    *_: Any,
    format: str,
    scale_layout: str,
    out: Tensor,
    **__: Any,
) -> str | None:
    """Why neither op below can serve a call where its tensors lie, or None."""
    return _call_reason(format, scale_layout, a, out) or _place_reason(a, a_scale, b, b_scale, out)


# --- calls ------------------------------------------------------------------------------------------------------------


def grouped_gemm_scaled(
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
) -> None:
    """``out[t] = a[t] @ b[g] + bias[g] * bias_scale[t]`` for the rows ``t`` of every group ``g``."""
    if out.numel() == 0:
        return
    if b.shape[0] == 0:
        if zero_tail:
            out.zero_()
        return
    operands = (a, a_scale, b, b_scale, offs, a_amax, b_amax)
    plan = _gemm_plan(operands, bias, bias_scale, format, b_direction, out, zero_tail)
    plan.run(*operands, out, bias, bias_scale)


def grouped_gemm_scaled_wgrad(
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
) -> None:
    """``out[g] = a[rows of g]^T @ b[rows of g]``, or the same added to ``out``."""
    if out.numel() == 0:
        return
    if a.numel() == 0:
        if not accumulate:
            out.zero_()
        return
    operands = (a, a_scale, b, b_scale, offs, a_amax, b_amax)
    _wgrad_plan(operands, format, out, accumulate).run(*operands, out, None, None)


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


def _gemm_plan(
    operands: tuple,
    bias: Tensor | None,
    bias_scale: Tensor | None,
    format: str,
    b_direction: str,
    out: Tensor,
    zero_tail: bool,
) -> Plan:
    a, b = operands[0], operands[2]
    form = FORMATS[format]
    depth = a.shape[1] * (2 if a.dtype == torch.uint8 else 1)
    rows = launch._power_of_two(a.shape[0] // b.shape[0])
    tiling = choose(backends.device_arch(a.device), VARLEN_M, form, out.shape[1], depth, rows)
    rows_first = b_direction == "rowwise" or form.placed
    dtypes = (host.name(out.dtype), host.name(bias), host.name(bias_scale))
    spec = EpilogueSpec(*dtypes, tail=zero_tail, alpha=form.alpha)
    return _plan("grouped_gemm_scaled", VARLEN_M, a, b, format, rows_first, spec, tiling)


def _wgrad_plan(operands: tuple, format: str, out: Tensor, accumulate: bool) -> Plan:
    a, b = operands[0], operands[2]
    form = FORMATS[format]
    groups, rows, columns = out.shape
    tokens = a.numel() // rows * (2 if a.dtype == torch.uint8 else 1)
    arch = backends.device_arch(a.device)
    tiling = choose(arch, VARLEN_K, form, columns, launch._power_of_two(tokens // groups), rows)
    spec = EpilogueSpec(host.name(out.dtype), accumulate=accumulate, alpha=form.alpha)
    return _plan("grouped_gemm_scaled_wgrad", VARLEN_K, a, b, format, False, spec, tiling)


def _plan(
    op: str, kind: str, a: Tensor, b: Tensor, format: str, rows_first: bool, spec: EpilogueSpec, tiling: GemmConfig
) -> Plan:
    arch = backends.device_arch(a.device)
    known = (kind, arch, a.device, format, a.dtype, b.dtype, rows_first, spec, tiling)
    plan = _plans.get(known)
    if plan is None:
        elements = (host.name(a.dtype), host.name(b.dtype))
        key = ScaledPlanKey(kind, arch, not a.is_cuda, format, *elements, rows_first, spec, tiling)
        function = host.compiled(op, key, a, lambda: build(key))
        plan = _plans[known] = Plan(function, launch._clusters(a.device, tiling.ctas))
    return plan


def build(key: ScaledPlanKey) -> Callable:
    """Compile the kernel for ``key``. Needs no GPU."""
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    from .gemm.sm90.scaled import ScaledGroupedGemm as Sm90
    from .gemm.sm100.scaled import ScaledGroupedGemm as Sm100

    # FP4 data crosses as bytes, and so do scales: the kernel knows what they hold.
    elements = {
        "float8_e4m3fn": cutlass.Float8E4M3FN,
        "float8_e5m2": cutlass.Float8E5M2,
        "uint8": cutlass.Float4E2M1FN,
    }
    crossing = {**elements, "uint8": cutlass.Uint8}
    plain = {
        "bfloat16": cutlass.BFloat16,
        "float16": cutlass.Float16,
        "float32": cutlass.Float32,
        "int32": cutlass.Int32,
    }

    def matrix(element: Any, dims: int) -> Any:
        """Contiguous along the last dimension, all else on 16 bytes."""
        step = ALIGNMENT * 8 // element.width
        strides = (*(cute.sym_int64(divisibility=step) for _ in range(dims - 1)), 1)
        return make_fake_tensor(element, _sizes(dims), strides, assumed_align=ALIGNMENT)

    def vector(dtype: str | None, dims: int) -> Any:
        """A tensor that is read element by element, in any layout."""
        if dtype is None:
            return None
        return make_fake_tensor(plain[dtype], _sizes(dims), tuple(cute.sym_int64() for _ in range(dims)))

    def blocks(dims: int) -> Any:
        """Float32 scales, contiguous."""
        strides = (*(cute.sym_int64() for _ in range(dims - 1)), 1)
        return make_fake_tensor(cutlass.Float32, _sizes(dims), strides, assumed_align=ALIGNMENT)

    def _sizes(dims: int) -> tuple:
        return tuple(cute.sym_int32() for _ in range(dims))

    form, spec = FORMATS[key.format], key.spec
    out_dims, b_dims = (2, 3) if key.kind == VARLEN_M else (3, 2)
    if form.block:
        scales = [blocks(dims) for dims in (2, b_dims)]
    else:
        scales = [matrix(cutlass.Uint8, dims) if form.vector else vector("float32", 1) for dims in (1, b_dims - 1)]
    if key.kind != VARLEN_M and form.vector:
        scales[1] = matrix(cutlass.Uint8, 1)
    amax = [vector("float32", 1) if spec.alpha == "amax" else None for _ in range(2)]
    traits = (key.kind, key.config, spec, elements[key.a_element], elements[key.b_element], form)
    gemm = Sm90(*traits) if key.arch == "sm_90" else Sm100(*traits, key.b_rows_first)
    return cute.compile[cute.GPUArch(GPU_ARCH[key.arch]), cute.EnableTVMFFI(True)](
        gemm,
        matrix(crossing[key.a_element], 2),
        scales[0],
        matrix(crossing[key.b_element], b_dims),
        scales[1],
        vector("int32", 1),
        *amax,
        matrix(plain[spec.out], out_dims),
        vector(spec.bias, 2),
        vector(spec.bias_scale, 1),
        cutlass.Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )


# --- warming up -------------------------------------------------------------------------------------------------------

_SIDE = 128  # of a scratch problem: a whole block of every format


def _scratch(like: Tensor, amax: Tensor | None, format: str, scale_layout: str, columnwise: bool, weights: bool) -> Any:
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
) -> None:
    """Compile and load what ``grouped_gemm_scaled`` with these arguments needs, by a launch on a scratch problem."""
    if out.numel() == 0 or b.shape[0] == 0:
        return
    operands = (a, a_scale, b, b_scale, offs, a_amax, b_amax)
    plan = _gemm_plan(operands, bias, bias_scale, format, b_direction, out, zero_tail)
    x, x_scale, x_amax = _scratch(a, a_amax, format, scale_layout, False, False)
    w, w_scale, w_amax = _scratch(b, b_amax, format, scale_layout, b_direction == "columnwise", True)
    plan.run(
        *(x, x_scale, w, w_scale, torch.zeros(1, dtype=torch.int32, device=a.device), x_amax, w_amax),
        torch.zeros(_SIDE, _SIDE, dtype=out.dtype, device=a.device),
        None if bias is None else bias.new_zeros(1, _SIDE),
        None if bias_scale is None else bias_scale.new_zeros(_SIDE),
    )


def prepare_grouped_gemm_scaled_wgrad(
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
) -> None:
    """Compile and load what ``grouped_gemm_scaled_wgrad`` with these arguments needs, by a launch on a scratch one."""
    if out.numel() == 0 or a.numel() == 0:
        return
    plan = _wgrad_plan((a, a_scale, b, b_scale, offs, a_amax, b_amax), format, out, accumulate)
    x, x_scale, x_amax = _scratch(a, a_amax, format, scale_layout, True, False)
    y, y_scale, y_amax = _scratch(b, b_amax, format, scale_layout, True, False)
    plan.run(
        *(x, x_scale, y, y_scale, torch.zeros(1, dtype=torch.int32, device=a.device), x_amax, y_amax),
        torch.zeros(1, _SIDE, _SIDE, dtype=out.dtype, device=a.device),
        None,
        None,
    )
