"""From tensors to a launch: which kernel serves a call, compiled at most once, called on the current stream.

A plan is found by dtypes, layouts, architecture, epilogue and tiling, never by token counts or offsets, so a change of
routing compiles nothing. The tiling follows from N, K and the mean number of rows per group, as a power of two, by a
coarse rule (``config.choose``); a model's shapes have few of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import backends
from . import config, host
from .config import VARLEN_K, VARLEN_M, GemmConfig
from .epilogue.spec import EpilogueSpec
from .host import ALIGNMENT, GPU_ARCH, MAX_ROWS

EMULATED_CLUSTERS = 4  # few enough that clusters take turns on tiles


class PlanKey(NamedTuple):
    """What a compiled kernel depends on."""

    kind: str
    arch: str
    emulated: bool
    element: str
    b_unit: int  # which dimension of B is contiguous; that of A is the last
    spec: EpilogueSpec
    config: GemmConfig


class Plan(NamedTuple):
    """A compiled kernel, and how many of its clusters to start."""

    call: Callable
    clusters: int

    def run(self, a: Tensor, *rest: Any) -> None:
        """Launch on the device of ``a``."""
        host.call(self.call, a, *rest, self.clusters)


_plans: dict[tuple, Plan] = {}
_by_shape: dict[tuple, Plan] = {}  # the same plans, found by all that is known of a call but token counts and addresses

# --- what the kernels take --------------------------------------------------------------------------------------------


def _matrix_reason(name: str, t: Tensor) -> str | None:
    """Why a tensor map cannot describe ``t``."""
    strides = t.stride()
    unit = _unit(strides)
    if strides[unit] != 1:
        return f"needs `{name}` with a unit stride in one of its last two dimensions, got strides {strides}"
    step = ALIGNMENT // t.element_size()
    for i, stride in enumerate(strides):
        if i != unit and (stride % step or (stride == 0 and t.shape[i] > 1)):
            return f"needs strides of `{name}` that are multiples of {ALIGNMENT} bytes and not 0, got {strides}"
    if host.address(t) % ALIGNMENT:
        return f"needs `{name}` aligned to {ALIGNMENT} bytes"
    return None


def _unit(strides: tuple[int, ...]) -> int:
    last = len(strides) - 1
    return last if strides[last] == 1 else last - 1


def _operands_reason(a: Tensor, b: Tensor, out: Tensor) -> str | None:
    """Why the maps of the three operands cannot be made."""
    return _matrix_reason("a", a) or _matrix_reason("b", b) or _matrix_reason("out", out)


def common_reason(a: Tensor, out: Tensor) -> str | None:
    """Why no kernel takes the dtypes and the rows of a dense call."""
    reason = host.packages_reason()
    if reason is not None:
        return reason
    if a.dtype is not torch.bfloat16 and a.dtype is not torch.float16:
        return f"takes bfloat16 and float16, got {a.dtype}"
    if out.dtype is not a.dtype and out.dtype is not torch.float32:
        return f"writes {a.dtype} or torch.float32, not {out.dtype}"
    if a.shape[0] > MAX_ROWS:
        return f"takes up to {MAX_ROWS} rows, got {a.shape[0]}"
    return None


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
    reason = common_reason(a, out)
    if reason is not None or out.numel() == 0:
        return reason
    if a.shape[1] == 0:
        return "does not take K = 0"
    if a.stride(1) != 1:
        # TMA wants the coordinate along the contiguous dimension on 16 bytes: else the device stops with an illegal
        # instruction, and a group may begin at any row.
        return f"needs `a` row-major (groups begin anywhere along its rows), got strides {a.stride()}"
    return _operands_reason(a, b, out)


def grouped_gemm_wgrad_supports(a: Tensor, b: Tensor, offs: Tensor, *, out: Tensor) -> str | None:
    """Why ``grouped_gemm_wgrad`` and its accumulating form below cannot serve a call, or None."""
    reason = common_reason(a, out)
    if reason is not None or out.numel() == 0 or a.shape[0] == 0:
        return reason
    for name, t in (("a", a), ("b", b)):
        if t.stride(1) != 1:
            return f"needs `{name}` row-major (groups are bounded along its rows), got strides {t.stride()}"
    return _operands_reason(a, b, out)


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
    vectors = (bias.dtype if bias is not None else None, bias_scale.dtype if bias_scale is not None else None)
    rows_class = (rows // (shape[0] or 1)).bit_length()
    key = (backends.emulated_arch, a.device, a.dtype, out.dtype, vectors, zero_tail, shape, strides, rows_class)
    plan = _by_shape.get(key)
    if plan is not None and 0 < rows <= MAX_ROWS and not (a.data_ptr() | b.data_ptr() | out.data_ptr()) % ALIGNMENT:
        plan.run(a, b, offs, out, bias, bias_scale)
        return None
    reason = grouped_gemm_supports(a, b, offs, bias, bias_scale, out=out, zero_tail=zero_tail)
    if reason is None:
        grouped_gemm(a, b, offs, bias, bias_scale, out=out, zero_tail=zero_tail)
        if out.numel() and shape[0]:
            _remember(key, strides, _gemm_plan(a, b, bias, bias_scale, out, zero_tail))
    return reason


def _attempt_wgrad(a: Tensor, b: Tensor, offs: Tensor, *, out: Tensor, accumulate: bool) -> str | None:
    rows, shape, strides = a.shape[0], out.shape, (a.stride(), b.stride(), out.stride())
    rows_class = (rows // (shape[0] or 1)).bit_length()
    key = (backends.emulated_arch, a.device, a.dtype, out.dtype, accumulate, shape, strides, rows_class)
    plan = _by_shape.get(key)
    if plan is not None and 0 < rows <= MAX_ROWS and not (a.data_ptr() | b.data_ptr() | out.data_ptr()) % ALIGNMENT:
        plan.run(a, b, offs, out, None, None)
        return None
    reason = grouped_gemm_wgrad_supports(a, b, offs, out=out)
    if reason is None:
        (grouped_gemm_wgrad_accumulate if accumulate else grouped_gemm_wgrad)(a, b, offs, out=out)
        if out.numel() and rows:
            _remember(key, strides, _wgrad_plan(a, b, out, accumulate))
    return reason


def attempt_grouped_gemm_wgrad(a: Tensor, b: Tensor, offs: Tensor, *, out: Tensor) -> str | None:
    """``grouped_gemm_wgrad`` likewise."""
    return _attempt_wgrad(a, b, offs, out=out, accumulate=False)


def attempt_grouped_gemm_wgrad_accumulate(a: Tensor, b: Tensor, offs: Tensor, *, out: Tensor) -> str | None:
    """``grouped_gemm_wgrad_accumulate`` likewise."""
    return _attempt_wgrad(a, b, offs, out=out, accumulate=True)


ATTEMPTS: dict[Callable[..., None], Callable[..., str | None]] = {
    grouped_gemm: attempt_grouped_gemm,
    grouped_gemm_wgrad: attempt_grouped_gemm_wgrad,
    grouped_gemm_wgrad_accumulate: attempt_grouped_gemm_wgrad_accumulate,
}


def _remember(key: tuple, strides: tuple, plan: Plan) -> None:
    if all(0 not in s for s in strides):  # a stride of 0 is fine for one row, and the key does not hold their number
        _by_shape[key] = plan


# --- plans ------------------------------------------------------------------------------------------------------------


def _gemm_plan(
    a: Tensor, b: Tensor, bias: Tensor | None, bias_scale: Tensor | None, out: Tensor, zero_tail: bool
) -> Plan:
    groups, depth, columns = b.shape
    arch = backends.device_arch(a.device)
    vectors = (bias.dtype if bias is not None else None, bias_scale.dtype if bias_scale is not None else None)
    layout = (VARLEN_M, arch, a.device, a.dtype, out.dtype, *vectors, b.stride(2) == 1, zero_tail)
    tiling = config.choose(arch, VARLEN_M, columns, depth, _power_of_two(a.shape[0] // groups))
    plan = _plans.get((layout, tiling))
    if plan is None:
        spec = EpilogueSpec(host.name(out.dtype), host.name(bias), host.name(bias_scale), tail=zero_tail)
        plan = _plans[layout, tiling] = _make("grouped_gemm", VARLEN_M, a, _unit(b.stride()), spec, tiling)
    return plan


def _wgrad_plan(a: Tensor, b: Tensor, out: Tensor, accumulate: bool) -> Plan:
    groups, rows, columns = out.shape
    arch = backends.device_arch(a.device)
    layout = (VARLEN_K, arch, a.device, a.dtype, out.dtype, accumulate)
    tiling = config.choose(arch, VARLEN_K, columns, _power_of_two(a.shape[0] // groups), rows)
    plan = _plans.get((layout, tiling))
    if plan is None:
        spec = EpilogueSpec(host.name(out.dtype), accumulate=accumulate)
        op = "grouped_gemm_wgrad_accumulate_" if accumulate else "grouped_gemm_wgrad"
        plan = _plans[layout, tiling] = _make(op, VARLEN_K, a, 1, spec, tiling)
    return plan


def _power_of_two(count: int) -> int:
    """The largest power of two up to ``count``; 0 for 0."""
    return 1 << count.bit_length() >> 1


def _make(op: str, kind: str, a: Tensor, b_unit: int, spec: EpilogueSpec, tiling: GemmConfig) -> Plan:
    key = PlanKey(kind, backends.device_arch(a.device), not a.is_cuda, host.name(a.dtype), b_unit, spec, tiling)
    function = host.compiled(op, key, a, lambda: build(key))
    return Plan(function, _clusters(a.device, tiling.ctas))


@functools.cache
def _clusters(device: torch.device, ctas: int) -> int:
    if device.type != "cuda":
        return EMULATED_CLUSTERS
    return max(torch.cuda.get_device_properties(device).multi_processor_count // ctas, 1)


def build(key: PlanKey) -> Callable:
    """Compile the kernel for ``key``. Needs no GPU."""
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    if key.arch == "sm_100":
        from .gemm.sm100 import kernel
    else:
        from .gemm.sm90 import kernel  # type: ignore[no-redef]
    types = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16, "float32": cutlass.Float32}

    def tensor(dtype: str, dims: int, unit: int) -> Any:
        """A tensor map's tensor: one unit stride, all else a multiple of 16 bytes."""
        step = ALIGNMENT * 8 // types[dtype].width
        strides = (1 if i == unit else cute.sym_int64(divisibility=step) for i in range(dims))
        return make_fake_tensor(types[dtype], _sizes(dims), tuple(strides), assumed_align=ALIGNMENT)

    def vector(dtype: str | None, dims: int) -> Any:
        """A tensor that is read element by element, in any layout."""
        if dtype is None:
            return None
        element = cutlass.Int32 if dtype == "int32" else types[dtype]
        return make_fake_tensor(element, _sizes(dims), tuple(cute.sym_int64() for _ in range(dims)))

    def _sizes(dims: int) -> tuple:
        return tuple(cute.sym_int32() for _ in range(dims))

    out_dims, b_dims = (2, 3) if key.kind == VARLEN_M else (3, 2)
    spec = key.spec
    kernel_class = kernel.GroupedGemm if spec.activation is None else kernel.ActivatedGroupedGemm
    gemm = kernel_class(key.kind, key.config, spec, types[key.element])
    out = tensor(spec.out, out_dims, out_dims - 1)
    epilogue: tuple = (out, vector(spec.bias, 2), vector(spec.bias_scale, 1))
    if spec.activation is not None:
        epilogue = (out, tensor(spec.out, 2, 1), vector(spec.bias, 2), vector(spec.probs, 1))
    return cute.compile[cute.GPUArch(GPU_ARCH[key.arch]), cute.EnableTVMFFI(True)](
        gemm,
        tensor(key.element, 2, 1),
        tensor(key.element, b_dims, key.b_unit),
        vector("int32", 1),
        *epilogue,
        cutlass.Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )


# --- warming up -------------------------------------------------------------------------------------------------------


def _scratch(like: Tensor, *shape: int) -> Tensor:
    """A small tensor of the dtype, device and memory order of ``like``."""
    t = torch.zeros(shape, dtype=like.dtype, device=like.device)
    last_is_unit = like.stride(-1) == 1
    return t if last_is_unit else t.transpose(-1, -2).contiguous().transpose(-1, -2)


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
    plan.run(_scratch(a, 8, 8), _scratch(b, 1, 8, 8), offs, result, row, factor)


def prepare_grouped_gemm_wgrad(a: Tensor, b: Tensor, offs: Tensor, *, out: Tensor, accumulate: bool = False) -> None:
    """Compile and load what ``grouped_gemm_wgrad`` with these arguments needs, by a launch on a scratch problem."""
    if out.numel() == 0 or a.shape[0] == 0:
        return
    plan = _wgrad_plan(a, b, out, accumulate)
    offs = torch.zeros(1, dtype=torch.int32, device=a.device)
    result = torch.zeros(1, 8, 8, dtype=out.dtype, device=a.device)
    plan.run(_scratch(a, 8, 8), _scratch(b, 8, 8), offs, result, None, None)
