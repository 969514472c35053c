"""Compiled quantisation kernels, and the stand-ins for tensors they are compiled with."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from ... import backends
from .. import cache

ALIGNMENT = 16

_plans: dict[Hashable, Callable] = {}


def fetch(key: Hashable, x: Tensor, build: Callable[[], Callable], op: str = "group_quantize") -> Callable:
    """The kernel for ``key``, which begins with the architecture; built, or loaded, if it is the first time."""
    plan = _plans.get(key)
    if plan is None:
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            raise backends.GraphCaptureError(
                f"tgl::{op}: the kernel for this call is not compiled yet, which CUDA graph capture forbids; "
                f"call tgl.warmup({op!r}, ...) with such arguments, or the op itself, before the capture"
            )
        plan = cache.fetch(key, build) if x.is_cuda else build()
        _plans[key] = plan
    return plan


def call(plan: Callable, x: Tensor, *rest: Any) -> None:
    """Launch on the device of ``x``."""
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        with torch.cuda.device(x.device):
            plan(x, *rest)
    else:
        plan(x, *rest)


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
