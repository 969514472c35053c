"""Compiled quantisation kernels, found again by what they are made for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from ... import backends
from ...meta.quantized import Options
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


def maxima(x: Tensor, offs: Tensor | None, row_scale: Tensor | None, noop: Tensor | None, options: Options) -> Callable:
    """The kernel that finds the groups' largest finite magnitudes."""
    arch, name = backends.device_arch(x.device), host.name
    made = (
        *(name(x.dtype), offs is not None, name(row_scale), name(noop)),
        *(options.rowwise, options.columnwise, options.rht),
    )
    return fetch((arch, not x.is_cuda, "group maxima", *made), x, lambda: build_maxima(arch, *made))


def build_maxima(
    arch: str,
    source: str,
    grouped: bool,
    row_scale: str | None,
    noop: str | None,
    rowwise: bool,
    columnwise: bool,
    rht: bool,
) -> Callable:
    """Compile it. Needs no GPU."""
    import cutlass

    from ..compiling import compiled, matrix, strided, vector
    from .maxima import GroupMaxima

    return compiled(
        arch,
        GroupMaxima(source, grouped, rht),
        matrix(source),
        vector("int32") if grouped else None,
        strided(row_scale),
        strided(noop),
        vector("int32") if rowwise else None,
        vector("int32") if columnwise else None,
        cutlass.Int32(1),
    )
