"""The activation between two layers: fused in one op, an op of its own, or aten expressions for a compiler to fuse."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..meta.specs import accumulator
from ..ops.grouped_activation import Params, grouped_activation
from ._inputs import check_row_factor
from ._transforms import compiled_for_cpu


def activate(x: Tensor, offs: Tensor, probs: Tensor | None, **activation: Any) -> Tensor:
    """Apply ``grouped_activation``; in a graph compiled for a CPU, aten expressions instead of the op.

    On a CPU the op is a sequence of aten calls, slower than the compiler's single loop; on a GPU it is a kernel.

    The tails of ``x`` and of the result's gradient must be zero, as grouped products leave them; the tail of the result
    is undefined.
    """
    if compiled_for_cpu(x.device):
        if probs is not None:
            check_row_factor("tgl::grouped_activation: `probs`", probs, x)
        return _Expressions.apply(x, probs, *constants(**activation))
    return grouped_activation(x, offs, probs, **activation)


def constants(
    kind: str,
    interleaved: bool = False,
    limit: float | None = None,
    alpha: float | None = None,
    offset: float | None = None,
) -> Params:
    """Return ``Params`` with all fields set: under dynamic=True Dynamo makes float defaults symbols and recompiles."""
    limit, alpha = 7.0 if limit is None else limit, 1.702 if alpha is None else alpha
    return Params(kind, interleaved, limit, alpha, 1.0 if offset is None else offset)


class _Expressions(torch.autograd.Function):
    """``y = p A(g) L(u)`` and its gradients for all rows including the tail, see ``ops/grouped_activation.py``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, probs: Tensor | None, *constants: Any) -> Tensor:
        ctx.save_for_backward(x, probs)
        ctx.constants = constants
        params, acc = Params(*constants), accumulator(x.dtype)
        y = params.value(*params.halves(x.to(acc)))
        if probs is not None:
            y = y * probs.to(acc)[:, None]
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, probs = ctx.saved_tensors
        params, acc = Params(*ctx.constants), accumulator(x.dtype)
        a, a1, linear, slope = params.factors(*params.halves(x.to(acc)))
        dy = dy.to(acc)
        dprobs = None
        if probs is not None:
            if ctx.needs_input_grad[1]:
                value = a if linear is None else a * linear
                dprobs = (dy * value).sum(1).to(probs.dtype)
            dy = dy * probs.to(acc)[:, None]
        # Rounded before joining, so that the compiler writes each half directly to its place.
        dg = (dy * a1 if linear is None else dy * a1 * linear).to(x.dtype)
        du = None
        if linear is not None:
            du = (dy * a if slope is None else dy * a * slope).to(x.dtype)
        return params.join(dg, du), dprobs, *(None for _ in ctx.constants)
