"""Checks that need not be made again for a call like one before."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from .specs import TensorSpec

Spec = TypeVar("Spec")
_NEVER = object()
LIMIT = 1024  # calls remembered per check; sizes of a training run are few, and a new number of tokens makes a new call


class RememberedSpec(TensorSpec):
    """A spec that is the same object for all calls alike, with room for what follows from their metadata."""

    kept: Any = None  # type: ignore[assignment]

    @functools.cached_property
    def by_rows(self) -> RememberedSpec:  # type: ignore[override]
        return RememberedSpec(*super().by_rows)


def _remembering(result: Any) -> Any:
    """The specs of a check's result as such that remember."""
    if isinstance(result, TensorSpec):
        return RememberedSpec(*result)
    if type(result) is tuple and all(isinstance(spec, TensorSpec) for spec in result):
        return tuple(map(_remembering, result))
    return result


def remembered(check: Callable[..., Spec]) -> Callable[..., Spec]:
    """``check``, which maps tensors and options to output specs, at the price of a look-up for what it has passed.

    For real tensors alone: sizes of traced ones are symbols. What raises is not remembered. Between the products of a
    layer an op finds the processor's caches cold, and a dozen checks then cost four times what one look-up does.

    Args:
        check: takes tensors or None by position and what can be hashed by keyword; looks at the tensors' shapes,
            strides, dtypes and devices and at nothing else.
    """
    passed: dict[tuple, Any] = {}

    @functools.wraps(check)
    def once(*tensors: Tensor | None, **options: Any) -> Spec:
        seen: list = [*options.items()]
        for t in tensors:  # a comprehension would be one more call
            if t is None:
                seen.append(None)
            else:
                # Flat, for every tuple within the key is one more object to fetch and compare.
                seen += t.shape
                seen += t.stride()
                seen += (t.dtype, t.device)
        key = tuple(seen)
        spec = passed.get(key, _NEVER)  # one step, as another thread may be clearing
        if spec is _NEVER:
            spec = check(*tensors, **options)
            spec = _remembering(spec)
            if len(passed) >= LIMIT:
                passed.clear()
            passed[key] = spec
        return spec

    return once


def remembered_out(check: Callable[..., None]) -> Callable[..., None]:
    """``remembered`` for a check that takes a tensor by the keyword ``out`` too."""
    once = remembered(lambda out, *tensors, **options: check(*tensors, out=out, **options))

    @functools.wraps(check)
    def once_out(*tensors: Tensor | None, out: Tensor, **options: Any) -> None:
        once(out, *tensors, **options)

    return once_out
