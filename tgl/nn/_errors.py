"""Errors of the modules, which must keep their message inside ``torch.compile``."""

from __future__ import annotations

from typing import NoReturn

import torch


def explain_to_dynamo(message: str) -> None:
    """Put ``message`` into the error of a trace, where a raise loses its message and warnings cannot be traced."""
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(message)


def fail(message: str, error: type[Exception] = ValueError) -> NoReturn:
    """Raise ``error``, also with ``message`` in the error of a trace."""
    explain_to_dynamo(message)
    raise error(message)


def shown(value: object) -> str:
    """Return ``value`` as text for a message: numbers and names as they are, other objects by their type."""
    return repr(value) if isinstance(value, (int, float, str, torch.dtype, type(None))) else f"a {type(value).__name__}"


def not_a_tensor(argument: str, value: object, must: str = "a tensor") -> NoReturn:
    """Raise the error of an argument that is no tensor; callers check ``isinstance`` themselves, to save a call."""
    fail(f"{argument} must be {must}, but got {shown(value)}", TypeError)


def not_a_microbatch(value: object) -> NoReturn:
    """Raise the error of an ``is_first_microbatch`` of an unsupported type."""
    fail(f"`is_first_microbatch` must be a bool, a bool tensor or None, but got {shown(value)}", TypeError)
