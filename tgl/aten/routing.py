"""Choices of a router grouped by expert."""

from __future__ import annotations

import torch
from torch import Tensor


def flattened(top_k_index: Tensor) -> Tensor:
    """``[T]``: the choices of the pairs, in a dtype that counts any number of experts."""
    choices = top_k_index.reshape(-1)
    return choices if choices.dtype.itemsize >= 4 else choices.int()


def behind(choices: Tensor, num_experts: int) -> Tensor:
    """``choices``, but those of no expert sort behind the experts."""
    return choices.masked_fill(choices < 0, num_experts)


def resized(t: Tensor, rows: int | torch.SymInt) -> Tensor:
    """``t [T]`` with so many rows: those behind the last one are no pair's."""
    return torch.nn.functional.pad(t, (0, rows - t.shape[0]), value=-1)  # type: ignore[arg-type]  # or cut off


def route(
    top_k_index: Tensor, num_experts: int, *, source: Tensor, position: Tensor, token: Tensor, offs: Tensor
) -> None:
    """A stable sort; reads nothing on the host."""
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
    torch.floor_divide(source, top_k_index.shape[1], out=token)  # of -1 it is -1
