"""A GEMM with a dactivation epilogue."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ... import backends
from ...meta.placement import ceil_div
from .. import tilings
from ..activation.activation_spec import ActivationSpec, spec_of
from ..archs import arch_of, having
from ..config import GemmConfig
from ..runtime.launcher import Plan, load, power_of_two, rows_class, small, warm
from ..runtime.names import name
from ..runtime.reach import Reach
from ..runtime.requirements import ALIGNMENT, MATRIX, ROW_MAJOR, ROWS, dense_reason, unit_dimension
from .gemm import PersistentGemmLauncher, gathered, given, kernel_of

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


class GemmDactivationLauncher(PersistentGemmLauncher[DactivationCall]):
    """The gradient of the pre-activation from a product, and on request the activation itself.

    A row's ``dprobs`` is the sum over its tiles, or warps' parts of tiles, across I in order, each the sum over its
    columns.
    """

    op = "grouped_gemm_dactivation"
    archs = having("GradientGroupedGemm")
    call = DactivationCall
    reach = Reach(
        {"dy": ROWS, "b": MATRIX, "h": ROWS, "dh": ROW_MAJOR, "act": ROW_MAJOR},
        ("dh", "act"),
        keeps=lambda c: not c.zero_tail,
        indexed={"dy": "rows"},
        gathers=lambda c: gathered(c.dy, dy=c.rows),
    )
    note = "one launch and, for dprobs, one that adds up the sums of tiles; groups read on the device"

    def refuses(self, c: DactivationCall) -> backends.Reason:
        """Return the reason against dtypes or widths, or None."""
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

    def alike(self, c: DactivationCall) -> tuple | None:
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

    def nothing(self, c: DactivationCall) -> bool:
        """Return whether there are no results, or no matrices to compute them from."""
        return c.dh.numel() == 0 or c.b.shape[0] == 0

    def without(self, c: DactivationCall) -> None:
        """Zero the results if the tail is zeroed: every row belongs to it."""
        if not c.zero_tail:
            return
        c.dh.zero_()
        c.dprobs.zero_()
        if c.act is not None:
            c.act.zero_()

    def key(self, c: DactivationCall, arch: str) -> DactivationKey:
        """Return the key of the kernel; the tiling follows from I, N and the class of rows per group."""
        groups, depth, columns = c.b.shape
        operand = None if self.reach.gathers(c) is None else "a"
        rows = power_of_two(load(c.dh.shape[0], c.expected_rows) // groups)
        tiling = tilings.choose_gradient(arch, columns, depth, rows)
        where = arch, not c.dy.is_cuda, name(c.dy), unit_dimension(c.b.stride())
        written = c.act is not None, c.zero_tail
        return DactivationKey(*where, spec_of(c.params), name(c.probs), tiling, operand, *written)

    def build(self, key: DactivationKey) -> Callable:
        """Compile the kernel for ``key``. Needs no GPU."""
        import cutlass

        from ..runtime.compiling import compiled, matrix, strided
        from ..runtime.elements import TYPES

        kernel, index = kernel_of(key, "GradientGroupedGemm", "GatheredGradientGroupedGemm")
        element = TYPES[key.element]
        halves = 2 if key.activation.gated and not key.activation.interleaved else 1
        columns = halves * ALIGNMENT * 8 // element.width
        return compiled(
            key.arch,
            kernel(key.config, element, key.element, key.activation, key.act, tail=key.tail),
            matrix(key.element),
            matrix(key.element, 3, unit=key.b_unit),
            strided("int32"),
            matrix(key.element, columns=columns),
            matrix(key.element, columns=columns),
            strided(key.probs),
            None if key.probs is None else matrix("float32", pitch=4, align=4),
            None if key.probs is None else strided("float32"),
            matrix(key.element) if key.act else None,
            *index,
            cutlass.Int32(1),
        )

    def arguments(self, c: DactivationCall) -> tuple:
        """Return the arguments of the kernel except the buffer for partial sums."""
        return self._with_sums(c, None)

    def _with_sums(self, c: DactivationCall, sums: Tensor | None) -> tuple:
        dprobs = None if sums is None else c.dprobs
        return c.dy, c.b, c.offs, c.dh, c.h, c.probs, sums, dprobs, c.act, *given(c.rows)

    def start(self, plan: Plan, c: DactivationCall) -> None:
        """Launch."""
        sums = None
        if c.probs is not None:
            width = arch_of(plan.key.arch).tilings.sum_columns(plan.key.config)
            sums = c.dprobs.new_empty(ceil_div(c.b.shape[2], width), c.dprobs.shape[0])
        plan.launch(*self._with_sums(c, sums))

    def scratch(self, c: DactivationCall) -> DactivationCall:
        """Return the warm-up call: one group without rows."""
        hidden = c.h.new_zeros(8, 16 if c.params.gated else 8)
        return c._replace(
            dy=small(c.dy, 8, 8),
            b=small(c.b, 1, 8, 8),
            h=hidden,
            offs=torch.zeros(1, dtype=torch.int32, device=c.dy.device),
            probs=None if c.probs is None else c.probs.new_zeros(8),
            dh=hidden.clone(),
            dprobs=c.dprobs.new_zeros(8, device=c.dy.device),
            act=None if c.act is None else c.h.new_zeros(8, 8),
            rows=None if c.rows is None else c.rows.new_zeros(8),
        )


GROUPED_GEMM_DACTIVATION = GemmDactivationLauncher()
LAUNCHERS = (GROUPED_GEMM_DACTIVATION,)
