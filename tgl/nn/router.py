"""A router: from logits to experts, their weights, and the losses that keep experts in balance."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ._errors import fail, shown


class RouterOutput(NamedTuple):
    """What ``topk_router`` returns. S tokens, E experts, k choices of each token.

    Attributes:
        weights: ``[S, k]``, float32 (float64 for float64 logits): the weight of each choice. Differentiable.
        top_k_index: int32 ``[S, k]``: the chosen experts, best first; for ``route``.
        tokens_per_expert: int32 ``[E]``: how many tokens chose each expert, of those that count where there is a
            ``mask``, here and below. None without ``losses``, as all below.
        load_balancing_loss: a scalar like ``weights``: ``E sum over experts of f P``, where f is
            ``tokens_per_expert / S`` and P the expert's mean share of a token's scores: the score of a softmax, or a
            sigmoid's divided by the sum over the experts. Differentiable through P. The loss of
            [Switch Transformers](https://arxiv.org/abs/2101.03961) for k choices, as transformers has it.
        z_loss: a scalar like ``weights``: the mean over tokens of ``logsumexp(logits)^2``, of
            [ST-MoE](https://arxiv.org/abs/2202.08906). Differentiable.
    """

    weights: Tensor
    top_k_index: Tensor
    tokens_per_expert: Tensor | None = None
    load_balancing_loss: Tensor | None = None
    z_loss: Tensor | None = None


def _at_least_one(tokens: int) -> int:
    """``max(tokens, 1)``. Dynamo has integers in any case, and in PyTorch 2.11 no ``torch.sym_max`` of known ones."""
    return max(tokens, 1) if isinstance(tokens, int) else torch.sym_max(tokens, 1)


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
) -> RouterOutput:
    """Choose ``top_k`` experts for every token, and weigh them.

    Experts are ranked by their scores plus ``bias``, and without one by their logits, which have the order of the
    scores. Of equal ones the lower number comes first. NaN is above all numbers: such experts are chosen and their
    weights are NaN. Scores are formed in float32, and the choices of a token depend on its logits alone, not on other
    tokens. The gradient goes to ``logits``; choices and ``bias`` have none.

    Args:
        logits: ``[S, E]``, bfloat16, float16, float32 or float64, any strides.
        top_k: k, from 1 to the number of experts in the groups that are kept.
        bias: ``[E]``, float32 or the dtype of ``logits``: added to the scores to rank experts, not to weigh them
            (DeepSeek-V3's ``e_score_correction_bias``).
        score_function: ``"softmax"``, ``"sigmoid"`` or ``"sqrtsoftplus"``.
        renormalize: divide by the sum of the chosen scores (plus 1e-20 but for the softmax). For a softmax this is the
            softmax over the chosen logits, which is how gpt-oss puts it.
        scale: factor of the weights.
        num_groups: neighbouring experts in as many groups of one size, of which the best are kept first.
        topk_groups: how many are kept; None for all.
        group_score: ``"max"``, the best score of a group (DeepSeek-V2), or ``"top2_sum"``, the sum of its two best
            (DeepSeek-V3); of scores plus ``bias``.
        losses: whether to return ``tokens_per_expert`` and the losses, for one pass over the logits with the rest.
        mask: bool ``[S]``, for ``losses``: the tokens that count in them, and in ``tokens_per_expert``; None for all.
            The others, which may be padding, are routed as ever. Means are over those that count, as with the
            ``attention_mask`` of transformers' ``load_balancing_loss_func``; where none does, the losses are 0.

    Returns:
        The ``RouterOutput``. Second derivatives exist, forward mode does not.

    Raises:
        TypeError: ``logits``, ``bias`` or ``mask`` is of another dtype, or ``top_k`` no integer.
        ValueError: a name is unknown, a size does not fit, ``bias`` or ``mask`` is on another device, or there is a
            ``mask`` without ``losses``.
    """
    if isinstance(top_k, bool) or not isinstance(top_k, int):
        fail(f"tgl::topk_router: `top_k` must be an integer, but got {top_k!r}", TypeError)
    if not isinstance(losses, bool):
        fail(f"tgl::topk_router: `losses` must be True or False, but got {shown(losses)}", TypeError)
    weights, index, tokens_per_expert, prob_sum, z_sum = torch.ops.tgl.topk_router(
        logits,
        top_k,
        bias,
        mask,
        score_function=score_function,
        renormalize=renormalize,
        scale=scale,
        num_groups=num_groups,
        topk_groups=num_groups if topk_groups is None else topk_groups,
        group_score=group_score,
        sums=losses,
    )
    if not losses:
        return RouterOutput(weights, index)
    tokens, experts = logits.shape
    some = _at_least_one(tokens) if mask is None else mask.sum(dtype=z_sum.dtype).clamp_min(1)
    balance = (tokens_per_expert * prob_sum).sum() * (experts / (some * some))
    return RouterOutput(weights, index, tokens_per_expert, balance, z_sum[0] / some)
