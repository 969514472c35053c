"""The Mixture-of-Experts block behind its router by operations of torch, as models spell it out."""

from __future__ import annotations

import torch
from torch import Tensor


def by_grouped_mm(x: Tensor, chosen: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """A sort, gathers, two ``torch._grouped_mm`` and a sum in float32; SwiGLU.

    Args:
        x: ``[S, H]``.
        chosen, weights: ``[S, k]``.
        w1, w2: ``[E, 2 I, H]`` and ``[E, H, I]``.
    """
    experts, order = chosen.reshape(-1).sort(stable=True)
    offs = torch.searchsorted(experts, torch.arange(w1.shape[0], device=x.device), right=True).int()
    token = order // chosen.shape[1]
    gate, linear = torch._grouped_mm(x[token], w1.transpose(1, 2), offs=offs).chunk(2, -1)
    weight = weights.reshape(-1)[order, None]
    hidden = (torch.nn.functional.silu(gate.float()) * linear.float() * weight).to(x.dtype)
    rows = torch._grouped_mm(hidden, w2.transpose(1, 2), offs=offs)
    return torch.zeros_like(x, dtype=torch.float32).index_add(0, token, rows.float()).to(x.dtype)
