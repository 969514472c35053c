"""Tensors as the memory they lie in, by rows or by columns."""

from __future__ import annotations

import torch


def raw(t: torch.Tensor) -> torch.Tensor:
    """The bytes of ``t``, as a view."""
    return (t if t.dim() < 2 or t.stride(-1) == 1 else t.t()).view(torch.uint8)


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape hold the same bytes, wherever these lie."""
    flat = (t.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8) for t in (one, other))
    return one.shape == other.shape and torch.equal(*flat)


def like(room: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """The beginning of ``room``, a vector of the dtype of ``t``, as a tensor laid out as ``t`` is."""
    return room.as_strided(t.shape, t.stride())
