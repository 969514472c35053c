"""MXFP8: E4M3 or E5M2 elements, one E8M0 scale per 32 (OCP Microscaling Formats 1.0, rounded as hardware does).

With ``d = amax * float32(1 / max)`` the scale of ``"rceil"`` is the smallest ``2^(e - 127) >= d``; ``"floor"`` takes
the exponent of amax less that of the largest element, ``"even"`` that of amax rounded to the element's
mantissa. Always in integers, never with ``log2``, which misses bytes next to powers of two. A block that holds Inf or
NaN gets scale 0xFF and elements 0x7F, in every mode (``cvt.rp.ue8m0x2`` without ``.satfinite``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ....meta.components import Components
from ....meta.formats import E8M0_NAN, ELEMENTS, FP32_INF, Element
from ....meta.quantized import DequantizeOptions, Options
from ..scratch import Scratch
from ._blocks import Pieces, clear_tail, columnwise, magnitude, rowwise
from ._decode import cast_saturates, fp8_values, multiply_blocks, power_of_two, table
from ._rows import Groups, Source, int32, steps
from ._scales import BlockScales, RowScales

BLOCK = 32
UNIT = 128
_SMALL = 27 << 23  # bits of 2^-100: d is no subnormal from here on, whatever the element


def quantize(source: Source, options: Options, out: Components) -> None:
    """Quantise in both directions; see the package for the contract."""
    groups, scratch = source.groups(), Scratch()
    rows, columns = source.rows(scratch), source.x.shape[-1]
    rule = functools.partial(_scaled, options=options, scratch=scratch)
    if options.rowwise:
        scales = RowScales(out.scale, groups, -(-columns // BLOCK), options.blocked)
        rowwise(rows, groups, BLOCK, rule, out.data, scales)
    if options.columnwise:
        blocks, data = groups.blocks(BLOCK), out.columnwise_data.view(groups.rows, columns)
        block_scales = BlockScales(out.columnwise_scale, groups, blocks, columns, UNIT, options.blocked)

        def writer(start: int, stop: int) -> Callable[[int, int, Tensor], Tensor]:
            return lambda left, right, scaled: data[start:stop, left:right].copy_(scaled)

        columnwise(rows, groups, blocks, rule, writer, block_scales)
        clear_tail(data, groups)
    scratch.keep()


def _scaled(wide: Tensor, pieces: Pieces, *, options: Options, scratch: Scratch) -> tuple[Tensor, Tensor]:
    """Return values ready to be cast, and the scales as int32, of blocks."""
    assert options.dtype is not None
    element = ELEMENTS[options.dtype]
    scaled = scratch.room("scaled", *wide.shape)
    byte = pieces.amax(magnitude(wide, scaled))
    if not byte.numel():  # K = 0
        return scaled, byte
    least, most = (int(bound) for bound in byte.aminmax())
    bad = byte >= FP32_INF if most >= FP32_INF else None
    e8m0_(byte, element, options.scaling, subnormal=least < _SMALL)
    inverse = torch.sub(int32(254), byte).bitwise_left_shift_(int32(23))  # no finite magnitude has a scale above 247
    pieces.multiply(wide, inverse.view(torch.float32), scaled)
    if options.scaling != "rceil" and not cast_saturates(options.dtype):
        scaled.clamp_(-element.max, element.max)  # rceil never exceeds it by enough to round up
    if bad is not None:
        byte.masked_fill_(bad, E8M0_NAN)
        scaled.masked_fill_(pieces.spread(bad), torch.nan)
    return scaled, byte


def e8m0_(amax: Tensor, element: Element, scaling: str, subnormal: bool = True) -> Tensor:
    """Turn finite magnitudes, given by their bits (int32), into scales 0 ... 254, in place.

    ``subnormal=False`` promises that no ``d`` is below the smallest normal number.
    """
    if scaling == "rceil":
        amax.view(torch.float32).mul_(element.inverse_max)
        # Any mantissa rounds up; that of a subnormal from above 2^-127, which is half the smallest normal.
        if subnormal:
            amax.add_(amax < 0x00800000, alpha=-0x400000)
        amax.add_(int32(0x7FFFFF))
    else:
        if scaling == "even":
            amax.add_(int32(element.half_ulp))
        amax.sub_(int32(element.max_exponent << 23))
    amax.bitwise_right_shift_(int32(23))
    return amax.clamp_(min=0) if scaling != "rceil" else amax


def dequantize(
    data: Tensor, scale: Tensor, offs: Tensor | None, amax: Tensor | None, *, options: DequantizeOptions, out: Tensor
) -> None:
    """Dequantise: element times ``2^(e - 127)``; see the package for the contract."""
    groups, scratch = Groups(out, offs), Scratch()
    columns = out.shape[-1]
    elements, result = data.view(groups.rows, columns), out.view(groups.rows, columns)
    values = table(data.dtype)
    if options.columnwise:
        by_block = BlockScales(scale, groups, groups.blocks(BLOCK), columns, UNIT, options.blocked)
    else:
        by_row = RowScales(scale, groups, -(-columns // BLOCK), options.blocked)
    for start, stop in steps(0, groups.routed, columns):
        wide = fp8_values(elements[start:stop], values, scratch)
        if options.columnwise:
            wide.mul_(power_of_two(by_block.read_rows(start, stop, 0, columns)))
        else:
            multiply_blocks(wide, power_of_two(by_row.read(start, stop)), BLOCK)
        result[start:stop].copy_(wide)
    result[groups.routed :].zero_()
    scratch.keep()
