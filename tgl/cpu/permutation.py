"""Tokens to rows of experts and back on a CPU: one pass over the rows.

``embedding_bag`` sums a token's choices as it reads them, where a gather and a sum would write and read another
``[T, H]``. It takes no place out of range: then its bags hold the other choices alone, and may be empty.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..aten import permutation as aten
from ..meta.specs import TensorSpec, accumulator

CACHED = 1 << 16  # elements of rows that are worked on at a time


def within(places: Tensor, count: int) -> bool:
    if not places.shape[0]:
        return True
    least, most = torch.aminmax(places)
    return least.item() >= 0 and most.item() < count


def dispatch(x: Tensor, token: Tensor, position: Tensor, weights: Tensor | None, *, top_k: int, out: Tensor) -> None:
    if weights is not None or not x.shape[0]:
        aten.dispatch(x, token, position, weights, top_k=top_k, out=out)
    elif within(token, x.shape[0]):
        torch.index_select(x, 0, token, out=out)
    else:
        absent = (token < 0) | (token >= x.shape[0])
        torch.index_select(x, 0, token.masked_fill(absent, 0), out=out)
        out.view(torch.uint8).index_fill_(0, absent.nonzero().view(-1), 0)  # of any dtype


def combine(y: Tensor, position: Tensor, weights: Tensor | None, *, top_k: int, out: Tensor) -> None:
    out.copy_(_combined(y, position, weights, top_k))


def produce_combine(spec: TensorSpec, operands: list, *, top_k: int) -> Tensor:
    y, position, weights = operands
    return _combined(y, position, weights, top_k)


def _combined(y: Tensor, position: Tensor, weights: Tensor | None, top_k: int) -> Tensor:
    pairs, rows = position.shape[0], y.shape[0]
    starts = torch.arange(0, pairs, top_k, dtype=position.dtype, device=y.device)
    factors = weights if weights is None else weights.to(accumulator(y.dtype)).reshape(-1)
    if not within(position, rows):
        present = (position >= 0) & (position < rows)
        position = position[present]
        factors = factors if factors is None else factors[present]
        counts = present.view(-1, top_k).sum(1, dtype=position.dtype)
        starts = counts.cumsum(0, dtype=position.dtype) - counts
    if factors is None:
        if top_k == 1 and position.shape[0] == pairs:
            return y.index_select(0, position)
        return torch.embedding_bag(y, position, starts, mode=0)[0]
    return torch.embedding_bag(y.to(factors.dtype), position, starts, mode=0, per_sample_weights=factors)[0].to(y.dtype)


def combine_backward(
    grad: Tensor,
    y: Tensor,
    token: Tensor,
    position: Tensor,
    weights: Tensor,
    *,
    top_k: int,
    dy: Tensor,
    dweights: Tensor,
) -> None:
    """Some rows at a time, whose float32 stays in the cache."""
    rows, columns = y.shape
    if not (columns and within(position, rows) and within(token, grad.shape[0])):
        aten.combine_backward(grad, y, token, position, weights, top_k=top_k, dy=dy, dweights=dweights)
        return
    acc = dweights.dtype
    # Zeros for a row of no pair, of which there are some if there are more rows than pairs.
    factors = torch.zeros(rows, dtype=acc, device=y.device).index_copy_(0, position.long(), weights.to(acc).reshape(-1))
    dots, count = factors.new_empty(rows), max(CACHED // columns, 1)
    for places, factor, own, result, dot in zip(*(t.split(count) for t in (token, factors[:, None], y, dy, dots))):
        of_token = grad.index_select(0, places).to(acc)
        torch.sum(of_token * own, 1, out=dot)
        result.copy_(of_token.mul_(factor))
    torch.index_select(dots, 0, position, out=dweights.view(-1))
