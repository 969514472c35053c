"""Notation of sharding rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.tensor import Placement, Replicate

Rule = tuple[list[Placement | None], list[Placement | None]]  # placements of the results, and of the arguments


def rule(results: Sequence[Placement], *arguments: tuple[Any, Placement]) -> Rule:
    """Return a rule with None for omitted arguments."""
    return list(results), [placement if spec is not None else None for spec, placement in arguments]


def replicated(results: int, *arguments: Any) -> Rule:
    """Return the rule with everything replicated."""
    return rule([Replicate()] * results, *((spec, Replicate()) for spec in arguments))
