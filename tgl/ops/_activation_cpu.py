"""The CPU kernels of ``grouped_activation``: steps that fit the cache, through a few buffers that every step reuses.

Whole-tensor expressions would be limited by memory, and by the page faults of their temporaries even more. Short steps
would be limited by Python.
"""

from __future__ import annotations

import itertools
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
        self.rows = max(1, min(self.routed, _SCRATCH // buffers // max(width, 1)))
        full, rest = divmod(self.routed, self.rows)
        self.sizes = [self.rows] * full + [rest] * (rest > 0)
        self.shape, self.dtype = (self.rows, width), specs.accumulator(x.dtype)
        self.buffers: dict[str, Tensor] = {}

    def cut(self, t: Tensor | None) -> Iterator[Tensor | None]:
        """The parts of ``t [T, ...]``, step by step; None for every step if there is no ``t``."""
        if t is None:
            return itertools.repeat(None)
        return iter(torch.split_with_sizes(t, [*self.sizes, t.shape[0] - self.routed])[:-1])

    def room(self, name: str, rows: int) -> Tensor:
        """The first ``rows`` of the buffer called ``name``; its contents last until the end of the step."""
        if name not in self.buffers:
            self.buffers[name] = torch.empty(self.shape, dtype=self.dtype)
        buffer = self.buffers[name]
        return buffer if rows == self.rows else buffer[:rows]


def _routed_rows(x: Tensor, offs: Tensor) -> int:
    """Rows before the tail, whatever ``offs`` holds. Reads it on the host."""
    return min(max([0, *offs.tolist()]), x.shape[0])


def _column(probs: Tensor | None) -> Tensor | None:
    return None if probs is None else probs[:, None]


def _clamped_gate(steps: _Steps, params: Params, g: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """``z`` and ``A(g)``, the second in ``a``, which may be ``g`` itself; ``A'(g) = silu'(z)`` below the limit."""
    z = steps.room("z", g.shape[0])
    torch.clamp(g, max=params.limit, out=a)
    torch.mul(a, params.alpha, out=z)
    a.mul_(torch.sigmoid(z, out=steps.room("s", g.shape[0])))
    return z, a


def _clamped_linear(steps: _Steps, params: Params, u: Tensor) -> Tensor:
    return torch.clamp(u, -params.limit, params.limit, out=steps.room("s", u.shape[0])).add_(params.offset)


def forward(x: Tensor, offs: Tensor, probs: Tensor | None, *, params: Params, out: Tensor) -> None:
    """``out = probs A(g) L(u)`` and a zero tail."""
    wide = out.dtype == specs.accumulator(x.dtype)
    steps = _Steps(x, offs, out.shape[1], 1 if wide else 2)
    for g, u, p, part in zip(*map(steps.cut, (*params.halves(x), _column(probs), out))):
        rows = part.shape[0]
        if wide:
            y = part
        else:
            y = g = steps.room("g", rows).copy_(g)
            u = None if u is None else steps.room("u", rows).copy_(u)
        if u is None:
            torch.clamp(g, min=0, out=y).square_()
        elif params.kind == "swiglu":
            _silu_out(g, out=y).mul_(u)
        else:
            _clamped_gate(steps, params, g, y)
            y.mul_(_clamped_linear(steps, params, u))
        if p is not None:
            y.mul_(p)
        if y is not part:
            part.copy_(y)
    out[steps.routed :].zero_()


def backward(
    dy: Tensor, x: Tensor, offs: Tensor, probs: Tensor | None, *, params: Params, dx: Tensor, dprobs: Tensor
) -> None:
    """``dg = probs dy A'(g) L(u)``, ``du = probs dy A(g) L'(u)``, ``dprobs = sum over the row of dy A(g) L(u)``."""
    in_place = dx.dtype == specs.accumulator(x.dtype) and not (params.gated and params.interleaved)
    steps = _Steps(x, offs, dy.shape[1], 1 if in_place else 4)
    inputs = (*params.halves(x), dy, _column(probs), *params.halves(dx), dprobs if probs is not None else None)
    for g, u, d, p, dg, du, dp in zip(*map(steps.cut, inputs)):
        rows = d.shape[0]
        a = steps.room("a", rows)
        if in_place:
            w, a_d = dg, du
        else:
            g, d = steps.room("g", rows).copy_(g), steps.room("d", rows).copy_(d)
            w = u = None if u is None else steps.room("u", rows).copy_(u)
            a_d = d
        if u is None:
            torch.clamp(g, min=0, out=a)
            w = torch.mul(d, a, out=dg if in_place else d)
        elif params.kind == "swiglu":
            z = g
            _silu_out(g, out=a)
            torch.mul(d, u, out=w)
            torch.mul(d, a, out=a_d)
        else:
            z, _ = _clamped_gate(steps, params, g, a)
            inside = u.abs() <= params.limit
            torch.mul(d, _clamped_linear(steps, params, u), out=w)
            torch.mul(d, a, out=a_d).mul_(inside)
        if p is not None:
            torch.sum(a.mul_(w), 1, out=dp)
            w.mul_(p)
            if u is not None:
                a_d.mul_(p)
        if u is None:
            dg.copy_(w.mul_(2))
            continue
        if params.kind != "swiglu":
            w.mul_(g <= params.limit)
        if in_place:
            _silu_backward_out(w, z, grad_input=dg)
        else:
            dg.copy_(_silu_backward_out(w, z, grad_input=a))
            du.copy_(a_d)
    dx[steps.routed :].zero_()
    dprobs[steps.routed :].zero_()
