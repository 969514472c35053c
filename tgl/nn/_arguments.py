"""Checks of constructor arguments, whose wrong type would otherwise fail far from the constructor, or not at all."""

from __future__ import annotations

import operator
from typing import Any

import torch

from ._errors import shown


def check_size(argument: str, value: Any, least: int = 0) -> int:
    """Return ``value``, an integer of at least ``least``, as an int.

    Raises:
        TypeError: it is no integer; bools and floats with an integer value are not accepted.
        ValueError: it is too small.
    """
    try:
        size = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        size = None
    if size is None:
        raise TypeError(f"`{argument}` must be an integer, but got {shown(value)}")
    if size < least:
        raise ValueError(f"`{argument}` must be at least {least}, but got {value}")
    return size


def one_of(**values: Any) -> Any:
    """Return the only one of ``values``, two names of one argument, that is given.

    Raises:
        TypeError: none is, or both are.
    """
    given = [name for name, value in values.items() if value is not None]
    if len(given) == 1:
        return values[given[0]]
    names = " or ".join(f"`{name}`" for name in values)
    got = " and ".join(f"{name}={shown(values[name])}" for name in given) or ("neither" if len(values) > 1 else None)
    raise TypeError(f"{names} must be given, but got {got}")


def dtype_of_parameters(params_dtype: torch.dtype | None, dtype: torch.dtype | None) -> torch.dtype | None:
    """Return the dtype given by one of two names; None if neither is given."""
    check_dtype("params_dtype", params_dtype)
    check_dtype("dtype", dtype)
    return None if params_dtype is dtype is None else one_of(params_dtype=params_dtype, dtype=dtype)


def check_flags(**flags: Any) -> None:
    """Raise ``TypeError`` for the first of ``flags`` that is no bool, because ``"False"`` and tensors are truthy."""
    for argument, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"`{argument}` must be True or False, but got {shown(value)}")


def check_number(argument: str, value: Any) -> None:
    """Raise ``TypeError`` unless ``value`` is a number or None."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
        raise TypeError(f"`{argument}` must be a number or None, but got {shown(value)}")


def check_dtype(argument: str, value: Any) -> None:
    """Raise ``TypeError`` unless ``value`` is a floating dtype or None."""
    if value is not None and not (isinstance(value, torch.dtype) and value.is_floating_point):
        raise TypeError(f"`{argument}` must be a floating dtype, but got {shown(value)}")


def check_device(argument: str, value: Any) -> None:
    """Raise unless ``value`` names a device or is None.

    Raises:
        TypeError: it is of another type.
        ValueError: there is no such device.
    """
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (str, int, torch.device)):
        raise TypeError(f"`{argument}` must be a device or None, but got {shown(value)}")
    try:
        torch.device(value)
    except RuntimeError as error:
        raise ValueError(f"`{argument}` must be a device or None, but got {value!r}: {error}") from error


def check_callable(argument: str, value: Any) -> None:
    """Raise ``TypeError`` unless ``value`` can be called or is None."""
    if value is not None and not callable(value):
        raise TypeError(f"`{argument}` must be callable or None, but got {shown(value)}")
