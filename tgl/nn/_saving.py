"""The one place where the layers save tensors for their backward and get them back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def save(ctx: Any, activations: Sequence[Tensor], resident: Sequence[Tensor | None] = ()) -> None:
    """Save ``activations``, which may live elsewhere until the backward, and ``resident`` tensors, which stay.

    Weights, routing and parameters' operands are resident: they are in use, and the next call needs them again.
    """
    ctx.activations = len(activations)
    ctx.save_for_backward(*activations, *resident)


def restore(ctx: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
    """``(activations, resident)`` as they were given to ``save``."""
    saved = ctx.saved_tensors
    return saved[: ctx.activations], saved[ctx.activations :]
