"""Dispatch, the experts' MLPs and combine as one node of autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops import grouped_mlp
from .routing import Routing, combine, dispatch_both, sum_choices


def routed_mlp(
    x: Tensor,
    weights: Tensor,
    routing: Routing,
    w1: Tensor,
    w2: Tensor,
    bias1: Tensor | None,
    bias2: Tensor | None,
    *,
    transposed: bool,
    activation: dict[str, Any],
) -> Tensor:
    """``combine(grouped_mlp(*dispatch_both(x, weights)))``, keeping ``x`` for the backward and not its copies.

    Not under autocast, whose casts belong to the ops inside.

    Args:
        x: ``[S, H]``.
        weights: ``[S, k]``: routing weight of every choice, dtype of ``x`` or float32.
        routing: from ``route``.
        w1, w2: ``[G, H, N]`` and ``[G, I, O]`` if ``transposed``, else ``[G, N, H]`` and ``[G, O, I]``.
        bias1, bias2: see ``grouped_mlp``.
        transposed: how the weights are stored.
        activation: its arguments, see ``grouped_mlp``.

    Returns:
        ``[S, O]``.
    """
    return _RoutedMLP.apply(x, weights, w1, w2, bias1, bias2, *routing, transposed, activation)


class _RoutedMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Tensor,
        w1: Tensor,
        w2: Tensor,
        bias1: Tensor | None,
        bias2: Tensor | None,
        source: Tensor,
        position: Tensor,
        offs: Tensor,
        top_k: int,
        token: Tensor,
        transposed: bool,
        activation: dict[str, Any],
    ) -> Tensor:
        recompute = x.device.type == "cpu"  # see ``grouped_mlp``
        y, h, act = torch.ops.tgl.grouped_mlp(
            x.index_select(0, token),
            w1 if transposed else w1.transpose(1, 2),
            w2 if transposed else w2.transpose(1, 2),
            offs,
            weights.reshape(-1).index_select(0, source),
            bias1,
            bias2,
            recompute=recompute,
            **activation,
        )
        routing = (source, position, offs, token)
        ctx.save_for_backward(x, weights, w1, w2, bias1, bias2, h, None if recompute else act, *routing)
        ctx.top_k, ctx.transposed, ctx.activation = top_k, transposed, activation
        return sum_choices(y, position, top_k)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, w1, w2, bias1, bias2, h, act, source, position, offs, token = ctx.saved_tensors
        needs = ctx.needs_input_grad[:6]
        matrices = (w1, w2) if ctx.transposed else (w1.transpose(1, 2), w2.transpose(1, 2))
        if torch.is_grad_enabled():  # a second order may follow
            return _differentiable(ctx, grad, needs, matrices)
        dx, dw1, dw2, dprobs, dbias1, dbias2 = torch.ops.tgl.grouped_mlp_backward(
            grad.index_select(0, token),
            x.index_select(0, token) if needs[2] else None,
            *matrices,
            offs,
            h,
            act,
            weights.reshape(-1).index_select(0, source),
            bias2,
            output_mask=[needs[i] for i in (0, 2, 3, 1, 4, 5)],
            **ctx.activation,
        )
        if not ctx.transposed:
            dw1, dw2 = (dw.transpose(1, 2) if need else None for dw, need in ((dw1, needs[2]), (dw2, needs[3])))
        grads = (
            sum_choices(dx, position, ctx.top_k) if needs[0] else None,
            dprobs.index_select(0, position).view(weights.shape) if needs[1] else None,
            dw1,
            dw2,
            dbias1.to(bias1.dtype) if needs[4] else None,
            dbias2.to(bias2.dtype) if needs[5] else None,
        )
        return *(g if need else None for g, need in zip(grads, needs)), *(None,) * 7


def _differentiable(
    ctx: Any, grad: Tensor, needs: tuple[bool, ...], matrices: tuple[Tensor, Tensor]
) -> tuple[Tensor | None, ...]:
    """The gradients as functions of ``grad`` and of the inputs, from a forward made of differentiable functions."""
    x, weights, w1, w2, bias1, bias2, _, _, source, position, offs, token = ctx.saved_tensors
    routing = Routing(source, position, offs, ctx.top_k, token)
    rows, probs = dispatch_both(x, weights, routing)
    y = combine(grouped_mlp(rows, matrices[0], matrices[1], offs, probs, bias1, bias2, **ctx.activation), routing)
    inputs = [t for t, need in zip((x, weights, w1, w2, bias1, bias2), needs) if need]
    found = iter(torch.autograd.grad(y, inputs, grad, create_graph=True))
    return *(next(found) if need else None for need in needs), *(None,) * 7
