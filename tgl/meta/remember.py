"""Answers that depend on the metadata of tensors alone, remembered."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from torch import Tensor

_P = ParamSpec("_P")
_T = TypeVar("_T")
_MOST = 1024  # answers of one function; token counts change all the time


def by_metadata(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorator: answer calls like an earlier one (positional; real tensors, not fake ones) without running again.

    Tensors are alike that have the same dtype, shape, strides and device; other arguments that are equal. Exceptions
    are not remembered. Between the products of a layer an op finds the caches of the processor cold, and a dozen checks
    in as many functions then cost four times what one look into a dict does.
    """
    known: dict[tuple, Any] = {}

    @functools.wraps(function)
    def remembered(*args: Any) -> Any:
        key = tuple([(a.dtype, a.shape, a.stride(), a.device) if isinstance(a, Tensor) else a for a in args])
        if key in known:
            return known[key]
        answer = function(*args)  # type: ignore[call-arg]
        if len(known) >= _MOST:
            known.clear()
        known[key] = answer
        return answer

    return remembered  # type: ignore[return-value]
