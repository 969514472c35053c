"""Tensors that are the slots of one packed tensor: evenly spaced, in order, in one allocation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def pack(parameters: Sequence[nn.Parameter]) -> Tensor | None:
    """Move ``parameters`` into one contiguous tensor, if they do not lie in one, and return that tensor.

    None if they are no plain tensors of one form (a wrapper may have replaced them): then they stay as they are.
    """
    first = parameters[0]
    if any(
        type(p.data) is not Tensor or (p.shape, p.dtype, p.device) != (first.shape, first.dtype, first.device)
        for p in parameters
    ):
        return None
    found = slots_of([p.data for p in parameters])
    if found is not None and found.is_contiguous():
        return found
    packed = torch.empty((len(parameters), *first.shape), dtype=first.dtype, device=first.device)
    for slot, parameter in zip(packed.unbind(), parameters):
        slot.copy_(parameter.data)
        parameter.data = slot
    return packed


def slots_of(parts: Sequence[Tensor]) -> Tensor | None:
    """The view ``[G, ...]`` of which ``parts`` are the slots, in order and evenly spaced; None if there is none."""
    first = parts[0]
    if first.device.type == "meta" or not all(p.is_contiguous() and p.shape == first.shape for p in parts):
        return None
    storage = first.untyped_storage().data_ptr()
    if any(p.untyped_storage().data_ptr() != storage or p.dtype != first.dtype for p in parts):
        return None
    starts = [p.storage_offset() for p in parts]
    step = starts[1] - starts[0] if len(parts) > 1 else first.numel()
    if step < first.numel() or any(start != starts[0] + i * step for i, start in enumerate(starts)):
        return None
    return first.as_strided((len(parts), *first.shape), (step, *first.stride()))


def lies_in(packed: Tensor, parts: Sequence[Tensor]) -> bool:
    """Whether ``parts`` are the slots of ``packed``, by address."""
    if packed.device.type == "meta":
        return True
    start, step = packed.data_ptr(), packed.stride(0) * packed.element_size()
    return packed.dtype == parts[0].dtype and all(p.data_ptr() == start + i * step for i, p in enumerate(parts))
