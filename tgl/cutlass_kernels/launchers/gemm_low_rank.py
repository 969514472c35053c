"""A GEMM that adds the product of a second pair of operands (LoRA)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ... import backends
from .. import tilings
from ..archs import PAIRED, arch_of, having
from ..config import VARLEN_M, WIDTHS
from ..epilogue import EpilogueSpec
from ..runtime.launcher import busy_groups, power_of_two, rows_class, small, warm
from ..runtime.names import name
from ..runtime.reach import Reach
from ..runtime.requirements import MATRIX, ROW_MAJOR, ROWS, unit_dimension
from .gemm import GemmKey, PersistentGemmLauncher, gemm_reason


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


class LowRankGemmLauncher(PersistentGemmLauncher[LowRankGemmCall]):
    """``out[t] = a[t] @ b[g] + low[t] @ up[g] + bias[g] * bias_scale[t]`` for the rows ``t`` of every group ``g``."""

    op = "grouped_gemm_low_rank"
    archs = having(PAIRED)
    call = LowRankGemmCall
    reach = Reach(
        {"a": ROWS, "b": MATRIX, "low": ROWS, "up": MATRIX, "out": ROW_MAJOR},
        ("out",),
        keeps=lambda c: not c.zero_tail,
        ordered={"up": "b"},
    )

    def refuses(self, c: LowRankGemmCall) -> backends.Reason:
        """Return the reason against dtypes, K = 0 or R = 0, or None."""
        return pair_reason(c.a, c.low, c.out)

    def alike(self, c: LowRankGemmCall) -> tuple | None:
        """Return the plan key; the number of rows enters it as the class of rows per group."""
        a, b, low, up, _, bias, bias_scale, out, zero_tail = c
        rows, shape = a.shape[0], b.shape
        addresses = a.data_ptr() | b.data_ptr() | low.data_ptr() | up.data_ptr() | out.data_ptr()
        if not warm(rows, addresses):
            return None
        layouts = (a.stride(), b.stride(), low.stride(), up.stride(), out.stride(), shape, up.shape[1])
        dtypes = (a.dtype, out.dtype, bias is None or bias.dtype, bias_scale is None or bias_scale.dtype)
        return layouts, dtypes, rows_class(rows, shape[0]), zero_tail

    def batch_invariant(self, c: LowRankGemmCall) -> bool:
        """Return True, as for ``grouped_gemm``: one contraction in one order."""
        return True

    def nothing(self, c: LowRankGemmCall) -> bool:
        """Return whether there are no results, or no matrices to compute them from."""
        return c.out.numel() == 0 or c.b.shape[0] == 0

    def without(self, c: LowRankGemmCall) -> None:
        """Zero the results if the tail is zeroed: every row belongs to it."""
        if c.zero_tail:
            c.out.zero_()

    def key(self, c: LowRankGemmCall, arch: str) -> GemmKey:
        """Return the key of the kernel; the tiling is that of the product without the second pair."""
        groups, depth, columns = c.b.shape
        rows = c.out.shape[0]
        problem = arch, VARLEN_M, columns, depth, power_of_two(rows // groups)
        tiling = tilings.choose(*problem, WIDTHS, busy_groups(rows, groups))
        spec = EpilogueSpec(name(c.out), name(c.bias), name(c.bias_scale), tail=c.zero_tail)
        return GemmKey(VARLEN_M, arch, not c.a.is_cuda, name(c.a), unit_dimension(c.b.stride()), spec, tiling)

    def build(self, key: GemmKey) -> Callable:
        """Compile the kernel for ``key``. Needs no GPU."""
        import cutlass

        from ..runtime.compiling import compiled, matrix, strided
        from ..runtime.elements import TYPES

        return compiled(
            key.arch,
            arch_of(key.arch).kernel(PAIRED)(key.kind, key.config, key.spec, TYPES[key.element]),
            matrix(key.element),
            matrix(key.element, 3, unit=key.b_unit),
            matrix(key.element),
            matrix(key.element, 3, unit=key.b_unit),
            strided("int32"),
            matrix(key.spec.out),
            strided(key.spec.bias, 2),
            strided(key.spec.bias_scale),
            cutlass.Int32(1),
        )

    def arguments(self, c: LowRankGemmCall) -> tuple:
        """Return the arguments of the kernel."""
        a, b, low, up, offs, bias, bias_scale, out, _ = c
        return a, b, low, up, offs, out, bias, bias_scale

    def scratch(self, c: LowRankGemmCall) -> LowRankGemmCall:
        """Return the warm-up call: one group without rows."""
        return c._replace(
            a=small(c.a, 8, 8),
            b=small(c.b, 1, 8, 8),
            low=small(c.low, 8, 8),
            up=small(c.up, 1, 8, 8),
            offs=torch.zeros(1, dtype=torch.int32, device=c.a.device),
            bias=None if c.bias is None else c.bias.new_zeros(1, 8),
            bias_scale=None if c.bias_scale is None else c.bias_scale.new_zeros(8),
            out=c.out.new_zeros(8, 8, device=c.a.device),
        )


def pair_reason(a: Tensor, low: Tensor, out: Tensor) -> backends.Reason:
    """Return why no dense kernel computes ``out`` from ``a`` and ``low``, whatever their layout, or None."""
    reason = gemm_reason(a, out)
    return "does not take R = 0" if reason is None and low.shape[1] == 0 and out.numel() else reason


GROUPED_GEMM_LOW_RANK = LowRankGemmLauncher()
