"""Gather and scatter of matrices at slots of a packed tensor on any device, where group ``g`` has slot ``slots[g]``.

Slots are evenly spaced views that may overlap, even a thousand per matrix, so slots that are not in the table are never
touched. An index out of range reads zeros and is not written.
"""

from __future__ import annotations

import torch
from torch import Tensor


def room(packed: Tensor, slots: Tensor) -> Tensor:
    """Allocate ``[G, M, N]`` for the matrices ``slots`` of ``packed [S, M, N]``, in its memory order."""
    _, rows, columns = packed.shape
    if packed.stride(-1) == 1:
        return packed.new_empty(slots.shape[0], rows, columns)
    return packed.new_empty(slots.shape[0], columns, rows).transpose(1, 2)


def gather(packed: Tensor, slots: Tensor) -> Tensor:
    """Copy the matrices ``slots`` of ``packed [S, M, N]`` to ``[G, M, N]``, in its memory order; no host read."""
    inside = slots.clamp(0, packed.shape[0] - 1)
    if packed.stride(-1) == 1:
        found = packed.index_select(0, inside)
    else:  # an index_select of a transposed view takes ten times as long
        found = packed.transpose(1, 2).index_select(0, inside).transpose(1, 2)
    return found.masked_fill_((slots != inside)[:, None, None], 0)


def scatter(packed: Tensor, slots: Tensor, values: Tensor) -> None:
    """Write ``packed[slots[g]] = values[g]`` for slots that do not overlap; no host read.

    An index out of range writes another group's matrix to that group's slot again, or the old values if all are out of
    range.
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
    """Return a view of each group's matrix, None for an index that is no slot; reads ``slots`` on the host."""
    count = packed.shape[0]
    return [packed[slot] if 0 <= slot < count else None for slot in slots.tolist()]
