"""Sums over the rows of groups, and group offsets from group sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import backends
from ...meta.memory import address
from ..archs import arch_of
from ..runtime import device
from ..runtime.launcher import Call, Launcher, Plan, warm
from ..runtime.names import name

LOAD_BYTES = 16
LANES = 32
ROWS = 256  # fewest rows of a tile
RING_ROWS = 4096  # fewest rows for a ring: a warp with fewer holds them all in registers
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)


class DbiasTiling(NamedTuple):
    """Tiling of a bias sum: the rows and columns that its warps read, as arguments of ``DbiasKernel``."""

    vector: int
    across: int
    slots: int = 0

    def tiles(self, rows: int, columns: int, multiprocessors: int) -> int:
        """Return as many tiles as multiprocessors hold blocks, with at least ``ROWS`` rows each; at least one."""
        strips = -(-columns // (self.across * self.vector))
        return min(max(multiprocessors * (1 if self.slots else 2) // strips, 1), -(-rows // ROWS))


class ReduceKey(NamedTuple):
    """Key of a compiled kernel."""

    arch: str
    emulated: bool
    element: str
    cut: DbiasTiling | None = None
    bias: str | None = None
    bias_scale: str | None = None


class DbiasCall(NamedTuple):
    """Arguments of ``grouped_dbias``."""

    dy: Tensor
    offs: Tensor
    out: Tensor


class DbiasDscalesCall(NamedTuple):
    """Arguments of ``grouped_dbias_dscales``."""

    dy: Tensor
    bias: Tensor
    bias_scale: Tensor
    offs: Tensor
    dbias: Tensor
    dscales: Tensor


class OffsetsCall(NamedTuple):
    """Arguments of ``splits_to_offsets``."""

    m_splits: Tensor
    out: Tensor


class RowSumsLauncher(Launcher[Call]):
    """Launcher of sums over rows, with two partial sums per tile for groups that span several tiles."""

    def reject_reason(self, c: Any) -> backends.Reason:
        """Return why the kernel does not take the dtypes, or None."""
        reason = device.packages_reason()
        if reason is None and c.dy.dtype not in FLOATS:
            reason = f"takes float32, bfloat16 and float16, got {c.dy.dtype}"
        return reason

    def build(self, key: ReduceKey) -> Callable:
        """Compile the kernel for ``key``."""
        return build(key)

    def partial(self, plan: Plan, dy: Tensor, dbias: Tensor) -> Tensor:
        """Return the buffer for partial sums."""
        rows, columns = dy.shape
        return dbias.new_empty(2 * plan.key.cut.tiles(rows, columns, device.multiprocessors(dy.device)), columns)


class DbiasLauncher(RowSumsLauncher[DbiasCall]):
    """``out[g] = sum of dy[t]`` over the rows ``t`` of every group ``g``."""

    op = "grouped_dbias"
    call = DbiasCall

    def plan_key(self, c: DbiasCall) -> tuple | None:
        """Return the plan key; of the sizes, it has only whether rows are many and whether there are groups."""
        dy, _, out = c
        rows, strides = dy.shape[0], dy.stride()
        if not warm(rows, dy.data_ptr()) or 0 in strides:
            return None
        return dy.dtype, out.numel() > 0, out.shape[1], strides, rows >= RING_ROWS

    def is_empty(self, c: DbiasCall) -> bool:
        """Return whether there are no columns, groups or rows."""
        return c.out.numel() == 0 or c.dy.shape[0] == 0

    def zero_outputs(self, c: DbiasCall) -> None:
        """Write zeros, the sums over no rows."""
        c.out.zero_()

    def key(self, c: DbiasCall, arch: str) -> ReduceKey:
        """Return the key; how rows are read follows from their width and number."""
        return ReduceKey(arch, not c.dy.is_cuda, name(c.dy), cut_of(arch, c.dy, None))

    def arguments(self, c: DbiasCall) -> tuple:
        """Return the arguments of the kernel except the buffer for partial sums."""
        return c.dy, c.offs, c.out

    def start(self, plan: Plan, c: DbiasCall) -> None:
        """Launch."""
        plan.launch(c.dy, c.offs, c.out, self.partial(plan, c.dy, c.out), None, None, None)

    def warmup_call(self, c: DbiasCall) -> DbiasCall:
        """Return the warm-up call: one row in no group, with columns that every kernel can load."""
        offs = torch.zeros(1, dtype=torch.int32, device=c.dy.device)
        return DbiasCall(c.dy.new_zeros(1, LOAD_BYTES), offs, c.out.new_zeros(1, LOAD_BYTES, device=c.dy.device))


class DbiasDscalesLauncher(RowSumsLauncher[DbiasDscalesCall]):
    """``dbias[g] = sum of bias_scale[t] dy[t]`` and ``dscales[t] = dy[t] . bias[g]``."""

    op = "grouped_dbias_dscales"
    call = DbiasDscalesCall

    def plan_key(self, c: DbiasDscalesCall) -> tuple | None:
        """Return the plan key, which does not depend on the number of rows."""
        dy, bias, bias_scale, _, dbias, _ = c
        strides = (dy.stride(), bias.stride())
        if not warm(dy.shape[0], dy.data_ptr() | bias.data_ptr()) or 0 in strides[0] or 0 in strides[1]:
            return None
        return dy.dtype, bias.dtype, bias_scale.dtype, dbias.shape, strides

    def is_empty(self, c: DbiasDscalesCall) -> bool:
        """Return whether there are no columns, groups or rows."""
        return c.dbias.numel() == 0 or c.dy.shape[0] == 0

    def zero_outputs(self, c: DbiasDscalesCall) -> None:
        """Write zeros, the sums over no rows, and zero rows that belong to no group."""
        c.dbias.zero_()
        c.dscales.zero_()

    def key(self, c: DbiasDscalesCall, arch: str) -> ReduceKey:
        """Return the key; how rows are read follows from their width."""
        return ReduceKey(
            arch, not c.dy.is_cuda, name(c.dy), cut_of(arch, c.dy, c.bias), name(c.bias), name(c.bias_scale)
        )

    def arguments(self, c: DbiasDscalesCall) -> tuple:
        """Return the arguments of the kernel except the buffer for partial sums."""
        return c.dy, c.offs, c.dbias, c.bias, c.bias_scale, c.dscales

    def start(self, plan: Plan, c: DbiasDscalesCall) -> None:
        """Launch."""
        partial = self.partial(plan, c.dy, c.dbias)
        plan.launch(c.dy, c.offs, c.dbias, partial, c.bias, c.bias_scale, c.dscales)

    def warmup_call(self, c: DbiasDscalesCall) -> DbiasDscalesCall:
        """Return the warm-up call: one row in no group, with columns that every kernel can load."""
        where = c.dy.device
        return DbiasDscalesCall(
            c.dy.new_zeros(1, LOAD_BYTES),
            c.bias.new_zeros(1, LOAD_BYTES),
            c.bias_scale.new_zeros(1),
            torch.zeros(1, dtype=torch.int32, device=where),
            c.dbias.new_zeros(1, LOAD_BYTES, device=where),
            c.dscales.new_zeros(1, device=where),
        )


class SplitsToOffsetsLauncher(Launcher[OffsetsCall]):
    """``out[g] = m_splits[0] + ... + m_splits[g]``."""

    op = "splits_to_offsets"
    call = OffsetsCall

    def reject_reason(self, c: OffsetsCall) -> backends.Reason:
        """Return why the kernel does not take the dtypes, or None."""
        reason = device.packages_reason()
        if reason is None and c.m_splits.dtype not in INTEGERS:
            reason = f"takes {', '.join(map(str, INTEGERS))}, got {c.m_splits.dtype}"
        return reason

    def plan_key(self, c: OffsetsCall) -> tuple | None:
        """Return the plan key, the dtype; the kernel reads elements one by one."""
        return (c.m_splits.dtype,) if c.out.numel() else None

    def is_empty(self, c: OffsetsCall) -> bool:
        """Return whether there are no groups."""
        return c.out.numel() == 0

    def key(self, c: OffsetsCall, arch: str) -> ReduceKey:
        """Return the key, which holds the dtype."""
        return ReduceKey(arch, not c.m_splits.is_cuda, name(c.m_splits))

    def build(self, key: ReduceKey) -> Callable:
        """Compile the kernel for ``key``."""
        return build(key)

    def arguments(self, c: OffsetsCall) -> tuple:
        """Return the arguments of the kernel."""
        return c

    def warmup_call(self, c: OffsetsCall) -> OffsetsCall:
        """Return the warm-up call: one group without rows."""
        return OffsetsCall(c.m_splits.new_zeros(1), c.out.new_zeros(1, device=c.m_splits.device))


def _vector(dy: Tensor) -> int:
    """Return the elements per load, up to 16 bytes, that divide row, row pitch and address of ``dy``."""
    if dy.stride(1) != 1:
        return 1
    vector = LOAD_BYTES // dy.element_size()
    while dy.shape[1] % vector or dy.stride(0) % vector or address(dy) % (vector * dy.element_size()):
        vector //= 2
    return vector


def cut_of(arch: str, dy: Tensor, bias: Tensor | None) -> DbiasTiling:
    """Return how to read ``dy``, and ``bias`` if there is one, as measured on an H200.

    A ring needs bulk copies, and the gradient of the scales needs more warps than fit with one.
    """
    rows, columns = dy.shape
    vector = _vector(dy)
    if bias is not None:
        vector = min(vector, _vector(bias))
    elif (
        arch_of(arch).bulk_copies
        and rows >= RING_ROWS
        and vector * dy.element_size() == LOAD_BYTES
        and columns >= LANES * vector
    ):
        return DbiasTiling(vector, LANES, 6 if columns <= 8 * LANES * vector else 4)
    return DbiasTiling(vector, 16 if columns >= 128 * vector else 8)


def build(key: ReduceKey) -> Callable:
    """Compile the kernel for ``key``. Needs no GPU."""
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_tensor

    from ..reduce.dbias import DbiasKernel
    from ..reduce.offsets import SplitsToOffsetsKernel
    from ..runtime.compiling import compiled
    from ..runtime.elements import TYPES

    groups = cute.sym_int32()
    ends = make_fake_compact_tensor(TYPES["int32"], (groups,))
    if key.cut is None:
        sizes = make_fake_tensor(TYPES[key.element], (groups,), (cute.sym_int64(),))
        return compiled(key.arch, SplitsToOffsetsKernel(), sizes, ends)
    vector = key.cut.vector
    rows, columns = cute.sym_int32(), cute.sym_int32(divisibility=vector)

    def matrix(element: Any, height: Any) -> Any:
        """Return a stand-in read by vectors along its rows, or element by element in any layout."""
        strides = (cute.sym_int64(divisibility=vector), 1) if vector > 1 else (cute.sym_int64(), cute.sym_int64())
        return make_fake_tensor(element, (height, columns), strides, assumed_align=vector * element.width // 8)

    out = make_fake_compact_tensor(TYPES["float32"], (groups, columns), stride_order=(1, 0))
    partial = make_fake_compact_tensor(TYPES["float32"], (cute.sym_int32(), columns), stride_order=(1, 0))
    bias = scale = dscales = None
    if key.bias is not None and key.bias_scale is not None:
        bias = matrix(TYPES[key.bias], groups)
        scale = make_fake_tensor(TYPES[key.bias_scale], (rows,), (cute.sym_int64(),))
        dscales = make_fake_compact_tensor(TYPES["float32"], (rows,))
    dy = matrix(TYPES[key.element], rows)
    return compiled(key.arch, DbiasKernel(*key.cut), dy, ends, out, partial, bias, scale, dscales)


GROUPED_DBIAS = DbiasLauncher()
GROUPED_DBIAS_DSCALES = DbiasDscalesLauncher()
SPLITS_TO_OFFSETS = SplitsToOffsetsLauncher()
LAUNCHERS = (GROUPED_DBIAS, GROUPED_DBIAS_DSCALES, SPLITS_TO_OFFSETS)
