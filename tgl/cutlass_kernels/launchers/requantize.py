"""Columnwise components from rowwise ones: codes are decoded on their way to a quantiser."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import backends
from ...meta.components import Components
from ...meta.quantized import Options
from ..archs import arch_of
from ..quantize.quantize_spec import DequantizeSpec
from ..runtime.launcher import Launcher, warm
from ..runtime.names import name
from .dequantize import aligned, as_bytes, scales_by_rows
from .format_quantizer import QuantizeCall
from .quantize import GROUP_QUANTIZE, WRITTEN, QuantizeKey, vectors_reason
from .quantize_mxfp8 import VECTOR

DECODED = ("mxfp8", "fp8_block")
"""Formats whose quantisers decode: FP8 in blocks of a row, whose scales take one pass over the values."""


class RequantizeCall(NamedTuple):
    """Arguments of ``group_requantize``."""

    data: Tensor
    scale: Tensor
    offs: Tensor | None
    amax: Tensor | None
    options: Options
    out: Components

    @property
    def quantizing(self) -> QuantizeCall:
        """Return the call as a ``QuantizeCall`` of bytes, with their scales as factors of rows."""
        return QuantizeCall(as_bytes(self.data), self.offs, None, self.scale, None, None, self.options, self.out)


class RequantizeLauncher(Launcher[RequantizeCall]):
    """Reads codes and scales once, and writes those of the other direction."""

    op = "group_requantize"
    call = RequantizeCall
    note = "one launch from codes to codes, groups read on the device"

    def reject_reason(self, c: RequantizeCall) -> backends.Reason:
        """Return why no kernel takes the format, or why the quantiser does not take the call, or None."""
        if c.options.format not in DECODED:
            return f"decodes {' and '.join(DECODED)}, got {c.options.format}"
        return GROUP_QUANTIZE.reject_reason(c.quantizing)

    def plan_key(self, c: RequantizeCall) -> tuple | None:
        """Return the plan key, which does not depend on the number of rows in groups."""
        data, scale, offs, _, options, out = c
        addresses, shape = data.data_ptr() | scale.data_ptr(), data.shape
        for t in out:
            addresses |= t.data_ptr()  # 0 where nothing is written
        if not warm(shape[0], addresses) or not shape[1]:
            return None
        return data.dtype, shape if offs is None else shape[1], options

    def is_empty(self, c: RequantizeCall) -> bool:
        """Return whether no kernel has anything to write, by the format."""
        return WRITTEN[c.options.format].is_empty(c.quantizing)

    def key(self, c: RequantizeCall, arch: str) -> QuantizeKey:
        """Return the key of the kernel: the format's for bytes, and how they are decoded."""
        quantizing = c.quantizing
        elementwise = vectors_reason(quantizing) is not None
        made = WRITTEN[c.options.format].spec(quantizing, arch_of(arch), None, elementwise)
        spec = _of_codes(made, c.options, c.data.dtype, c.offs is not None)
        return QuantizeKey(arch, not c.data.is_cuda, c.options.format, spec)

    def build(self, key: QuantizeKey) -> Callable:
        """Compile the kernel for ``key``."""
        return WRITTEN[key.format].build(key.arch, key.spec)

    def arguments(self, c: RequantizeCall) -> tuple:
        """Return the arguments of the kernel; scales that are not aligned to 16 bytes are copied."""
        quantizing = c.quantizing
        scale = aligned(c.scale) if c.offs is not None else scales_by_rows(c.scale, c.options.blocked)
        return WRITTEN[c.options.format].arguments(quantizing._replace(row_scale=scale))


@functools.lru_cache(maxsize=256)
def _of_codes(made: Any, options: Options, dtype: torch.dtype, grouped: bool) -> Any:
    """Return the spec of values in float32 that these codes decode to."""
    codes = DequantizeSpec(
        format=options.format,
        element=name(dtype),
        out="float32",
        columnwise=False,
        blocked=options.blocked,
        square=options.block_2d and options.description.square_scales,
        rht=False,
        grouped=grouped,
        vector=VECTOR,
        run=0,
    )
    return replace(made, source=codes.out, row_scale=None, codes=codes)


GROUP_REQUANTIZE = RequantizeLauncher()
