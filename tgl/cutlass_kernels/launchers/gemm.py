"""Dense GEMMs: forward and input gradient, weight gradient, and accumulation of the weight gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import backends
from ...meta import placement
from ...meta.slots import scatter
from .. import tilings
from ..archs import arch_of, having, serving
from ..config import VARLEN_K, VARLEN_M, WIDTHS, GemmConfig
from ..epilogue import EpilogueSpec
from ..runtime import device
from ..runtime.launcher import Call, Launcher, busy_groups, load, power_of_two, rows_class, small, warm
from ..runtime.names import name
from ..runtime.reach import Reach
from ..runtime.requirements import MATRIX, ROW_MAJOR, ROWS, dense_reason, unit_dimension


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


class GemmCall(NamedTuple):
    """Arguments of ``grouped_gemm``."""

    a: Tensor
    b: Tensor
    offs: Tensor
    bias: Tensor | None
    bias_scale: Tensor | None
    out: Tensor
    zero_tail: bool
    slots: Tensor | None = None
    rows: Tensor | None = None
    begin: Tensor | None = None
    expected_rows: int | None = None


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


class PersistentGemmLauncher(Launcher[Call]):
    """Launcher of a persistent GEMM: as many clusters are started as run at once, and each takes tile after tile."""

    archs = having("GroupedGemm")

    def last(self, key: GemmKey, where: torch.device) -> tuple:
        """Return the number of clusters."""
        return (device.clusters(where, key.config.ctas),)

    def tiling(self, c: Call, chip: str) -> GemmConfig | None:
        """Return the tiling of the kernel's key, or None if there is nothing to compute."""
        if self.nothing(c):
            return None
        config: GemmConfig = self.key(c, arch_of(chip).name).config
        return config


