"""The one place where the layers save tensors for their backward and get them back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .. import offload


def save(ctx: Any, activations: Sequence[Tensor], resident: Sequence[Tensor | None] = ()) -> None:
    """Save ``activations``, which may live elsewhere until the backward, and ``resident`` tensors, which stay.

    Weights, routing and parameters' operands are resident: they are in use, and the next call needs them again. The
    activations of one call move as one, or none of them does.
    """
    ctx.home = None
    if offload.in_graph():
        moved = offload.to_host(activations)
        if moved is not None:
            ctx.home, activations = activations[0].device, moved
    else:
        offload.announce(activations, resident)
    ctx.activations = len(activations)
    ctx.save_for_backward(*activations, *resident)


def restore(ctx: Any, grad: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
    """``(activations, resident)`` as they were given to ``save``, for a backward that was given ``grad``."""
    saved = ctx.saved_tensors
    activations, resident = saved[: ctx.activations], saved[ctx.activations :]
    return activations if ctx.home is None else offload.to_device(activations, ctx.home, grad), resident
