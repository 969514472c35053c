"""The gradient edge of a layer's parameters in a compiled graph, for gradients that bypass autograd.

The backward of such a layer returns None for a weight, so a graph has no path to the weight and the engine cannot tell
whether the weight's gradient is requested. An empty tensor, made once outside the graph, provides that path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops._engine import RETURNED, requested_grads
from ._hooks import returned_stand_in


class _Edge(torch.autograd.Function):
    """Return an empty tensor whose autograd node leads to the accumulation nodes of ``parameters``."""

    is_gradient_edge = True  # read by ``_engine.executed``

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.parameters = parameters
        return parameters[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        requested = requested_grads(ctx, returned=True)
        return tuple([returned_stand_in(p) if r is RETURNED else None for p, r in zip(ctx.parameters, requested)])


class GradientEdge:
    """The gradient edge of ``parameters``, all of which require grad. A copy of the layer makes its own.

    Attributes:
        parameters: the leaves.
        tensor: empty; its ``grad_fn`` leads to the leaves.
    """

    def __init__(self, parameters: Sequence[Tensor] = ()) -> None:
        self.parameters, self.tensor = list(parameters), None
        if parameters:
            with torch.inference_mode(False), torch.enable_grad():
                self.tensor = _Edge.apply(*parameters)

    def __reduce__(self) -> tuple:
        return GradientEdge, ()

    def leads_to(self, parameters: Sequence[Tensor]) -> bool:
        """Return whether the edge leads to ``parameters``; a change of dtype or device gives a parameter a new node."""
        if self.tensor is None:
            return False
        nodes = [node for node, _ in self.tensor.grad_fn.next_functions]
        current = [torch.autograd.graph.get_gradient_edge(p).node for p in parameters]
        return len(nodes) == len(current) and all(a is b for a, b in zip(nodes, current))
