"""Gradients of an op's backward, of which its ``output_mask`` requests some."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..meta.specs import TensorSpec

Gradients = tuple[dict[str, Tensor | None], tuple[TensorSpec, ...]]
"""Gradients by name, None for one that is not requested, and their specs."""


def requested(names: Sequence[str], made: Sequence[TensorSpec], mask: Sequence[bool]) -> dict[str, TensorSpec | None]:
    """Return the specs of the requested gradients, and None for the others."""
    wanted: dict[str, TensorSpec | None] = {}
    for name, spec, want in zip(names, made, mask):  # a comprehension would add a frame
        wanted[name] = spec if want else None
    return wanted


def results(names: Sequence[str], grads: dict[str, Tensor | None], made: Sequence[TensorSpec]) -> tuple[Tensor, ...]:
    """Return an op's results, with empty tensors for gradients that are not requested."""
    found = map(grads.get, names)
    return tuple([spec.empty() if grad is None else grad for grad, spec in zip(found, made)])
