"""GEMMs on quantised operands: forward and input gradient, weight gradient, and its accumulation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import backends
from ...meta.calls import ScaledGemmCall, ScaledWgradCall
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
from ..runtime.operands import Operand
from ..runtime.requirements import MATRIX, MAX_ROWS, START
from . import scaled_operands
from .gemm import BIAS, BIAS_SCALE, OFFS, SLOTS
from .gemm_launcher import SIDE, SQUARE, PersistentGemmLauncher


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


def _scale(dims: int, rows: bool = False) -> Callable[[ScaledGemmKey], Any]:
    """Return a function to what the compiler gets instead of the scales of an operand of ``dims`` dimensions.

    Args:
        rows: whether it is the operand with the rows of a forward product.
    """

    def stand_in(key: ScaledGemmKey) -> Any:
        from ..runtime.compiling import matrix, strided

        form = OPERANDS[key.format]
        if form.block:
            return strided("float32", 2) if rows else matrix("float32", dims, pitch=4)
        return matrix("uint8", dims - 1) if form.vector else strided("float32")

    return stand_in


def _amax(key: ScaledGemmKey) -> Any:
    """Return what the compiler gets instead of the amax of an operand's groups."""
    from ..runtime.compiling import strided

    return strided("float32" if key.spec.alpha == "amax" else None)


AMAXES = (Operand("a_amax", stand_in=_amax), Operand("b_amax", stand_in=_amax))


class ScaledLauncher(PersistentGemmLauncher[Call]):
    """Launcher of a GEMM on quantised operands."""

    kernel_name = "ScaledGroupedGemm"
    archs = having("ScaledGroupedGemm")

    def warmup_sizes(self, c: Any) -> dict[str, int]:
        """Return the sizes of the warm-up call."""
        return SQUARE

    def reject_reason(self, c: Any) -> backends.Reason:
        """Return why no kernel takes the format or the sizes, or None."""
        return scaled_reason(c.format, c.a, c.out)

    def reason(self, c: Any) -> backends.Reason:
        """Return the reason of ``reject_reason``, or that scales are in a layout that needs a copy, or None."""
        return self.reject_reason(c) or scaled_operands.reason(c) or self.reach.reason(c)

    def run_copied(self, c: Any) -> None:
        """Run with copies of tensors that the kernel cannot read in place, and of scales in another layout."""
        scaled_operands.run_with_copies(c, self.reach, self.run)

    def prepare_copied(self, c: Any) -> None:
        """Prepare what ``run_copied`` runs."""
        self.reach.moved(scaled_operands.made(c), self.prepare)

    def copies(self, c: Any) -> dict[str, int]:
        """Return the bytes that ``run_copied`` copies, by name."""
        return self.reach.copies(c) | scaled_operands.copies(c)

    def kernel(self, key: ScaledGemmKey) -> Callable:
        """Return the kernel of ``key``, to be compiled."""
        import cutlass

        from ..runtime.elements import TYPES

        # FP4 data is passed as bytes, and so are scales: the kernel knows their types.
        types = (cutlass.Float4E2M1FN if e == "uint8" else TYPES[e] for e in (key.a_element, key.b_element))
        form = OPERANDS[key.format]
        return self.kernel_class(key)(key.kind, key.config, key.spec, *types, form, key.b_rows_first)


