"""``tgl::after``: a dependency that a compiler cannot see otherwise."""

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
"""Return a copy of ``x`` that cannot be made before ``dependency`` is computed; ``dependency`` is not read.

A backward that recomputes from saved tensors alone looks to a partitioner like part of the forward: it would merge the
two computations and save the result instead of recomputing it. A copy of ``offs`` that depends on the gradient prevents
that.
"""
