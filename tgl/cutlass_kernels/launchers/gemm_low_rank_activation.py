"""A GEMM that adds the product of a second pair of operands (LoRA), with an activation as a second output."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from ... import backends
from ..activation.activation_spec import spec_of
from ..archs import PAIRED_ACTIVATED, having
from ..epilogue import EpilogueSpec
from ..runtime.launcher import rows_class, warm
from ..runtime.names import name
from ..runtime.operands import Operand
from ..runtime.requirements import ROW_MAJOR
from .gemm import BIAS, OFFS, ForwardGemmLauncher
from .gemm_activation import PROBS, halved, halves_reason, widths_of
from .gemm_low_rank import PAIRS, pair_reason

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


class LowRankGemmActivationLauncher(ForwardGemmLauncher[LowRankGemmActivationCall]):
    """``h = a[t] @ b[g] + low[t] @ up[g] + bias[g]`` for every row, and ``y``, its activation, with zero tails."""

    op = "grouped_gemm_low_rank_activation"
    call = LowRankGemmActivationCall
    kernel_name = PAIRED_ACTIVATED
    archs = having(PAIRED_ACTIVATED)
    operands = (
        *PAIRS,
        OFFS,
        Operand("h", "TN", "spec.out", ROW_MAJOR, output=True),
        Operand("y", "TI", "spec.out", ROW_MAJOR, output=True),
        BIAS,
        PROBS,
    )

    def reject_reason(self, c: LowRankGemmActivationCall) -> backends.Reason:
        """Return the reason of either of the two ops that this one combines, or None."""
        reason = pair_reason(c.a, c.low, c.h)
        return halves_reason(c.b, c.y, c.params) if reason is None and c.h.numel() else reason

    def plan_key(self, c: LowRankGemmActivationCall) -> tuple | None:
        """Return the plan key; the number of rows enters it as the class of rows per group."""
        a, b, low, up, _, bias, probs, params, y, h = c
        rows, shape = a.shape[0], b.shape
        addresses = a.data_ptr() | b.data_ptr() | low.data_ptr() | up.data_ptr() | h.data_ptr() | y.data_ptr()
        if not warm(rows, addresses):
            return None
        layouts = (a.stride(), b.stride(), low.stride(), up.stride(), h.stride(), y.stride(), shape, up.shape[1])
        dtypes = (a.dtype, h.dtype, bias is None or bias.dtype, probs is None or probs.dtype)
        return layouts, dtypes, params, rows_class(rows, shape[0])

    def spec(self, c: LowRankGemmActivationCall) -> EpilogueSpec:
        """Return the epilogue."""
        activation = spec_of(c.params)
        return EpilogueSpec(name(c.h), name(c.bias), tail=True, activation=activation, probs=name(c.probs))

    def widths(self, c: LowRankGemmActivationCall) -> tuple[int, ...]:
        """Return the allowed columns of a tile."""
        return widths_of(c.params, c.b)

    def warmup_sizes(self, c: LowRankGemmActivationCall) -> dict[str, int]:
        """Return the sizes of the warm-up call."""
        return halved(c.params)


GROUPED_GEMM_LOW_RANK_ACTIVATION = LowRankGemmActivationLauncher()
