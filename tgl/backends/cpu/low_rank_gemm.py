"""``grouped_gemm_low_rank`` on a CPU, with one rounding, whatever the dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...meta import specs
from ...meta.low_rank import LowRankCall
from ...meta.memory import in_lines
from ..portable.loops import rounds_once
from ..portable.segments import below_autograd, segment_sizes
from .gemm import grouped_gemm


def gemm(*operands: Any, out: Tensor, zero_tail: bool) -> None:
    """Run the op: add the second product to the first in the dtype of the sums, or form both as one product."""
    call = LowRankCall(*operands)
    a, b, low, up, offs, bias, bias_scale = call
    if out.dtype == specs.accumulator(a.dtype):
        grouped_gemm(a, b, offs, bias, bias_scale, out=out, zero_tail=zero_tail)
        _add(low, up, segment_sizes(offs, out.shape[0]), out)
        return
    call = call._replace(a=in_lines(a), b=in_lines(b), low=in_lines(low), up=in_lines(up))
    sizes = segment_sizes(offs, out.shape[0])
    if zero_tail and sizes[-1]:
        out[out.shape[0] - sizes[-1] :].zero_()
    with below_autograd():
        (_as_one if rounds_once(a, bias, bias_scale, out.dtype) else _widened)(call, sizes, out)


def _as_one(call: LowRankCall, sizes: tuple[int, ...], out: Tensor) -> None:
    """Form one product over both contractions, concatenated in memory.

    ``torch.mm`` reads 16-bit operands directly, and cannot add to a result that is wider than they are.
    """
    a, b, low, up, _, bias, _ = call
    _, depth, columns = b.shape
    depth += low.shape[1]
    by_columns = b.stride(2) != 1
    rows = a.new_empty(max(sizes[:-1], default=0), depth)
    matrix = a.new_empty((columns, depth) if by_columns else (depth, columns))
    *parts, _ = zip(*(torch.split_with_sizes(t, sizes) for t in (a, low, out)))
    for g, (x, narrow, y) in enumerate(parts):
        if not sizes[g]:
            continue
        both = torch.cat((x, narrow), 1, out=rows[: sizes[g]])
        if by_columns:
            w = torch.cat((b[g].t(), up[g].t()), 1, out=matrix).t()
        else:
            w = torch.cat((b[g], up[g]), 0, out=matrix)
        if bias is None:
            torch.mm(both, w, out=y)
        else:
            torch.addmm(bias[g], both, w, out=y)


def _widened(call: LowRankCall, sizes: tuple[int, ...], out: Tensor) -> None:
    """Form products of operands in the accumulator's dtype, where torch.mm cannot round once."""
    a, b, low, up, _, bias, bias_scale = call
    acc = specs.accumulator(a.dtype)
    scales = None if bias_scale is None else bias_scale.split(sizes)
    *parts, _ = zip(*(torch.split_with_sizes(t, sizes) for t in (a, low, out)))
    for g, (x, narrow, y) in enumerate(parts):
        if not sizes[g]:
            continue
        wide = torch.mm(x.to(acc), b[g].to(acc)).addmm_(narrow.to(acc), up[g].to(acc))
        if bias is not None:
            row = bias[g].to(acc)
            wide.add_(row if scales is None else torch.outer(scales[g].to(acc), row))
        y.copy_(wide)


def _add(low: Tensor, up: Tensor, sizes: tuple[int, ...], out: Tensor) -> None:
    """Add every group's ``low up`` to its rows of ``out``, which has the dtype of the sums."""
    with below_autograd():
        *parts, _ = torch.split_with_sizes(out, sizes)
        for x, w, y in zip(torch.split_with_sizes(low, sizes), up.unbind(), parts):
            if y.shape[0]:
                y.addmm_(x.to(y.dtype), w.to(y.dtype))
