"""Token rounding: fill whole tiles by dropping an expert's lowest-scored tokens or adding the best of the others.

With many small experts the last tile of a group is mostly padding. The method is from SonicMoE (Guo et al., 2025,
arXiv:2512.14080): it changes the assignment of tokens by less than a tile per expert.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ._errors import fail, not_a_tensor, shown

_ROUNDINGS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "nearest": lambda count, multiple: (count + multiple // 2) // multiple,  # half a tile rounds up
    "up": lambda count, multiple: (count + multiple - 1) // multiple,
    "down": lambda count, multiple: count // multiple,
}


def round_tokens(
    top_k_index: Tensor,
    scores: Tensor,
    *,
    multiple: int = 128,
    rounding: str = "nearest",
    max_choices: int | None = None,
) -> Tensor:
    """Reassign tokens so that the number of tokens of each expert is a multiple of the kernels' tile.

    An expert keeps the highest-scored tokens of those that chose it; if it gets more, they are the highest-scored
    tokens of those that did not. Of equal scores the earlier token comes first. Does not synchronise with the host, and
    is deterministic. This is for training: the experts of a token depend on its batch, and an expert with less than
    half a multiple may lose all tokens.

    Use it between the router and ``route``::

        scores = logits.softmax(-1)
        chosen = tgl.round_tokens(scores.topk(k).indices, scores)
        weights = scores.gather(1, chosen.clamp(min=0))
        rows = tokens * k + num_experts * 64  # half a tile for each
        routing = tgl.route(chosen, num_experts, num_rows=rows, sentinels=True)
        y = tgl.moe(x, routing, weights, w1, w2)

    Args:
        top_k_index: integer ``[S, k]``: experts chosen by each token, values out of ``[0, G)`` for none.
        scores: ``[S, G]``, floating: the router's score of every expert. No gradient passes to them here.
        multiple: rows of a tile, at least 1.
        rounding: how each expert's number of tokens is rounded: ``nearest``, ``up`` or ``down``; the result is at most
            the largest multiple within S.
        max_choices: C, the largest number of experts of a token, at most G. If more experts have a token, those with
            the lowest scores drop it, and then have less than a multiple. By default ``min(2 k, G)``.

    Returns:
        int64 ``[S, C]``, the experts of each token in the order of its scores, and -1 for a dropped slot, as input of
        ``route`` (``sentinels=True``). The weight of a dropped slot is not used.

    Raises:
        TypeError: ``top_k_index`` is of no integer dtype, or ``scores`` not floating.
        ValueError: shapes or devices that do not fit, or an unknown ``rounding``.
    """
    _check(top_k_index, scores, multiple, rounding, max_choices)
    tokens, experts = scores.shape
    choices = min(2 * top_k_index.shape[1], experts) if max_choices is None else max_choices
    scores = scores.detach()
    none = (top_k_index < 0) | (top_k_index >= experts)
    chosen = torch.zeros(tokens, experts + 1, dtype=torch.bool, device=scores.device)
    chosen = chosen.scatter(1, top_k_index.long().masked_fill(none, experts), True)[:, :experts]
    count = _ROUNDINGS[rounding](chosen.sum(0), multiple).clamp(max=tokens // multiple) * multiple

    by_score = scores.argsort(dim=0, descending=True, stable=True)
    chosen_first = chosen.gather(0, by_score).byte().argsort(dim=0, descending=True, stable=True)
    order = by_score.gather(0, chosen_first)  # the order of tokens, for every expert
    among_the_first = torch.arange(tokens, device=scores.device)[:, None] < count
    kept = torch.zeros_like(chosen).scatter(0, order, among_the_first)

    by_score = scores.argsort(dim=1, descending=True, stable=True)
    kept_first = kept.gather(1, by_score).byte().argsort(dim=1, descending=True, stable=True)[:, :choices]
    found = by_score.gather(1, kept_first)
    return found.masked_fill(~kept.gather(1, found), -1)


def _check(top_k_index: Tensor, scores: Tensor, multiple: int, rounding: str, max_choices: int | None) -> None:
    op = "tgl::round_tokens"
    for name, t, letters in (("top_k_index", top_k_index, "[S, k]"), ("scores", scores, "[S, G]")):
        if not isinstance(t, Tensor):
            not_a_tensor(f"{op}: `{name}`", t)
        if t.dim() != 2:
            fail(f"{op}: `{name}` must be 2-D {letters}, but got shape {tuple(t.shape)}")
    if top_k_index.dtype.is_floating_point or top_k_index.dtype.is_complex or top_k_index.dtype == torch.bool:
        fail(f"{op}: `top_k_index` must be an integer tensor, but got {top_k_index.dtype}", TypeError)
    if not scores.dtype.is_floating_point:
        fail(f"{op}: `scores` must be a floating tensor, but got {scores.dtype}", TypeError)
    if scores.device != top_k_index.device:
        fail(f"{op}: `scores` must be on {top_k_index.device} like `top_k_index`, but got {scores.device}")
    if (same := scores.shape[0] == top_k_index.shape[0]) is False:
        tokens = f"the {top_k_index.shape[0]} tokens of `top_k_index`"
        fail(f"{op}: `scores` must have {tokens}, but got shape {tuple(scores.shape)}")
    torch._check(same, lambda: "tgl::round_tokens: `scores` must have the tokens of `top_k_index`")
    if isinstance(multiple, bool) or not isinstance(multiple, int):
        fail(f"{op}: `multiple` must be an integer, but got {shown(multiple)}", TypeError)
    if max_choices is not None and (isinstance(max_choices, bool) or not isinstance(max_choices, (int, torch.SymInt))):
        fail(f"{op}: `max_choices` must be an integer or None, but got {shown(max_choices)}", TypeError)
    if multiple < 1:
        fail(f"{op}: `multiple` must be at least 1, but got {multiple}")
    if not isinstance(rounding, str) or rounding not in _ROUNDINGS:
        fail(f"{op}: `rounding` must be one of {', '.join(_ROUNDINGS)}, but got {rounding!r}")
    if max_choices is not None and not 1 <= max_choices <= scores.shape[1]:
        fail(f"{op}: `max_choices` must be from 1 to the {scores.shape[1]} experts, but got {max_choices}")
