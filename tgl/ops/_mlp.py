"""``grouped_mlp`` made of the other ops' implementations, whichever serve the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import backends
from ..meta import specs
from ..meta.mlp import by_columns

if TYPE_CHECKING:
    from .grouped_activation import Params


def forward(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    offs: Tensor,
    probs: Tensor | None,
    bias1: Tensor | None,
    bias2: Tensor | None,
    *,
    params: Params,
    y: Tensor,
    h: Tensor,
    act: Tensor | None,
) -> None:
    """``h = x w1 + bias1``, ``act = probs A(h)`` (if None, not kept), ``y = act w2 + probs bias2``."""
    if act is None:
        act = h.new_empty(h.shape[0], w2.shape[1])
    backends.run("grouped_gemm_activation", x.device, x, w1, offs, bias1, probs, params=params, y=act, h=h)
    scale = probs if bias2 is not None else None
    backends.run("grouped_gemm", x.device, act, w2, offs, bias2, scale, out=y, zero_tail=True)


def backward(
    dy: Tensor,
    x: Tensor | None,
    w1: Tensor,
    w2: Tensor,
    offs: Tensor,
    h: Tensor,
    act: Tensor | None,
    probs: Tensor | None,
    bias2: Tensor | None,
    *,
    params: Params,
    dx: Tensor | None,
    dw1: Tensor | None,
    dw2: Tensor | None,
    dprobs: Tensor | None,
    dbias1: Tensor | None,
    dbias2: Tensor | None,
) -> None:
    """The gradients that have a destination."""
    device = dy.device
    if dw2 is not None:
        if act is None:
            act = h.new_empty(h.shape[0], w2.shape[1])
            backends.run("grouped_activation", device, h, offs, probs, params=params, out=act)
        _wgrad(act, dy, offs, w2, dw2)
    del act
    scaled = None
    if bias2 is not None and probs is not None and (dbias2 is not None or dprobs is not None):
        acc = specs.accumulator(dy.dtype)
        scaled = torch.empty(dy.shape[0], dtype=acc, device=device)
        sums = torch.empty(bias2.shape, dtype=acc, device=device) if dbias2 is None else dbias2
        backends.run("grouped_dbias_dscales", device, dy, bias2, probs, offs, dbias=sums, dscales=scaled)
    elif dbias2 is not None:
        backends.run("grouped_dbias", device, dy, offs, out=dbias2)
    if dx is None and dw1 is None and dprobs is None and dbias1 is None:
        return

    dh = torch.empty(h.shape, dtype=h.dtype, device=device)
    sums = torch.empty(h.shape[0] if probs is not None else 0, dtype=specs.accumulator(h.dtype), device=device)
    w2 = w2.transpose(1, 2)
    backends.run("grouped_gemm_dactivation", device, dy, w2, h, offs, probs, params=params, dh=dh, dprobs=sums)
    if dprobs is not None:
        dprobs.copy_(sums)
        if scaled is not None:
            dprobs.add_(scaled.to(dprobs.dtype))
    if dbias1 is not None:
        backends.run("grouped_dbias", device, dh, offs, out=dbias1)
    if dw1 is not None and x is not None:
        _wgrad(x, dh, offs, w1, dw1)
    if dx is not None:
        backends.run("grouped_gemm", device, dh, w1.transpose(1, 2), offs, None, None, out=dx, zero_tail=True)


def _wgrad(a: Tensor, b: Tensor, offs: Tensor, w: Tensor, out: Tensor) -> None:
    """``out[g] = a^T b``, in the memory order of ``w``."""
    if by_columns(w):
        backends.run("grouped_gemm_wgrad", a.device, b, a, offs, out=out.transpose(1, 2))
    else:
        backends.run("grouped_gemm_wgrad", a.device, a, b, offs, out=out)
