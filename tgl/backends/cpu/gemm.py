"""``grouped_gemm`` and ``grouped_gemm_wgrad`` on a CPU: in batches, in ATen's loop, or in ours.

ATen's ``grouped_mm`` is the same ``mm`` per group as our loop, at a third of the Python cost per group. It takes fewer
layouts, trusts ``offs``, leaves the tail uninitialised and pads the rows of some results.
"""

from __future__ import annotations

import functools
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ...meta.calls import GemmCall, taking
from ...meta.specs import TensorSpec
from ..portable import loops
from ..portable.segments import native_matmul, sizes_of
from . import batched as _batched_cpu
from .indexed import InScratch
from .scratch import Scratch

ALIGNMENT = 16  # bytes, required by ATen's loop


class ProductPaths(NamedTuple):
    """The paths that the metadata of the operands permit, and the sizes of the product.

    Attributes:
        rows: number of grouped rows.
        k, n: sides of a matrix.
        direct: torch.mm or torch.addmm of the unconverted operands computes a group and rounds once.
        batches: the groups may be put into batches.
        aten: ATen's loop takes the operands, if they are aligned and in order.
    """

    rows: int
    k: int
    n: int
    direct: bool = False
    batches: bool = False
    aten: bool = False

    @property
    def one_by_one(self) -> ProductPaths:
        """Return the paths for matrices that do not lie in the order of the groups."""
        return self._replace(batches=False, aten=False)

    def of_index(self, rows: int) -> ProductPaths:
        """Return the paths for that many rows by an index, which ATen's loop does not take."""
        return self._replace(rows=rows, aten=False)


def product_paths(
    a: Tensor, b: Tensor, bias: Tensor | None = None, *, columns: int, dtype: torch.dtype, scaled: bool = False
) -> ProductPaths:
    """Return the paths that can form a product with that many columns in ``dtype``.

    Args:
        a, b: the operands of ``grouped_mm`` or their transposes; ``a`` has the rows that are grouped.
        bias: added to the result, times a scale per row if ``scaled``.
        columns, dtype: those of the result.
    """
    rows, k = a.shape
    direct = dtype == a.dtype and native_matmul(a) and not scaled and (bias is None or bias.dtype == dtype)
    if not direct:
        return ProductPaths(rows, k, columns)
    by_rows = a.stride(1) == 1 and (b.ndim == 3 or b.stride(1) == 1)
    batches = a.dtype == torch.bfloat16 and a.device.type == "cpu" and by_rows
    whole_units = columns * a.dtype.itemsize % ALIGNMENT == 0
    takes = bias is None and a.dtype in (torch.float32, torch.bfloat16) and whole_units and _regular(a) and _regular(b)
    return ProductPaths(rows, k, columns, True, batches, takes)


def _regular(t: Tensor) -> bool:
    """Return whether ``t`` is row- or column-major, not empty, without overlap, and 16-byte aligned if its start is."""
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
    """The work that the values of ``offs`` require.

    Attributes:
        sizes: sizes of the groups and, last, of the tail.
        batches: groups that are faster in batches, see ``_batched_cpu``.
        in_aten: ATen's loop serves it, given aligned operands: ``offs`` neither descends nor leaves the rows, and
            there is nothing to be batched. The results are those of our loop but for the tail.
    """

    sizes: tuple[int, ...]
    batches: _batched_cpu.Batches
    in_aten: bool


@functools.lru_cache(maxsize=64)  # repeated by the products of a layer
def work(ends: tuple[int, ...], paths: ProductPaths) -> Work:
    """Return the work for the values of ``offs``."""
    sizes = sizes_of(ends, paths.rows)
    batches = _batched_cpu.plan(sizes, min(paths.k, paths.n), max(paths.k, paths.n))[1] if paths.batches else ()
    # Sizes that were clamped or emptied are not the differences of the ends.
    in_order = tuple(accumulate(sizes[:-1])) == ends
    return Work(sizes, batches, paths.aten and in_order and not batches)


def form_products(call: GemmCall) -> None:
    """Form one product per group (small ones in batches), with float32 accumulation and one rounding."""
    if call.begin is not None:
        call = call.from_begin(call.begin)
    a, b, offs, bias, bias_scale, out, _, slots, rows, *_ = call
    paths = product_paths(a, b, bias, columns=out.shape[1], dtype=out.dtype, scaled=bias_scale is not None)
    if slots is not None:
        paths = paths.one_by_one
    if rows is None:
        _gemm(call, a, paths, work(tuple(offs.tolist()), paths))
        return
    scratch, paths = Scratch(), paths.of_index(rows.shape[0])
    grouped_work, (x,) = _indexed(offs, paths, scratch, (a, rows))
    _gemm(call, x, paths, grouped_work)
    scratch.keep()


grouped_gemm = taking(GemmCall, form_products)


