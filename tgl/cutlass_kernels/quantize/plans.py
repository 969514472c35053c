"""Compiled quantisation kernels, and the stand-ins for tensors they are compiled with."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from .. import host
from ..host import ALIGNMENT

_plans: dict[Hashable, Callable] = {}


def fetch(key: Hashable, x: Tensor, build: Callable[[], Callable], op: str = "group_quantize") -> Callable:
    """The kernel for ``key``, which begins with the architecture; built, or loaded, if it is the first time."""
    plan = _plans.get(key)
    if plan is None:
        plan = _plans[key] = host.compiled(op, key, x, build)
    return plan


def flag(noop: Tensor | None) -> Tensor | None:
    """The flag as a vector of one element of a type that kernels know."""
    if noop is None:
        return None
    return (noop.view(torch.uint8) if noop.dtype == torch.bool else noop).view(1)


def element(name: str) -> Any:
    """The kernel's type of a dtype."""
    import cutlass

    from .lanes import TYPES

    return {n: getattr(cutlass, kind) for n, kind in TYPES.items()}[name]


def matrix(name: str, pitch: int = ALIGNMENT) -> Any:
    """A matrix whose rows lie on ``pitch`` bytes."""
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_tensor

    kind = element(name)
    strides = (cute.sym_int64(divisibility=max(pitch * 8 // kind.width, 1)), 1)
    return make_fake_tensor(kind, (cute.sym_int32(), cute.sym_int32()), strides, assumed_align=ALIGNMENT)


def vector(name: str, align: int = 4) -> Any:
    """A contiguous vector."""
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_tensor

    return make_fake_tensor(element(name), (cute.sym_int32(),), (1,), assumed_align=align)


def strided(name: str | None) -> Any:
    """A vector of any stride; None for None."""
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_tensor

    return None if name is None else make_fake_tensor(element(name), (cute.sym_int32(),), (cute.sym_int64(),))
