"""``autograd.Function`` under the transforms of ``torch.func``, which need a form that costs more per call.

A layer's own function works on what is inside a transform's wrappers, with no transform active, as its ops keep state
and have no derivative: it is of first order. Its results then get a node at every level, which raises.
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
    """``function.apply`` for a ``function`` with ``setup_context``, at the price of one without where that will do.

    In front of a call with ``setup_context`` torch binds the arguments by their names, which takes as long as all else
    that an ``autograd.Function`` does.
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
    """Whether a graph is being compiled for a CPU, by what leaves the backward of an ``autograd.Function`` in.

    Never with torch 2.11, whose Dynamo takes ``is_exporting()`` for true in every graph, and which gives a gradient of
    zeros to the ``autograd.Function`` of an activation between two ops: there the ops stay.
    """
    compiled = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
    # Under a transform of torch.func Dynamo leaves the backward of an autograd.Function out.
    return compiled and device.type == "cpu" and not torch._C._are_functorch_transforms_active()


def active() -> bool:
    """Whether a transform of ``torch.func`` runs eagerly."""
    return torch._C._are_functorch_transforms_active() and not torch.compiler.is_compiling()


@contextmanager
def outside() -> Iterator[None]:
    """No transform active, and no gradients."""
    with temporarily_clear_interpreter_stack(), torch.no_grad():
        yield


def inside_of(t: Any) -> Any:
    """The tensor inside the wrappers of ``grad`` (and ``vjp``); anything else as it is."""
    while isinstance(t, Tensor) and _functorch.is_functorch_wrapped_tensor(t):
        if _functorch.is_batchedtensor(t):
            _refuse("Vmap")
        t = _functorch.get_unwrapped(t)
    return t


def is_differentiated(t: Tensor) -> bool:
    """Whether a transform differentiates by ``t``, or by what it is made of."""
    return _functorch.is_functorch_wrapped_tensor(t)


def check_reverse_mode() -> None:
    """Every active transform is ``torch.func.grad`` or ``torch.func.vjp``.

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
    """The first ``count`` tensors, with a node at every level at which any tensor requires grad."""

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
    """``gradients`` that raise if anybody differentiates them by ``of`` or what it is made of."""
    results = list(gradients)
    places = [i for i, t in enumerate(results) if t is not None and not stands_in(t)]
    if places:
        tensors = [t for t in of if isinstance(t, Tensor)]
        for i, t in zip(places, _FirstOrder.apply(len(places), *[results[i] for i in places], *tensors)):
            results[i] = t
    return tuple(results)
