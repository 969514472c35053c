"""Steps of grouping a router's choices by expert, which eager, traced and fallback ways to do so share."""

from __future__ import annotations

import torch
from torch import Tensor

from .specs import Dim


def flattened(top_k_index: Tensor) -> Tensor:
    """``[S k]``: the choices of the pairs, in a dtype that counts any number of experts."""
    choices = top_k_index.reshape(-1)
    return choices if choices.dtype.itemsize >= 4 else choices.int()


def behind(choices: Tensor, num_experts: int) -> Tensor:
    """``choices``, but those of no expert sort behind the experts."""
    return choices.masked_fill(choices < 0, num_experts)


def narrow(choices: Tensor, num_experts: int) -> Tensor:
    """``behind`` in bytes, of which a sort by digits takes one pass; for fewer than 255 experts."""
    return choices.clamp(-1, num_experts).to(torch.uint8)  # in which -1 is the last


def resized(t: Tensor, rows: Dim) -> Tensor:
    """``t [T]`` with so many rows: cut off, or with rows of no pair behind the last one."""
    return torch.nn.functional.pad(t, (0, rows - t.shape[0]), value=-1)  # type: ignore[arg-type]