def _indexed(
    offs: Tensor, paths: ProductPaths, scratch: Scratch, *operands: tuple[Tensor, Tensor | None]
) -> tuple[Work, list[Tensor | InScratch]]:
    """Return the ``work``, and the operands by their indices, in memory of ``scratch``."""
    grouped_work = work(tuple(offs.tolist()), paths)
    indexed_operands: list[Tensor | InScratch] = []
    for place, (t, index) in enumerate(operands):
        if index is None:
            indexed_operands.append(t)
            continue
        rows = InScratch(t, index, paths.rows - grouped_work.sizes[-1], scratch, f"rows of operand {place}")
        indexed_operands.append(rows)
        if not rows.within:
            grouped_work = grouped_work._replace(batches=())  # batches would read some row for missing ones
    return grouped_work, indexed_operands


def produce_grouped_gemm(
    spec: TensorSpec, operands: list, *, zero_tail: bool, slots: Tensor | None = None, rows: Tensor | None = None
) -> Tensor:
    """Run ``grouped_gemm`` into new memory: by ATen's loop if it takes the operands and nothing is batched."""
    a, b, offs, bias, bias_scale = operands
    if slots is not None or rows is not None:
        out = spec.empty()
        form_products(GemmCall(a, b, offs, bias, bias_scale, out, zero_tail, slots, rows))
        return out
    paths = product_paths(a, b, bias, columns=b.shape[2], dtype=spec.dtype, scaled=bias_scale is not None)
    grouped_work = work(tuple(offs.tolist()), paths)
    if grouped_work.in_aten and not (a.data_ptr() | b.data_ptr()) % ALIGNMENT:
        out = torch.nn.functional.grouped_mm(a, b, offs=offs)
        if zero_tail and grouped_work.sizes[-1]:
            out[-grouped_work.sizes[-1] :].zero_()
        return out
    out = spec.empty()
    _gemm(GemmCall(a, b, offs, bias, bias_scale, out, zero_tail), a, paths, grouped_work)
    return out


def _gemm(call: GemmCall, a: Tensor | InScratch, paths: ProductPaths, work: Work) -> None:
    done = _batched_cpu.gemm(a, call.b, work.sizes, work.batches, call.bias, call.out) if work.batches else ()
    loops.gemm(call, a, work.sizes, direct=paths.direct, done=done)


def grouped_gemm_wgrad(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    *,
    out: Tensor,
    slots: Tensor | None = None,
    a_rows: Tensor | None = None,
    b_rows: Tensor | None = None,
) -> None:
    """Form one product per group (small ones in batches); an empty group's slot is zeroed."""
    paths = product_paths(a, b, columns=b.shape[1], dtype=out.dtype)
    if slots is not None:
        paths = paths.one_by_one
    if a_rows is None and b_rows is None:
        _wgrad(a, b, paths, work(tuple(offs.tolist()), paths), out, slots)
        return
    scratch, paths = Scratch(), paths.of_index((a if a_rows is None else a_rows).shape[0])
    grouped_work, (x, y) = _indexed(offs, paths, scratch, (a, a_rows), (b, b_rows))
    _wgrad(x, y, paths, grouped_work, out, slots)
    scratch.keep()


def grouped_gemm_wgrad_accumulate(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    *,
    out: Tensor,
    slots: Tensor | None = None,
    a_rows: Tensor | None = None,
    b_rows: Tensor | None = None,
) -> None:
    """Add every group's product to its slot; an empty group's slot is not touched."""
    if a_rows is None and b_rows is None:
        loops.grouped_gemm_wgrad_accumulate(a, b, offs, out=out, slots=slots)
        return
    scratch, rows = Scratch(), (a if a_rows is None else a_rows).shape[0]
    grouped_work, (x, y) = _indexed(offs, ProductPaths(rows, a.shape[1], b.shape[1]), scratch, (a, a_rows), (b, b_rows))
    loops.accumulate(x, y, grouped_work.sizes, out, slots)
    scratch.keep()


def produce_grouped_gemm_wgrad(
    spec: TensorSpec, operands: list, *, a_rows: Tensor | None = None, b_rows: Tensor | None = None
) -> Tensor:
    """Run ``grouped_gemm_wgrad`` into new memory: by ATen's loop under the same conditions."""
    a, b, offs = operands
    if a_rows is not None or b_rows is not None:
        out = spec.empty()
        grouped_gemm_wgrad(a, b, offs, out=out, a_rows=a_rows, b_rows=b_rows)
        return out
    paths = product_paths(a, b, columns=b.shape[1], dtype=spec.dtype)
    grouped_work = work(tuple(offs.tolist()), paths)
    if grouped_work.in_aten and not (a.data_ptr() | b.data_ptr()) % ALIGNMENT:
        return torch.nn.functional.grouped_mm(a.t(), b, offs=offs)
    out = spec.empty()
    _wgrad(a, b, paths, grouped_work, out)
    return out


def _wgrad(
    a: Tensor | InScratch,
    b: Tensor | InScratch,
    paths: ProductPaths,
    work: Work,
    out: Tensor,
    slots: Tensor | None = None,
) -> None:
    done = _batched_cpu.wgrad(a, b, work.sizes, work.batches, out) if work.batches else ()
    loops.wgrad(a, b, work.sizes, out, direct=paths.direct, slots=slots, done=done)
