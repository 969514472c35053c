"""The activation and its backward as expressions over whole tensors, the tail masked: nothing is read on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...meta import placement, specs

if TYPE_CHECKING:
    from ...ops.grouped_activation import Params


def forward(x: Tensor, offs: Tensor, probs: Tensor | None, *, params: Params, out: Tensor) -> None:
    g, u = params.halves(x.to(specs.accumulator(x.dtype)))
    y = params.value(g, u)
    out.copy_(y if probs is None else y.mul_(probs.to(y.dtype)[:, None]))
    out.masked_fill_(placement.tail(offs, x.shape[0])[:, None], 0)


def backward(
    dy: Tensor, x: Tensor, offs: Tensor, probs: Tensor | None, *, params: Params, dx: Tensor, dprobs: Tensor
) -> None:
    tail, acc = placement.tail(offs, x.shape[0]), specs.accumulator(x.dtype)
    a, a1, linear, slope = params.factors(*params.halves(x.to(acc)))
    dy = dy.to(acc)
    if probs is not None:
        torch.sum(dy * a if linear is None else (dy * a).mul_(linear), 1, out=dprobs)
        dprobs.masked_fill_(tail, 0)
        dy = dy * probs.to(acc)[:, None]
    dg_out, du_out = params.halves(dx)
    dg_out.copy_(dy * a1 if linear is None else (dy * a1).mul_(linear))
    if du_out is not None:
        du = dy * a
        du_out.copy_(du if slope is None else du.mul_(slope))
    dx.masked_fill_(tail[:, None], 0)
