"""How a sharding rule is written down."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.tensor import Placement, Replicate

Rule = tuple[list[Placement | None], list[Placement | None]]  # of the results, of the arguments


def rule(results: Sequence[Placement], *arguments: tuple[Any, Placement]) -> Rule:
    """A rule with None for the arguments that a call leaves out."""
    return list(results), [placement if spec is not None else None for spec, placement in arguments]


def replicated(results: int, *arguments: Any) -> Rule:
    """Everything on every rank."""
    return rule([Replicate()] * results, *((spec, Replicate()) for spec in arguments))
