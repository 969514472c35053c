"""Options of top-k routers, output specs of ``topk_router``, and its gradient as a formula.

A router scores experts by a token's logits, ranks them, keeps the best k and computes their weights. Letters: S tokens,
E experts, k experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import checks
from .specs import TensorSpec, Unasked, accumulator

EPSILON = 1e-20
"""Added to a sum of scores before dividing by it, as in DeepSeek-V3: scores that are all 0 give weights of 0."""


OUTPUTS = ("weights", "top_k_index", "tokens_per_expert", "prob_sum", "z_sum")


class Score(NamedTuple):
    """A score function, from logits to scores of experts.

    Attributes:
        name: name of the score function.
        value: ``x [S, E] -> scores [S, E]``, a new tensor.
        slope: ``(x, scores) -> the derivatives of scores``, for a score that depends on one logit; None for the
            softmax, whose scores depend on all logits and sum to 1.
    """

    name: str
    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor, Tensor], Tensor] | None = None


def _sqrtsoftplus_slope(x: Tensor, scores: Tensor) -> Tensor:
    return 0.5 * x.sigmoid() / scores.clamp_min(torch.finfo(x.dtype).tiny)


SCORES = {
    s.name: s
    for s in (
        Score("softmax", lambda x: x.softmax(1)),
        Score("sigmoid", torch.sigmoid, lambda x, scores: scores * (1 - scores)),
        Score("sqrtsoftplus", lambda x: torch.nn.functional.softplus(x, threshold=40).sqrt(), _sqrtsoftplus_slope),
    )
}


class GroupRule(NamedTuple):
    """A group score, from the scores of the group's experts.

    Attributes:
        name: name of the rule.
        value: ``[S, groups, experts of one] -> [S, groups]``.
        experts: least number of experts of a group.
        by_order: whether the ranking of groups depends only on the order of the scores, which is that of the logits.
    """

    name: str
    value: Callable[[Tensor], Tensor]
    experts: int
    by_order: bool


GROUP_RULES = {
    r.name: r
    for r in (
        GroupRule("max", lambda scores: scores.amax(2), 1, True),
        GroupRule("top2_sum", lambda scores: scores.topk(2, 2).values.sum(2), 2, False),
    )
}


class Router(NamedTuple):
    """The keyword arguments of ``topk_router``."""

    score_function: str = "softmax"
    renormalize: bool = False
    scale: float = 1.0
    num_groups: int = 1
    topk_groups: int = 1
    group_score: str = "max"
    sums: bool = False

    @property
    def score(self) -> Score:
        """The entry of the table."""
        return SCORES[self.score_function]

    @property
    def grouped(self) -> bool:
        """Whether experts come only from some of the groups."""
        return self.topk_groups < self.num_groups

    def by_logits(self, bias: Any) -> bool:
        """Return whether experts can be ranked by their logits, whose order is that of the scores."""
        return bias is None and (not self.grouped or GROUP_RULES[self.group_score].by_order)


class Weighing(NamedTuple):
    """The keyword arguments of ``topk_router_backward``: those of ``Router`` that gradients depend on."""

    score_function: str = "softmax"
    renormalize: bool = False
    scale: float = 1.0

    @property
    def score(self) -> Score:
        """The entry of the table."""
        return SCORES[self.score_function]


def _logits(op: str, logits: Tensor) -> None:
    checks.ndim(op, "logits", logits, 2, "[S, E]")
    checks.floating(op, "logits", logits)


def _mask(op: str, mask: Tensor | None, logits: Tensor, sums: bool) -> None:
    """Check ``mask``, a bool per token, which requires sums."""
    if mask is not None:
        checks.require(sums, op, "mask", "None where there are no sums (losses)", "a tensor")
        checks.operand(op, "mask", mask, (logits.shape[0],), "[S]", (torch.bool,), ("logits", logits.device))


def _index(op: str, index: Tensor, logits: Tensor, top_k: int) -> None:
    """Check ``index``, the experts of a replay."""
    checks.operand(
        op, "index", index, (logits.shape[0], top_k), "[S, k]", (torch.int32, torch.int64), ("logits", logits.device)
    )


def topk_router(
    logits: Tensor,
    top_k: int,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    index: Tensor | None = None,
    *,
    router: Router,
) -> tuple[TensorSpec, ...]:
    """``weights`` and int32 ``top_k_index [S, k]``, int32 ``tokens_per_expert [E]``, ``prob_sum [E]``, ``z_sum [1]``.

    The last three are ``[0]`` without ``sums``. Weights and sums are of the accumulator's dtype.
    """
    op = "topk_router"
    _logits(op, logits)
    checks.known(op, "score_function", router.score_function, SCORES)
    checks.known(op, "group_score", router.group_score, GROUP_RULES)
    tokens, experts = logits.shape
    device, acc = logits.device, accumulator(logits.dtype)
    groups, kept, rule = router.num_groups, router.topk_groups, GROUP_RULES[router.group_score]
    checks.require(groups >= 1, op, "num_groups", "at least 1", groups)
    checks.require(experts % groups == 0, op, "num_groups", lambda: f"a divisor of the {experts} experts", groups)
    checks.require(1 <= kept <= groups, op, "topk_groups", f"from 1 to num_groups = {groups}", kept)
    able = experts // groups * kept
    checks.require(top_k >= 1, op, "top_k", "at least 1", top_k)
    checks.require(top_k <= able, op, "top_k", lambda: f"at most the {able} experts to choose from", top_k)
    if router.grouped:
        size, fewest = experts // groups, rule.experts
        must = f"a number of groups of {fewest} experts or more for {rule.name!r}"
        checks.require(size >= fewest, op, "num_groups", must, groups)
    if bias is not None:
        checks.operand(op, "bias", bias, (experts,), "[E]", (acc, logits.dtype), ("logits", device))
    _mask(op, mask, logits, router.sums)
    if index is not None:
        _index(op, index, logits, top_k)
    weights, chosen = TensorSpec((tokens, top_k), acc, device), TensorSpec((tokens, top_k), torch.int32, device)
    if not router.sums:
        return weights, chosen, *(Unasked((0,), dtype, device) for dtype in (torch.int32, acc, acc))
    counts, probs = TensorSpec((experts,), torch.int32, device), TensorSpec((experts,), acc, device)
    return weights, chosen, counts, probs, TensorSpec((1,), acc, device)


def topk_router_backward(
    grad_weights: Tensor,
    logits: Tensor,
    top_k_index: Tensor,
    grad_prob_sum: Tensor | None = None,
    grad_z_sum: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    weighing: Weighing,
) -> TensorSpec:
    """The gradient of ``logits``, with the same shape and dtype."""
    op = "topk_router_backward"
    _logits(op, logits)
    checks.known(op, "score_function", weighing.score_function, SCORES)
    tokens, experts = logits.shape
    device, acc = logits.device, accumulator(logits.dtype)
    checks.ndim(op, "top_k_index", top_k_index, 2, "[S, k]")
    checks.size(op, "top_k_index", top_k_index, 0, tokens, lambda: f"[S, k] with S = {tokens} like `logits`")
    checks.either_dtype(op, "top_k_index", top_k_index, torch.int32)
    checks.same_device(op, "top_k_index", top_k_index, "logits", device)
    given = (
        ("grad_weights", grad_weights, tuple(top_k_index.shape), "[S, k]"),
        ("grad_prob_sum", grad_prob_sum, (experts,), "[E]"),
        ("grad_z_sum", grad_z_sum, (1,), "[1]"),
    )
    for name, t, shape, letters in given:
        if t is not None:
            checks.shape(op, name, t, shape, letters)
            checks.either_dtype(op, name, t, acc)
            checks.same_device(op, name, t, "logits", device)
    both = (grad_prob_sum is None) == (grad_z_sum is None)
    checks.require(both, op, "grad_z_sum", "given where `grad_prob_sum` is, and not elsewhere", grad_z_sum)
    _mask(op, mask, logits, grad_prob_sum is not None)
    return TensorSpec((tokens, experts), logits.dtype, device)


def gradient(
    grad_weights: Tensor,
    logits: Tensor,
    index: Tensor,
    grad_prob_sum: Tensor | None,
    grad_z_sum: Tensor | None,
    mask: Tensor | None,
    weighing: Weighing,
) -> Tensor:
    """Return the gradient of ``logits`` in differentiable operations.

    With the scores s, and weights w that sum to 1 over the chosen: ``dw_j = w_j (g_j - sum of g w)`` if renormalised by
    a softmax, else ``ds_j = g_j``, or ``(g_j - sum of g s / D) / D`` for the sum D of the chosen scores. Through a
    softmax p, ``dx_i = p_i (ds_i - sum of ds p)``. The gradients of the sums have that form too, for all experts of the
    tokens that count. Slots whose expert is out of range are dropped.
    """
    score, scale = weighing.score, weighing.scale
    x = logits.to(accumulator(logits.dtype))
    dropped = (index < 0) | (index >= x.shape[1])
    index = index.masked_fill(dropped, 0)
    chosen = x.gather(1, index)
    g = (grad_weights * scale).masked_fill(dropped, 0)
    whole = None
    if score.slope is None:
        if weighing.renormalize:
            w = chosen.masked_fill(dropped, -torch.inf).softmax(1).masked_fill(dropped, 0)
            local = w * (g - (g * w).sum(1, keepdim=True))
        else:
            p = x.softmax(1)
            local = g * p.gather(1, index)
            whole = -p * local.sum(1, keepdim=True)
    else:
        s = score.value(chosen)
        if weighing.renormalize:
            total = s.masked_fill(dropped, 0).sum(1, keepdim=True) + EPSILON
            g = ((g - (g * s).sum(1, keepdim=True) / total) / total).masked_fill(dropped, 0)
        local = g * score.slope(chosen, s)
    dx = torch.zeros_like(x).scatter_add(1, index, local)  # dropped slots add 0
    if whole is not None:
        dx = dx + whole
    if grad_prob_sum is not None and grad_z_sum is not None:
        p = x.softmax(1)
        by_sums = 2 * grad_z_sum * x.logsumexp(1, keepdim=True) * p
        if score.slope is None:
            by_sums = by_sums + p * (grad_prob_sum - (p * grad_prob_sum).sum(1, keepdim=True))
        else:
            s = score.value(x)
            total = s.sum(1, keepdim=True) + EPSILON
            off = grad_prob_sum - (s * grad_prob_sum).sum(1, keepdim=True) / total
            by_sums = by_sums + off / total * score.slope(x, s)
        dx = dx + (by_sums if mask is None else by_sums.where(mask[:, None], 0))
    return dx.to(logits.dtype)
