"""Weights of experts as a framework's buffer may hold them: from the last to the first, at uneven distances."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tgl


def reverse_weights(network: nn.Module) -> list[Tensor]:
    """Move the weights of every grouped layer into a buffer of NaN of its own; returns the buffers."""
    buffers = []
    for layer in network.modules():
        if isinstance(layer, tgl.GroupedLinear):
            weights = layer.group_parameters("weight")
            size = weights[0].numel()
            starts = [8 + g * size + 16 * g * g for g in range(len(weights))][::-1]
            buffer = torch.full((starts[0] + size,), float("nan"), dtype=weights[0].dtype)
            for weight, start in zip(weights, starts):
                place = buffer[start : start + size].view_as(weight)
                place.copy_(weight.detach())
                weight.data = place
            buffers.append(buffer)
    return buffers


class Readers(TorchDispatchMode):
    """Operations that read some buffers, by name; a view of a buffer counts as the buffer."""

    supports_higher_order_operators = True

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        super().__init__()
        self.storages = {_storage(buffer) for buffer in buffers}
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {_storage(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)} & self.storages
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor) and _storage(t) not in given]
        if given and (made or func._schema.is_mutable):
            self.found.append(str(func))
        return result


def _storage(t: Tensor) -> int:
    return t.untyped_storage()._cdata
