"""Compiled quantisation kernels, and the stand-ins for tensors they are compiled with."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from ... import backends
from ...meta.quantized import Options
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


def cleared(amax: Tensor, noop: Tensor | None) -> Tensor:
    """The bits of ``amax``, zero unless the flag says that nothing is to be written."""
    if noop is None:
        amax.zero_()
    else:
        amax.masked_fill_(noop == 0, 0.0)
    return amax.view(torch.int32)


def maxima(x: Tensor, offs: Tensor | None, row_scale: Tensor | None, noop: Tensor | None, options: Options) -> Callable:
    """The kernel that finds the groups' largest magnitudes, of NVFP4 of what is finite."""
    arch, name = backends.device_arch(x.device), host.name
    made = (
        *(name(x.dtype), offs is not None, name(row_scale), name(noop), options.rowwise, options.columnwise),
        *(options.format == "nvfp4", options.rht),
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
    finite: bool,
    rht: bool,
) -> Callable:
    """Compile it. Needs no GPU."""
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_stream

    from .maxima import GroupMaxima

    return cute.compile[cute.GPUArch(host.GPU_ARCH[arch]), cute.EnableTVMFFI(True)](
        GroupMaxima(source, grouped, finite, rht),
        matrix(source),
        vector("int32") if grouped else None,
        strided(row_scale),
        strided(noop),
        vector("int32") if rowwise else None,
        vector("int32") if columnwise else None,
        cutlass.Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )


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
