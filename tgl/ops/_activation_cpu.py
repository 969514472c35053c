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

_SCRATCH = 1 << 17  # elements in all the buffers of SwiGLU: few calls per layer, yet in the cache and small beside it

_silu_out = torch.ops.aten.silu.out
_silu_backward_out = torch.ops.aten.silu_backward.grad_input


class _Steps:
    """Cuts the routed rows into steps and lends buffers of one step's size, in the accumulator's dtype."""

    def __init__(self, x: Tensor, offs: Tensor, width: int, buffers: int) -> None:
        self.routed = _routed_rows(x, offs)
        self.rows = min(self.routed, max(1, _SCRATCH // buffers // max(width, 1)))
        self.shape, self.dtype = (self.rows, width), specs.accumulator(x.dtype)
        self.count = 0
        self.buffers: dict[str, Tensor] = {}

    def __iter__(self) -> Iterator[slice]:
        for start in range(0, self.routed, max(self.rows, 1)):
            self.count = min(self.rows, self.routed - start)
            yield slice(start, start + self.count)

    def room(self, name: str) -> Tensor:
        """The buffer called ``name``; its contents last until the end of the step."""
        if name not in self.buffers:
            self.buffers[name] = torch.empty(self.shape, dtype=self.dtype)
        buffer = self.buffers[name]
        return buffer if self.count == self.rows else buffer[: self.count]


def _routed_rows(x: Tensor, offs: Tensor) -> int:
    """Rows before the tail, whatever ``offs`` holds. Reads it on the host."""
    routed = 0
    for end in offs.tolist():
        routed = min(max(end, routed), x.shape[0])
    return routed


def _gated_factors(steps: _Steps, params: Params, g: Tensor, u: Tensor, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``z, A(g), L(u)``, the second in ``a``, where ``A'(g) = silu'(z)`` below the limit."""
    if params.kind == "swiglu":
        return g, _silu_out(g, out=a), u
    z, linear = steps.room("z"), steps.room("linear")
    torch.clamp(g, max=params.limit, out=a)
    torch.mul(a, params.alpha, out=z)
    a.mul_(torch.sigmoid(z, out=linear))
    return z, a, torch.clamp(u, -params.limit, params.limit, out=linear).add_(params.offset)


def forward(x: Tensor, offs: Tensor, probs: Tensor | None, *, params: Params, out: Tensor) -> None:
    """``out = probs A(g) L(u)`` and a zero tail."""
    same_dtype = out.dtype == specs.accumulator(x.dtype)
    in_place = same_dtype and not (params.gated and params.interleaved)
    steps = _Steps(x, offs, out.shape[1], 2 if in_place else 4)
    for rows in steps:
        g, u = params.halves(x[rows])
        y = out[rows] if same_dtype else steps.room("y")
        if not in_place:
            g, u = steps.room("g").copy_(g), None if u is None else steps.room("u").copy_(u)
        if u is None:
            torch.clamp(g, min=0, out=y).square_()
        else:
            _, a, linear = _gated_factors(steps, params, g, u, y)
            a.mul_(linear)
        if probs is not None:
            y.mul_(probs[rows, None])
        if not same_dtype:
            out[rows].copy_(y)
    out[steps.routed :].zero_()


def backward(
    dy: Tensor, x: Tensor, offs: Tensor, probs: Tensor | None, *, params: Params, dx: Tensor, dprobs: Tensor
) -> None:
    """``dg = probs dy A'(g) L(u)``, ``du = probs dy A(g) L'(u)``, ``dprobs = sum over the row of dy A(g) L(u)``."""
    in_place = dx.dtype == specs.accumulator(x.dtype) and not (params.gated and params.interleaved)
    steps = _Steps(x, offs, dy.shape[1], 2 if in_place else 4)
    for rows in steps:
        g, u = params.halves(x[rows])
        dg, du = params.halves(dx[rows])
        d, p = dy[rows], None if probs is None else probs[rows, None]
        if not in_place:
            g, d = steps.room("g").copy_(g), steps.room("d").copy_(d)
            u = None if u is None else steps.room("u").copy_(u)
        a = steps.room("a")
        if u is None or du is None:
            torch.clamp(g, min=0, out=a)
            w = torch.mul(d, a, out=steps.room("w"))
            if p is not None:
                torch.sum(a.mul_(w), 1, out=dprobs[rows])
                w.mul_(p)
            dg.copy_(w.mul_(2))
            continue
        z, a, linear = _gated_factors(steps, params, g, u, a)
        w = torch.mul(d, linear, out=steps.room("w") if in_place and linear is u else linear)
        a_d = torch.mul(d, a, out=du if in_place else d)
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
    dx[steps.routed :].zero_()
    dprobs[steps.routed :].zero_()
