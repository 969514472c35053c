"""Steps of grouping a router's top-k slots by expert, shared by the eager, traced and fallback implementations."""

from __future__ import annotations

import torch
from torch import Tensor

from .specs import Dim


def flattened(top_k_index: Tensor) -> Tensor:
    """Return ``[S k]``, the expert of every top-k slot, in a dtype that holds any number of experts."""
    choices = top_k_index.reshape(-1)
    return choices if choices.dtype.itemsize >= 4 else choices.int()


def behind(choices: Tensor, num_experts: int) -> Tensor:
    """Return ``choices`` with dropped slots mapped so that they sort after the experts."""
    return choices.masked_fill(choices < 0, num_experts)


def narrow(choices: Tensor, num_experts: int) -> Tensor:
    """Return ``behind`` as bytes, which a radix sort handles in one pass; for fewer than 255 experts."""
    return choices.clamp(-1, num_experts).to(torch.uint8)  # -1 becomes 255, the last


def resized(t: Tensor, rows: Dim) -> Tensor:
    """Return ``t [T]`` with ``rows`` rows: truncated, or padded with -1 (unused rows)."""
    return torch.nn.functional.pad(t, (0, rows - t.shape[0]), value=-1)  # type: ignore[arg-type]
