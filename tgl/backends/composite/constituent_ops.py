"""The ops that a composition runs for a call, found by running the composition under the op recorder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...meta.specs import TensorSpec
from .. import Composition

Parts = Callable[..., Composition]


def of_run(run: Callable[..., None]) -> Parts:
    """Return ``Implementation.parts`` for an implementation with ``run``."""

    def parts(*args: Any, **kwargs: Any) -> Composition:
        given = [_stand_in(a) for a in args]
        return Composition(lambda: run(*given, **_stand_ins(kwargs)), _device(args))

    return parts


def of_produce(produce: Callable[..., Any], *destinations: str) -> Parts:
    """Return ``Implementation.parts`` for an implementation with ``produce``.

    Args:
        produce: the implementation's function.
        destinations: the keywords of a call that are outputs.
    """

    def parts(*args: Any, **kwargs: Any) -> Composition:
        specs = {name: _spec(kwargs.pop(name)) for name in destinations}
        given = [_stand_in(a) for a in args]
        return Composition(lambda: produce(specs, given, **_stand_ins(kwargs)), _device(args))

    return parts


def _device(args: tuple) -> torch.device:
    return next(a.device for a in args if isinstance(a, Tensor))


def _stand_ins(options: dict[str, Any]) -> dict[str, Any]:
    return {name: _stand_in(value) for name, value in options.items()}


def _stand_in(value: Any) -> Any:
    """Return a meta tensor for a tensor; anything else, and the meta tensors of components, as they are."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _spec(made: Tensor | None) -> TensorSpec | None:
    """Return the spec of an output, or None if it is not requested."""
    if made is None:
        return None
    stride = None if made.is_contiguous() else made.stride()
    return TensorSpec(tuple(made.shape), made.dtype, torch.device("meta"), stride)