class ScaledGemmLauncher(ScaledLauncher[ScaledGemmCall]):
    """``out[t] = a[t] @ b[g] + bias[g] * bias_scale[t]`` for the rows ``t`` of every group ``g``."""

    op = "grouped_gemm_scaled"
    call = ScaledGemmCall
    operands = (
        Operand("a", "TK", "a_element", MATRIX),
        Operand("a_scale", need=START, stand_in=_scale(2, rows=True)),
        Operand("b", "GNK", "b_element", MATRIX),
        Operand("b_scale", need=START, stand_in=_scale(3)),
        OFFS,
        *AMAXES,
        Operand("out", "TN", "spec.out", MATRIX, output=True),
        BIAS,
        BIAS_SCALE,
        None,
    )

    def plan_key(self, c: ScaledGemmCall) -> tuple | None:
        """Return the plan key; the number of rows enters it as the class of rows per group."""
        a, a_scale, b, b_scale, _, _, _, bias, bias_scale, *meant, out, zero_tail = c
        rows, shape = a.shape[0], b.shape
        addresses = a.data_ptr() | a_scale.data_ptr() | b.data_ptr() | b_scale.data_ptr() | out.data_ptr()
        if not warm(rows, addresses):
            return None
        layouts = (a.stride(), b.stride(), out.stride(), shape)
        dtypes = (a.dtype, b.dtype, out.dtype, bias is None or bias.dtype, bias_scale is None or bias_scale.dtype)
        return layouts, dtypes, rows_class(rows, shape[0]), zero_tail, *meant

    def keeps(self, c: ScaledGemmCall) -> bool:
        """Return whether rows past the last group must be preserved."""
        return not c.zero_tail

    def key(self, c: ScaledGemmCall, arch: str) -> ScaledGemmKey:
        """Return the key of the kernel; the tiling follows from N, K and the class of rows per group."""
        form = OPERANDS[c.format]
        depth = c.a.shape[1] * (2 if c.a.dtype == torch.uint8 else 1)
        rows = power_of_two(c.a.shape[0] // c.b.shape[0])
        first, elements = c.b_direction == "rowwise" or form.placed, (name(c.a), name(c.b))
        tiling = tilings.choose_scaled(arch, VARLEN_M, form, c.out.shape[1], depth, rows)
        spec = EpilogueSpec(name(c.out), name(c.bias), name(c.bias_scale), tail=c.zero_tail, alpha=form.alpha)
        return ScaledGemmKey(VARLEN_M, arch, not c.a.is_cuda, c.format, *elements, first, spec, tiling)

    def warmup_call(self, c: ScaledGemmCall) -> ScaledGemmCall:
        """Return the warm-up call: one group without rows."""
        turned = c.b_direction == "columnwise"
        return super().warmup_call(c)._replace(**square(c, "a"), **square(c, "b", columnwise=turned, weights=True))


class ScaledWgradLauncher(ScaledLauncher[ScaledWgradCall]):
    """``out[g] = a[rows of g]^T @ b[rows of g]``, or added to ``out``; group ``g`` may be matrix ``slots[g]``."""

    call = ScaledWgradCall
    operands = (
        Operand("a", "KT", "a_element", MATRIX),
        Operand("a_scale", need=START, stand_in=_scale(2)),
        Operand("b", "NT", "b_element", MATRIX),
        Operand("b_scale", need=START, stand_in=_scale(2)),
        OFFS,
        *AMAXES,
        Operand("out", "SKN", "spec.out", MATRIX, output=True),
        *(None, None),
        SLOTS,
    )

    def __init__(self, op: str) -> None:
        self.op = op
        super().__init__()

    def plan_key(self, c: ScaledWgradCall) -> tuple | None:
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

    def keeps(self, c: ScaledWgradCall) -> bool:
        """Return whether sums are added."""
        return c.accumulate

    def key(self, c: ScaledWgradCall, arch: str) -> ScaledGemmKey:
        """Return the key of the kernel; the tiling follows from M, N and the class of rows per group."""
        form, (_, rows, columns) = OPERANDS[c.format], c.out.shape
        depth = power_of_two(tokens_of(c.a, rows) // c.offs.shape[0])
        tiling = tilings.choose_scaled(arch, VARLEN_K, form, columns, depth, rows)
        spec = EpilogueSpec(name(c.out), accumulate=c.accumulate, alpha=form.alpha)
        elements = (name(c.a), name(c.b))
        emulated, table = not c.a.is_cuda, c.slots is not None
        return ScaledGemmKey(VARLEN_K, arch, emulated, c.format, *elements, False, spec, tiling, table)

    def warmup_call(self, c: ScaledWgradCall) -> ScaledWgradCall:
        """Return the warm-up call: one group without rows."""
        return super().warmup_call(c)._replace(**square(c, "a", columnwise=True), **square(c, "b", columnwise=True))


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


def square(c: Any, side: str, *, columnwise: bool = False, weights: bool = False) -> dict[str, Any]:
    """Return data, scale and amax of a square of zeros for the operand ``side`` of the warm-up call of ``c``.

    Args:
        columnwise: whether the operand is quantised along its columns.
        weights: whether it is one matrix, not the rows of one group.
    """
    like, amax = getattr(c, side), getattr(c, f"{side}_amax")
    options = Options(
        c.format,
        rowwise=not columnwise,
        columnwise=columnwise,
        dtype=like.dtype,
        scale_layout=c.scale_layout,
        block_2d=weights and OPERANDS[c.format].block > 0,
    ).resolved("grouped_gemm_scaled")
    shape = (1, SIDE, SIDE) if weights else (SIDE, SIDE)
    specs = component_specs(options, shape, 1, like.device, grouped=not weights)
    data, scale, made = (spec.empty().zero_() for spec in (specs[3:6] if columnwise else specs[:3]))
    return {side: data, f"{side}_scale": scale, f"{side}_amax": None if amax is None else made}


GROUPED_GEMM_SCALED = ScaledGemmLauncher()
GROUPED_GEMM_SCALED_WGRAD = ScaledWgradLauncher("grouped_gemm_scaled_wgrad")
GROUPED_GEMM_SCALED_WGRAD_ACCUMULATE = ScaledWgradLauncher("grouped_gemm_scaled_wgrad_accumulate_")
LAUNCHERS = (GROUPED_GEMM_SCALED, GROUPED_GEMM_SCALED_WGRAD, GROUPED_GEMM_SCALED_WGRAD_ACCUMULATE)
