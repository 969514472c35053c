"""Permutation of tokens to rows of experts and back, slot by slot.

Nothing is read on the host, and the order of sums does not depend on the device. A place out of range is read as place
0 and its row replaced by zeros, so that an unused row, which may hold NaN, adds nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...meta.specs import accumulator


def taken(t: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of ``t`` at ``places``, any row for those out of range, and a mask of those, ``[n, 1]``."""
    absent = (places < 0) | (places >= t.shape[0])
    return t.index_select(0, places.masked_fill(absent, 0)), absent[:, None]


def dispatch(
    x: Tensor,
    token: Tensor,
    position: Tensor,
    weights: Tensor | None,
    *,
    top_k: int,
    out: Tensor,
    zero_tail: bool = True,
) -> None:
    if not x.shape[0]:
        out.zero_()
        return
    rows, absent = taken(x, token)
    if weights is not None:
        rows = rows.to(accumulator(x.dtype)) * in_order_of_rows(weights, position, token.shape[0])[:, None]
    rows.view(torch.uint8).masked_fill_(absent, 0)  # zeros work for any dtype
    out.copy_(rows)


def in_order_of_rows(weights: Tensor, position: Tensor, rows: int) -> Tensor:
    """Return the weight of every row's pair, ``[T]``; undefined for a row without a pair."""
    absent = (position < 0) | (position >= rows)
    beyond = position.masked_fill(absent, rows).long()
    return weights.new_empty(rows + 1).index_copy_(0, beyond, weights.reshape(-1))[:rows]


def combine(y: Tensor, position: Tensor, weights: Tensor | None, *, top_k: int, out: Tensor) -> None:
    total = torch.zeros(out.shape, dtype=accumulator(y.dtype), device=y.device)
    if y.shape[0]:
        for j, choice in enumerate(position.view(-1, top_k).unbind(1)):
            rows, absent = taken(y, choice)
            rows = rows.to(total.dtype)
            if weights is not None:
                rows = rows * weights[:, j, None]
            total += rows.masked_fill_(absent, 0)
    out.copy_(total)


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
    dispatch(grad, token, position, weights, top_k=top_k, out=dy)
    if not y.shape[0]:
        dweights.zero_()
        return
    wide = grad.to(dweights.dtype)
    for j, choice in enumerate(position.view(-1, top_k).unbind(1)):
        rows, absent = taken(y, choice)
        torch.sum((wide * rows).masked_fill_(absent, 0), 1, out=dweights[:, j])
