"""How a CPU forms the products of groups: in batches, in ATen's loop, or in ours.

ATen's ``grouped_mm`` is the same ``mm`` per group as our loop, at a third of what a turn costs in Python. It takes
fewer layouts, trusts ``offs``, leaves the tail uninitialised and pads the rows of some results.

What is decided here is remembered, for the reason given in ``meta/remembered.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from .. import backends
from ..meta.remembered import LIMIT, RememberedSpec, remembered
from ..meta.specs import TensorSpec
from . import _batched_cpu
from ._segments import native_matmul, sizes_of

NOTE = "small bfloat16 groups in batches; the loop of torch.nn.functional.grouped_mm where that takes the operands"
ALIGNMENT = 16  # bytes, of what ATen's loop takes


class Ways(NamedTuple):
    """What the metadata of operands permit, and what they say about the product.

    Attributes:
        rows: that are grouped.
        k, n: sides of a matrix.
        direct: torch.mm or torch.addmm of the operands as they are computes a group and rounds once.
        batches: the groups may be put into batches.
        aten: ATen's loop takes them, if they are aligned and in order.
    """

    rows: int
    k: int
    n: int
    direct: bool = False
    batches: bool = False
    aten: bool = False


@remembered
def ways(
    a: Tensor, b: Tensor, bias: Tensor | None = None, *, columns: int, dtype: torch.dtype, scaled: bool = False
) -> Ways:
    """The ways to form a product with that many columns in ``dtype``.

    Args:
        a, b: the operands of ``grouped_mm`` or their transposes; ``a`` has the rows that are grouped.
        bias: added to the result, times a scale per row if ``scaled``.
        columns, dtype: of the result.
    """
    rows, k = a.shape
    direct = dtype == a.dtype and native_matmul(a) and not scaled and (bias is None or bias.dtype == dtype)
    if not direct:
        return Ways(rows, k, columns)
    by_rows = a.stride(1) == 1 and (b.ndim == 3 or b.stride(1) == 1)
    batches = a.dtype == torch.bfloat16 and a.device.type == "cpu" and by_rows
    whole_units = columns * a.dtype.itemsize % ALIGNMENT == 0
    takes = bias is None and a.dtype in (torch.float32, torch.bfloat16) and whole_units and _regular(a) and _regular(b)
    return Ways(rows, k, columns, True, batches, takes)


def ways_to(spec: TensorSpec, a: Tensor, b: Tensor, bias: Tensor | None = None, *, scaled: bool = False) -> Ways:
    """``ways`` to produce what ``spec`` describes; the next time they are in ``spec.kept``, if it is remembered."""
    found = ways(a, b, bias, columns=spec.shape[-1], dtype=spec.dtype, scaled=scaled)
    if isinstance(spec, RememberedSpec):
        spec.kept = found
    return found


def _regular(t: Tensor) -> bool:
    """Not empty, row- or column-major without overlap, every row and matrix on 16 bytes if the first one is."""
    if not t.numel():
        return False
    *outer, row, column = t.stride()
    rows, columns = t.shape[-2:]
    pitch, width = (row, columns) if column == 1 else (column, rows)
    if (column != 1 and row != 1) or pitch < width:
        return False
    step = ALIGNMENT // t.element_size()
    return not pitch % step and not any(stride % step for stride in outer)


class Work(NamedTuple):
    """What the values of ``offs`` ask for.

    Attributes:
        sizes: of the groups and, last, of the tail.
        batches: groups that are better taken together, see ``_batched_cpu``.
        in_aten: ATen's loop does it, given aligned operands: ``offs`` neither descends nor leaves the rows, and
            there is nothing to be batched. The results are those of our loop but for the tail.
    """

    sizes: tuple[int, ...]
    batches: _batched_cpu.Batches
    in_aten: bool


@functools.lru_cache(maxsize=64)  # the products of a layer ask alike
def work(ends: tuple[int, ...], ways: Ways) -> Work:
    """For what ``offs`` holds."""
    sizes = sizes_of(ends, ways.rows)
    batches = _batched_cpu.plan(sizes, min(ways.k, ways.n), max(ways.k, ways.n))[1] if ways.batches else ()
    # Clamped or emptied sizes are not the differences of the ends.
    in_order = tuple(accumulate(sizes[:-1])) == ends
    return Work(sizes, batches, ways.aten and in_order and not batches)


class Direct:
    """The calls of an op that ATen's loop may take, from one look-up to that loop.

    The way through checks, registry and implementation, remembered as it is, is three more functions and another
    look-up: 3 of the 18 us that a call spends in Python where it finds the caches cold. ``remembered`` in place of the
    table of its own would be one function more, and gives most of that back.

    Args:
        implementation: whose calls they are.
        check: makes the spec of such a call from ``a``, ``b``, ``offs`` and ``out_dtype``.

    Attributes:
        active: whether the implementation is the first to be asked for tensors of a CPU.
    """

    def __init__(self, implementation: backends.Implementation, check: Callable[..., TensorSpec]) -> None:
        self._implementation, self._check = implementation, check
        self._known: dict[tuple, Ways] = {}
        backends.on_change(self._refresh)
        self._refresh()

    def _refresh(self) -> None:
        self.active = backends.first(self._implementation.op, torch.device("cpu")) is self._implementation

    def work(self, a: Tensor, b: Tensor, offs: Tensor, out_dtype: torch.dtype | None) -> Work | None:
        """What ``offs`` asks for, if ATen's loop is to do it. Raises what ``check`` does."""
        key = (
            *a.shape, *a.stride(), a.dtype, a.device, *b.shape, *b.stride(), b.dtype, b.device,
            *offs.shape, *offs.stride(), offs.dtype, offs.device, out_dtype,
        )  # fmt: skip
        found = self._known.get(key)
        if found is None:
            spec = self._check(a, b, offs, out_dtype=out_dtype)
            if len(self._known) >= LIMIT:
                self._known.clear()
            found = self._known[key] = ways(a, b, columns=spec.shape[-1], dtype=spec.dtype)
        if not found.aten or (a.data_ptr() | b.data_ptr()) % ALIGNMENT:
            return None
        asked = work(tuple(offs.tolist()), found)
        return asked if asked.in_aten else None
