"""Compiled quantisation kernels, found again by what they are made for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from .. import host

EMULATED_MULTIPROCESSORS = 2

_plans: dict[Hashable, Callable] = {}


def fetch(key: Hashable, x: Tensor, build: Callable[[], Callable], op: str = "group_quantize") -> Callable:
    """What launches the kernel for ``key``, which begins with the architecture; built, or loaded, the first time."""
    plan = _plans.get(key)
    if plan is None:
        plan = _plans[key] = host.launcher(host.compiled(op, key, x, build))
    return plan


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many a device has."""
    if device.type != "cuda":
        return EMULATED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def flag(noop: Tensor | None) -> Tensor | None:
    """The flag as a vector of one element of a type that kernels know."""
    if noop is None:
        return None
    return (noop.view(torch.uint8) if noop.dtype == torch.bool else noop).view(1)


def cleared(amax: Tensor, noop: Tensor | None) -> Tensor:
    """The bits of ``amax``, zero unless the flag says that nothing is to be written."""
    if noop is None:
        amax.zero_()
    else:
        amax.masked_fill_(noop == 0, 0.0)
    return amax.view(torch.int32)
