"""Matrices at slots of a packed tensor, where group ``g`` has slot ``slots[g]``: what holds on any device.

Slots are views at even distances that may overlap, a thousand to a matrix, so nothing here touches one that is not
named. A number that is no slot's reads as zeros and is not written.
"""

from __future__ import annotations

import torch
from torch import Tensor


def room(packed: Tensor, slots: Tensor) -> Tensor:
    """``[G, M, N]`` for the matrices ``slots`` of ``packed [S, M, N]``, in its memory order, uninitialised."""
    _, rows, columns = packed.shape
    if packed.stride(-1) == 1:
        return packed.new_empty(slots.shape[0], rows, columns)
    return packed.new_empty(slots.shape[0], columns, rows).transpose(1, 2)


def gather(packed: Tensor, slots: Tensor) -> Tensor:
    """``[G, M, N]``: a copy of the matrices ``slots`` of ``packed [S, M, N]``, in its memory order; no host read."""
    inside = slots.clamp(0, packed.shape[0] - 1)
    if packed.stride(-1) == 1:
        found = packed.index_select(0, inside)
    else:  # an index_select of a transposed view takes ten times as long
        found = packed.transpose(1, 2).index_select(0, inside).transpose(1, 2)
    return found.masked_fill_((slots != inside)[:, None, None], 0)


def scatter(packed: Tensor, slots: Tensor, values: Tensor) -> None:
    """``packed[slots[g]] = values[g]`` for slots that do not overlap; no host read.

    For a number that is no slot's another group's matrix is written where it is written anyway, or what is there.
    """
    if not slots.shape[0]:
        return
    inside = slots.clamp(0, packed.shape[0] - 1)
    valid = slots == inside
    first = valid.to(torch.uint8).argmax()
    source = torch.where(valid, torch.arange(slots.shape[0], device=slots.device), first)
    target = inside.index_select(0, source).long()
    values = torch.where(valid.any(), values.index_select(0, source), packed.index_select(0, target))
    packed.index_copy_(0, target, values)


def on_host(packed: Tensor, slots: Tensor) -> list[Tensor | None]:
    """A view of each group's matrix, None for a number that is no slot's; reads ``slots`` on the host."""
    count = packed.shape[0]
    return [packed[slot] if 0 <= slot < count else None for slot in slots.tolist()]
