"""``autograd.Function`` under the transforms of ``torch.func``, which need a form that costs more per call.

A layer's own function runs on the tensors inside a transform's wrappers, with no transform active, because its ops keep
state and have no derivative: it supports first order only. Its results then get a node at every level, which raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C import _functorch
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters, temporarily_clear_interpreter_stack
from torch.autograd import Function

from ._errors import fail
from ._hooks import stands_in

_REFUSED = {
    "Vmap": "torch.vmap, which jacrev and jacfwd use too: call it once on all rows",
    "Jvp": "torch.func.jvp or another forward mode: use reverse mode (torch.func.grad or vjp)",
    "Functionalize": "torch.func.functionalize: use torch.compile",
}
_PLAIN_LAYER = "a layer with `single_grouped_weight`, without a recipe, buffers or other options of training"


def applier(function: type[Function]) -> Callable[..., Any]:
    """Return ``function.apply`` for a ``function`` with ``setup_context``, at the cost of one without where possible.

    Before a call with ``setup_context`` torch binds the arguments by name, which takes as long as the rest of an
    ``autograd.Function``. Only transforms need ``setup_context``.
    """

    def forward(ctx: Any, *inputs: Any) -> Any:
        output = function.forward(*inputs)
        function.setup_context(ctx, inputs, output)
        return output

    members = {"forward": staticmethod(forward), "backward": staticmethod(function.backward)}
    plain = type(function.__name__, (Function,), members)

    def apply(*inputs: Any) -> Any:
        chosen: Any = function if torch._C._are_functorch_transforms_active() else plain
        return chosen.apply(*inputs)

    return apply


def compiled_for_cpu(device: torch.device) -> bool:
    """Return whether a graph is being compiled for a CPU that keeps the backward of an ``autograd.Function``.

    Always False with torch 2.11, whose Dynamo evaluates ``is_exporting()`` to true in every graph. It also gives a zero
    gradient to the ``autograd.Function`` of an activation between two ops, so the ops are used there.
    """
    compiled = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
    # Under a transform of torch.func Dynamo drops the backward of an autograd.Function.
    return compiled and device.type == "cpu" and not torch._C._are_functorch_transforms_active()


def active() -> bool:
    """Return whether a transform of ``torch.func`` runs eagerly."""
    return torch._C._are_functorch_transforms_active() and not torch.compiler.is_compiling()


@contextmanager
def outside() -> Iterator[None]:
    """Deactivate all transforms, and disable grad."""
    with temporarily_clear_interpreter_stack(), torch.no_grad():
        yield


def inside_of(t: Any) -> Any:
    """Return the tensor inside the wrappers of ``grad`` (and ``vjp``); anything else unchanged."""
    while isinstance(t, Tensor) and _functorch.is_functorch_wrapped_tensor(t):
        if _functorch.is_batchedtensor(t):
            _refuse("Vmap")
        t = _functorch.get_unwrapped(t)
    return t


def is_differentiated(t: Tensor) -> bool:
    """Return whether a transform differentiates with respect to ``t``, or tensors that it was computed from."""
    return _functorch.is_functorch_wrapped_tensor(t)


def check_reverse_mode() -> None:
    """Check that every active transform is ``torch.func.grad`` or ``torch.func.vjp``.

    Raises:
        RuntimeError: one is not.
    """
    for interpreter in retrieve_all_functorch_interpreters():
        if interpreter.key().name != "Grad":
            _refuse(interpreter.key().name)


def _refuse(name: str) -> NoReturn:
    why = f"a layer of this kind cannot run under {_REFUSED.get(name, 'the transform ' + name)}"
    fail(f"{why}, or take {_PLAIN_LAYER}" if name == "Vmap" else why, RuntimeError)


class _FirstOrder(Function):
    """Return the first ``count`` tensors, with a raising node at every level at which any tensor requires grad."""

    @staticmethod
    def forward(count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple([t.detach() for t in tensors[:count]])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        raise RuntimeError(f"gradients of a layer of this kind have no derivative; those of {_PLAIN_LAYER} have")


def first_order(gradients: Sequence[Tensor | None], of: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Return ``gradients`` that raise if they are differentiated with respect to ``of`` or its ancestors."""
    results = list(gradients)
    places = [i for i, t in enumerate(results) if t is not None and not stands_in(t)]
    if places:
        tensors = [t for t in of if isinstance(t, Tensor)]
        for i, t in zip(places, _FirstOrder.apply(len(places), *[results[i] for i in places], *tensors)):
            results[i] = t
    return tuple(results)
