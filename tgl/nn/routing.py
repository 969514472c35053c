"""From a router's choice to groups of rows and back: sort by expert, gather, and weighted sum.

Forward and backward are gathers only, never a scatter-add, so they are deterministic on every device and need no
atomics.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Routing(NamedTuple):
    """Where every (token, choice) pair goes. S tokens, k choices each, T = S k rows, G experts.

    Attributes:
        source: int64 ``[T]``: row ``t`` of the grouped order is choice ``source[t] % k`` of token ``source[t] // k``.
        position: int64 ``[T]``, the inverse: pair ``i`` (token ``i // k``, choice ``i % k``) sits in row
            ``position[i]``.
        offs: int32 ``[G]``: cumulative ends of the experts' rows.
        top_k: k.
    """

    source: Tensor
    position: Tensor
    offs: Tensor
    top_k: int


def route(top_k_index: Tensor, num_experts: int) -> Routing:
    """Group the (token, choice) pairs by expert, on the device; pairs of one expert keep the order of their tokens.

    Args:
        top_k_index: integer ``[S, k]``: experts chosen by each token. Values of ``num_experts`` and more (the sentinels
            of expert parallelism) go to the tail: no expert's rows, and zeros in every grouped op.
        num_experts: G.

    Returns:
        The ``Routing``.
    """
    experts, source = torch.sort(top_k_index.reshape(-1), stable=True)
    position = torch.empty_like(source)
    position[source] = torch.arange(source.shape[0], device=source.device)
    groups = torch.arange(num_experts, device=experts.device, dtype=experts.dtype)
    offs = torch.searchsorted(experts, groups, right=True, out_int32=True)
    return Routing(source, position, offs, top_k_index.shape[-1])


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, position: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(position)
        ctx.top_k = top_k
        return x.index_select(0, source // top_k)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (position,) = ctx.saved_tensors
        pairs = grad.index_select(0, position)
        return pairs.view(-1, ctx.top_k, grad.shape[1]).sum(1), None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor, source: Tensor, position: Tensor) -> Tensor:
        ctx.save_for_backward(y, weights, source, position)
        pairs = y.index_select(0, position).view(*weights.shape, y.shape[1])
        return (pairs * weights[:, :, None].to(y.dtype)).sum(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        y, weights, source, position = ctx.saved_tensors
        dy = dweights = None
        if ctx.needs_input_grad[0]:
            row_weights = weights.reshape(-1)[source].to(grad.dtype)
            dy = grad.index_select(0, source // weights.shape[1]) * row_weights[:, None]
        if ctx.needs_input_grad[1]:
            pairs = y.index_select(0, position).view(*weights.shape, y.shape[1])
            dweights = (pairs * grad[:, None, :]).sum(2, dtype=torch.float32).to(weights.dtype)
        return dy, dweights, None, None


def dispatch(x: Tensor, routing: Routing) -> Tensor:
    """Copy every token to the rows of the experts it chose.

    Args:
        x: ``[S, H]``.
        routing: from ``route``.

    Returns:
        ``[T, H]``, grouped by expert.
    """
    return _Dispatch.apply(x, routing.source, routing.position, routing.top_k)


def combine(y: Tensor, routing: Routing, weights: Tensor) -> Tensor:
    """Sum the experts' answers for every token.

    Args:
        y: ``[T, H]``, grouped by expert, in the order of ``dispatch``.
        routing: from ``route``.
        weights: ``[S, k]``: routing weight of every choice.

    Returns:
        ``[S, H]``: for token ``s``, the sum over its choices ``j`` of ``weights[s, j] * y[row of (s, j)]``.
    """
    return _Combine.apply(y, weights, routing.source, routing.position)
