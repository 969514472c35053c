"""Saving of GroupedTensors for a backward, component by component, as plain tensors.

Hooks on saved tensors (``torch.autograd.graph.save_on_cpu``, offloading, checkpointing) then see every component, and a
compiled graph saves the components rather than a wrapper whose size its partitioner does not know.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ._structure import CLASSES
from .grouped_tensor import NAMES, GroupedTensor


def save_for_backward(ctx: Any, *tensors: Tensor | None) -> None:
    """Call ``ctx.save_for_backward`` for an ``autograd.Function`` whose tensors may include GroupedTensors."""
    flat: list[Tensor | None] = []
    kinds: list[tuple | None] = []
    for t in tensors:
        if isinstance(t, GroupedTensor):
            names = tuple([name for name in NAMES if getattr(t, name) is not None])
            flat.extend([getattr(t, name) for name in names])
            kinds.append((names, t.format, t.shape, t.dtype, t.static, t.shapes))
        else:
            flat.append(t)
            kinds.append(None)
    ctx.save_for_backward(*flat)
    ctx.kinds = tuple(kinds)


def saved_tensors(ctx: Any) -> tuple[Tensor | None, ...]:
    """Return the arguments of ``save_for_backward``; unpacks every component once."""
    flat = iter(ctx.saved_tensors)
    found: list[Tensor | None] = []
    for kind in ctx.kinds:
        if kind is None:
            found.append(next(flat))
        else:
            names, format, shape, dtype, static, shapes = kind
            parts = {name: next(flat) for name in names}
            found.append(CLASSES[format](shape, dtype, static, parts, shapes))
    return tuple(found)
