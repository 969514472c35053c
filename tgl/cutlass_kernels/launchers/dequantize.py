"""Dequantisation of all formats."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ... import backends
from ...meta.memory import address
from ...meta.quantized import DequantizeOptions
from ..quantize.quantize_spec import DequantizeSpec
from ..runtime import device
from ..runtime.launcher import Launcher, warm
from ..runtime.names import name
from ..runtime.requirements import ALIGNMENT, MAX_ROWS

RUN = 16  # rows of transposed data per load of a lane


class DequantizeKey(NamedTuple):
    """Key of a compiled kernel."""

    arch: str
    emulated: bool
    spec: DequantizeSpec


class DequantizeCall(NamedTuple):
    """Arguments of ``group_dequantize``."""

    data: Tensor
    scale: Tensor
    offs: Tensor | None
    amax: Tensor | None
    options: DequantizeOptions
    out: Tensor


class DequantizeLauncher(Launcher[DequantizeCall]):
    """Writes the values of components to ``out``."""

    op = "group_dequantize"
    call = DequantizeCall
    note = "one launch, groups read on the device; components that do not begin on 16 bytes are copied"

    def reject_reason(self, c: DequantizeCall) -> backends.Reason:
        """Return why the kernel does not take the sizes, or None."""
        reason, out = device.packages_reason(), c.out
        if reason is None and out.numel() and out.numel() // out.shape[-1] > MAX_ROWS:
            reason = f"takes up to {MAX_ROWS} rows, got {out.numel() // out.shape[-1]}"
        return reason

    def plan_key(self, c: DequantizeCall) -> tuple | None:
        """Return the plan key, which does not depend on the number of rows; unaligned components are copied first."""
        data, scale, offs, _, options, out = c
        *rows, columns = out.shape
        if not columns or not warm(rows[0], data.data_ptr() | scale.data_ptr()):
            return None
        if offs is None:
            sizes: tuple = (rows[1] > 0,)
            if not rows[1]:
                return None
        else:
            sizes = (offs.shape[0],)
        return data.dtype, out.dtype, options, offs is None, sizes, columns, data.shape[-1]

    def batch_invariant(self, c: DequantizeCall) -> bool:
        """Return True: every element depends on itself alone."""
        return True

    def is_empty(self, c: DequantizeCall) -> bool:
        """Return whether there are no values, or no group that has some."""
        return c.out.numel() == 0 or (c.offs is not None and c.offs.shape[0] == 0)

    def zero_outputs(self, c: DequantizeCall) -> None:
        """Zero the results: every row belongs to the tail."""
        c.out.zero_()

    def key(self, c: DequantizeCall, arch: str) -> DequantizeKey:
        """Return the key of the kernel; the widths of accesses follow from those of rows."""
        options, form = c.options, c.options.description
        transposed = options.columnwise and form.transposed_columnwise
        spec = DequantizeSpec(
            format=options.format,
            element="float4_e2m1" if form.per_byte == 2 else name(c.data.dtype),
            out=name(c.out.dtype),
            columnwise=options.columnwise,
            blocked=options.blocked,
            square=options.block_2d and form.square_scales,
            rht=options.rht,
            grouped=c.offs is not None,
            vector=divisor(c.out.shape[-1], ALIGNMENT // c.out.element_size()),
            run=divisor(c.data.shape[-1], RUN // form.per_byte) if transposed else 0,
        )
        return DequantizeKey(arch, not c.data.is_cuda, spec)

    def build(self, key: DequantizeKey) -> Callable:
        """Compile the kernel for ``key``. Needs no GPU."""
        import cutlass

        from ..quantize.decode import FP4
        from ..quantize.dequantize import DequantizeRowsKernel
        from ..quantize.dequantize_transposed import DequantizeTransposedKernel
        from ..runtime.compiling import compiled, matrix, scales_of, vector

        spec = key.spec
        pitch = spec.run or (spec.vector // 2 if spec.element == FP4 else spec.vector)
        return compiled(
            key.arch,
            (DequantizeTransposedKernel if spec.run else DequantizeRowsKernel)(spec),
            matrix("uint8", pitch=pitch),
            scales_of(spec),
            vector("int32") if spec.grouped else None,
            vector("float32") if spec.decoding.amax else None,
            matrix(spec.out, pitch=spec.vector * (4 if spec.out == "float32" else 2)),
            cutlass.Int32(1),
        )

    def arguments(self, c: DequantizeCall) -> tuple:
        """Return the arguments of the kernel."""
        elements, out = as_bytes(aligned(c.data)), c.out
        if c.offs is not None:
            return elements, aligned(c.scale), c.offs, c.amax, out, 0
        scales, rows = scales_by_rows(c.scale, c.options.blocked), out.view(-1, out.shape[-1])
        return elements.view(-1, elements.shape[-1]), scales, c.offs, c.amax, rows, out.shape[1]


def as_bytes(data: Tensor) -> Tensor:
    """Return codes of any dtype as bytes."""
    return data if data.dtype == torch.uint8 else data.view(torch.uint8)


def scales_by_rows(scale: Tensor, blocked: bool) -> Tensor:
    """Return the scales of matrices, one below the other and aligned to 16 bytes; those of whole groups unchanged."""
    scale = aligned(scale)
    return scale if scale.dim() == 1 else scale.view(-1) if blocked else scale.view(-1, scale.shape[-1])


def aligned(t: Tensor) -> Tensor:
    """Return ``t``, or a copy if its address is not aligned to 16 bytes."""
    return t.clone() if address(t) % ALIGNMENT else t


def divisor(size: int, most: int) -> int:
    """Return the largest power of two up to ``most`` that divides ``size``."""
    return min(size & -size, most)


GROUP_DEQUANTIZE = DequantizeLauncher()
