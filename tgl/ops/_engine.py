"""What the autograd engine will do with the gradients of a node that it is running."""

from __future__ import annotations

from typing import Any

import torch

# Private, hence guarded: where torch lacks them every gradient that is needed is formed.
_will_execute = getattr(torch._C, "_will_engine_execute_node", None)
_running_task = getattr(torch._C, "_current_graph_task_id", None)
_running_node = getattr(torch._C, "_current_autograd_node", None)

RETURNED: Any = 2
"""For True, of a gradient that ``torch.autograd.grad`` returns: there must be one, wherever it is accumulated."""

in_dynamo = torch.compiler.is_dynamo_compiling
"""Whether Dynamo traces the caller; a backward is traced by compiled autograd, or with an ``autograd.Function``."""


class TracedContext:
    """The context of a node whose backward compiled autograd traces: it has nothing to free, the graph does that."""

    def __init__(self, ctx: Any) -> None:
        self.ctx = ctx

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ctx, name)

    def maybe_clear_saved_tensors(self) -> None:
        pass


def asked_for(ctx: Any, *, returned: bool = False) -> tuple[bool, ...]:
    """``ctx.needs_input_grad`` of a running backward, without the gradients that nobody has asked for.

    ``returned``: those of leaves are ``RETURNED`` where they are.

    ``torch.autograd.grad(y, x)`` and ``y.backward(inputs=...)`` run the nodes on the way to what they name alone, while
    ``needs_input_grad`` is about the forward. Outside a backward of the engine, and in a trace, it is left as it is.
    """
    needs: tuple[bool, ...] = ctx.needs_input_grad
    if in_dynamo():
        return getattr(ctx, "requested", needs)
    if _will_execute is None or _running_task is None or _running_task() == -1:
        return needs
    # A node runs for one gradient at least, and torch would raise an exception about a leaf.
    if sum(needs) == 1 and not returned:
        return needs
    # Inputs that require grad have an edge each, in order; other tensors have an empty one, and the rest has none.
    edges = iter([node for node, _ in ctx.next_functions if node is not None])
    return tuple([need and _executes(next(edges)) for need in needs])


def _executes(node: Any) -> bool:
    try:
        return _will_execute(node)  # type: ignore[misc]
    except RuntimeError:  # a leaf whose gradient ``torch.autograd.grad`` returns
        return RETURNED


def compiled_autograd_key(ctx: Any) -> tuple[int, ...]:
    """The ``_compiled_autograd_key`` of a function whose backward writes beside autograd.

    Compiled autograd asks for it in front of every backward: the last moment at which the engine knows what is
    requested, which a graph has to be for.
    """
    ctx.requested = asked_for(ctx, returned=True)
    return (ctx._autograd_function_id, *map(int, ctx.requested))


def executed(edge: Any) -> list[bool] | None:
    """For every node behind ``edge`` whether the engine will execute it (or ``RETURNED``); None: it cannot be known.

    ``edge`` is a node behind the one that is running. None: all those gradient edges of parameters behind the one that
    is running, if they have one answer.
    """
    if _will_execute is None or _running_task is None or _running_task() == -1:
        return None
    if edge is not None:
        return [_executes(node) for node, _ in edge.next_functions]
    answers = {answer for node in _edges() for answer in executed(node) or ()}
    return list(answers) if len(answers) == 1 else None


def executed_today(edge: Any) -> list[bool]:
    """``executed`` of the nodes that the parameters at ``edge`` have now.

    A parameter gets another node if its ``data`` changes the dtype or device, also if it is changed back.
    """
    parameters = [p for node in (_edges() if edge is None else [edge]) for p in node.parameters]
    return [_executes(torch.autograd.graph.get_gradient_edge(p).node) for p in parameters if p.requires_grad]


def _edges() -> list[Any]:
    """The gradient edges of parameters behind the node that is running."""
    running = None if _running_node is None else _running_node()
    return [] if running is None else [node for node, _ in running.next_functions if _is_gradient_edge(node)]


def _is_gradient_edge(node: Any) -> bool:
    return getattr(getattr(node, "_forward_cls", None), "is_gradient_edge", False)
