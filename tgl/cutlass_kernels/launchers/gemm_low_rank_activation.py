"""A GEMM that adds the product of a second pair of operands (LoRA), with an activation as a second output."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ... import backends
from .. import tilings
from ..activation.activation_spec import spec_of
from ..archs import PAIRED_ACTIVATED, arch_of, having
from ..config import VARLEN_M
from ..epilogue import EpilogueSpec
from ..runtime.launcher import busy_groups, power_of_two, rows_class, small, warm
from ..runtime.names import name
from ..runtime.reach import Reach
from ..runtime.requirements import MATRIX, ROW_MAJOR, ROWS, unit_dimension
from .gemm import GemmKey, PersistentGemmLauncher
from .gemm_activation import halves_reason, widths_of
from .gemm_low_rank import pair_reason

if TYPE_CHECKING:
    from ...ops.grouped_activation import Params


class LowRankGemmActivationCall(NamedTuple):
    """Arguments of ``grouped_gemm_low_rank_activation``."""

    a: Tensor
    b: Tensor
    low: Tensor
    up: Tensor
    offs: Tensor
    bias: Tensor | None
    probs: Tensor | None
    params: Params
    y: Tensor
    h: Tensor


class LowRankGemmActivationLauncher(PersistentGemmLauncher[LowRankGemmActivationCall]):
    """``h = a[t] @ b[g] + low[t] @ up[g] + bias[g]`` for every row, and ``y``, its activation, with zero tails."""

    op = "grouped_gemm_low_rank_activation"
    archs = having(PAIRED_ACTIVATED)
    call = LowRankGemmActivationCall
    reach = Reach(
        {"a": ROWS, "b": MATRIX, "low": ROWS, "up": MATRIX, "y": ROW_MAJOR, "h": ROW_MAJOR},
        ("y", "h"),
        ordered={"up": "b"},
    )

    def refuses(self, c: LowRankGemmActivationCall) -> backends.Reason:
        """Return the reason of either of the two ops that this one combines, or None."""
        reason = pair_reason(c.a, c.low, c.h)
        return halves_reason(c.b, c.y, c.params) if reason is None and c.h.numel() else reason

    def alike(self, c: LowRankGemmActivationCall) -> tuple | None:
        """Return the plan key; the number of rows enters it as the class of rows per group."""
        a, b, low, up, _, bias, probs, params, y, h = c
        rows, shape = a.shape[0], b.shape
        addresses = a.data_ptr() | b.data_ptr() | low.data_ptr() | up.data_ptr() | h.data_ptr() | y.data_ptr()
        if not warm(rows, addresses):
            return None
        layouts = (a.stride(), b.stride(), low.stride(), up.stride(), h.stride(), y.stride(), shape, up.shape[1])
        dtypes = (a.dtype, h.dtype, bias is None or bias.dtype, probs is None or probs.dtype)
        return layouts, dtypes, params, rows_class(rows, shape[0])

    def batch_invariant(self, c: LowRankGemmActivationCall) -> bool:
        """Return True, as for ``grouped_gemm``: one contraction in one order, and an elementwise activation."""
        return True

    def nothing(self, c: LowRankGemmActivationCall) -> bool:
        """Return whether there are no results, or no matrices to compute them from."""
        return c.h.numel() == 0 or c.b.shape[0] == 0

    def without(self, c: LowRankGemmActivationCall) -> None:
        """Zero the results: every row belongs to the tail."""
        c.h.zero_()
        c.y.zero_()

    def key(self, c: LowRankGemmActivationCall, arch: str) -> GemmKey:
        """Return the key of the kernel; the tiling is that of the op without the second pair."""
        groups, depth, columns = c.b.shape
        rows = c.h.shape[0]
        problem = arch, VARLEN_M, columns, depth, power_of_two(rows // groups)
        tiling = tilings.choose(*problem, widths_of(c.params, c.b), busy_groups(rows, groups))
        activation = spec_of(c.params)
        spec = EpilogueSpec(name(c.h), name(c.bias), tail=True, activation=activation, probs=name(c.probs))
        return GemmKey(VARLEN_M, arch, not c.a.is_cuda, name(c.a), unit_dimension(c.b.stride()), spec, tiling)

    def build(self, key: GemmKey) -> Callable:
        """Compile the kernel for ``key``. Needs no GPU."""
        import cutlass

        from ..runtime.compiling import compiled, matrix, strided
        from ..runtime.elements import TYPES

        return compiled(
            key.arch,
            arch_of(key.arch).kernel(PAIRED_ACTIVATED)(key.kind, key.config, key.spec, TYPES[key.element]),
            matrix(key.element),
            matrix(key.element, 3, unit=key.b_unit),
            matrix(key.element),
            matrix(key.element, 3, unit=key.b_unit),
            strided("int32"),
            matrix(key.spec.out),
            matrix(key.spec.out),
            strided(key.spec.bias, 2),
            strided(key.spec.probs),
            cutlass.Int32(1),
        )

    def arguments(self, c: LowRankGemmActivationCall) -> tuple:
        """Return the arguments of the kernel."""
        return c.a, c.b, c.low, c.up, c.offs, c.h, c.y, c.bias, c.probs

    def scratch(self, c: LowRankGemmActivationCall) -> LowRankGemmActivationCall:
        """Return the warm-up call: one group without rows."""
        width = 16 if c.params.gated else 8
        return c._replace(
            a=small(c.a, 8, 8),
            b=small(c.b, 1, 8, width),
            low=small(c.low, 8, 8),
            up=small(c.up, 1, 8, width),
            offs=torch.zeros(1, dtype=torch.int32, device=c.a.device),
            bias=None if c.bias is None else c.bias.new_zeros(1, width),
            probs=None if c.probs is None else c.probs.new_zeros(8),
            y=c.h.new_zeros(8, 8, device=c.a.device),
            h=c.h.new_zeros(8, width, device=c.a.device),
        )


GROUPED_GEMM_LOW_RANK_ACTIVATION = LowRankGemmActivationLauncher()
