"""Hooks of parameters whose gradients bypass autograd: formed later, or added to ``main_grad``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_STANDS_IN = "stands_in_for_main_grad"


class _Deferred:
    """A tensor hook that is skipped if autograd has no gradient or only a stand-in."""

    def __init__(self, hook: Callable[[Tensor], Any]) -> None:
        self.hook = hook

    def __call__(self, grad: Tensor | None) -> Any:
        # Another use of the parameter may still have an ordinary gradient.
        return None if grad is None or stands_in(grad) else self.hook(grad)


class _Postponed:
    """A post-accumulate-grad hook that only ``call_accumulated_hooks`` runs, after ``backward_dw``."""

    def __init__(self, hook: Callable[[Tensor], Any]) -> None:
        self.hook = hook

    def __call__(self, parameter: Tensor) -> None:
        pass


def have_tensor_hooks(parameters: Sequence[Tensor]) -> bool:
    """Return whether any of the parameters has a hook from ``register_hook``."""
    return any(p._backward_hooks for p in parameters)


def defer_tensor_hooks(parameters: Sequence[Tensor]) -> None:
    """Make the running backward skip tensor hooks, which ``apply_tensor_hooks`` calls later."""
    for parameter in parameters:
        _wrap(parameter._backward_hooks, _Deferred)


def postpone_hooks(parameters: Sequence[Tensor]) -> None:
    """Defer tensor hooks, and leave post-accumulate-grad hooks to ``call_accumulated_hooks``."""
    defer_tensor_hooks(parameters)
    for parameter in parameters:
        _wrap(getattr(parameter, "_post_accumulate_grad_hooks", None), _Postponed)


def _wrap(hooks: Any, wrapper: type) -> None:
    """Wrap hooks in place in their dictionary, because their handles remove them by key."""
    for key, hook in (hooks or {}).items():
        if not isinstance(hook, wrapper):
            hooks[key] = wrapper(hook)


def apply_tensor_hooks(parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return ``gradients`` after the tensor hooks of those ``parameters`` that require grad."""
    found = []
    for parameter, grad in zip(parameters, gradients):
        hooks: Any = parameter._backward_hooks if parameter.requires_grad else None
        for hook in list((hooks or {}).values()):
            result = (hook.hook if isinstance(hook, _Deferred) else hook)(grad)
            grad = grad if result is None else result
        found.append(grad)
    return found


def call_accumulated_hooks(parameters: Sequence[Tensor]) -> None:
    """Call the post-accumulate-grad hooks of ``parameters``, whose gradients have been accumulated."""
    for parameter in parameters:
        hooks: Any = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        for hook in list(hooks.values()):
            (hook.hook if isinstance(hook, _Postponed) else hook)(parameter)


def stand_in(like: Tensor, shape: torch.Size | Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return zeros instead of a gradient that is in ``main_grad``: an expanded scalar until it is accumulated."""
    zeros = like.new_zeros((), dtype=dtype).expand(shape)
    if not torch.compiler.is_compiling():
        setattr(zeros, _STANDS_IN, True)
    return zeros


def returned_stand_in(parameter: Tensor) -> Tensor:
    """Return zeros for a parameter whose gradient went elsewhere, because ``torch.autograd.grad`` raises for None.

    A caller such as torch's zero-bubble schedules adds it to ``grad`` in place, which an earlier expanded stand-in does
    not support, so that one is removed.
    """
    if parameter.grad is not None and stands_in(parameter.grad):
        parameter.grad = None
    return stand_in(parameter.detach(), parameter.shape, parameter.dtype)


def stands_in(t: Tensor) -> bool:
    """Return whether ``t`` is a ``stand_in``."""
    return hasattr(t, _STANDS_IN)


class ModuleHooks(list):
    """Hooks of ``backward_dw``. They refer to one module's parameters, so a copy of the module has none."""

    def __reduce__(self) -> tuple:
        return ModuleHooks, ()

    def __deepcopy__(self, memo: dict) -> ModuleHooks:
        return ModuleHooks()
