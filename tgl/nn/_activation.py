"""The activation between two layers: the op, or what the compiler may fuse with its neighbours."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..meta.specs import accumulator
from ..ops.grouped_activation import Params, grouped_activation


def activate(x: Tensor, offs: Tensor, probs: Tensor | None, **activation: Any) -> Tensor:
    """``grouped_activation``; in a graph compiled for a CPU, expressions of aten instead of the op.

    On a CPU the op is a sequence of aten calls, which the compiler's one loop outdoes; on a GPU it is a kernel.
    """
    if torch.compiler.is_compiling() and not torch.compiler.is_exporting() and x.device.type == "cpu":
        return _Expressions.apply(x, offs, probs, *_constants(**activation))
    return grouped_activation(x, offs, probs, **activation)


def _constants(
    kind: str,
    interleaved: bool = False,
    limit: float | None = None,
    alpha: float | None = None,
    offset: float | None = None,
) -> Params:
    """All fields given: of float defaults Dynamo would make symbols, and compile twice under dynamic=True."""
    limit, alpha = 7.0 if limit is None else limit, 1.702 if alpha is None else alpha
    return Params(kind, interleaved, limit, alpha, 1.0 if offset is None else offset)


class _Expressions(torch.autograd.Function):
    """``y = p A(g) L(u)`` and its gradients, see ``ops/grouped_activation.py``; zeros for the tail."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, offs: Tensor, probs: Tensor | None, *constants: Any) -> Tensor:
        ctx.save_for_backward(x, offs, probs)
        ctx.constants = constants
        params, acc = Params(*constants), accumulator(x.dtype)
        y = params.value(*params.halves(x.to(acc)))
        if probs is not None:
            y = y * probs.to(acc)[:, None]
        return torch.where(_routed(x, offs), y.to(x.dtype), 0)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, offs, probs = ctx.saved_tensors
        params, acc, routed = Params(*ctx.constants), accumulator(x.dtype), _routed(x, offs)
        a, a1, linear, slope = params.factors(*params.halves(x.to(acc)))
        dy = dy.to(acc)
        dprobs = None
        if probs is not None:
            if ctx.needs_input_grad[2]:
                value = a if linear is None else a * linear
                dprobs = torch.where(routed[:, 0], (dy * value).sum(1), 0).to(probs.dtype)
            dy = dy * probs.to(acc)[:, None]
        # Rounded and cut off before they are joined: the compiler then writes each half where it belongs.
        dg = torch.where(routed, (dy * a1 if linear is None else dy * a1 * linear).to(x.dtype), 0)
        du = None
        if linear is not None:
            du = torch.where(routed, (dy * a if slope is None else dy * a * slope).to(x.dtype), 0)
        return params.join(dg, du), None, dprobs, *(None for _ in ctx.constants)


def _routed(x: Tensor, offs: Tensor) -> Tensor:
    """``[T, 1]`` mask of the rows before the tail."""
    end = offs[-1] if offs.shape[0] else 0
    return (torch.arange(x.shape[0], device=x.device) < end)[:, None]
