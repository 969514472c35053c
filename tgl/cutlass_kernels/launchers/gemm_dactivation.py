"""A GEMM with a dactivation epilogue."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from ... import backends
from ...meta.placement import ceil_div
from .. import tilings
from ..activation.activation_spec import ActivationSpec, spec_of
from ..archs import arch_of, having
from ..config import GemmConfig
from ..runtime.launcher import Launcher, Plan, load, power_of_two, rows_class, warm
from ..runtime.names import name
from ..runtime.operands import Operand, tensor
from ..runtime.requirements import ALIGNMENT, MATRIX, ROW_MAJOR, ROWS, dense_reason, unit_dimension
from .gemm import OFFS
from .gemm_activation import halved
from .gemm_launcher import PersistentGemmLauncher

if TYPE_CHECKING:
    from ...ops.grouped_activation import Params


class DactivationKey(NamedTuple):
    """Key of a compiled kernel."""

    arch: str
    emulated: bool
    element: str
    b_unit: int  # which dimension of B is contiguous
    activation: ActivationSpec
    probs: str | None
    config: GemmConfig
    gathered: str | None = None  # "a" if rows of dy are gathered by an index
    act: bool = False  # whether the activation itself is written
    tail: bool = True  # whether rows past the last group become zeros


class DactivationCall(NamedTuple):
    """Arguments of ``grouped_gemm_dactivation``."""

    dy: Tensor
    b: Tensor
    h: Tensor
    offs: Tensor
    probs: Tensor | None
    params: Params
    dh: Tensor
    dprobs: Tensor
    act: Tensor | None = None
    rows: Tensor | None = None
    zero_tail: bool = True
    expected_rows: int | None = None


def _halves(key: DactivationKey) -> Any:
    """Return what the compiler gets instead of a pre-activation, whose halves begin at whole vectors."""
    from ..runtime.compiling import matrix
    from ..runtime.elements import TYPES

    halves = 2 if key.activation.gated and not key.activation.interleaved else 1
    return matrix(key.element, columns=halves * ALIGNMENT * 8 // TYPES[key.element].width)


class GemmDactivationLauncher(PersistentGemmLauncher[DactivationCall]):
    """The gradient of the pre-activation from a product, and on request the activation itself.

    A row's ``dprobs`` is the sum over its tiles, or warps' parts of tiles, across I in order, each the sum over its
    columns.
    """

    op = "grouped_gemm_dactivation"
    call = DactivationCall
    kernel_name = "GradientGroupedGemm"
    archs = having("GradientGroupedGemm")
    operands = (
        Operand("dy", "TK", "element", ROWS, indexed_by="rows"),
        Operand("b", "GKI", "element", MATRIX, unit="b_unit"),
        OFFS,
        Operand("dh", "TN", "element", ROW_MAJOR, output=True, stand_in=_halves),
        Operand("h", "TN", "element", ROWS, stand_in=_halves),
        Operand("probs", "T", "probs"),
        Operand("sums", "", "float32", when="probs", stand_in=tensor("matrix", "float32", pitch=4, align=4)),
        Operand("dprobs", "T", "float32", when="probs", output=True),
        Operand("act", "TI", "element", ROW_MAJOR, when="act", output=True),
    )
    note = "one launch and, for dprobs, one that adds up the sums of tiles; groups read on the device"

    def reject_reason(self, c: DactivationCall) -> backends.Reason:
        """Return why the kernel does not take the dtypes or widths, or None."""
        reason = dense_reason(c.dy, c.dh, c.rows)
        if reason is not None or c.dh.numel() == 0:
            return reason
        if c.dy.shape[1] == 0:
            return "does not take K = 0"
        side_by_side = c.params.gated and not c.params.interleaved
        step = ALIGNMENT // c.h.element_size()
        columns = c.b.shape[2] if side_by_side else c.h.shape[1]
        if columns % step:
            return f"needs {'halves' if side_by_side else 'rows'} of `h` of a multiple of {step} columns, got {columns}"
        return None

    batch_invariant = Launcher.batch_invariant  # False: the sums of ``dprobs`` depend on the tiling

    def plan_key(self, c: DactivationCall) -> tuple | None:
        """Return the plan key; the number of rows enters it as the class of rows per group."""
        dy, b, h, _, probs, params, dh, _, act, index, zero_tail, expected = c
        rows, shape = dh.shape[0], b.shape
        written = 0 if act is None else act.data_ptr()
        if not warm(max(rows, dy.shape[0]), dy.data_ptr() | b.data_ptr() | h.data_ptr() | dh.data_ptr() | written):
            return None
        layouts = (dy.stride(), b.stride(), h.stride(), dh.stride(), act is None or act.stride(), shape)
        dtypes = (dy.dtype, probs is None or probs.dtype)
        size = rows_class(rows if expected is None else expected, shape[0])
        return layouts, dtypes, params, size, index is None, zero_tail

    def keeps(self, c: DactivationCall) -> bool:
        """Return whether rows past the last group must be preserved."""
        return not c.zero_tail

    def key(self, c: DactivationCall, arch: str) -> DactivationKey:
        """Return the key of the kernel; the tiling follows from I, N and the class of rows per group."""
        groups, depth, columns = c.b.shape
        operand = None if self.reach.gathers(c) is None else "a"
        rows = power_of_two(load(c.dh.shape[0], c.expected_rows) // groups)
        tiling = tilings.choose_gradient(arch, columns, depth, rows)
        where = arch, not c.dy.is_cuda, name(c.dy), unit_dimension(c.b.stride())
        written = c.act is not None, c.zero_tail
        return DactivationKey(*where, spec_of(c.params), name(c.probs), tiling, operand, *written)

    def kernel(self, key: DactivationKey) -> Callable:
        """Return the kernel of ``key``, to be compiled."""
        from ..runtime.elements import TYPES

        kernel = self.kernel_class(key)
        return kernel(key.config, TYPES[key.element], key.element, key.activation, key.act, tail=key.tail)

    def start(self, plan: Plan, c: DactivationCall) -> None:
        """Launch, with a buffer for the sums of tiles."""
        sums = dprobs = None
        if c.probs is not None:
            width = arch_of(plan.key.arch).tilings.sum_columns(plan.key.config)
            dprobs = c.dprobs
            sums = dprobs.new_empty(ceil_div(c.b.shape[2], width), dprobs.shape[0])
        index = () if c.rows is None else (c.rows,)
        plan.launch(c.dy, c.b, c.offs, c.dh, c.h, c.probs, sums, dprobs, c.act, *index)

    def warmup_sizes(self, c: DactivationCall) -> dict[str, int]:
        """Return the sizes of the warm-up call."""
        return halved(c.params)


GROUPED_GEMM_DACTIVATION = GemmDactivationLauncher()
LAUNCHERS = (GROUPED_GEMM_DACTIVATION,)
