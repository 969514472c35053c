"""A GEMM with an activation as a second output."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from ... import backends
from ..activation.activation_spec import spec_of
from ..archs import having, serving
from ..config import WIDTHS
from ..epilogue import EpilogueSpec
from ..runtime.names import name
from ..runtime.operands import Operand
from ..runtime.requirements import ALIGNMENT, MATRIX, ROW_MAJOR, ROWS
from .gemm import BIAS, OFFS, ForwardGemmLauncher, gemm_reason
from .gemm_launcher import SIZES

if TYPE_CHECKING:
    from ...ops.grouped_activation import Params


class GemmActivationCall(NamedTuple):
    """Arguments of ``grouped_gemm_activation``; ``h`` is None if it is not requested."""

    a: Tensor
    b: Tensor
    offs: Tensor
    bias: Tensor | None
    probs: Tensor | None
    params: Params
    y: Tensor
    h: Tensor | None
    rows: Tensor | None = None
    zero_tail: bool = True
    expected_rows: int | None = None


PROBS = Operand("probs", "T", "spec.probs")


class GemmActivationLauncher(ForwardGemmLauncher[GemmActivationCall]):
    """``h = a[t] @ b[g] + bias[g]`` for the rows ``t`` of every group ``g``, and ``y``, its activation."""

    op = "grouped_gemm_activation"
    call = GemmActivationCall
    kernel_name = "ActivatedGroupedGemm"
    archs = having("ActivatedGroupedGemm")
    operands = (
        Operand("a", "TK", "element", ROWS, indexed_by="rows"),
        Operand("b", "GKN", "element", MATRIX, unit="b_unit"),
        OFFS,
        Operand("h", "TN", "spec.out", ROW_MAJOR, when="spec.keeps", output=True),
        Operand("y", "TI", "spec.out", ROW_MAJOR, output=True),
        BIAS,
        PROBS,
    )

    def reject_reason(self, c: GemmActivationCall) -> backends.Reason:
        """Return why the kernel does not take the widths, or halves that no tensor map can separate, or None."""
        reason = gemm_reason(c.a, c.y, c.rows)
        return halves_reason(c.b, c.y, c.params) if reason is None and c.y.numel() else reason

    def spec(self, c: GemmActivationCall) -> EpilogueSpec:
        """Return the epilogue."""
        activation, probs, kept = spec_of(c.params), name(c.probs), c.h is not None
        return EpilogueSpec(name(c.y), name(c.bias), tail=c.zero_tail, activation=activation, probs=probs, keeps=kept)

    def widths(self, c: GemmActivationCall) -> tuple[int, ...]:
        """Return the allowed columns of a tile."""
        return widths_of(c.params, c.b)

    def warmup_sizes(self, c: GemmActivationCall) -> dict[str, int]:
        """Return the sizes of the warm-up call."""
        return halved(c.params)


def halved(params: Params) -> dict[str, int]:
    """Return the sizes of the warm-up call of an activation, which may halve the columns."""
    return {**SIZES, "N": 2 * SIZES["I"] if params.gated else SIZES["I"]}


def widths_of(params: Params, b: Tensor) -> tuple[int, ...]:
    """Return the allowed columns of a tile, ascending, for a product with ``b`` and its activation.

    Gate and linear half of a tile are boxes of B: whole lines of shared memory, if B is contiguous along columns.
    Interleaved halves take a few registers more than 192 accumulators leave.
    """
    if not params.gated:
        return WIDTHS
    return (128, 256) if params.interleaved or b.stride(2) == 1 else (128, 192, 256)


def halves_reason(b: Tensor, y: Tensor, params: Params) -> backends.Reason:
    """Return why no kernel computes the activation ``y`` of a product with ``b``, or None."""
    step = ALIGNMENT // y.element_size()
    if y.shape[1] % step:
        return f"needs a multiple of {step} columns of the result, got {y.shape[1]}"
    across = b.stride(2) == 1
    arch = serving(backends.device_arch(b.device))
    maps = arch is None or arch.maps_operands
    if params.gated and params.interleaved and across and maps:
        return "needs `b` contiguous along K when gate and linear half alternate: a tensor map skips no elements"
    half = b.shape[2] // 2 * b.element_size()
    if params.gated and across and half % ALIGNMENT:
        return f"needs halves of `b` on {ALIGNMENT} bytes, got {half} bytes from one to the other"
    return None


GROUPED_GEMM_ACTIVATION = GemmActivationLauncher()
LAUNCHERS = (GROUPED_GEMM_ACTIVATION,)
