"""Dense GEMMs: forward and input gradient, weight gradient, and accumulation of the weight gradient."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ... import backends
from ...meta import placement
from ...meta.calls import GemmCall
from .. import tilings
from ..archs import having
from ..config import VARLEN_K, VARLEN_M, WIDTHS, GemmConfig
from ..epilogue import EpilogueSpec
from ..runtime.launcher import Call, busy_groups, load, power_of_two
from ..runtime.names import name
from ..runtime.operands import Operand
from ..runtime.requirements import MATRIX, ROW_MAJOR, ROWS, dense_reason, unit_dimension
from .gemm_launcher import PersistentGemmLauncher


class GemmKey(NamedTuple):
    """Key of a compiled kernel."""

    kind: str
    arch: str
    emulated: bool
    element: str
    b_unit: int  # which dimension of B is contiguous; for A it is the last
    spec: EpilogueSpec
    config: GemmConfig
    slots: bool = False  # whether a table of slots names the matrices
    gathered: str | None = None  # the operand whose rows are gathered by an index
    begins: bool = False  # whether the call has the row offset of the first group


class WgradCall(NamedTuple):
    """A call of ``grouped_gemm_wgrad`` or its accumulating form."""

    a: Tensor
    b: Tensor
    offs: Tensor
    out: Tensor
    slots: Tensor | None = None
    a_rows: Tensor | None = None
    b_rows: Tensor | None = None
    expected_rows: int | None = None


OFFS = Operand("offs", "G", "int32")
BIAS = Operand("bias", "GN", "spec.bias")
BIAS_SCALE = Operand("bias_scale", "T", "spec.bias_scale")
SLOTS = Operand("slots", "G", "int32", when="slots")


class ForwardGemmLauncher(PersistentGemmLauncher[Call]):
    """Launcher of a GEMM of the rows ``t`` of every group ``g``, ``a[t] @ b[g]``, with an epilogue."""

    def spec(self, c: Call) -> EpilogueSpec:
        """Return the epilogue."""
        raise NotImplementedError

    def widths(self, c: Call) -> tuple[int, ...] | None:
        """Return the allowed columns of a tile, ascending; None: any."""
        return None

    def keeps(self, c: Call) -> bool:
        """Return whether rows past the last group must be preserved."""
        return not getattr(c, "zero_tail", True)

    def key(self, c: Call, arch: str) -> GemmKey:
        """Return the key of the kernel; the tiling follows from N, K and the class of rows per group."""
        (_, depth, columns), groups = c.b.shape, c.offs.shape[0]
        rows = load(self.outputs(c)[0].shape[0], getattr(c, "expected_rows", None))
        problem, widths = (arch, VARLEN_M, columns, depth, power_of_two(rows // groups)), self.widths(c)
        operand = self.reach.gathers(c)
        if operand is None:
            tiling = tilings.choose(*problem, widths or WIDTHS, busy_groups(rows, groups))
        else:
            tiling = tilings.choose_gathering(*problem, operand, widths)
        emulated, unit = not c.a.is_cuda, unit_dimension(c.b.stride())
        tables = getattr(c, "slots", None) is not None, operand, getattr(c, "begin", None) is not None
        return GemmKey(VARLEN_M, arch, emulated, name(c.a), unit, self.spec(c), tiling, *tables)


class GemmLauncher(ForwardGemmLauncher[GemmCall]):
    """``out[t] = a[t] @ b[g] + bias[g] * bias_scale[t]`` for the rows ``t`` of every group ``g``."""

    op = "grouped_gemm"
    call = GemmCall
    kernel_name = "GroupedGemm"
    archs = having("GroupedGemm")
    operands = (
        Operand("a", "TK", "element", ROWS, indexed_by="rows"),
        Operand("b", "SKN", "element", MATRIX, unit="b_unit"),
        OFFS,
        Operand("out", "TN", "spec.out", ROW_MAJOR, output=True),
        BIAS,
        BIAS_SCALE,
        SLOTS,
        Operand("begin", "1", "int32", when="begins"),
    )

    def reject_reason(self, c: GemmCall) -> backends.Reason:
        """Return why the kernel does not take the dtypes or K = 0, or None."""
        return gemm_reason(c.a, c.out, c.rows)

    def keeps(self, c: GemmCall) -> bool:
        """Return whether rows before the first or past the last group must be preserved."""
        return not c.zero_tail or c.begin is not None

    def zero_outputs(self, c: GemmCall) -> None:
        """Zero the rows if the tail is zeroed: every row from the first group's offset on belongs to it."""
        if c.zero_tail and c.begin is not None:
            c.out.masked_fill_(placement.tail(c.begin, c.out.shape[0])[:, None], 0)
        else:
            super().zero_outputs(c)

    def spec(self, c: GemmCall) -> EpilogueSpec:
        """Return the epilogue."""
        return EpilogueSpec(name(c.out), name(c.bias), name(c.bias_scale), tail=c.zero_tail)


