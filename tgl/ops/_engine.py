"""Queries of the autograd engine: which gradients of the running node are requested."""

from __future__ import annotations

from typing import Any

import torch

# Private functions, which may be missing: then every gradient in `needs_input_grad` is formed.
_will_execute = getattr(torch._C, "_will_engine_execute_node", None)
_running_task = getattr(torch._C, "_current_graph_task_id", None)
_running_node = getattr(torch._C, "_current_autograd_node", None)

RETURNED: Any = 2
"""Marks a gradient that ``torch.autograd.grad`` returns: it must not be None, even with main_grad."""

in_dynamo = torch.compiler.is_dynamo_compiling
"""Whether Dynamo traces the caller; it traces a backward for compiled autograd, or with an ``autograd.Function``."""


class TracedContext:
    """The context of a node whose backward is traced: freeing saved tensors is a no-op, because the graph does it."""

    def __init__(self, ctx: Any) -> None:
        self.ctx = ctx

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ctx, name)

    def maybe_clear_saved_tensors(self) -> None:
        pass


def requested_grads(ctx: Any, *, returned: bool = False) -> tuple[bool, ...]:
    """Return ``ctx.needs_input_grad`` of a running backward, restricted to gradients that are requested.

    ``returned``: mark gradients of leaves that ``torch.autograd.grad`` returns as ``RETURNED``.

    ``torch.autograd.grad(y, x)`` and ``y.backward(inputs=...)`` run only the nodes that lead to the named tensors,
    while ``needs_input_grad`` is fixed in the forward. Outside a backward of the engine, and in a trace, it is returned
    unchanged.
    """
    needs: tuple[bool, ...] = ctx.needs_input_grad
    if in_dynamo():
        return getattr(ctx, "requested", needs)
    if _will_execute is None or _running_task is None or _running_task() == -1:
        return needs
    # A node runs for at least one gradient, and the query raises for a leaf.
    if sum(needs) == 1 and not returned:
        return needs
    # Inputs that require grad have an edge each, in order; other tensors have an empty edge, other arguments none.
    edges = iter([node for node, _ in ctx.next_functions if node is not None])
    return tuple([need and _executes(next(edges)) for need in needs])


def _executes(node: Any) -> bool:
    try:
        return _will_execute(node)  # type: ignore[misc]
    except RuntimeError:  # a leaf whose gradient ``torch.autograd.grad`` returns
        return RETURNED


def compiled_autograd_key(ctx: Any) -> tuple[int, ...]:
    """Return the ``_compiled_autograd_key`` of a function whose backward writes gradients that bypass autograd.

    Compiled autograd calls it before every backward. Only then does the engine still know which gradients are
    requested, and the graph depends on that.
    """
    ctx.requested = requested_grads(ctx, returned=True)
    return (ctx._autograd_function_id, *map(int, ctx.requested))


def executed(edge: Any) -> list[bool] | None:
    """Return for every node behind ``edge`` whether the engine will execute it (or ``RETURNED``); None if unknown.

    ``edge`` is a node behind the running one. If it is None, all gradient edges of parameters behind the running node
    are queried, and must have the same answer.
    """
    if _will_execute is None or _running_task is None or _running_task() == -1:
        return None
    if edge is not None:
        return [_executes(node) for node, _ in edge.next_functions]
    answers = {answer for node in _edges() for answer in executed(node) or ()}
    return list(answers) if len(answers) == 1 else None


def executed_today(edge: Any) -> list[bool]:
    """Return ``executed`` for the current nodes of the parameters at ``edge``.

    A parameter gets a new node if its ``data`` changes dtype or device, even if it is changed back.
    """
    parameters = [p for node in (_edges() if edge is None else [edge]) for p in node.parameters]
    return [_executes(torch.autograd.graph.get_gradient_edge(p).node) for p in parameters if p.requires_grad]


def _edges() -> list[Any]:
    """Return the gradient edges of parameters behind the running node."""
    running = None if _running_node is None else _running_node()
    return [] if running is None else [node for node, _ in running.next_functions if _is_gradient_edge(node)]


def _is_gradient_edge(node: Any) -> bool:
    return getattr(getattr(node, "_forward_cls", None), "is_gradient_edge", False)
