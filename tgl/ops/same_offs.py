"""``tgl::same_offs``: compare the group ends of a call with those that its input was quantised with."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import debug
from ..meta import checks
from ._library import register

NAME = "same_offs"


def _check(offs: Tensor, quantized_with: Tensor) -> None:
    checks.offsets(NAME, offs, None, "offs", offs.device)
    checks.offsets(NAME, quantized_with, offs.shape[0], "offs", offs.device)


def _kernel(offs: Tensor, quantized_with: Tensor) -> Tensor:
    _check(offs, quantized_with)
    debug.check_same_offs(offs, quantized_with)
    return torch.empty_like(offs).copy_(offs)


def _fake(offs: Tensor, quantized_with: Tensor) -> Tensor:
    _check(offs, quantized_with)
    return torch.empty_like(offs)


_op = register(f"{NAME}(Tensor offs, Tensor quantized_with) -> Tensor", _kernel, _fake)


def same_offs(offs: Tensor, quantized_with: Tensor) -> Tensor:
    """Return ``offs`` after comparing them with ``quantized_with``, both int32 ``[G]``, inside ``debug_checks()``.

    In a graph the result is a copy, so that the graph contains the comparison; in eager mode it is ``offs`` itself.

    Raises:
        ValueError: the two differ, inside ``debug_checks()``; elsewhere their values are not read.
    """
    if torch.compiler.is_compiling():
        return _op(offs, quantized_with)
    debug.check_same_offs(offs, quantized_with)
    return offs