class WgradLauncher(PersistentGemmLauncher[WgradCall]):
    """``out[g] = a[rows of g]^T @ b[rows of g]``, or added to ``out``; group ``g`` may be matrix ``slots[g]``."""

    call = WgradCall
    kernel_name = "GroupedGemm"
    archs = having("GroupedGemm")
    operands = (
        Operand("a", "TK", "element", ROWS, indexed_by="a_rows"),
        Operand("b", "TN", "element", ROWS, indexed_by="b_rows"),
        OFFS,
        Operand("out", "SKN", "spec.out", ROW_MAJOR, output=True),
        *(None, None),
        SLOTS,
        None,
    )

    def __init__(self, op: str, *, accumulate: bool) -> None:
        self.op, self.accumulate = op, accumulate
        super().__init__()

    def reject_reason(self, c: WgradCall) -> backends.Reason:
        """Return why the kernel does not take the dtypes, or None."""
        return dense_reason(c.a, c.out, c.a_rows, c.b_rows)

    def keeps(self, c: WgradCall) -> bool:
        """Return whether sums are added; then a slot whose group is empty keeps its bytes, too."""
        return self.accumulate

    def key(self, c: WgradCall, arch: str) -> GemmKey:
        """Return the key of the kernel; the tiling follows from M, N and the class of rows per group."""
        _, rows, columns = c.out.shape
        depth = power_of_two(load(rows_of(c), c.expected_rows) // c.offs.shape[0])
        operand = self.reach.gathers(c)
        problem = arch, VARLEN_K, columns, depth, rows
        # A 192-wide tile has no registers left for the old 16-bit sums, which are read before the new ones are stored.
        widths = (64, 128, 256) if self.accumulate and c.out.dtype != torch.float32 else WIDTHS
        if operand is None:
            tiling = tilings.choose(*problem, widths)
        else:
            tiling = tilings.choose_gathering(*problem, operand, widths)
        spec = EpilogueSpec(name(c.out), accumulate=self.accumulate)
        return GemmKey(VARLEN_K, arch, not c.a.is_cuda, name(c.a), 1, spec, tiling, c.slots is not None, operand)


def gemm_reason(a: Tensor, out: Tensor, rows: Tensor | None = None) -> backends.Reason:
    """Return why no dense kernel computes ``out`` from ``a``, whatever their layout, or None."""
    reason = dense_reason(a, out, rows)
    return "does not take K = 0" if reason is None and a.shape[1] == 0 and out.numel() else reason


def rows_of(c: WgradCall) -> int:
    """Return T, the number of rows."""
    rows: int = (c.a if c.a_rows is None else c.a_rows).shape[0]
    return rows


GROUPED_GEMM = GemmLauncher()
GROUPED_GEMM_WGRAD = WgradLauncher("grouped_gemm_wgrad", accumulate=False)
GROUPED_GEMM_WGRAD_ACCUMULATE = WgradLauncher("grouped_gemm_wgrad_accumulate_", accumulate=True)
LAUNCHERS = (GROUPED_GEMM, GROUPED_GEMM_WGRAD, GROUPED_GEMM_WGRAD_ACCUMULATE)
