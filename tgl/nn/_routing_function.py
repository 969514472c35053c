"""``tgl.dispatch`` and ``tgl.combine`` for calls that can bypass the dispatcher: autograd nodes over eager kernels.

Dispatching an op, its autograd node and each op of its backward costs more than the gather of a small batch. Calls that
something may observe, and backwards that may be differentiated, use the ops.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops import permutation
from ..ops._engine import requested_grads
from ..ops._library import unobserved


def _direct(grad: Tensor) -> bool:
    """Return whether a backward can bypass the dispatcher."""
    return not torch.is_grad_enabled() and unobserved(grad)


class _Dispatch(torch.autograd.Function):
    """``apply(token, position, top_k, x)``: the rows ``[T, ...]`` of tokens ``x``."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, position: Tensor, top_k: int, x: Tensor) -> Tensor:
        ctx.save_for_backward(token, position)
        ctx.top_k = top_k
        return permutation.dispatch(x, token, position, top_k)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        token, position = ctx.saved_tensors
        combine = permutation.combine if _direct(grad) else torch.ops.tgl.combine
        return None, None, None, combine(grad, token, position, ctx.top_k)


class _DispatchBoth(torch.autograd.Function):
    """``apply(token, source, position, top_k, x, weights)``: the rows of ``x``, and the weights in row order."""

    @staticmethod
    def forward(
        ctx: Any, token: Tensor, source: Tensor, position: Tensor, top_k: int, x: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(token, source, position)
        ctx.top_k = top_k
        rows = permutation.dispatch(x, token, position, top_k)
        return rows, permutation.dispatch(weights.reshape(-1), source, position, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_weights: Tensor) -> tuple[Tensor | None, ...]:
        token, source, position = ctx.saved_tensors
        *_, needs_dx, needs_dweights = requested_grads(ctx)
        combine = permutation.combine if _direct(grad) else torch.ops.tgl.combine
        dx = combine(grad, token, position, ctx.top_k) if needs_dx else None
        if not needs_dweights:
            return None, None, None, None, dx, None
        return None, None, None, None, dx, combine(grad_weights, source, position, 1).view(-1, ctx.top_k)


class _Combine(torch.autograd.Function):
    """``apply(token, position, top_k, y)``: the sum of every token's rows ``y``."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, position: Tensor, top_k: int, y: Tensor) -> Tensor:
        ctx.save_for_backward(token, position)
        ctx.top_k = top_k
        return permutation.combine(y, token, position, top_k)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        token, position = ctx.saved_tensors
        dispatch = permutation.dispatch if _direct(grad) else torch.ops.tgl.dispatch
        return None, None, None, dispatch(grad, token, position, ctx.top_k)


dispatch, dispatch_both, combine = _Dispatch.apply, _DispatchBoth.apply, _Combine.apply
