"""``tgl::same_offs``: the group ends of a call, held against those that its input was quantised with."""

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
    """``offs``, which ``debug_checks`` compares with the ends that an input was ``quantized_with``, both int32 ``[G]``.

    In a graph it is a copy, so that the comparison has a place there; eagerly it is ``offs`` itself.

    Raises:
        ValueError: the two differ, inside ``debug_checks()``; elsewhere their values are not looked at.
    """
    if torch.compiler.is_compiling():
        return _op(offs, quantized_with)
    debug.check_same_offs(offs, quantized_with)
    return offs
