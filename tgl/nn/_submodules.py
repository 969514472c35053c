"""Helpers for layers inside other modules, which may have hooks or be replaced by another module."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as _module

from ._errors import fail
from .grouped_linear import GroupedLinear


def hooked(*modules: nn.Module) -> bool:
    """Return whether any of ``modules`` has hooks, so that calling it does more than its forward."""
    for module in modules:  # a generator would add frames to every call
        if module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks:
            return True
    return bool(
        _module._global_forward_pre_hooks
        or _module._global_forward_hooks
        or _module._global_backward_pre_hooks
        or _module._global_backward_hooks
    )


def has_own_forward(*layers: nn.Module, kinds: tuple[type[nn.Module], ...] = (GroupedLinear,)) -> bool:
    """Return whether any of ``layers`` is not one of ``kinds`` or overrides their forward, as a wrapper does."""
    for layer in layers:
        for kind in kinds:
            if isinstance(layer, kind):
                if type(layer).forward is not kind.forward or "forward" in layer.__dict__:
                    return True
                break
        else:
            return True
    return False


def to_be_called(layer: nn.Module, kinds: tuple[type[nn.Module], ...] = (GroupedLinear,)) -> bool:
    """Return whether ``layer`` must be called as a module, because it has hooks or a forward of its own."""
    return hooked(layer) or has_own_forward(layer, kinds=kinds)


def given(**options: Any) -> dict[str, Any]:
    """Return the options that are not None."""
    return {name: value for name, value in options.items() if value is not None}


def linears(*layers: nn.Module) -> list[GroupedLinear]:
    """Return every ``GroupedLinear`` among ``layers`` and inside them."""
    return [m for layer in layers for m in layer.modules() if isinstance(m, GroupedLinear)]


def check_takes(name: str, layer: nn.Module, options: dict[str, Any]) -> None:
    """Check that ``layer``, which replaces ``name``, can be called as ``layer(inp, m_splits, **options)``."""
    try:
        inspect.signature(layer.forward).bind(None, None, **options)
    except TypeError as error:
        wanted = ", ".join(["inp", "m_splits", *(f"{option}=..." for option in options)])
        fail(
            f"`{name}` must be a module whose forward takes ({wanted}) and returns [T, N], but got a "
            f"{type(layer).__name__}: {error}",
            TypeError,
        )


def splits_of(offs: Tensor) -> Tensor:
    """Return the ``m_splits`` that add up to ``offs``."""
    return offs.diff(prepend=offs.new_zeros(1))
