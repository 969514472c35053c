"""Errors of the modules, which must keep their message inside ``torch.compile``."""

from __future__ import annotations

from typing import NoReturn

import torch


def explain_to_dynamo(message: str) -> None:
    """Put ``message`` into the error of a trace, where a Python raise loses its own and a warning cannot be traced."""
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(message)


def fail(message: str, error: type[Exception] = ValueError) -> NoReturn:
    """Raise ``error``, with ``message`` in the error of a trace as well."""
    explain_to_dynamo(message)
    raise error(message)
