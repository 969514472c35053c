"""What the autograd engine will do with the gradients of a node that it is running."""

from __future__ import annotations

from typing import Any

import torch

# Private, hence guarded: where torch lacks them every gradient that is needed is formed.
_will_execute = getattr(torch._C, "_will_engine_execute_node", None)
_running_task = getattr(torch._C, "_current_graph_task_id", None)


def asked_for(ctx: Any) -> tuple[bool, ...]:
    """``ctx.needs_input_grad`` of a running backward, without the gradients that nobody has asked for.

    ``torch.autograd.grad(y, x)`` and ``y.backward(inputs=...)`` run the nodes on the way to what they name alone, while
    ``needs_input_grad`` is about the forward. Outside a backward of the engine, and in a trace, it is left as it is.
    """
    needs: tuple[bool, ...] = ctx.needs_input_grad
    if torch.compiler.is_compiling() or _will_execute is None or _running_task is None or _running_task() == -1:
        return needs
    if sum(needs) == 1:  # a node runs for one gradient at least, and torch would raise an exception about a leaf
        return needs
    # Inputs that require grad have an edge each, in order; other tensors have an empty one, and the rest has none.
    edges = iter([node for node, _ in ctx.next_functions if node is not None])
    return tuple([need and _executes(next(edges)) for need in needs])


def _executes(node: Any) -> bool:
    try:
        return _will_execute(node)  # type: ignore[misc]
    except RuntimeError:  # a leaf whose gradient ``torch.autograd.grad`` returns
        return True
