"""Launches of the FP8 kernels; arguments have been checked by ``calls``."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ... import backends
from ...meta.quantized import Components, Options
from .. import host
from ..activation.spec import ActivationSpec
from . import plans, windows
from .spec import FP8Spec


def supports(x: Tensor, offs: Tensor | None, options: Options) -> str | None:
    """Why there is no FP8 kernel for a call that ``calls`` would take, or None."""
    if options.format == "fp8_tensor" and x.numel() == 0 and (offs is None or x.shape[-1] == 0):
        return "finds no scales of groups without values"
    if offs is None and options.columnwise and x.shape[-2] % 16:
        return f"needs N to be a multiple of 16 for transposed data of matrices, got {x.shape[-2]}"
    return None


def arguments(
    x: Tensor,
    offs: Tensor | None,
    scale: Tensor | None,
    row_scale: Tensor | None,
    noop: Tensor | None,
    options: Options,
    out: Components,
) -> tuple:
    """What the kernel takes, which writes the components of ``x``, ``dbias`` excepted; maxima to be raised are cleared.

    One launch, of ``fp8_tensor`` after a small one or a clear.
    """
    columns, rows = x.shape[-1], x.shape[1] if offs is None else 0
    source = x if x.dim() == 2 else x.view(-1, columns)
    whole = options.format == "fp8_tensor"

    def matrix(t: Tensor) -> Tensor:
        return t if t.dim() < 3 else t.view(-1, t.shape[-1])

    def maxima(amax: Tensor) -> Tensor | None:
        return None if not whole else amax.view(torch.int32) if scale is None else plans.cleared(amax, noop)

    row: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
    column = row
    if options.rowwise:
        row = (matrix(out.data), matrix(out.scale), maxima(out.amax))
    if options.columnwise:
        column = (matrix(out.columnwise_data), matrix(out.columnwise_scale), maxima(out.columnwise_amax))
    flag = plans.flag(noop)
    if whole and scale is None:
        shared = torch.empty(windows.words_shared(x, offs), dtype=torch.int32, device=x.device)
        return source, offs, row_scale, flag, *row, *column, shared, rows, plans.multiprocessors(x.device)
    return source, offs, scale, row_scale, flag, *row, *column, rows


def plan_for(
    x: Tensor,
    offs: Tensor | None,
    scale: Tensor | None,
    row_scale: Tensor | None,
    noop: Tensor | None,
    options: Options,
    activation: ActivationSpec | None = None,
) -> Callable:
    """The kernel that these arguments need, compiled and loaded."""
    arch = backends.device_arch(x.device)
    given = (offs is not None, scale is not None)
    spec = _spec(x.dtype, *given, host.dtype(row_scale), host.dtype(noop), options, activation)
    op = "group_quantize" if activation is None else "grouped_activation_quantize"
    return plans.fetch((arch, not x.is_cuda, spec), x, lambda: build(arch, spec), op)


@functools.lru_cache(maxsize=256)
def _spec(
    source: torch.dtype,
    grouped: bool,
    given: bool,
    row_scale: torch.dtype | None,
    noop: torch.dtype | None,
    options: Options,
    activation: ActivationSpec | None,
) -> FP8Spec:
    name = host.name
    return FP8Spec(
        source=name(source),
        element=name(options.dtype),
        rowwise=options.rowwise,
        columnwise=options.columnwise,
        blocks=None if options.format == "fp8_tensor" else "2d" if options.block_2d else "1d",
        power_of_two=bool(options.power_of_two),
        eps=struct.unpack("<i", struct.pack("<f", options.eps))[0],
        grouped=grouped,
        given=given,
        row_scale=name(row_scale),
        noop=name(noop),
        activation=activation,
    )


def build(arch: str, spec: FP8Spec) -> Callable:
    """Compile the kernel for ``spec``. Needs no GPU."""
    import cutlass

    from ..compiling import compiled, matrix, strided, vector
    from .activated import ActivateQuantizeFP8
    from .fp8 import QuantizeFP8
    from .fp8_groups import QuantizeFP8Groups

    def side(present: bool, pitch: int, *, by_columns: bool = False) -> tuple[Any, Any, Any]:
        if not present:
            return None, None, None
        if spec.blocks is None:
            return matrix(spec.element, pitch=pitch), vector("float32"), vector("int32")
        return matrix(spec.element, pitch=pitch), matrix("float32", unit=0 if by_columns else -1, pitch=4), None

    source, offs = matrix(spec.source), vector("int32") if spec.grouped else None
    factors = (strided(spec.row_scale), strided(spec.noop))
    sides = (*side(spec.rowwise, 8, by_columns=spec.blocks == "1d" and spec.grouped), *side(spec.columnwise, 16))
    rows = cutlass.Int32(1)
    if spec.blocks is None and not spec.given:
        shared, count = vector("int32"), cutlass.Int32(1)
        return compiled(arch, QuantizeFP8Groups(spec), source, offs, *factors, *sides, shared, rows, count)
    given = vector("float32") if spec.given else None
    kernel = (QuantizeFP8 if spec.activation is None else ActivateQuantizeFP8)(spec)
    return compiled(arch, kernel, source, offs, given, *factors, *sides, rows)
