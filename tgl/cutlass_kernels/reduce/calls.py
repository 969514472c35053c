"""From tensors to a launch of a reduction kernel; the counterpart of ``launch`` for the GEMMs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import backends
from .. import host, plans

LOAD_BYTES = 16
LANES = 32
MULTIPROCESSORS = 132  # of an H200
ROWS = 256  # of a tile, at least
RING_ROWS = 4096  # for a ring, at least: where a warp has a few rows, registers hold them all
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)


class Cut(NamedTuple):
    """How a bias sum's warps read rows: the arguments of ``GroupedDbias``."""

    vector: int
    across: int
    slots: int = 0


class ReduceKey(NamedTuple):
    """What a compiled kernel depends on."""

    op: str
    arch: str
    emulated: bool
    element: str
    cut: Cut | None = None
    bias: str | None = None
    bias_scale: str | None = None


class SumPlan(NamedTuple):
    """What launches a kernel for sums over rows, and into how many tiles it cuts them at most."""

    launch: Callable[..., None]
    most_tiles: int

    def tiles(self, rows: int) -> int:
        """As many tiles as multiprocessors hold blocks, but none of few rows; there are some."""
        return min(self.most_tiles, -(-rows // ROWS))

    def run(
        self,
        dy: Tensor,
        offs: Tensor,
        dbias: Tensor,
        bias: Tensor | None = None,
        bias_scale: Tensor | None = None,
        dscales: Tensor | None = None,
    ) -> None:
        """Launch, with room for the sums of groups that lie in several tiles: two for each tile."""
        rows, columns = dy.shape
        partial = dbias.new_empty(2 * self.tiles(rows), columns)
        self.launch(dy, offs, dbias, partial, bias, bias_scale, dscales)


_plans: dict[tuple, Callable] = {}


def grouped_dbias_supports(dy: Tensor, offs: Tensor, *, out: Tensor) -> str | None:
    """Why ``grouped_dbias`` below cannot serve a call, or None."""
    reason = host.packages_reason()
    if reason is not None:
        return reason
    if dy.dtype not in FLOATS:
        return f"takes float32, bfloat16 and float16, got {dy.dtype}"
    return None


def grouped_dbias(dy: Tensor, offs: Tensor, *, out: Tensor) -> None:
    """``out[g] = sum of dy[t]`` over the rows ``t`` of every group ``g``."""
    if out.numel() == 0:
        return
    if dy.shape[0] == 0:
        out.zero_()
        return
    _sum_plan(dy).run(dy, offs, out)


def attempt_grouped_dbias(dy: Tensor, offs: Tensor, *, out: Tensor) -> str | None:
    """``grouped_dbias`` if it can serve the call, else why not; one look-up for a call like one before."""
    rows, strides = dy.shape[0], dy.stride()
    key = ("grouped_dbias", backends.emulated_arch, dy.device, dy.dtype, out.shape, strides, rows >= RING_ROWS)
    plan = plans.known(key, rows, dy.data_ptr())
    if plan is not None:
        plan.run(dy, offs, out)
        return None
    reason = grouped_dbias_supports(dy, offs, out=out)
    if reason is None:
        grouped_dbias(dy, offs, out=out)
        if out.numel() and rows and not dy.data_ptr() % host.ALIGNMENT:
            plans.remember(key, (strides,), _sum_plan(dy))
    return reason


def prepare_grouped_dbias(dy: Tensor, offs: Tensor, *, out: Tensor) -> None:
    """Compile and load what ``grouped_dbias`` with these arguments needs, by a launch on a scratch problem."""
    if out.numel() == 0 or dy.shape[0] == 0:
        return
    offs = torch.zeros(1, dtype=torch.int32, device=dy.device)
    result = torch.zeros(1, LOAD_BYTES, dtype=out.dtype, device=dy.device)
    _sum_plan(dy).run(dy.new_zeros(1, LOAD_BYTES), offs, result)  # columns that every kernel can load


def grouped_dbias_dscales_supports(
    dy: Tensor, bias: Tensor, bias_scale: Tensor, offs: Tensor, *, dbias: Tensor, dscales: Tensor
) -> str | None:
    """Why ``grouped_dbias_dscales`` below cannot serve a call, or None."""
    return grouped_dbias_supports(dy, offs, out=dbias)


def grouped_dbias_dscales(
    dy: Tensor, bias: Tensor, bias_scale: Tensor, offs: Tensor, *, dbias: Tensor, dscales: Tensor
) -> None:
    """``dbias[g] = sum of bias_scale[t] dy[t]`` and ``dscales[t] = dy[t] . bias[g]``."""
    if dbias.numel() == 0 or dy.shape[0] == 0:
        dbias.zero_()
        dscales.zero_()
        return
    _sum_plan(dy, bias, bias_scale).run(dy, offs, dbias, bias, bias_scale, dscales)


def attempt_grouped_dbias_dscales(
    dy: Tensor, bias: Tensor, bias_scale: Tensor, offs: Tensor, *, dbias: Tensor, dscales: Tensor
) -> str | None:
    """``grouped_dbias_dscales`` likewise."""
    rows, strides, dtypes = dy.shape[0], (dy.stride(), bias.stride()), (dy.dtype, bias.dtype, bias_scale.dtype)
    key = ("grouped_dbias_dscales", backends.emulated_arch, dy.device, dtypes, dbias.shape, strides)
    addresses = dy.data_ptr() | bias.data_ptr()
    plan = plans.known(key, rows, addresses)
    if plan is not None:
        plan.run(dy, offs, dbias, bias, bias_scale, dscales)
        return None
    reason = grouped_dbias_dscales_supports(dy, bias, bias_scale, offs, dbias=dbias, dscales=dscales)
    if reason is None:
        grouped_dbias_dscales(dy, bias, bias_scale, offs, dbias=dbias, dscales=dscales)
        if dbias.numel() and rows and not addresses % host.ALIGNMENT:
            plans.remember(key, strides, _sum_plan(dy, bias, bias_scale))
    return reason


def prepare_grouped_dbias_dscales(
    dy: Tensor, bias: Tensor, bias_scale: Tensor, offs: Tensor, *, dbias: Tensor, dscales: Tensor
) -> None:
    """Compile and load what ``grouped_dbias_dscales`` with these arguments needs, by a launch on a scratch problem."""
    if dbias.numel() == 0 or dy.shape[0] == 0:
        return
    offs = torch.zeros(1, dtype=torch.int32, device=dy.device)
    result = torch.zeros(1, LOAD_BYTES, dtype=dbias.dtype, device=dy.device)
    dots = torch.zeros(1, dtype=dscales.dtype, device=dy.device)
    row, factor = bias.new_zeros(1, LOAD_BYTES), bias_scale.new_zeros(1)
    _sum_plan(dy, bias, bias_scale).run(dy.new_zeros(1, LOAD_BYTES), offs, result, row, factor, dots)


def _sum_plan(dy: Tensor, bias: Tensor | None = None, bias_scale: Tensor | None = None) -> SumPlan:
    cut = _cut(dy, bias)
    dtypes = (dy.dtype, host.dtype(bias), host.dtype(bias_scale))
    key = ("grouped_dbias", backends.device_arch(dy.device), dy.device, dtypes, cut)
    launch = _plans.get(key)
    if launch is None:
        op = "grouped_dbias" if bias is None else "grouped_dbias_dscales"
        launch = _plans[key] = _make(op, dy, cut, *map(host.name, dtypes))
    strips = -(-dy.shape[1] // (cut.across * cut.vector))
    return SumPlan(launch, max(MULTIPROCESSORS * (1 if cut.slots else 2) // strips, 1))


def splits_to_offsets_supports(m_splits: Tensor, *, out: Tensor) -> str | None:
    """Why ``splits_to_offsets`` below cannot serve a call, or None."""
    reason = host.packages_reason()
    if reason is None and m_splits.dtype not in INTEGERS:
        reason = f"takes {', '.join(map(str, INTEGERS))}, got {m_splits.dtype}"
    return reason


def splits_to_offsets(m_splits: Tensor, *, out: Tensor) -> None:
    """``out[g] = m_splits[0] + ... + m_splits[g]``."""
    if out.numel() == 0:
        return
    _offsets_plan(m_splits)(m_splits, out)


def prepare_splits_to_offsets(m_splits: Tensor, *, out: Tensor) -> None:
    """Compile and load what ``splits_to_offsets`` with these arguments needs, by a launch on a scratch problem."""
    if out.numel():
        size = m_splits.new_zeros(1)
        _offsets_plan(m_splits)(size, torch.zeros(1, dtype=out.dtype, device=size.device))


def _offsets_plan(m_splits: Tensor) -> Callable:
    key = ("splits_to_offsets", backends.device_arch(m_splits.device), m_splits.device, m_splits.dtype)
    plan = _plans.get(key)
    if plan is None:
        plan = _plans[key] = _make("splits_to_offsets", m_splits, None, host.name(m_splits.dtype))
    return plan


def _vector(dy: Tensor) -> int:
    """Elements a load may take: what divides the row, the row pitch and the address of ``dy``, up to 16 bytes."""
    if dy.stride(1) != 1:
        return 1
    vector = LOAD_BYTES // dy.element_size()
    while dy.shape[1] % vector or dy.stride(0) % vector or dy.data_ptr() % (vector * dy.element_size()):
        vector //= 2
    return vector


def _cut(dy: Tensor, bias: Tensor | None) -> Cut:
    """How to read ``dy``, and ``bias`` if there is one, as measured on an H200 (``benchmarks/NOTES.md``).

    The gradient of the scales takes more warps than a ring has room for.
    """
    rows, columns = dy.shape
    vector = _vector(dy)
    if bias is not None:
        vector = min(vector, _vector(bias))
    elif rows >= RING_ROWS and vector * dy.element_size() == LOAD_BYTES and columns >= LANES * vector:
        return Cut(vector, LANES, 6 if columns <= 8 * LANES * vector else 4)
    return Cut(vector, 16 if columns >= 128 * vector else 8)


def _make(op: str, first: Tensor, cut: Cut | None, element: Any, bias: Any = None, bias_scale: Any = None) -> Callable:
    key = ReduceKey(op, backends.device_arch(first.device), not first.is_cuda, element, cut, bias, bias_scale)
    return host.launcher(host.compiled(op, key, first, lambda: build(key)))


def build(key: ReduceKey) -> Callable:
    """Compile the kernel for ``key``. Needs no GPU."""
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_tensor

    from ..compiling import compiled
    from ..elements import TYPES
    from .dbias import GroupedDbias
    from .offsets import SplitsToOffsets

    groups = cute.sym_int32()
    ends = make_fake_compact_tensor(TYPES["int32"], (groups,))
    if key.cut is None:
        sizes = make_fake_tensor(TYPES[key.element], (groups,), (cute.sym_int64(),))
        return compiled(key.arch, SplitsToOffsets(), sizes, ends)
    vector = key.cut.vector
    rows, columns = cute.sym_int32(), cute.sym_int32(divisibility=vector)

    def matrix(element: Any, height: Any) -> Any:
        """Read by vectors along its rows, or element by element in any layout."""
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
    return compiled(key.arch, GroupedDbias(*key.cut), dy, ends, out, partial, bias, scale, dscales)
