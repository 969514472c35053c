"""Permutation of tokens to rows of experts and back on a CPU, in one pass over the rows.

``embedding_bag`` sums a token's top-k slots as it reads them, where a gather and a sum would write and read another
``[T, H]``. Neither it nor ``index_select`` takes a place out of range; both check every place and raise. Checking
beforehand takes as long as a small gather, so it is only done after they raise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...meta.memory import has_rows
from ...meta.permutation import as_rows
from ...meta.specs import TensorSpec, accumulator
from ..portable import permutation as aten

CACHED = 1 << 16  # elements of rows that are processed at a time


def within(places: Tensor, count: int) -> bool:
    if not places.shape[0]:
        return True
    least, most = torch.aminmax(places)
    return least.item() >= 0 and most.item() < count


def rows_at(t: Tensor, places: Tensor) -> Tensor:
    """Return the rows of ``t`` at ``places``, or its elements; zeros for places out of range."""
    if not t.numel():  # torch raises other errors for empty ones
        return t.new_zeros((places.shape[0], *t.shape[1:]))
    try:
        return t.index_select(0, places)
    except IndexError:
        absent = (places < 0) | (places >= t.shape[0])
        taken = t.index_select(0, places.masked_fill(absent, 0))
        as_rows(taken).view(torch.uint8).index_fill_(0, absent.nonzero().view(-1), 0)  # works for any dtype
        return taken


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
    if weights is None:
        out.copy_(rows_at(x, token))
    else:
        aten.dispatch(x, token, position, weights, top_k=top_k, out=out)


def produce_dispatch(spec: TensorSpec, operands: list, *, top_k: int, zero_tail: bool = True) -> Tensor:
    x, token, position, weights = operands
    if weights is None:
        return rows_at(x, token)
    out = spec.empty()
    dispatch(as_rows(x), token, position, weights, top_k=top_k, out=as_rows(out))
    return out


def combine(y: Tensor, position: Tensor, weights: Tensor | None, *, top_k: int, out: Tensor) -> None:
    out.copy_(_combined(y, position, weights, top_k, out.dtype))


def produce_combine(spec: TensorSpec, operands: list, *, top_k: int) -> Tensor:
    y, position, weights = operands
    if y.dim() == 2 or (weights is None and top_k == 1):
        return _combined(y, position, weights, top_k, spec.dtype)
    out = spec.empty()
    combine(as_rows(y), position, weights, top_k=top_k, out=as_rows(out))
    return out


def _combined(y: Tensor, position: Tensor, weights: Tensor | None, top_k: int, dtype: torch.dtype) -> Tensor:
    """Return sums in ``dtype``; if the rows have another, of a float32 copy, as bags are rounded to their input's
    dtype.
    """
    if weights is None and top_k == 1:
        return rows_at(y, position).to(dtype)
    if not y.numel():  # with several threads a bag without columns fails
        return y.new_zeros((position.shape[0] // top_k, *y.shape[1:]), dtype=dtype)
    if dtype != y.dtype:
        y = y.to(accumulator(y.dtype))
    if not has_rows(y):
        y = y.contiguous()  # a bag of others sums in another order
    starts = torch.arange(0, position.shape[0], top_k, dtype=position.dtype, device=y.device)
    factors = weights if weights is None else weights.to(accumulator(y.dtype)).contiguous().view(-1)
    rows = y if factors is None else y.to(factors.dtype)
    try:
        return _bags(rows, position, starts, factors).to(dtype)
    except RuntimeError:
        present = (position >= 0) & (position < y.shape[0])
        if present.all():
            raise  # for another reason
    counts = present.view(-1, top_k).sum(1, dtype=position.dtype)
    starts = counts.cumsum(0, dtype=position.dtype) - counts
    factors = factors if factors is None else factors[present]
    return _bags(rows, position[present], starts, factors).to(dtype)


def _bags(rows: Tensor, places: Tensor, starts: Tensor, factors: Tensor | None) -> Tensor:
    return torch.embedding_bag(rows, places, starts, mode=0, per_sample_weights=factors)[0]


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
    """Differentiate some rows at a time, whose float32 values stay in the cache."""
    rows, columns = y.shape
    if not (columns and within(position, rows) and within(token, grad.shape[0])):
        aten.combine_backward(grad, y, token, position, weights, top_k=top_k, dy=dy, dweights=dweights)
        return
    acc = dweights.dtype
    # Zeros for rows without a pair, which exist if there are more rows than pairs.
    factors = torch.zeros(rows, dtype=acc, device=y.device).index_copy_(0, position.long(), weights.to(acc).reshape(-1))
    dots, count = factors.new_empty(rows), max(CACHED // columns, 1)
    for places, factor, own, result, dot in zip(*(t.split(count) for t in (token, factors[:, None], y, dy, dots))):
        of_token = grad.index_select(0, places).to(acc)
        torch.sum(of_token * own, 1, out=dot)
        result.copy_(of_token.mul_(factor))
    torch.index_select(dots, 0, position, out=dweights.view(-1))
