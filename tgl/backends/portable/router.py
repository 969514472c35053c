"""A router as steps of ATen: the CPU implementation, and the GPU's where no kernel serves."""

from __future__ import annotations

import torch
from torch import Tensor

from ...meta.router import EPSILON, GROUP_RULES, OUTPUTS, Router, Weighing, gradient
from ...meta.specs import accumulator


def forward(
    logits: Tensor,
    top_k: int,
    bias: Tensor | None,
    mask: Tensor | None,
    index: Tensor | None,
    *,
    router: Router,
    **outputs: Tensor | None,
) -> None:
    """Run the router; reads nothing on the host."""
    x = logits.to(accumulator(logits.dtype)).contiguous()  # other memory is summed in another order
    weights, top_k_index, tokens_per_expert, prob_sum, z_sum = (outputs[name] for name in OUTPUTS)
    assert weights is not None
    assert top_k_index is not None
    if index is None:
        index = _choose(x, top_k, bias, router)
        weights.copy_(_weigh(x, index, router))
    else:
        index = index.masked_fill((index < 0) | (index >= x.shape[1]), -1).long()
        weights.copy_(_weigh(x, index, router, dropped=index < 0))
    top_k_index.copy_(index)
    if tokens_per_expert is None or prob_sum is None or z_sum is None:
        return
    shares, squares = _shares(x, router), x.logsumexp(1).square()
    if mask is not None:
        index = index.where(mask[:, None], -1)
        shares, squares = shares.where(mask[:, None], 0), squares.where(mask, 0)
    count = index.new_zeros(x.shape[1] + 1)  # the first counts slots without an expert
    tokens_per_expert.copy_(count.scatter_add_(0, index.flatten() + 1, torch.ones_like(index).flatten())[1:])
    torch.sum(shares, 0, out=prob_sum)
    z_sum.copy_(squares.sum())


def _choose(x: Tensor, top_k: int, bias: Tensor | None, router: Router) -> Tensor:
    """Return the best experts, best first; ties go to the lower number. NaN is better than all numbers."""
    rank = x if router.by_logits(bias) else router.score.value(x)
    if bias is not None:
        rank = rank + bias.to(rank.dtype)
    if not router.grouped and rank.dtype == torch.float32:
        return _best(rank, top_k)
    order = _best_first(rank)
    if router.grouped:
        scores = GROUP_RULES[router.group_score].value(rank.unflatten(1, (router.num_groups, -1)))
        out = torch.ones_like(scores, dtype=torch.bool)
        out.scatter_(1, _best_first(scores)[:, : router.topk_groups], False)
        left_out = out.gather(1, order // (x.shape[1] // router.num_groups))
        order = order.gather(1, torch.sort(left_out.to(torch.uint8), dim=1, stable=True).indices)
    return order[:, :top_k]


def _best(values: Tensor, count: int) -> Tensor:
    """Return the first ``count`` of ``_best_first`` of float32 values, in two thirds of its time.

    The values are mapped to integers of the same order, with their position in the low bits, so that no two are equal.
    """
    bits = values.add(0.0).masked_fill_(values.isnan(), torch.nan).view(torch.int32)  # one zero, and one NaN
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    last = values.shape[1] - 1
    places = torch.arange(last, -1, -1, device=values.device)
    return last - ((ordered.long() << 32) + places).topk(count, dim=1).values.bitwise_and_(0xFFFFFFFF)


def _best_first(values: Tensor) -> Tensor:
    return torch.sort(values, dim=1, descending=True, stable=True).indices


def _weigh(x: Tensor, index: Tensor, router: Router, dropped: Tensor | None = None) -> Tensor:
    """Return the weights of the experts ``index``, 0 for ``dropped`` slots."""
    if dropped is not None:
        index = index.masked_fill(dropped, 0)
    chosen = x.gather(1, index)
    if router.score.slope is None:
        if router.renormalize:
            scores = (chosen if dropped is None else chosen.masked_fill(dropped, -torch.inf)).softmax(1)
        else:
            scores = (chosen - x.logsumexp(1, keepdim=True)).exp()
    else:
        scores = router.score.value(chosen)
        if router.renormalize:
            summed = scores if dropped is None else scores.masked_fill(dropped, 0)
            scores = scores / (summed.sum(1, keepdim=True) + EPSILON)
    scores = scores * router.scale
    return scores if dropped is None else scores.masked_fill(dropped, 0)


def _shares(x: Tensor, router: Router) -> Tensor:
    """Return scores that sum to 1."""
    scores = router.score.value(x)
    return scores if router.score.slope is None else scores / (scores.sum(1, keepdim=True) + EPSILON)


def backward(
    grad_weights: Tensor,
    logits: Tensor,
    top_k_index: Tensor,
    *sums_and_mask: Tensor | None,
    weighing: Weighing,
    out: Tensor,
) -> None:
    """Run the router's backward; reads nothing on the host."""
    grad_prob_sum, grad_z_sum, mask = sums_and_mask
    grad_weights, logits, index = grad_weights.contiguous(), logits.contiguous(), top_k_index.long()
    out.copy_(gradient(grad_weights, logits, index, grad_prob_sum, grad_z_sum, mask, weighing))
