"""Routing of top-k slots to experts."""

from __future__ import annotations

import torch
from torch import Tensor

from ...meta.topk_slots import behind, flattened, resized


def route(
    top_k_index: Tensor, num_experts: int, *, source: Tensor, position: Tensor, token: Tensor, offs: Tensor
) -> None:
    """Sort slots by expert, stably; reads nothing on the host."""
    experts, order = torch.sort(behind(flattened(top_k_index), num_experts), stable=True)
    groups = torch.arange(num_experts, dtype=experts.dtype, device=experts.device)
    torch.searchsorted(experts, groups, right=True, out_int32=True, out=offs)
    rows = torch.arange(order.shape[0], dtype=torch.int32, device=order.device)
    of_none = experts >= num_experts
    if source.shape != position.shape:
        of_none |= rows >= source.shape[0]
        offs.clamp_(max=source.shape[0])
    position.scatter_(0, order, rows.masked_fill_(of_none, -1))
    source.copy_(resized(order.masked_fill_(of_none, -1), source.shape[0]))
    torch.floor_divide(source, top_k_index.shape[1], out=token)  # floor division keeps -1
