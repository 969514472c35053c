"""Notation of sharding rules: the arguments of an op's call, and the placements of its results and tensors."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor import Placement, Replicate

Rule = tuple[list[Placement | None], list[Placement | None]]  # placements of the results, and of the arguments


class OpCall(SimpleNamespace):
    """The arguments of a call on DTensors, by name; those that the call leaves out have their defaults."""

    def __init__(self, op: torch._ops.OpOverload, args: tuple, keywords: dict[str, Any]) -> None:
        self._schema = op._schema
        values = {argument.name: argument.default_value for argument in op._schema.arguments}
        super().__init__(**values | dict(zip(values, args)) | keywords)

    def rule(self, results: list[Placement], **placements: Placement) -> Rule:
        """Return a rule, in which tensors without a placement are replicated."""
        made: list[Placement | None] = []
        for argument in self._schema.arguments:
            is_tensor = "Tensor" in str(argument.type)
            if is_tensor and getattr(self, argument.name) is not None:
                made.append(placements.get(argument.name, Replicate()))
            elif is_tensor or not argument.kwarg_only:
                made.append(None)
        return list(results), made

    def whole(self) -> Rule:
        """Return the rule with everything replicated."""
        return self.rule([Replicate()] * len(self._schema.returns))


Rules = Callable[[OpCall], list[Rule]]
"""Returns the rules of a call, for one dimension of the mesh."""
