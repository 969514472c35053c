"""The gradient edge of a layer's parameters in a compiled graph, for gradients that autograd does not see.

The backward of such a layer returns None for a weight, and a graph then has no path to it: the engine could not say
whether the weight's gradient is requested. A tensor without elements, made once outside of the graph, is that path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops._engine import RETURNED, asked_for
from ._hooks import returned_stand_in


class _Edge(torch.autograd.Function):
    """An empty tensor behind which the gradients of ``parameters`` are accumulated."""

    is_gradient_edge = True  # for ``_engine.executed``

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.parameters = parameters
        return parameters[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        requested = asked_for(ctx, returned=True)
        return tuple([returned_stand_in(p) if r is RETURNED else None for p, r in zip(ctx.parameters, requested)])


class GradientEdge:
    """The edge of ``parameters``, all of which require grad. A copy of the layer that has it makes its own.

    Attributes:
        parameters: the leaves.
        tensor: without elements; its ``grad_fn`` leads to them.
    """

    def __init__(self, parameters: Sequence[Tensor] = ()) -> None:
        self.parameters, self.tensor = list(parameters), None
        if parameters:
            with torch.inference_mode(False), torch.enable_grad():
                self.tensor = _Edge.apply(*parameters)

    def __reduce__(self) -> tuple:
        return GradientEdge, ()

    def leads_to(self, parameters: Sequence[Tensor]) -> bool:
        """Whether it is that of ``parameters``; a parameter that changes its dtype or device gets another node."""
        if self.tensor is None:
            return False
        nodes = [node for node, _ in self.tensor.grad_fn.next_functions]
        current = [torch.autograd.graph.get_gradient_edge(p).node for p in parameters]
        return len(nodes) == len(current) and all(a is b for a, b in zip(nodes, current))
