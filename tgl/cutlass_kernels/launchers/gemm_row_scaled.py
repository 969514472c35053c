"""GEMMs on FP8 operands with a scale per row: forward, and the weight gradient of operands in torch's layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ... import backends
from .. import tilings
from ..archs import arch_of
from ..config import VARLEN_K, VARLEN_M, GemmConfig
from ..epilogue import EpilogueSpec
from ..gemm.operand_formats import ROW_SCALED, ROW_SCALED_WGRAD
from ..runtime import device
from ..runtime.launcher import power_of_two, rows_class, warm
from ..runtime.names import name
from ..runtime.reach import Reach
from ..runtime.requirements import ALIGNMENT, MAX_ROWS, ROW_MAJOR
from .gemm import PersistentGemmLauncher

SIDE = 128  # of a warm-up problem


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
    reach = Reach({"a": ROW_MAJOR, "b": ROW_MAJOR, "out": ROW_MAJOR}, ("out",))

    def refuses(self, c: RowScaledCall) -> backends.Reason:
        """Return the reason against too many rows or K = 0, or None."""
        reason = device.packages_reason()
        if reason is None and max(c.a.shape) > MAX_ROWS:
            reason = f"takes up to {MAX_ROWS} rows, got {max(c.a.shape)}"
        if reason is None and c.out.dim() == 2 and c.a.shape[1] == 0 and c.out.numel():
            reason = "does not take K = 0"
        return reason

    def _alike(self, c: RowScaledCall, tokens: int, groups: int) -> tuple | None:
        """Return the part of the plan key that follows from ``tokens`` (as a class per group), dtypes and addresses."""
        a, _, b, _, _, out = c
        if not warm(tokens, a.data_ptr() | b.data_ptr() | out.data_ptr()):
            return None
        return a.dtype, b.dtype, out.dtype, out.stride(), rows_class(tokens, groups)

    def build(self, key: RowScaledKey) -> Callable:
        """Compile the kernel for ``key``."""
        return build(key)

    def arguments(self, c: RowScaledCall) -> tuple:
        """Return the arguments of the kernel."""
        return *c[:5], None, None, c.out, None, None, None

    def key_of(self, c: RowScaledCall, arch: str, kind: str, tiling: GemmConfig) -> RowScaledKey:
        """Return the key of a kind and a tiling."""
        spec = EpilogueSpec(name(c.out), tail=kind == VARLEN_M, alpha=ROW_SCALED.alpha)
        return RowScaledKey(kind, arch, not c.a.is_cuda, name(c.a), name(c.b), spec, tiling)


class RowScaledGemmLauncher(RowScaledLauncher):
    """``out[t] = (a[t] @ b[g]^T) * a_scale[t] * b_scale[g]`` for the rows ``t`` of every group ``g``."""

    op = "grouped_gemm_row_scaled"

    def alike(self, c: RowScaledCall) -> tuple | None:
        """Return the plan key, which is free of the number of rows."""
        rest = self._alike(c, c.a.shape[0], c.b.shape[0])
        return rest and (c.a.stride(), c.b.stride(), c.b.shape, *rest)

    def batch_invariant(self, c: RowScaledCall) -> bool:
        """Return True: every tiling adds up K in one order."""
        return True

    def nothing(self, c: RowScaledCall) -> bool:
        """Return whether there are no results, or no matrices to compute them from."""
        return c.out.numel() == 0 or c.b.shape[0] == 0

    def without(self, c: RowScaledCall) -> None:
        """Zero the results: every row belongs to the tail."""
        c.out.zero_()

    def key(self, c: RowScaledCall, arch: str) -> RowScaledKey:
        """Return the key of the kernel; the tiling follows from N, K and the class of rows per group."""
        rows = power_of_two(c.a.shape[0] // c.b.shape[0])
        columns, depth = c.b.shape[1:]
        return self.key_of(c, arch, VARLEN_M, tilings.choose_scaled(arch, VARLEN_M, ROW_SCALED, columns, depth, rows))

    def scratch(self, c: RowScaledCall) -> RowScaledCall:
        """Return the warm-up call: one group without rows."""
        made, where = torch.float32, c.a.device
        return RowScaledCall(
            torch.zeros(SIDE, SIDE, dtype=c.a.dtype, device=where),
            torch.zeros(SIDE, dtype=made, device=where),
            torch.zeros(1, SIDE, SIDE, dtype=c.b.dtype, device=where),
            torch.zeros(1, SIDE, dtype=made, device=where),
            torch.zeros(1, dtype=torch.int32, device=where),
            torch.zeros(SIDE, SIDE, dtype=c.out.dtype, device=where),
        )


class RowScaledWgradLauncher(RowScaledLauncher):
    """``out[g] = (a[:, of g] @ b[:, of g]^T) * a_scale[g]^T * b_scale[g]``."""

    op = "grouped_gemm_row_scaled_wgrad"

    def alike(self, c: RowScaledCall) -> tuple | None:
        """Return the plan key, which is free of the number of tokens; pitches need only be aligned."""
        (a_pitch, a_step), (b_pitch, b_step) = c.a.stride(), c.b.stride()
        if not a_pitch or not b_pitch or (a_pitch | b_pitch) % ALIGNMENT:  # elements are bytes
            return None
        rest = self._alike(c, c.a.shape[1], c.out.shape[0])
        return rest and (a_step, b_step, c.out.shape, *rest)

    def nothing(self, c: RowScaledCall) -> bool:
        """Return whether there are no matrices, or no tokens to compute them from."""
        return c.out.numel() == 0 or c.a.numel() == 0

    def without(self, c: RowScaledCall) -> None:
        """Write zeros, the sums over no tokens."""
        c.out.zero_()

    def key(self, c: RowScaledCall, arch: str) -> RowScaledKey:
        """Return the key of the kernel; the tiling follows from M, N and the class of tokens per group."""
        groups, rows, columns = c.out.shape
        depth = power_of_two(c.a.shape[1] // groups)
        return self.key_of(
            c, arch, VARLEN_K, tilings.choose_scaled(arch, VARLEN_K, ROW_SCALED_WGRAD, columns, depth, rows)
        )

    def scratch(self, c: RowScaledCall) -> RowScaledCall:
        """Return the warm-up call: one group without tokens."""
        made, where = torch.float32, c.a.device
        return RowScaledCall(
            torch.zeros(SIDE, SIDE, dtype=c.a.dtype, device=where),
            torch.zeros(1, SIDE, dtype=made, device=where),
            torch.zeros(SIDE, SIDE, dtype=c.b.dtype, device=where),
            torch.zeros(1, SIDE, dtype=made, device=where),
            torch.zeros(1, dtype=torch.int32, device=where),
            torch.zeros(1, SIDE, SIDE, dtype=c.out.dtype, device=where),
        )


def build(key: RowScaledKey) -> Callable:
    """Compile the kernel for ``key``. Needs no GPU."""
    import cutlass

    from ..runtime.compiling import compiled, matrix, strided
    from ..runtime.elements import TYPES

    rows = key.kind == VARLEN_M
    form = ROW_SCALED if rows else ROW_SCALED_WGRAD
    elements = (TYPES[key.a_element], TYPES[key.b_element])
    kernel = arch_of(key.arch).kernel("ScaledGroupedGemm")
    return compiled(
        key.arch,
        kernel(key.kind, key.config, key.spec, *elements, form, rows),
        matrix(key.a_element),
        strided("float32", 1 if rows else 2),
        matrix(key.b_element, 3 if rows else 2),
        strided("float32", 2),
        strided("int32"),
        None,
        None,
        matrix(key.spec.out, 2 if rows else 3),
        None,
        None,
        None,
        cutlass.Int32(1),
    )


GROUPED_GEMM_ROW_SCALED = RowScaledGemmLauncher()
GROUPED_GEMM_ROW_SCALED_WGRAD = RowScaledWgradLauncher()
LAUNCHERS = (GROUPED_GEMM_ROW_SCALED, GROUPED_GEMM_ROW_SCALED_WGRAD)
