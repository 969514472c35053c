"""Tensors that lie in memory as views and autograd leave them, and as no allocation does."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def _gaps(t: Tensor, *steps: int) -> Tensor:
    """A copy of ``t`` with so many places for an element along each of the last dimensions."""
    outer = t.shape[: t.dim() - len(steps)]
    room = t.new_full((*outer, *(size * step for size, step in zip(t.shape[len(outer) :], steps))), -99)
    view = room[(..., *(slice(None, None, step) for step in steps))]
    view.copy_(t)
    return view


def _overlapping(t: Tensor) -> Tensor:
    """Every row begins one element after the previous one."""
    count = t.shape[-2] + t.shape[-1] - 1
    room = t.flatten(-2)[..., :count].contiguous()
    return room.as_strided(t.shape, (*room.stride()[:-1], 1, 1))


MATRICES: dict[str, Callable[[Tensor], Tensor]] = {
    "every other row": lambda t: _gaps(t, 2, 1),
    "every other element": lambda t: _gaps(t, 1, 2),
    "turned, with gaps": lambda t: _gaps(t.transpose(-1, -2), 2, 2).transpose(-1, -2),
    "one value": lambda t: t.flatten()[:1].view((1,) * t.dim()).expand(t.shape),
    "one row": lambda t: t[..., :1, :].expand(t.shape),
    "one column": lambda t: _gaps(t, 2, 1)[..., :1].expand(t.shape),
    "overlapping": _overlapping,
    "negative": lambda t: torch._neg_view(-t),
    "imaginary part of a conjugate": lambda t: torch._neg_view(_gaps(-t, 1, 2)),
    "spectrum over rows": lambda t: _gaps(t.transpose(-1, -2), 1, 2).transpose(-1, -2),
}
"""Functions of a tensor of two dimensions or more: its values at such strides, the first ones where values repeat."""

VECTORS: dict[str, Callable[[Tensor], Tensor]] = {
    "every other element": lambda t: _gaps(t, 2),
    "one value": lambda t: t[:1].expand(t.shape),
    "negative": lambda t: torch._neg_view(-t),
}
"""Layouts of a vector."""


def laid_out(t: Tensor, where: str) -> Tensor:
    """``t`` as the table says, if it has an entry for its dimensions."""
    table = MATRICES if t.dim() > 1 else VECTORS
    return table[where](t) if where in table and t.dim() and t.numel() else t


def plain(t: Tensor) -> Tensor:
    """The same values in memory of their own, row-major."""
    return t.resolve_neg().clone(memory_format=torch.contiguous_format)
