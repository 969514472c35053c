"""MXFP4: E2M1 elements, one E8M0 scale per 32 (OCP Microscaling Formats 1.0), as gpt-oss stores its experts.

Scales are made as those of MXFP8, with 6 for the largest element. A block that holds Inf or NaN gets scale 0xFF and
elements 0x7, since E2M1 has no NaN: the scale says it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....meta.components import Components
from ....meta.formats import E2M1, E8M0_BIAS, E8M0_NAN
from ....meta.quantized import DequantizeOptions, Options
from ._decode import power_of_two
from ._fp4_loops import columnwise, columnwise_back, rowwise, rowwise_back
from ._fp4_stacks import Stack, Stacked
from ._rows import Source
from .mxfp8 import e8m0_


def block_scales(amax: Tensor, scaling: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return E8M0 scale bytes of blocks, the multipliers of their elements, and which blocks hold Inf or NaN.

    Args:
        amax: float32, amax of each block, on any device; Inf or NaN if the block holds one.
        scaling: one of ``SCALINGS``.
    """
    broken = ~torch.isfinite(amax)
    byte = e8m0_(amax.masked_fill(broken, 0.0).view(torch.int32), E2M1, scaling)
    # No finite magnitude has a scale above 253, so the inverse is a normal number.
    inverse = (2 * E8M0_BIAS - byte).bitwise_left_shift_(23).view(torch.float32)
    return byte.to(torch.uint8).masked_fill_(broken, E8M0_NAN), inverse, broken


class _MXFP4Scales:
    """E8M0 scales, each computed from the elements of its block alone."""

    def __init__(self, scaling: str) -> None:
        self.scaling = scaling

    def scales(self, amax: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return block_scales(amax, self.scaling)

    def decoded(self, scale: Tensor, group: Tensor) -> Tensor:
        return power_of_two(scale)


def quantize(source: Source, options: Options, out: Components) -> None:
    """Quantise; see the package for the contract."""
    stacked, scales = Stacked.of(source, options.description), _MXFP4Scales(options.scaling)
    if options.rowwise:
        rowwise(stacked, scales, None, options, out.data, out.scale)
    if options.columnwise:
        columnwise(stacked, scales, None, options, out.columnwise_data, out.columnwise_scale)


def dequantize(
    data: Tensor, scale: Tensor, offs: Tensor | None, amax: Tensor | None, *, options: DequantizeOptions, out: Tensor
) -> None:
    """Dequantise: element times ``2^(e - 127)``; see the package for the contract."""
    back = columnwise_back if options.columnwise else rowwise_back
    back(data, scale, _MXFP4Scales("rceil"), Stack(options.description, out, offs), options, out)