class GemmLauncher(PersistentGemmLauncher[GemmCall]):
    """``out[t] = a[t] @ b[g] + bias[g] * bias_scale[t]`` for the rows ``t`` of every group ``g``."""

    op = "grouped_gemm"
    call = GemmCall
    reach = Reach(
        {"a": ROWS, "b": MATRIX, "out": ROW_MAJOR},
        ("out",),
        keeps=lambda c: not c.zero_tail or c.begin is not None,
        slotted="b",
        indexed={"a": "rows"},
        gathers=lambda c: gathered(c.a, a=c.rows),
    )

    def refuses(self, c: GemmCall) -> backends.Reason:
        """Return the reason against dtypes or K = 0, or None."""
        return gemm_reason(c.a, c.out, c.rows)

    def alike(self, c: GemmCall) -> tuple | None:
        """Return the plan key; the number of rows enters it as the class of rows per group."""
        a, b, _, bias, bias_scale, out, zero_tail, slots, index, begin, expected = c
        rows, shape = out.shape[0], b.shape
        if not warm(max(rows, a.shape[0]), a.data_ptr() | b.data_ptr() | out.data_ptr()):
            return None
        size = rows_class(rows if expected is None else expected, shape[0] if slots is None else slots.shape[0])
        layouts = (a.stride(), b.stride(), out.stride(), shape)
        dtypes = (a.dtype, out.dtype, bias is None or bias.dtype, bias_scale is None or bias_scale.dtype)
        return layouts, dtypes, size, zero_tail, slots is None, index is None, begin is None

    def batch_invariant(self, c: GemmCall) -> bool:
        """Return True: every tiling adds up K in one order, by MMAs of one depth, for one row alone."""
        return True

    def nothing(self, c: GemmCall) -> bool:
        """Return whether there are no results, or no matrices to compute them from."""
        return c.out.numel() == 0 or groups_of(c.b, c.slots) == 0

    def without(self, c: GemmCall) -> None:
        """Zero the rows if the tail is zeroed: every row belongs to it."""
        if not c.zero_tail:
            return
        if c.begin is None:
            c.out.zero_()
        else:
            c.out.masked_fill_(placement.tail(c.begin, c.out.shape[0])[:, None], 0)

    def key(self, c: GemmCall, arch: str) -> GemmKey:
        """Return the key of the kernel; the tiling follows from N, K and the class of rows per group."""
        _, depth, columns = c.b.shape
        groups, rows = groups_of(c.b, c.slots), load(c.out.shape[0], c.expected_rows)
        problem = arch, VARLEN_M, columns, depth, power_of_two(rows // groups)
        operand = self.reach.gathers(c)
        if operand is None:
            tiling = tilings.choose(*problem, WIDTHS, busy_groups(rows, groups))
        else:
            tiling = tilings.choose_gathering(*problem, operand)
        spec = EpilogueSpec(name(c.out), name(c.bias), name(c.bias_scale), tail=c.zero_tail)
        emulated, unit = not c.a.is_cuda, unit_dimension(c.b.stride())
        tables = c.slots is not None, operand, c.begin is not None
        return GemmKey(VARLEN_M, arch, emulated, name(c.a), unit, spec, tiling, *tables)

    def build(self, key: GemmKey) -> Callable:
        """Compile the kernel for ``key``."""
        return build(key)

    def arguments(self, c: GemmCall) -> tuple:
        """Return the arguments of the kernel."""
        a, b, offs, bias, bias_scale, out, _, slots, rows, begin, _ = c
        return a, b, offs, out, bias, bias_scale, slots, begin, *given(rows)

    def scratch(self, c: GemmCall) -> GemmCall:
        """Return the warm-up call: one group without rows."""
        offs = torch.zeros(1, dtype=torch.int32, device=c.a.device)
        return c._replace(
            a=small(c.a, 8, 8),
            b=small(c.b, 1, 8, 8),
            offs=offs,
            bias=None if c.bias is None else c.bias.new_zeros(1, 8),
            bias_scale=None if c.bias_scale is None else c.bias_scale.new_zeros(8),
            out=c.out.new_zeros(8, 8, device=c.a.device),
            slots=None if c.slots is None else offs,
            rows=None if c.rows is None else offs.new_zeros(8),
            begin=None if c.begin is None else offs,
        )


class WgradLauncher(PersistentGemmLauncher[WgradCall]):
    """``out[g] = a[rows of g]^T @ b[rows of g]``, or added to ``out``; group ``g`` may be matrix ``slots[g]``."""

    call = WgradCall

    def __init__(self, op: str, *, accumulate: bool) -> None:
        self.op, self.accumulate = op, accumulate
        # An accumulated output keeps the bytes of a slot whose group is empty.
        self.reach = Reach(  # type: ignore[misc]
            {"a": ROWS, "b": ROWS, "out": ROW_MAJOR},
            ("out",),
            keeps=lambda c: accumulate,
            slotted="out",
            indexed={"a": "a_rows", "b": "b_rows"},
            gathers=lambda c: gathered(c.a, a=c.a_rows, b=c.b_rows),
        )

    def refuses(self, c: WgradCall) -> backends.Reason:
        """Return the reason against dtypes, or None."""
        return dense_reason(c.a, c.out, c.a_rows, c.b_rows)

    def alike(self, c: WgradCall) -> tuple | None:
        """Return the plan key; the number of rows enters it as the class of rows per group."""
        a, b, _, out, slots, a_index, b_index, expected = c
        shape = out.shape
        if not warm(max(a.shape[0], b.shape[0]), a.data_ptr() | b.data_ptr() | out.data_ptr()):
            return None
        rows = rows_of(c) if expected is None else expected
        size = rows_class(rows, shape[0] if slots is None else slots.shape[0])
        layouts = (a.stride(), b.stride(), out.stride(), shape)
        return layouts, a.dtype, out.dtype, size, slots is None, a_index is None, b_index is None

    def nothing(self, c: WgradCall) -> bool:
        """Return whether there are no matrices, or no rows to compute them from."""
        operands = (c.a, c.b, *(index for index in (c.a_rows, c.b_rows) if index is not None))
        return c.out.numel() == 0 or groups_of(c.out, c.slots) == 0 or any(t.shape[0] == 0 for t in operands)

    def without(self, c: WgradCall) -> None:
        """Write zeros, the sums over no rows, unless they are added."""
        if not self.accumulate:
            clear(c.out, c.slots)

    def key(self, c: WgradCall, arch: str) -> GemmKey:
        """Return the key of the kernel; the tiling follows from M, N and the class of rows per group."""
        _, rows, columns = c.out.shape
        depth = power_of_two(load(rows_of(c), c.expected_rows) // groups_of(c.out, c.slots))
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

    def build(self, key: GemmKey) -> Callable:
        """Compile the kernel for ``key``."""
        return build(key)

    def arguments(self, c: WgradCall) -> tuple:
        """Return the arguments of the kernel."""
        a, b, offs, out, slots, a_rows, b_rows, _ = c
        return a, b, offs, out, None, None, slots, None, *given(a_rows, b_rows)

    def scratch(self, c: WgradCall) -> WgradCall:
        """Return the warm-up call: one group without rows."""
        offs = torch.zeros(1, dtype=torch.int32, device=c.a.device)
        return c._replace(
            a=small(c.a, 8, 8),
            b=small(c.b, 8, 8),
            offs=offs,
            out=c.out.new_zeros(1, 8, 8, device=c.a.device),
            slots=None if c.slots is None else offs,
            a_rows=None if c.a_rows is None else offs.new_zeros(8),
            b_rows=None if c.b_rows is None else offs.new_zeros(8),
        )


def gemm_reason(a: Tensor, out: Tensor, rows: Tensor | None = None) -> backends.Reason:
    """Return why no dense kernel computes ``out`` from ``a``, whatever their layout, or None."""
    reason = dense_reason(a, out, rows)
    return "does not take K = 0" if reason is None and a.shape[1] == 0 and out.numel() else reason


def gathered(on: Tensor, **indices: Tensor | None) -> str | None:
    """Return the operand whose rows the kernel gathers; None if there is none, or no such kernel on the device.

    Args:
        on: an operand, for the device.
        indices: index of each operand. A kernel takes one: the first that is not None.
    """
    for operand, index in indices.items():
        if index is not None:
            arch = serving(backends.device_arch(on.device))
            return operand if arch is not None and arch.gathers else None
    return None


def kernel_of(key: Any, plain: str, gathering: str) -> tuple[Callable, tuple]:
    """Return the kernel class for ``key``, and stand-ins for the additional arguments of gathering kernels.

    Args:
        key: of any GEMM.
        plain, gathering: names of the classes.
    """
    from ..runtime.compiling import strided

    arch = arch_of(key.arch)
    if key.gathered is None:
        return arch.kernel(plain), ()
    return functools.partial(arch.kernel(gathering), gathered=key.gathered), (strided("int32"),)


def given(*indices: Tensor | None) -> tuple[Tensor, ...]:
    """Return the index of a call that has one, an argument that only gathering kernels have."""
    return tuple(index for index in indices if index is not None)


def rows_of(c: WgradCall) -> int:
    """Return T, the number of rows."""
    rows: int = (c.a if c.a_rows is None else c.a_rows).shape[0]
    return rows


def groups_of(matrices: Tensor, slots: Tensor | None) -> int:
    """Return the number of groups."""
    return matrices.shape[0] if slots is None else slots.shape[0]


def clear(out: Tensor, slots: Tensor | None) -> None:
    """Zero the matrices of all groups."""
    if slots is None:
        out.zero_()
    else:
        scatter(out, slots, out.new_zeros(slots.shape[0], *out.shape[1:]))


def build(key: GemmKey) -> Callable:
    """Compile the kernel for ``key``. Needs no GPU."""
    import cutlass

    from ..runtime.compiling import compiled, matrix, strided
    from ..runtime.elements import TYPES

    kernel, index = kernel_of(key, "GroupedGemm", "GatheredGroupedGemm")
    out_dims, b_dims = (2, 3) if key.kind == VARLEN_M else (3, 2)
    return compiled(
        key.arch,
        kernel(key.kind, key.config, key.spec, TYPES[key.element]),
        matrix(key.element),
        matrix(key.element, b_dims, unit=key.b_unit),
        strided("int32"),
        matrix(key.spec.out, out_dims),
        strided(key.spec.bias, 2),
        strided(key.spec.bias_scale),
        strided("int32") if key.slots else None,
        strided("int32") if key.begins else None,
        *index,
        cutlass.Int32(1),
    )


GROUPED_GEMM = GemmLauncher()
GROUPED_GEMM_WGRAD = WgradLauncher("grouped_gemm_wgrad", accumulate=False)
GROUPED_GEMM_WGRAD_ACCUMULATE = WgradLauncher("grouped_gemm_wgrad_accumulate_", accumulate=True)
LAUNCHERS = (GROUPED_GEMM, GROUPED_GEMM_WGRAD, GROUPED_GEMM_WGRAD_ACCUMULATE)
