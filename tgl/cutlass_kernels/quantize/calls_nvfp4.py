"""Launches of the NVFP4 kernels; arguments have been checked by ``calls``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ... import backends
from ...meta.quantized import Components, Options
from .. import host
from . import plans
from .spec import NVFP4Spec

PIECE = 32  # rows of a 16-byte piece of transposed data


def supports(x: Tensor, offs: Tensor | None, options: Options) -> str | None:
    """Why there is no NVFP4 kernel for a call that ``calls`` would take, or None."""
    if offs is None and options.columnwise and x.shape[-2] % PIECE:
        return f"needs N to be a multiple of {PIECE} for transposed data of matrices, got {x.shape[-2]}"
    return None


def run(
    x: Tensor,
    offs: Tensor | None,
    row_scale: Tensor | None,
    rng: Tensor | None,
    noop: Tensor | None,
    options: Options,
    out: Components,
) -> None:
    """Write the components of ``x``, ``dbias`` excepted."""
    columns, rows = x.shape[-1], x.shape[1] if offs is None else 0
    if x.numel() == 0 and (columns == 0 or offs is None or offs.shape[0] == 0):
        for amax in (out.amax, out.columnwise_amax):
            plans.cleared(amax, noop)
        return
    source = x if x.dim() == 2 else x.view(-1, columns)

    def data(t: Tensor) -> Tensor:
        flat = t.view(torch.uint8) if t.dim() == 2 else t.view(torch.uint8).flatten(0, 1)
        return flat if flat.numel() else flat.as_strided(flat.shape, (PIECE, 1))  # where strides mean nothing

    def scales(t: Tensor) -> Tensor:
        return t.view(torch.uint8).view(-1) if options.blocked else data(t)

    row: tuple[Tensor | None, ...] = (None, None, None)
    column: tuple[Tensor | None, ...] = (None, None, None)
    if options.rowwise:
        row = (data(out.data), scales(out.scale), out.amax)
    if options.columnwise:
        column = (data(out.columnwise_data), scales(out.columnwise_scale), out.columnwise_amax)
    words = None if rng is None else rng.contiguous().view(torch.int32)
    plan = _plan(x, offs, row_scale, rng, noop, options)
    plan(source, offs, row_scale, words, plans.flag(noop), *row, *column, rows)


def prepare(
    x: Tensor, offs: Tensor | None, row_scale: Tensor | None, rng: Tensor | None, noop: Tensor | None, options: Options
) -> None:
    """Compile and load what ``run`` with these arguments needs."""
    _plan(x, offs, row_scale, rng, noop, options)


def _plan(
    x: Tensor, offs: Tensor | None, row_scale: Tensor | None, rng: Tensor | None, noop: Tensor | None, options: Options
) -> Callable:
    arch = backends.device_arch(x.device)
    given = (offs is not None, rng is not None)
    spec = _spec(arch, x.dtype, *given, host.dtype(row_scale), host.dtype(noop), options)
    return plans.fetch((arch, not x.is_cuda, spec), x, lambda: build(arch, spec))


@functools.lru_cache(maxsize=256)
def _spec(
    arch: str,
    source: torch.dtype,
    grouped: bool,
    stochastic: bool,
    row_scale: torch.dtype | None,
    noop: torch.dtype | None,
    options: Options,
) -> NVFP4Spec:
    name = host.name
    return NVFP4Spec(
        source=name(source),
        rowwise=options.rowwise,
        columnwise=options.columnwise,
        blocks_2d=options.block_2d,
        blocked=options.blocked,
        grouped=grouped,
        rht=options.rht,
        stochastic=stochastic,
        converts=arch == "sm_100",
        row_scale=name(row_scale),
        noop=name(noop),
    )


def build(arch: str, spec: NVFP4Spec) -> Callable:
    """Compile the kernel for ``spec``. Needs no GPU."""
    import cutlass

    from ..compiling import compiled, matrix, strided, vector
    from .nvfp4 import QuantizeNVFP4

    def side(present: bool, pitch: int) -> tuple[Any, Any, Any]:
        if not present:
            return None, None, None
        scales = vector("uint8", 16) if spec.blocked else matrix("uint8", pitch=1)
        return matrix("uint8", pitch=pitch), scales, vector("float32")

    return compiled(
        arch,
        QuantizeNVFP4(spec),
        matrix(spec.source),
        vector("int32") if spec.grouped else None,
        strided(spec.row_scale),
        vector("int32") if spec.stochastic else None,
        strided(spec.noop),
        *side(spec.rowwise, 4),
        *side(spec.columnwise, 16),
        cutlass.Int32(1),
    )
