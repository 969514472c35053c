"""Routers as models write them with torch operators, their losses, and tgl's: functions of logits and a bias."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import tgl

WEIGHT_OF_LOSS = 0.01
Router = Callable[[Tensor, Tensor | None], Sequence[Tensor]]
"""Weights and experts of every token, and a loss behind them where there is one."""


class Routed(NamedTuple):
    """Tokens, experts, top-k, the dtype of logits, and the options of ``tgl.topk_router``."""

    tokens: int
    experts: int
    top_k: int
    dtype: torch.dtype = torch.bfloat16
    options: Mapping[str, Any] = types.MappingProxyType({"renormalize": True})
    bias: bool = False


_DEEPSEEK = {
    "score_function": "sigmoid",
    "renormalize": True,
    "scale": 2.5,
    "num_groups": 8,
    "topk_groups": 4,
    "group_score": "top2_sum",
}
SHAPES = {
    "one token": Routed(1, 128, 8),
    "64 tokens": Routed(64, 128, 8),
    "256 tokens": Routed(256, 128, 8),
    "mixtral": Routed(16384, 8, 2),
    "qwen3": Routed(16384, 128, 8),
    "qwen3-next": Routed(32768, 512, 10),
    "deepseek": Routed(8192, 256, 8, torch.float32, _DEEPSEEK, True),
}


def by_softmax(shape: Routed) -> Router:
    """Return the router of Mixtral and Qwen3."""

    def call(logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        probabilities = torch.softmax(logits, 1, dtype=torch.promote_types(logits.dtype, torch.float32))
        weights, index = torch.topk(probabilities, shape.top_k, dim=1)
        return weights / weights.sum(1, keepdim=True), index

    return call


def by_grouped_sigmoid(shape: Routed) -> Router:
    """Return the router of DeepSeek-V3."""
    options = shape.options

    def call(logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        scores = logits.sigmoid()
        ranked = scores + bias
        of_groups = ranked.unflatten(1, (options["num_groups"], -1)).topk(2, dim=2).values.sum(2)
        kept = of_groups.topk(options["topk_groups"], dim=1, sorted=False).indices
        mask = torch.zeros_like(of_groups).scatter(1, kept, 1).bool()
        mask = mask[:, :, None].expand(-1, -1, shape.experts // options["num_groups"]).flatten(1)
        index = ranked.masked_fill(~mask, -float("inf")).topk(shape.top_k, dim=1, sorted=False).indices
        weights = scores.gather(1, index)
        return weights / (weights.sum(1, keepdim=True) + 1e-20) * options["scale"], index

    return call


def by_torch(shape: Routed, losses: bool) -> Router:
    """Return the router of torch operators, with the weighted sum of both losses if requested."""
    sigmoid = shape.options.get("score_function", "softmax") == "sigmoid"
    router = by_grouped_sigmoid(shape) if sigmoid else by_softmax(shape)

    def call(logits: Tensor, bias: Tensor | None) -> Sequence[Tensor]:
        weights, index = router(logits, bias)
        x = logits.to(weights.dtype)
        shares = x.sigmoid() if sigmoid else x.softmax(1)
        shares = shares / shares.sum(1, keepdim=True)
        counts = torch.zeros(shape.experts, device=x.device, dtype=x.dtype)
        counts = counts.scatter_add(0, index.flatten().long(), torch.ones_like(weights).flatten())
        balance = shape.experts * (counts * shares.sum(0)).sum() / shape.tokens**2
        return weights, index, WEIGHT_OF_LOSS * (balance + x.logsumexp(1).square().mean())

    return call if losses else router


def by_tgl(shape: Routed, losses: bool) -> Router:
    def call(logits: Tensor, bias: Tensor | None) -> Sequence[Tensor]:
        made = tgl.topk_router(logits, shape.top_k, bias, losses=losses, **shape.options)
        if not losses:
            return made.weights, made.top_k_index
        return made.weights, made.top_k_index, WEIGHT_OF_LOSS * (made.load_balancing_loss + made.z_loss)

    return call


def with_gradient(router: Router) -> Callable[[Tensor, Tensor | None, Tensor], Sequence[Tensor]]:
    """Return a call that gives the router's results and the gradient of the logits."""

    def call(logits: Tensor, bias: Tensor | None, grad: Tensor) -> Sequence[Tensor]:
        leaf = logits.detach().requires_grad_()
        weights, index, *loss = router(leaf, bias)
        made = torch.autograd.grad([weights, *loss], leaf, [grad, *(torch.ones_like(value) for value in loss)])
        return weights.detach(), index, *(value.detach() for value in loss), *made

    return call
