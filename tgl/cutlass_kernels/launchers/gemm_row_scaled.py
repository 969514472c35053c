"""GEMMs on FP8 operands with a scale per row: forward, and the weight gradient of operands in torch's layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from ... import backends
from .. import tilings
from ..config import VARLEN_K, VARLEN_M, GemmConfig
from ..epilogue import EpilogueSpec
from ..gemm.operand_formats import ROW_SCALED, ROW_SCALED_WGRAD
from ..runtime import device
from ..runtime.launcher import power_of_two, rows_class, warm
from ..runtime.names import name
from ..runtime.operands import Operand
from ..runtime.requirements import MAX_ROWS, ROW_MAJOR
from .gemm import OFFS
from .gemm_launcher import SQUARE, PersistentGemmLauncher


class RowScaledKey(NamedTuple):
    """Key of a compiled kernel."""

    kind: str
    arch: str
    emulated: bool
    a_element: str
    b_element: str
    spec: EpilogueSpec
    config: GemmConfig


class RowScaledCall(NamedTuple):
    """Arguments of one of the ops."""

    a: Tensor
    a_scale: Tensor
    b: Tensor
    b_scale: Tensor
    offs: Tensor
    out: Tensor


class RowScaledLauncher(PersistentGemmLauncher[RowScaledCall]):
    """Launcher of either op: operands are rows along the contraction, since Hopper's FP8 MMAs take no others."""

    call = RowScaledCall
    archs = frozenset(ROW_SCALED.archs)
    kernel_name = "ScaledGroupedGemm"

    def reject_reason(self, c: RowScaledCall) -> backends.Reason:
        """Return why the kernel does not take so many rows or K = 0, or None."""
        reason = device.packages_reason()
        if reason is None and max(c.a.shape) > MAX_ROWS:
            reason = f"takes up to {MAX_ROWS} rows, got {max(c.a.shape)}"
        if reason is None and c.out.dim() == 2 and c.a.shape[1] == 0 and c.out.numel():
            reason = "does not take K = 0"
        return reason

    def kernel(self, key: RowScaledKey) -> Callable:
        """Return the kernel of ``key``, to be compiled."""
        from ..runtime.elements import TYPES

        rows = key.kind == VARLEN_M
        form, elements = ROW_SCALED if rows else ROW_SCALED_WGRAD, (TYPES[key.a_element], TYPES[key.b_element])
        return self.kernel_class(key)(key.kind, key.config, key.spec, *elements, form, rows)

    def warmup_sizes(self, c: RowScaledCall) -> dict[str, int]:
        """Return the sizes of the warm-up call."""
        return SQUARE

    def key_of(self, c: RowScaledCall, arch: str, kind: str, tiling: GemmConfig) -> RowScaledKey:
        """Return the key of the kernel for a kind of problem and a tiling."""
        spec = EpilogueSpec(name(c.out), tail=kind == VARLEN_M, alpha=ROW_SCALED.alpha)
        return RowScaledKey(kind, arch, not c.a.is_cuda, name(c.a), name(c.b), spec, tiling)


class RowScaledGemmLauncher(RowScaledLauncher):
    """``out[t] = (a[t] @ b[g]^T) * a_scale[t] * b_scale[g]`` for the rows ``t`` of every group ``g``."""

    op = "grouped_gemm_row_scaled"
    operands = (
        Operand("a", "TK", "a_element", ROW_MAJOR),
        Operand("a_scale", "T", "float32"),
        Operand("b", "GNK", "b_element", ROW_MAJOR),
        Operand("b_scale", "GN", "float32"),
        OFFS,
        *(None, None),
        Operand("out", "TN", "spec.out", ROW_MAJOR, output=True),
        *(None, None, None),
    )

    def key(self, c: RowScaledCall, arch: str) -> RowScaledKey:
        """Return the key of the kernel; the tiling follows from N, K and the class of rows per group."""
        rows = power_of_two(c.a.shape[0] // c.b.shape[0])
        columns, depth = c.b.shape[1:]
        return self.key_of(c, arch, VARLEN_M, tilings.choose_scaled(arch, VARLEN_M, ROW_SCALED, columns, depth, rows))


class RowScaledWgradLauncher(RowScaledLauncher):
    """``out[g] = (a[:, g] @ b[:, g]^T) * a_scale[g]^T * b_scale[g]``, with the columns of every group ``g``."""

    op = "grouped_gemm_row_scaled_wgrad"
    operands = (
        Operand("a", "KT", "a_element", ROW_MAJOR),
        Operand("a_scale", "GK", "float32"),
        Operand("b", "NT", "b_element", ROW_MAJOR),
        Operand("b_scale", "GN", "float32"),
        OFFS,
        *(None, None),
        Operand("out", "GKN", "spec.out", ROW_MAJOR, output=True),
        *(None, None, None),
    )

    def plan_key(self, c: RowScaledCall) -> tuple | None:
        """Return the plan key, which does not depend on the number of tokens; pitches need only be aligned."""
        a, _, b, _, _, out = c
        (tokens, shape), (a_pitch, a_step), (b_pitch, b_step) = (a.shape[1], out.shape), a.stride(), b.stride()
        addresses = a.data_ptr() | b.data_ptr() | out.data_ptr() | a_pitch | b_pitch  # elements are bytes
        if not a_pitch or not b_pitch or not warm(tokens, addresses):
            return None
        return a_step, b_step, shape, a.dtype, b.dtype, out.dtype, out.stride(), rows_class(tokens, shape[0])

    def key(self, c: RowScaledCall, arch: str) -> RowScaledKey:
        """Return the key of the kernel; the tiling follows from M, N and the class of tokens per group."""
        groups, rows, columns = c.out.shape
        depth = power_of_two(c.a.shape[1] // groups)
        return self.key_of(
            c, arch, VARLEN_K, tilings.choose_scaled(arch, VARLEN_K, ROW_SCALED_WGRAD, columns, depth, rows)
        )


GROUPED_GEMM_ROW_SCALED = RowScaledGemmLauncher()
GROUPED_GEMM_ROW_SCALED_WGRAD = RowScaledWgradLauncher()
LAUNCHERS = (GROUPED_GEMM_ROW_SCALED, GROUPED_GEMM_ROW_SCALED_WGRAD)
