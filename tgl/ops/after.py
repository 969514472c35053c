"""``tgl::after``: an order that a compiler cannot see otherwise."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._library import Formula, register

NAME = "after"


def _kernel(x: Tensor, dependency: Tensor) -> Tensor:
    return torch.empty_like(x).copy_(x)


def _save(ctx: Any, needs: tuple[bool, ...], x: Tensor, dependency: Tensor, *, output: Tensor) -> None:
    pass


def _backward(ctx: Any, needs: tuple[bool, ...], g: Tensor) -> tuple[Tensor, None]:
    return g, None


after = register(
    f"{NAME}(Tensor x, Tensor dependency) -> Tensor",
    _kernel,
    lambda x, dependency: torch.empty_like(x),
    formula=Formula(_save, _backward),
)
"""A copy of ``x`` that cannot be made before there is ``dependency``, which is not read.

What a backward computes again from saved tensors alone looks to a partitioner like work of the forward whose result is
to be saved: it would merge the two calls and save what was to be recomputed. Given a copy of ``offs`` that comes after
the gradient, it cannot.
"""
