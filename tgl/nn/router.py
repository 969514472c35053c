"""The top-k router: from logits to experts, their weights, and the load balancing losses."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ._errors import fail, not_a_tensor, shown
from ._repr import one_line


class RouterOutput(NamedTuple):
    """Result of ``topk_router`` for S tokens, E experts and k experts per token.

    ``weights`` and ``top_k_index`` have the leading dimensions of the logits, ``[..., k]`` for ``[..., E]``.

    Attributes:
        weights: ``[S, k]``, float32 (float64 for float64 logits): the weight of each top-k slot. Differentiable.
        top_k_index: int32 ``[S, k]``: the chosen experts, best first; for ``route``. The tensor ``index`` where that is
            given.
        tokens_per_expert: int32 ``[E]``: number of tokens that chose each expert. With a ``mask``, this and the losses
            count only the tokens in it. None without ``losses``, like the losses.
        load_balancing_loss: a scalar like ``weights``: ``E sum over experts of f P``, where f is
            ``tokens_per_expert / S`` and P the expert's mean share of a token's scores: the score of a softmax, or a
            sigmoid's divided by the sum over the experts. Differentiable through P. The loss of
            [Switch Transformers](https://arxiv.org/abs/2101.03961) for k experts per token, as in transformers.
        z_loss: a scalar like ``weights``: the mean over tokens of ``logsumexp(logits)^2``, of
            [ST-MoE](https://arxiv.org/abs/2202.08906). Differentiable.
    """

    weights: Tensor
    top_k_index: Tensor
    tokens_per_expert: Tensor | None = None
    load_balancing_loss: Tensor | None = None
    z_loss: Tensor | None = None

    def __repr__(self) -> str:
        return one_line(self)


def _at_least_one(tokens: int) -> int:
    """Return ``max(tokens, 1)``; Dynamo of PyTorch 2.11 does not support ``torch.sym_max`` of plain integers."""
    return max(tokens, 1) if isinstance(tokens, int) else torch.sym_max(tokens, 1)


def _flat(argument: str, t: Tensor | None, expected: tuple) -> Tensor | None:
    """Return ``index [..., k]`` or ``mask [...]``, of the leading dimensions of the logits, for flat logits."""
    if t is None:
        return None
    if tuple(t.shape) != tuple(expected):
        must = "of the leading dimensions of `logits`" + (" and `top_k`" if argument == "index" else "")
        fail(f"tgl::topk_router: `{argument}` must be {must}, {tuple(expected)}, but got shape {tuple(t.shape)}")
    return t.flatten(0, -2) if argument == "index" else t.flatten()


def topk_router(
    logits: Tensor,
    top_k: int,
    bias: Tensor | None = None,
    *,
    score_function: str = "softmax",
    renormalize: bool = False,
    scale: float = 1.0,
    num_groups: int = 1,
    topk_groups: int | None = None,
    group_score: str = "max",
    losses: bool = False,
    mask: Tensor | None = None,
    index: Tensor | None = None,
) -> RouterOutput:
    """Choose ``top_k`` experts for every token, and compute their weights.

    Experts are ranked by their scores plus ``bias``, and without one by their logits, which have the order of the
    scores. Of equal experts the one with the lower number comes first. NaN ranks above all numbers: such experts are
    chosen and their weights are NaN. Scores are formed in float32, and the experts of a token depend only on its own
    logits. The gradient goes to ``logits``; ``top_k_index`` and ``bias`` have none.

    With ``index`` the experts are given instead of chosen (routing replay): a training step of reinforcement learning
    passes the ``top_k_index`` of the rollout, and gets weights and gradients at those experts from its own logits.

    Args:
        logits: ``[S, E]`` or ``[..., E]``, bfloat16, float16, float32 or float64, any strides.
        top_k: k, from 1 to the number of experts in the groups that are kept.
        bias: ``[E]``, float32 or the dtype of ``logits``: added to the scores to rank experts, not to weigh them
            (DeepSeek-V3's ``e_score_correction_bias``).
        score_function: ``"softmax"``, ``"sigmoid"`` or ``"sqrtsoftplus"``.
        renormalize: divide by the sum of the chosen scores (plus 1e-20 but for the softmax). For a softmax this is the
            softmax over the chosen logits, the formula of gpt-oss.
        scale: factor of the weights.
        num_groups: number of equal groups of neighbouring experts; experts come only from the best groups.
        topk_groups: number of groups to choose from; None for all.
        group_score: score of a group: ``"max"``, its best (DeepSeek-V2), or ``"top2_sum"``, the sum of its two best
            (DeepSeek-V3); of scores plus ``bias``.
        losses: whether to return ``tokens_per_expert`` and the losses, computed in the same pass over the logits.
        mask: bool ``[S]`` (``[...]``), for ``losses``: the tokens that count in the losses and ``tokens_per_expert``;
            None for all. Other tokens, such as padding, are still routed. Means are over the tokens that count, as with
            the ``attention_mask`` of transformers' ``load_balancing_loss_func``; if there are none, the losses are 0.
        index: int32 or int64 ``[S, k]`` (``[..., k]``): the experts of every token, returned as ``top_k_index``. -1 is
            a dropped slot: its weight is 0, the other slots share the sum of ``renormalize``, and it does not count in
            ``tokens_per_expert``. Other values out of range are dropped too, and an error inside
            ``tgl.debug_checks()``. ``bias`` and the groups, which only choose, are then without effect.

    Returns:
        The ``RouterOutput``. Second derivatives exist, forward mode does not.

    Raises:
        TypeError: ``logits``, ``bias``, ``mask`` or ``index`` is of another dtype, or ``top_k`` no integer.
        ValueError: a name is unknown, a size does not fit, a tensor is on another device than ``logits``, or there is a
            ``mask`` without ``losses``.
    """
    if isinstance(top_k, bool) or not isinstance(top_k, int):
        fail(f"tgl::topk_router: `top_k` must be an integer, but got {top_k!r}", TypeError)
    if not isinstance(losses, bool):
        fail(f"tgl::topk_router: `losses` must be True or False, but got {shown(losses)}", TypeError)
    if not isinstance(logits, Tensor):
        not_a_tensor("tgl::topk_router: `logits`", logits)
    if index is not None and not isinstance(index, Tensor):
        not_a_tensor("tgl::topk_router: `index`", index, "a tensor or None")
    if mask is not None and not isinstance(mask, Tensor):
        not_a_tensor("tgl::topk_router: `mask`", mask, "a tensor or None")
    shape = logits.shape
    given = index
    if len(shape) > 2:
        logits = logits.flatten(0, -2)
        index = _flat("index", index, (*shape[:-1], top_k))
        mask = _flat("mask", mask, shape[:-1])
    weights, chosen, tokens_per_expert, prob_sum, z_sum = torch.ops.tgl.topk_router(
        logits,
        top_k,
        bias,
        mask,
        index,
        score_function=score_function,
        renormalize=renormalize,
        scale=scale,
        num_groups=num_groups,
        topk_groups=num_groups if topk_groups is None else topk_groups,
        group_score=group_score,
        sums=losses,
    )
    if len(shape) > 2:
        weights, chosen = (t.unflatten(0, shape[:-1]) for t in (weights, chosen))
    if given is not None:
        chosen = given
    if not losses:
        return RouterOutput(weights, chosen)
    tokens, experts = logits.shape
    some = _at_least_one(tokens) if mask is None else mask.sum(dtype=z_sum.dtype).clamp_min(1)
    balance = (tokens_per_expert * prob_sum).sum() * (experts / (some * some))
    return RouterOutput(weights, chosen, tokens_per_expert, balance, z_sum[0] / some)
