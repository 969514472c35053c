"""Overloads ``requested`` of ops that write a weight's gradient outside autograd, for compiled graphs.

In eager mode a backward knows which gradients are requested (``_engine``). A compiled layer is one autograd node whose
ops were fixed by the trace, so ``torch.autograd.grad(y, x)`` runs the ops of every gradient. These overloads get the
weight's gradient edge, and query the engine when they run: nothing is written unless the gradient of a weight at that
edge is requested. A captured CUDA graph would repeat one answer forever, hence their tag.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import _engine
from ._library import KERNELS, LIB

_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)


def define_requested(schema: str, op: torch._ops.OpOverload, fake: Callable) -> torch._ops.OpOverload:
    """Register the overload ``requested`` of ``op``, which also takes the keyword ``edge``.

    Args:
        schema: schema of ``op``.
        op: the op to run if the gradient of a parameter at ``edge`` is requested.
        fake: fake of ``op``.
    """
    (name, rest), separator = schema.split("(", 1), ", " if ", *, " in schema else ", *, "
    arguments, returns = rest.rsplit(") -> ", 1)
    LIB.define(f"{name}.requested({arguments}{separator}Tensor edge) -> {returns}", tags=_TAGS)
    requested: torch._ops.OpOverload = getattr(torch.ops.tgl, name).requested

    def kernel(*args: Any, edge: Tensor, **kwargs: Any) -> None:
        if _requested(name, edge):
            op(*args, **kwargs)

    KERNELS[requested] = kernel
    LIB.impl(requested, kernel, "CompositeExplicitAutograd")
    fake_requested: Callable = lambda *args, edge, **kwargs: fake(*args, **kwargs)  # noqa: E731
    torch.library.register_fake(f"tgl::{name}.requested", fake_requested, lib=LIB)
    return requested


def _requested(name: str, edge: Tensor) -> bool:
    """Return whether the running backward forms the gradients of the parameters at ``edge``.

    Raises:
        RuntimeError: it forms only some of them, or this cannot be known.
    """
    answers = _engine.executed(edge.grad_fn)
    if answers is None:
        raise RuntimeError(
            f"tgl::{name}: fuse_wgrad_accumulation and delay_wgrad_compute in a compiled graph need a backward outside "
            "of the graph, run by autograd's engine: whether the weight's gradient is requested cannot be known in "
            "torch.autograd.grad inside a compiled function, nor under compiled autograd; call requires_grad_(False) "
            "on the weights for a gradient of the input alone, or do not compile the layer"
        )
    if any(answers) and not all(answers):
        raise RuntimeError(
            f"tgl::{name}: a compiled layer with fuse_wgrad_accumulation or delay_wgrad_compute forms the gradients of "
            f"all its parameters or of none, but {sum(map(bool, answers))} of {len(answers)} were requested; request "
            "all of them, or call the layer eagerly"
        )
    if not any(answers) and any(_engine.executed_today(edge.grad_fn)):
        raise RuntimeError(
            f"tgl::{name}: the weights must keep their dtype and device from the call that compiled the layer on, but "
            "`data` of another dtype or device was assigned since: assign it by `layer.to`, or call the layer eagerly"
        )
    return all(answers)
