"""The CPU kernels of ``grouped_activation``: steps that fit the cache, through a few buffers that every step reuses.

Whole-tensor expressions would be limited by memory, and by the page faults of their temporaries even more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..meta import specs

if TYPE_CHECKING:
    from .grouped_activation import Params

_STEP = 1 << 17  # output elements per step: few calls, and the 3 MiB it touches stay in the L3 cache

_silu_out = torch.ops.aten.silu.out
_silu_backward_out = torch.ops.aten.silu_backward.grad_input


def _steps(x: Tensor, routed: int, width: int, buffers: int) -> Iterator[tuple[slice, tuple[Tensor, ...]]]:
    """The rows of each step, with ``buffers`` scratch matrices of as many rows in the accumulator's dtype."""
    rows = min(routed, max(1, _STEP // max(width, 1)))
    scratch = torch.empty(buffers, rows, width, dtype=specs.accumulator(x.dtype), device=x.device)
    full = scratch.unbind()
    for start in range(0, routed, max(rows, 1)):
        count = min(rows, routed - start)
        yield slice(start, start + count), full if count == rows else scratch[:, :count].unbind()


def _routed_rows(x: Tensor, offs: Tensor) -> int:
    """Rows before the tail, whatever ``offs`` holds. Reads it on the host."""
    routed = 0
    for end in offs.tolist():
        routed = min(max(end, routed), x.shape[0])
    return routed


def _gated_factors(
    params: Params, g: Tensor, u: Tensor, z: Tensor, a: Tensor, linear: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """``z, A(g), L(u)`` where ``A'(g) = silu'(z)`` below the limit; ``z``, ``a``, ``linear``: room for them."""
    if params.kind == "swiglu":
        return g, _silu_out(g, out=a), u
    torch.clamp(g, max=params.limit, out=a)
    torch.mul(a, params.alpha, out=z)
    a.mul_(torch.sigmoid(z, out=linear))
    return z, a, torch.clamp(u, -params.limit, params.limit, out=linear).add_(params.offset)


def forward(x: Tensor, offs: Tensor, probs: Tensor | None, *, params: Params, out: Tensor) -> None:
    """``out = probs A(g) L(u)`` and a zero tail."""
    routed, same_dtype = _routed_rows(x, offs), out.dtype == specs.accumulator(x.dtype)
    in_place = same_dtype and not (params.gated and params.interleaved)
    for rows, (g_wide, u_wide, y_wide, z, linear) in _steps(x, routed, out.shape[1], 5):
        g, u = params.halves(x[rows])
        y = out[rows] if same_dtype else y_wide
        if not in_place:
            g, u = g_wide.copy_(g), None if u is None else u_wide.copy_(u)
        if u is None:
            torch.clamp(g, min=0, out=y).square_()
        else:
            _, a, factor = _gated_factors(params, g, u, z, y, linear)
            a.mul_(factor)
        if probs is not None:
            y.mul_(probs[rows, None])
        if not same_dtype:
            out[rows].copy_(y)
    out[routed:].zero_()


def backward(
    dy: Tensor, x: Tensor, offs: Tensor, probs: Tensor | None, *, params: Params, dx: Tensor, dprobs: Tensor
) -> None:
    """``dg = probs dy A'(g) L(u)``, ``du = probs dy A(g) L'(u)``, ``dprobs = sum over the row of dy A(g) L(u)``."""
    routed = _routed_rows(x, offs)
    in_place = dx.dtype == specs.accumulator(x.dtype) and not (params.gated and params.interleaved)
    for rows, (g_wide, u_wide, d_wide, z, a, linear, w, product) in _steps(x, routed, dy.shape[1], 8):
        g, u = params.halves(x[rows])
        dg, du = params.halves(dx[rows])
        d, p = dy[rows], None if probs is None else probs[rows, None]
        if not in_place:
            g, u, d = g_wide.copy_(g), None if u is None else u_wide.copy_(u), d_wide.copy_(d)
        if u is None:
            torch.clamp(g, min=0, out=a)
            torch.mul(d, a, out=w)
            if p is not None:
                torch.sum(torch.mul(w, a, out=product), 1, out=dprobs[rows])
                w.mul_(p)
            dg.copy_(w.mul_(2))
            continue
        z, a, factor = _gated_factors(params, g, u, z, a, linear)
        torch.mul(d, factor, out=w)
        a_d = torch.mul(a, d, out=du if in_place else product)
        if p is not None:
            torch.sum(a.mul_(w), 1, out=dprobs[rows])
            w.mul_(p)
            a_d.mul_(p)
        if params.kind != "swiglu":
            w.mul_(g <= params.limit)
            a_d.mul_(u.abs() <= params.limit)
        if in_place:
            _silu_backward_out(w, z, grad_input=dg)
        else:
            dg.copy_(_silu_backward_out(w, z, grad_input=a))
            du.copy_(a_d)
    dx[routed:].zero_()
    dprobs[routed:].zero_()
