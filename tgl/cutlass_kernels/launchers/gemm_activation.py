"""A GEMM with an activation as a second output."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ... import backends
from .. import tilings
from ..activation.activation_spec import spec_of
from ..archs import having, serving
from ..config import VARLEN_M, WIDTHS
from ..epilogue import EpilogueSpec
from ..runtime.launcher import busy_groups, load, power_of_two, rows_class, small, warm
from ..runtime.names import name
from ..runtime.reach import Reach
from ..runtime.requirements import ALIGNMENT, MATRIX, ROW_MAJOR, ROWS, unit_dimension
from .gemm import GemmKey, PersistentGemmLauncher, gathered, gemm_reason, given, kernel_of

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


class GemmActivationLauncher(PersistentGemmLauncher[GemmActivationCall]):
    """``h = a[t] @ b[g] + bias[g]`` for the rows ``t`` of every group ``g``, and ``y``, its activation."""

    op = "grouped_gemm_activation"
    archs = having("ActivatedGroupedGemm")
    call = GemmActivationCall
    reach = Reach(
        {"a": ROWS, "b": MATRIX, "y": ROW_MAJOR, "h": ROW_MAJOR},
        ("y", "h"),
        keeps=lambda c: not c.zero_tail,
        indexed={"a": "rows"},
        gathers=lambda c: gathered(c.a, a=c.rows),
    )

    def refuses(self, c: GemmActivationCall) -> backends.Reason:
        """Return the reason against widths, or matrices whose halves no tensor map can separate, or None."""
        reason = gemm_reason(c.a, c.y, c.rows)
        return halves_reason(c.b, c.y, c.params) if reason is None and c.y.numel() else reason

    def alike(self, c: GemmActivationCall) -> tuple | None:
        """Return the plan key; the number of rows enters it as the class of rows per group."""
        a, b, _, bias, probs, params, y, h, index, zero_tail, expected = c
        rows, shape = y.shape[0], b.shape
        written = y.data_ptr() if h is None else h.data_ptr() | y.data_ptr()
        if not warm(max(rows, a.shape[0]), a.data_ptr() | b.data_ptr() | written):
            return None
        layouts = (a.stride(), b.stride(), h is None or h.stride(), y.stride(), shape)
        dtypes = (a.dtype, y.dtype, bias is None or bias.dtype, probs is None or probs.dtype)
        size = rows_class(rows if expected is None else expected, shape[0])
        return layouts, dtypes, params, size, index is None, zero_tail

    def batch_invariant(self, c: GemmActivationCall) -> bool:
        """Return True, as for ``grouped_gemm``: the activation is elementwise."""
        return True

    def nothing(self, c: GemmActivationCall) -> bool:
        """Return whether there are no results, or no matrices to compute them from."""
        return c.y.numel() == 0 or c.b.shape[0] == 0

    def without(self, c: GemmActivationCall) -> None:
        """Zero the results if the tail is zeroed: every row belongs to it."""
        if not c.zero_tail:
            return
        c.y.zero_()
        if c.h is not None:
            c.h.zero_()

    def key(self, c: GemmActivationCall, arch: str) -> GemmKey:
        """Return the key of the kernel; the tiling follows from N, K and the class of rows per group."""
        (groups, depth, columns), rows = c.b.shape, load(c.y.shape[0], c.expected_rows)
        problem = arch, VARLEN_M, columns, depth, power_of_two(rows // groups)
        operand, widths = self.reach.gathers(c), widths_of(c.params, c.b)
        if operand is None:
            tiling = tilings.choose(*problem, widths, busy_groups(rows, groups))
        else:
            tiling = tilings.choose_gathering(*problem, operand, widths)
        activation = spec_of(c.params)
        factors, kept = {"activation": activation, "probs": name(c.probs)}, c.h is not None
        spec = EpilogueSpec(name(c.y), name(c.bias), tail=c.zero_tail, keeps=kept, **factors)
        emulated, unit = not c.a.is_cuda, unit_dimension(c.b.stride())
        return GemmKey(VARLEN_M, arch, emulated, name(c.a), unit, spec, tiling, gathered=operand)

    def build(self, key: GemmKey) -> Callable:
        """Compile the kernel for ``key``. Needs no GPU."""
        import cutlass

        from ..runtime.compiling import compiled, matrix, strided
        from ..runtime.elements import TYPES

        kernel, index = kernel_of(key, "ActivatedGroupedGemm", "GatheredActivatedGroupedGemm")
        return compiled(
            key.arch,
            kernel(key.kind, key.config, key.spec, TYPES[key.element]),
            matrix(key.element),
            matrix(key.element, 3, unit=key.b_unit),
            strided("int32"),
            matrix(key.spec.out) if key.spec.keeps else None,
            matrix(key.spec.out),
            strided(key.spec.bias, 2),
            strided(key.spec.probs),
            *index,
            cutlass.Int32(1),
        )

    def arguments(self, c: GemmActivationCall) -> tuple:
        """Return the arguments of the kernel."""
        return c.a, c.b, c.offs, c.h, c.y, c.bias, c.probs, *given(c.rows)

    def scratch(self, c: GemmActivationCall) -> GemmActivationCall:
        """Return the warm-up call: one group without rows."""
        width = 16 if c.params.gated else 8
        return c._replace(
            a=small(c.a, 8, 8),
            b=small(c.b, 1, 8, width),
            offs=torch.zeros(1, dtype=torch.int32, device=c.a.device),
            bias=None if c.bias is None else c.bias.new_zeros(1, width),
            probs=None if c.probs is None else c.probs.new_zeros(8),
            y=c.y.new_zeros(8, 8, device=c.a.device),
            h=None if c.h is None else c.h.new_zeros(8, width, device=c.a.device),
            rows=None if c.rows is None else c.rows.new_zeros(8),
        )


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
