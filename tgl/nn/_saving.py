"""Saving and restoring of the layers' tensors for the backward, including offload in a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .. import offload


def save(
    ctx: Any, units: Sequence[Sequence[Tensor]], resident: Sequence[Tensor | None] = (), anchor: Tensor | None = None
) -> None:
    """Save ``units`` of activations, which may be offloaded until the backward, and ``resident`` tensors.

    Weights, routing and parameters' operands are resident, because the next call needs them again. The activations of
    one unit are offloaded together or not at all. ``anchor``: see ``of_first_order``, which reads it.
    """
    in_graph = offload.in_graph()
    tensors: list[Tensor | None] = []
    units_kept = []
    for unit in units:
        moved = offload.to_host(unit) if in_graph and unit else None
        units_kept.append((len(unit), None if moved is None else unit[0].device))
        tensors.extend(unit if moved is None else moved)
        if not in_graph:
            offload.announce(unit, resident)
    ctx.units = tuple(units_kept)
    ctx.end = len(tensors) + len(resident)
    ctx.save_for_backward(*tensors, *resident, anchor)


def restore(ctx: Any) -> tuple[list[tuple[Tensor, ...]], tuple[Tensor | None, ...]]:
    """Return ``(units, resident)`` as passed to ``save``; offloaded units are on the host, see ``bring_back``."""
    saved = ctx.saved_tensors
    units, at = [], 0
    for size, _ in ctx.units:
        units.append(saved[at : at + size])
        at += size
    return units, saved[at : ctx.end]


def bring_back(ctx: Any, index: int, unit: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """Return the unit of this ``index`` on its own device, copied back once ``grad`` has been computed."""
    home = ctx.units[index][1]
    return unit if home is None else offload.to_device(unit, home, grad)
