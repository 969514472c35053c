"""A GEMM that adds the product of a second pair of operands (LoRA)."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ... import backends
from ..archs import PAIRED, having
from ..epilogue import EpilogueSpec
from ..runtime.launcher import rows_class, warm
from ..runtime.names import name
from ..runtime.operands import Operand
from ..runtime.requirements import MATRIX, ROW_MAJOR, ROWS
from .gemm import BIAS, BIAS_SCALE, OFFS, ForwardGemmLauncher, gemm_reason


class LowRankGemmCall(NamedTuple):
    """Arguments of ``grouped_gemm_low_rank``."""

    a: Tensor
    b: Tensor
    low: Tensor
    up: Tensor
    offs: Tensor
    bias: Tensor | None
    bias_scale: Tensor | None
    out: Tensor
    zero_tail: bool


PAIRS = (
    Operand("a", "TK", "element", ROWS),
    Operand("b", "GKN", "element", MATRIX, unit="b_unit"),
    Operand("low", "TR", "element", ROWS),
    Operand("up", "GRN", "element", MATRIX, unit="b_unit", beside="b"),
)


class LowRankGemmLauncher(ForwardGemmLauncher[LowRankGemmCall]):
    """``out[t] = a[t] @ b[g] + low[t] @ up[g] + bias[g] * bias_scale[t]`` for the rows ``t`` of every group ``g``."""

    op = "grouped_gemm_low_rank"
    call = LowRankGemmCall
    kernel_name = PAIRED
    archs = having(PAIRED)
    operands = (
        *PAIRS,
        OFFS,
        Operand("out", "TN", "spec.out", ROW_MAJOR, output=True),
        BIAS,
        BIAS_SCALE,
    )

    def reject_reason(self, c: LowRankGemmCall) -> backends.Reason:
        """Return why the kernel does not take the dtypes, K = 0 or R = 0, or None."""
        return pair_reason(c.a, c.low, c.out)

    def plan_key(self, c: LowRankGemmCall) -> tuple | None:
        """Return the plan key; the number of rows enters it as the class of rows per group."""
        a, b, low, up, _, bias, bias_scale, out, zero_tail = c
        rows, shape = a.shape[0], b.shape
        addresses = a.data_ptr() | b.data_ptr() | low.data_ptr() | up.data_ptr() | out.data_ptr()
        if not warm(rows, addresses):
            return None
        layouts = (a.stride(), b.stride(), low.stride(), up.stride(), out.stride(), shape, up.shape[1])
        dtypes = (a.dtype, out.dtype, bias is None or bias.dtype, bias_scale is None or bias_scale.dtype)
        return layouts, dtypes, rows_class(rows, shape[0]), zero_tail

    def spec(self, c: LowRankGemmCall) -> EpilogueSpec:
        """Return the epilogue."""
        return EpilogueSpec(name(c.out), name(c.bias), name(c.bias_scale), tail=c.zero_tail)


def pair_reason(a: Tensor, low: Tensor, out: Tensor) -> backends.Reason:
    """Return why no dense kernel computes ``out`` from ``a`` and ``low``, whatever their layout, or None."""
    reason = gemm_reason(a, out)
    return "does not take R = 0" if reason is None and low.shape[1] == 0 and out.numel() else reason


GROUPED_GEMM_LOW_RANK = LowRankGemmLauncher()
