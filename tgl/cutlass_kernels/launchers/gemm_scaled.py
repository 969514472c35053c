"""GEMMs on quantised operands: forward and input gradient, weight gradient, and its accumulation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import backends
from ...meta.components import component_specs
from ...meta.quantized import Options
from .. import tilings
from ..archs import arch_of, having
from ..config import VARLEN_K, VARLEN_M, GemmConfig
from ..epilogue import EpilogueSpec
from ..gemm.operand_formats import NO_KERNEL, OPERANDS
from ..runtime import device
from ..runtime.launcher import Call, power_of_two, rows_class, warm
from ..runtime.names import name
from ..runtime.reach import Reach
from ..runtime.requirements import MATRIX, MAX_ROWS, START
from . import scaled_operands
from .gemm import PersistentGemmLauncher, clear

SIDE = 128  # of a warm-up problem: a whole block of every format


class ScaledGemmKey(NamedTuple):
    """Key of a compiled kernel."""

    kind: str
    arch: str
    emulated: bool
    format: str
    a_element: str
    b_element: str
    b_rows_first: bool
    spec: EpilogueSpec
    config: GemmConfig
    slots: bool = False  # whether a table of slots names the matrices of the output


class ScaledGemmCall(NamedTuple):
    """Arguments of ``grouped_gemm_scaled``."""

    a: Tensor
    a_scale: Tensor
    b: Tensor
    b_scale: Tensor
    offs: Tensor
    a_amax: Tensor | None
    b_amax: Tensor | None
    bias: Tensor | None
    bias_scale: Tensor | None
    format: str
    b_direction: str
    scale_layout: str
    out: Tensor
    zero_tail: bool


class ScaledWgradCall(NamedTuple):
    """A call of ``grouped_gemm_scaled_wgrad`` or its accumulating form."""

    a: Tensor
    a_scale: Tensor
    b: Tensor
    b_scale: Tensor
    offs: Tensor
    a_amax: Tensor | None
    b_amax: Tensor | None
    format: str
    scale_layout: str
    out: Tensor
    accumulate: bool
    slots: Tensor | None = None


NEEDS = {"a": MATRIX, "a_scale": START, "b": MATRIX, "b_scale": START, "out": MATRIX}


class ScaledLauncher(PersistentGemmLauncher[Call]):
    """Launcher of a GEMM on quantised operands."""

    archs = having("ScaledGroupedGemm")

    def refuses(self, c: Any) -> backends.Reason:
        """Return the reason against formats without tensor cores for them, or sizes, or None."""
        return scaled_reason(c.format, c.a, c.out)

    def reason(self, c: Any) -> backends.Reason:
        """Return the reason of ``refuses``, or that scales are in a layout that needs a copy, or None."""
        return self.refuses(c) or scaled_operands.reason(c) or self.reach.reason(c)

    def run_copied(self, c: Any) -> None:
        """Run with copies of tensors that the kernel cannot read in place, and of scales in another layout."""
        scaled_operands.placed(c, self.reach, self.run)

    def prepare_copied(self, c: Any) -> None:
        """Prepare what ``run_copied`` runs."""
        self.reach.moved(scaled_operands.made(c), self.prepare)

    def copies(self, c: Any) -> dict[str, int]:
        """Return the bytes that ``run_copied`` copies, by name."""
        return self.reach.copies(c) | scaled_operands.copies(c)

    def build(self, key: ScaledGemmKey) -> Callable:
        """Compile the kernel for ``key``."""
        return build(key)


class ScaledGemmLauncher(ScaledLauncher[ScaledGemmCall]):
    """``out[t] = a[t] @ b[g] + bias[g] * bias_scale[t]`` for the rows ``t`` of every group ``g``."""

    op = "grouped_gemm_scaled"
    call = ScaledGemmCall
    reach = Reach(NEEDS, ("out",), keeps=lambda c: not c.zero_tail)

    def alike(self, c: ScaledGemmCall) -> tuple | None:
        """Return the plan key; the number of rows enters it as the class of rows per group."""
        a, a_scale, b, b_scale, _, _, _, bias, bias_scale, *meant, out, zero_tail = c
        rows, shape = a.shape[0], b.shape
        addresses = a.data_ptr() | a_scale.data_ptr() | b.data_ptr() | b_scale.data_ptr() | out.data_ptr()
        if not warm(rows, addresses):
            return None
        layouts = (a.stride(), b.stride(), out.stride(), shape)
        dtypes = (a.dtype, b.dtype, out.dtype, bias is None or bias.dtype, bias_scale is None or bias_scale.dtype)
        return layouts, dtypes, rows_class(rows, shape[0]), zero_tail, *meant

    def batch_invariant(self, c: ScaledGemmCall) -> bool:
        """Return True: every tiling adds up K in one order and scales partial sums of one depth."""
        return True

    def nothing(self, c: ScaledGemmCall) -> bool:
        """Return whether there are no results, or no matrices to compute them from."""
        return c.out.numel() == 0 or c.b.shape[0] == 0

    def without(self, c: ScaledGemmCall) -> None:
        """Zero the results if the tail is zeroed: every row belongs to it."""
        if c.zero_tail:
            c.out.zero_()

    def key(self, c: ScaledGemmCall, arch: str) -> ScaledGemmKey:
        """Return the key of the kernel; the tiling follows from N, K and the class of rows per group."""
        form = OPERANDS[c.format]
        depth = c.a.shape[1] * (2 if c.a.dtype == torch.uint8 else 1)
        rows = power_of_two(c.a.shape[0] // c.b.shape[0])
        first, elements = c.b_direction == "rowwise" or form.placed, (name(c.a), name(c.b))
        tiling = tilings.choose_scaled(arch, VARLEN_M, form, c.out.shape[1], depth, rows)
        spec = EpilogueSpec(name(c.out), name(c.bias), name(c.bias_scale), tail=c.zero_tail, alpha=form.alpha)
        return ScaledGemmKey(VARLEN_M, arch, not c.a.is_cuda, c.format, *elements, first, spec, tiling)

    def arguments(self, c: ScaledGemmCall) -> tuple:
        """Return the arguments of the kernel."""
        return *c[:7], c.out, c.bias, c.bias_scale, None

    def scratch(self, c: ScaledGemmCall) -> ScaledGemmCall:
        """Return the warm-up call: one group without rows."""
        x, x_scale, x_amax = scratch_square(c.a, c.a_amax, c.format, c.scale_layout, columnwise=False, weights=False)
        turned = c.b_direction == "columnwise"
        w, w_scale, w_amax = scratch_square(c.b, c.b_amax, c.format, c.scale_layout, columnwise=turned, weights=True)
        offs = torch.zeros(1, dtype=torch.int32, device=c.a.device)
        return ScaledGemmCall(
            *(x, x_scale, w, w_scale, offs, x_amax, w_amax),
            bias=None if c.bias is None else c.bias.new_zeros(1, SIDE),
            bias_scale=None if c.bias_scale is None else c.bias_scale.new_zeros(SIDE),
            format=c.format,
            b_direction=c.b_direction,
            scale_layout=c.scale_layout,
            out=c.out.new_zeros(SIDE, SIDE, device=c.a.device),
            zero_tail=c.zero_tail,
        )


class ScaledWgradLauncher(ScaledLauncher[ScaledWgradCall]):
    """``out[g] = a[rows of g]^T @ b[rows of g]``, or added to ``out``; group ``g`` may be matrix ``slots[g]``."""

    call = ScaledWgradCall
    reach = Reach(NEEDS, ("out",), keeps=lambda c: c.accumulate, slotted="out")

    def __init__(self, op: str) -> None:
        self.op = op

    def alike(self, c: ScaledWgradCall) -> tuple | None:
        """Return the plan key; the number of rows enters it as the class of rows per group.

        The pitch of columnwise data may be the number of tokens, so only its alignment is checked.
        """
        a, a_scale, b, b_scale, _, _, _, format, scale_layout, out, accumulate, slots = c
        (a_pitch, a_step), (b_pitch, b_step), shape = a.stride(), b.stride(), out.shape
        tokens = tokens_of(a, shape[1])
        addresses = a.data_ptr() | a_scale.data_ptr() | b.data_ptr() | b_scale.data_ptr() | out.data_ptr()
        if not warm(tokens, addresses | a_pitch | b_pitch):  # elements are bytes
            return None
        size = rows_class(tokens, shape[0] if slots is None else slots.shape[0])
        dtypes = (a.dtype, b.dtype, out.dtype)
        return (out.stride(), a_step, b_step, shape), dtypes, size, format, scale_layout, accumulate, slots is None

    def nothing(self, c: ScaledWgradCall) -> bool:
        """Return whether there are no matrices, or no rows to compute them from."""
        return c.out.numel() == 0 or c.offs.shape[0] == 0 or c.a.numel() == 0

    def without(self, c: ScaledWgradCall) -> None:
        """Write zeros, the sums over no rows, unless they are added."""
        if not c.accumulate:
            clear(c.out, c.slots)

    def key(self, c: ScaledWgradCall, arch: str) -> ScaledGemmKey:
        """Return the key of the kernel; the tiling follows from M, N and the class of rows per group."""
        form, (_, rows, columns) = OPERANDS[c.format], c.out.shape
        depth = power_of_two(tokens_of(c.a, rows) // c.offs.shape[0])
        tiling = tilings.choose_scaled(arch, VARLEN_K, form, columns, depth, rows)
        spec = EpilogueSpec(name(c.out), accumulate=c.accumulate, alpha=form.alpha)
        elements = (name(c.a), name(c.b))
        emulated, table = not c.a.is_cuda, c.slots is not None
        return ScaledGemmKey(VARLEN_K, arch, emulated, c.format, *elements, False, spec, tiling, table)

    def arguments(self, c: ScaledWgradCall) -> tuple:
        """Return the arguments of the kernel."""
        return *c[:7], c.out, None, None, c.slots

    def scratch(self, c: ScaledWgradCall) -> ScaledWgradCall:
        """Return the warm-up call: one group without rows."""
        x, x_scale, x_amax = scratch_square(c.a, c.a_amax, c.format, c.scale_layout, columnwise=True, weights=False)
        y, y_scale, y_amax = scratch_square(c.b, c.b_amax, c.format, c.scale_layout, columnwise=True, weights=False)
        offs = torch.zeros(1, dtype=torch.int32, device=c.a.device)
        operands = (x, x_scale, y, y_scale, offs, x_amax, y_amax)
        out = c.out.new_zeros(1, SIDE, SIDE, device=c.a.device)
        return ScaledWgradCall(*operands, *c[7:9], out, c.accumulate, None if c.slots is None else offs)


def scaled_reason(format: str, a: Tensor, out: Tensor) -> backends.Reason:
    """Return why there is no kernel for a call, whatever the layout of its tensors, or None."""
    reason = device.packages_reason()
    if reason is not None:
        return reason
    if format not in OPERANDS:
        return NO_KERNEL.get(format, f"takes {', '.join(OPERANDS)}, got {format}")
    arch = arch_of(backends.device_arch(a.device)).name
    if arch not in OPERANDS[format].archs:
        here = ", ".join(known for known, form in OPERANDS.items() if arch in form.archs)
        return f"takes {format} on {', '.join(OPERANDS[format].archs)}, not on {arch}, which takes {here}"
    if max(a.shape) > MAX_ROWS:
        return f"takes up to {MAX_ROWS} rows, got {max(a.shape)}"
    if out.dim() == 2 and a.shape[1] == 0 and out.numel():
        return "does not take K = 0"
    return None


def tokens_of(data: Tensor, features: int) -> int:
    """Return the capacity of columnwise ``data`` in tokens."""
    return data.numel() // (features or 1) * (2 if data.dtype == torch.uint8 else 1)


def scratch_square(
    like: Tensor, amax: Tensor | None, format: str, scale_layout: str, *, columnwise: bool, weights: bool
) -> Any:
    """Return data, scale and amax of a square of zeros, as rows of one group or as one matrix."""
    options = Options(
        format,
        rowwise=not columnwise,
        columnwise=columnwise,
        dtype=like.dtype,
        scale_layout=scale_layout,
        block_2d=weights and OPERANDS[format].block > 0,
    ).resolved("grouped_gemm_scaled")
    shape = (1, SIDE, SIDE) if weights else (SIDE, SIDE)
    specs = component_specs(options, shape, 1, like.device, grouped=not weights)
    data, scale, made = (spec.empty().zero_() for spec in (specs[3:6] if columnwise else specs[:3]))
    return data, scale, None if amax is None else made


def build(key: ScaledGemmKey) -> Callable:
    """Compile the kernel for ``key``. Needs no GPU."""
    import cutlass

    from ..runtime.compiling import compiled, matrix, strided
    from ..runtime.elements import TYPES

    form, spec = OPERANDS[key.format], key.spec
    out_dims, b_dims = (2, 3) if key.kind == VARLEN_M else (3, 2)
    if form.block:
        rows = strided("float32", 2) if key.kind == VARLEN_M else matrix("float32", pitch=4)
        scales = [rows, matrix("float32", b_dims, pitch=4)]
    elif form.vector:
        scales = [matrix("uint8", dims) for dims in (1, b_dims - 1)]
    else:
        scales = [strided("float32") for _ in range(2)]
    amax = "float32" if spec.alpha == "amax" else None
    # FP4 data is passed as bytes, and so are scales: the kernel knows their types.
    a_type, b_type = (cutlass.Float4E2M1FN if e == "uint8" else TYPES[e] for e in (key.a_element, key.b_element))
    kernel = arch_of(key.arch).kernel("ScaledGroupedGemm")
    return compiled(
        key.arch,
        kernel(key.kind, key.config, spec, a_type, b_type, form, key.b_rows_first),
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
        strided("int32") if key.slots else None,
        cutlass.Int32(1),
    )


GROUPED_GEMM_SCALED = ScaledGemmLauncher()
GROUPED_GEMM_SCALED_WGRAD = ScaledWgradLauncher("grouped_gemm_scaled_wgrad")
GROUPED_GEMM_SCALED_WGRAD_ACCUMULATE = ScaledWgradLauncher("grouped_gemm_scaled_wgrad_accumulate_")
LAUNCHERS = (GROUPED_GEMM_SCALED, GROUPED_GEMM_SCALED_WGRAD, GROUPED_GEMM_SCALED_WGRAD_ACCUMULATE)
