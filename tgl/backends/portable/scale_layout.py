"""Scales in other layouts through one map of offsets (``meta.scale_layout``), computed on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from ...meta import scale_layout
from .indexed import Indexed


def scatter(
    scale: Tensor, offs: Tensor | None, *, scales: scale_layout.Scales, out: Tensor, rows: Tensor | None = None
) -> None:
    """Run ``scale_to_layout``."""
    if rows is not None:
        scale = Indexed(scale, rows).rows(rows)
    offset = scale_layout.offsets(scales, offs).flatten()
    room = scale.new_zeros(out.numel() + 1)  # the last place takes scales that belong to no group
    room.scatter_(0, torch.where(offset < 0, out.numel(), offset), scale.flatten())
    out.copy_(room[:-1].view(out.shape))


def gather(scale: Tensor, offs: Tensor | None, *, scales: scale_layout.Scales, out: Tensor) -> None:
    """Run ``scale_from_layout``."""
    offset = scale_layout.offsets(scales, offs).flatten()
    room = torch.cat([scale.flatten(), scale.new_zeros(1)])
    out.copy_(room[torch.where(offset < 0, scale.numel(), offset)].view(out.shape))
