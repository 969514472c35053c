"""One step of ATen per group, on any device. The sizes of the groups are read on the host from ``offs``."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from ...meta import specs
from ...meta.calls import GemmCall, taking
from ...meta.memory import in_lines
from ...meta.slots import on_host
from .indexed import Indexed, indexed, split, split_transposed
from .segments import below_autograd, native_matmul, segment_sizes


def rounds_once(a: Tensor, bias: Tensor | None, bias_scale: Tensor | None, dtype: torch.dtype) -> bool:
    """Return whether torch.mm or torch.addmm of the unconverted operands rounds a group once to ``dtype``."""
    plain = bias_scale is None and (bias is None or bias.dtype == dtype)
    return plain and dtype == a.dtype and native_matmul(a)


def form_products(call: GemmCall) -> None:
    """Form one matrix product per group, accumulated in float32 and rounded once."""
    if call.begin is not None:
        call = call.from_begin(call.begin)
    sizes = segment_sizes(call.offs, call.out.shape[0])
    direct = rounds_once(call.a, call.bias, call.bias_scale, call.out.dtype)
    gemm(call, indexed(call.a, call.rows), sizes, direct=direct)


grouped_gemm = taking(GemmCall, form_products)


def gemm(
    call: GemmCall, a: Tensor | Indexed, sizes: tuple[int, ...], *, direct: bool, done: Collection[int] = ()
) -> None:
    """Run ``grouped_gemm`` for groups of those sizes (the last is the tail's), except those that are ``done``.

    ``a`` has the rows in groups, and ``direct`` is the result of ``rounds_once``.
    """
    b, bias, slots, out = call.b, call.bias, call.slots, call.out
    if call.zero_tail and sizes[-1]:
        out[out.shape[0] - sizes[-1] :].zero_()
    if len(done) == len(sizes) - 1:
        return
    if not direct:  # a wider copy keeps the order of odd strides, which would change the order of sums
        a, b = in_lines(a) if isinstance(a, Tensor) else a, in_lines(b)
    with below_autograd():
        matrices = b.unbind() if slots is None else _at(b, slots)
        a_parts = split(a, sizes, done)
        *out_parts, _ = torch.split_with_sizes(out, sizes)  # Tensor.split is Python and costs twice as much
        if not direct:
            _widened(a_parts, matrices, sizes, bias, call.bias_scale, out_parts)
        elif bias is None:
            for g, (x, w, y) in enumerate(zip(a_parts, matrices, out_parts)):
                if sizes[g] and g not in done:
                    torch.mm(x, w, out=y)
        else:
            for g, (x, w, y, row) in enumerate(zip(a_parts, matrices, out_parts, bias.unbind())):
                if sizes[g] and g not in done:
                    torch.addmm(row, x, w, out=y)


def _at(b: Tensor, slots: Tensor) -> list[Tensor]:
    """Return the matrix of every group; zeros for a slot out of range."""
    found = on_host(b, slots)
    return [b.new_zeros(b.shape[1:]) if w is None else w for w in found]


def _widened(
    a_parts: Iterable[Tensor],
    matrices: Sequence[Tensor],
    sizes: tuple[int, ...],
    bias: Tensor | None,
    bias_scale: Tensor | None,
    out_parts: list[Tensor],
) -> None:
    """Form products of operands in the accumulator's dtype, where torch.mm cannot round once."""
    acc = specs.accumulator(matrices[0].dtype)
    scales = bias_scale.split(sizes) if bias_scale is not None else None
    for g, (x, w, y) in enumerate(zip(a_parts, matrices, out_parts)):
        if not x.shape[0]:
            continue
        x, w = x.to(acc), w.to(acc)
        if bias is None:
            value = torch.mm(x, w)
        elif scales is None:
            value = torch.addmm(bias[g].to(acc), x, w)
        else:
            value = torch.addmm(torch.outer(scales[g].to(acc), bias[g].to(acc)), x, w)
        y.copy_(value)


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
    """Form one matrix product per group; an empty group's slot is zeroed."""
    direct = rounds_once(a, None, None, out.dtype)
    x, y = indexed(a, a_rows), indexed(b, b_rows)
    wgrad(x, y, segment_sizes(offs, x.shape[0]), out, direct=direct, slots=slots)


def wgrad(
    a: Tensor | Indexed,
    b: Tensor | Indexed,
    sizes: tuple[int, ...],
    out: Tensor,
    *,
    direct: bool,
    slots: Tensor | None = None,
    done: Collection[int] = (),
) -> None:
    """Run ``grouped_gemm_wgrad`` for groups of those sizes (the last is the tail's), except those that are ``done``."""
    if len(done) == len(sizes) - 1:
        return
    acc = specs.accumulator(a.dtype)
    if not direct and isinstance(b, Tensor):
        b = in_lines(b)
    with below_autograd():
        for g, (size, xt, y, slot) in enumerate(_parts(a, b, sizes, out, slots, done)):
            if slot is None:
                continue
            if not size:
                slot.zero_()
            elif g in done:
                continue
            elif direct:
                torch.mm(xt, y, out=slot)
            else:
                slot.copy_(torch.mm(xt.to(acc), y.to(acc)))


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
    """Add every group's product to its slot in the accumulator's dtype; an empty group's slot is not touched."""
    x, y = indexed(a, a_rows), indexed(b, b_rows)
    accumulate(x, y, segment_sizes(offs, x.shape[0]), out, slots)


def accumulate(
    a: Tensor | Indexed, b: Tensor | Indexed, sizes: tuple[int, ...], out: Tensor, slots: Tensor | None
) -> None:
    """Run ``grouped_gemm_wgrad_accumulate_`` for groups of those sizes (the last is the tail's)."""
    acc = specs.accumulator(a.dtype)
    b = in_lines(b) if isinstance(b, Tensor) else b
    with below_autograd():
        for size, xt, y, slot in _parts(a, b, sizes, out, slots):
            if not size or slot is None:
                continue
            if slot.dtype == acc:
                slot.addmm_(xt.to(acc), y.to(acc))
            else:
                slot.copy_(torch.addmm(slot.to(acc), xt.to(acc), y.to(acc)))


def _parts(
    a: Tensor | Indexed,
    b: Tensor | Indexed,
    sizes: tuple[int, ...],
    out: Tensor,
    slots: Tensor | None,
    done: Collection[int] = (),
) -> zip:
    """Return size, rows of ``a`` transposed, rows of ``b`` and slot, None if there is none, of every group."""
    places = out.unbind() if slots is None else on_host(out, slots)
    return zip(sizes, split_transposed(a, sizes, done), split(b, sizes, done), places)


def grouped_dbias(dy: Tensor, offs: Tensor, *, out: Tensor) -> None:
    """Form one sum over rows per group."""
    if not dy.is_contiguous():
        dy = in_lines(dy)
    for rows, total in zip(dy.split(segment_sizes(offs, dy.shape[0])), out.unbind()):
        torch.sum(rows, 0, dtype=out.dtype, out=total)


def grouped_dbias_dscales(
    dy: Tensor, bias: Tensor, bias_scale: Tensor, offs: Tensor, *, dbias: Tensor, dscales: Tensor
) -> None:
    """Form two matrix-vector products per group, and a zero tail."""
    if not dy.is_contiguous():
        dy = in_lines(dy)
    bias, bias_scale = bias.contiguous(), bias_scale.contiguous()
    acc = dbias.dtype
    sizes = segment_sizes(offs, dy.shape[0])
    *scale_out, tail = dscales.split(sizes)
    for rows, row_scales, row, total, dots in zip(
        dy.split(sizes), bias_scale.split(sizes), bias.unbind(), dbias.unbind(), scale_out
    ):
        wide = rows.to(acc)
        torch.mv(wide.t(), row_scales.to(acc), out=total)
        torch.mv(wide, row.to(acc), out=dots)
    tail.zero_()
