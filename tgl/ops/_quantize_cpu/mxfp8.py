"""MXFP8: E4M3 or E5M2 elements, one E8M0 scale per 32 (OCP Microscaling Formats specification 1.0, hardware rounding).

With ``d = amax * float32(1 / max)`` the scale of ``"rceil"`` is the smallest ``2^(e - 127) >= d``; ``"floor"`` takes the
exponent of amax less that of the largest element, ``"even"`` the same after rounding amax to the element's mantissa.
Always in integers, never with ``log2``, which misses bytes next to powers of two. A block that holds Inf or NaN gets
scale 0xFF and elements 0x7F, in every mode (``cvt.rp.ue8m0x2`` without ``.satfinite``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...meta.formats import E8M0_NAN, ELEMENTS, FP32_INF, Element
from ...meta.quantized import Components, DequantizeOptions, Options
from ._decode import fp8_values, power_of_two, table
from ._rows import Groups, Rows, Scratch, steps
from ._scales import BlockScales, RowScales

BLOCK = 32
UNIT = 128
_SIGN_OFF = 0x7FFFFFFF


def quantize(
    x: Tensor,
    offs: Tensor | None,
    scale: Tensor | None,
    row_scale: Tensor | None,
    rng: Tensor | None,
    *,
    options: Options,
    out: Components,
) -> None:
    """Both directions; see the package for the contract."""
    groups, scratch = Groups(x, offs), Scratch()
    rows = Rows(x, row_scale, scratch)
    if options.rowwise:
        _rowwise(rows, groups, options, out, scratch)
    if options.columnwise:
        _columnwise(rows, groups, options, out, scratch)


def _rowwise(rows: Rows, groups: Groups, options: Options, out: Components, scratch: Scratch) -> None:
    columns = -(-rows.columns // BLOCK)
    data = out.data.view(groups.rows, rows.columns)
    scales = RowScales(out.scale, groups, columns, options.blocked)
    scales.clear()
    for start, stop in steps(0, groups.routed, columns * BLOCK):
        wide = rows.load(start, stop, width=columns * BLOCK).unflatten(1, (columns, BLOCK))
        scaled, byte = _scaled(wide, 2, options, scratch)
        data[start:stop].copy_(scaled.view(stop - start, -1)[:, : rows.columns])
        scales.write(start, stop, byte.squeeze(2))
    data[groups.routed :].view(torch.uint8).zero_()


def _columnwise(rows: Rows, groups: Groups, options: Options, out: Components, scratch: Scratch) -> None:
    blocks = groups.blocks(BLOCK)
    data = out.columnwise_data.view(groups.rows, rows.columns)
    scales = BlockScales(out.columnwise_scale, groups, blocks, rows.columns, UNIT, options.blocked)
    scales.clear()
    for left, right in steps(0, rows.columns, BLOCK):
        for start, stop in blocks.steps(right - left, None):
            holes = blocks.holes(start, stop)
            wide = rows.load_blocks(blocks, start, stop, left, right, holes)
            scaled, byte = _scaled(wide, 1, options, scratch)
            first, last = blocks.rows(start, stop)
            data[first:last, left:right].copy_(present(scaled.flatten(0, 1), holes, last - first, scratch))
            scales.write(start, stop, left, right, byte.squeeze(1))
    data[groups.routed :].view(torch.uint8).zero_()


def present(places: Tensor, holes: Tensor | None, rows: int, scratch: Scratch) -> Tensor:
    """``places`` without those of ``holes``."""
    if holes is None:
        return places
    filled = (~holes).view(-1).nonzero().view(-1)
    return torch.index_select(places, 0, filled, out=scratch.room("present", rows, places.shape[1]))


def _scaled(wide: Tensor, dim: int, options: Options, scratch: Scratch) -> tuple[Tensor, Tensor]:
    """Values ready to be cast, and the scale bytes (``dim`` kept), of blocks along ``dim``."""
    assert options.dtype is not None
    element = ELEMENTS[options.dtype]
    scaled = scratch.room("scaled", *wide.shape)
    magnitude = torch.bitwise_and(wide.view(torch.int32), _SIGN_OFF, out=scaled.view(torch.int32))
    amax = magnitude.amax(dim, keepdim=True)  # of the bits: ordered like the values, NaN above Inf
    byte = e8m0(amax, element, options.scaling)
    torch.mul(wide, ((254 - byte) << 23).clamp_(min=0x00400000).view(torch.float32), out=scaled)
    if options.scaling != "rceil":
        scaled.clamp_(-element.max, element.max)  # rceil never exceeds it by enough to round up
    bad = byte == E8M0_NAN
    if bad.any():
        scaled.masked_fill_(bad, torch.nan)
    return scaled, byte.to(torch.uint8)


def e8m0(amax: Tensor, element: Element, scaling: str) -> Tensor:
    """The scale, int32 0 ... 255, for magnitudes given by their bits (int32)."""
    if scaling == "rceil":
        inverse_max = torch.tensor(element.inverse_max, dtype=torch.int32).view(torch.float32)
        bits = (amax.view(torch.float32) * inverse_max).view(torch.int32)
        # Any mantissa rounds up; that of a subnormal from above 2^-127, which is half the smallest normal.
        byte = (bits + 0x3FFFFF).add_(bits >= 0x00800000, alpha=0x400000) >> 23
    else:
        rounded = amax + element.half_ulp if scaling == "even" else amax
        byte = ((rounded >> 23) - element.max_exponent).clamp_(min=0)
    return byte.masked_fill_(amax >= FP32_INF, E8M0_NAN)


def dequantize(
    data: Tensor, scale: Tensor, offs: Tensor | None, amax: Tensor | None, *, options: DequantizeOptions, out: Tensor
) -> None:
    """Element times ``2^(e - 127)``; see the package for the contract."""
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


def multiply_blocks(wide: Tensor, factors: Tensor, block: int) -> None:
    """Multiply every run of ``block`` columns, the last one partial, by its factor, in place."""
    whole = wide.shape[1] // block
    wide[:, : whole * block].unflatten(1, (whole, block)).mul_(factors[:, :whole, None])
    wide[:, whole * block :].mul_(factors[:, whole:])
