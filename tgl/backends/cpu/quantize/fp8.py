"""FP8 with float32 scales: one per group (``fp8_tensor``), or one per 1x128, 128x1 or 128x128 (``fp8_block``).

Data is ``x * scale`` with ``scale = max / amax``; what is stored is ``scale_inv = 1 / scale``. An amax of 0 has scale
1, an infinite scale becomes the largest float32, and powers of two are had by dropping the mantissa. Where amax is Inf
or NaN the scale is 1 and ``scale_inv`` NaN (TransformerEngine stores 1, which would pass an Inf off as 448).

Columnwise data is stored transposed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ....meta.components import Components
from ....meta.formats import ELEMENTS
from ....meta.quantized import DequantizeOptions, Options
from ...portable.fp8_scales import EXPONENT, LARGEST, scales_of
from ..scratch import Scratch
from ._blocks import Pieces, along_rows, clear_tail, columnwise, cut, magnitude, rowwise
from ._decode import fp8_values, multiply_blocks, table
from ._rows import Float32Rows, Groups, Source, int32, step_of, steps
from ._scales import BlockScales, RowScales
from ._transposed import ROWS, Transposed

BLOCK = 128
SCALE_UNIT, DATA_UNIT = 128, 32
_SMALL = 2.0**-100  # an amax above it has a finite scale, for any element type


def _scales(amax: Tensor, options: Options) -> tuple[Tensor, Tensor, bool]:
    """Return ``scales_of`` and whether every amax is finite; reads the host, to skip steps that no amax needs."""
    assert options.dtype is not None
    largest, power_of_two = ELEMENTS[options.dtype].max, bool(options.power_of_two)
    least, most = (float(bound) for bound in amax.aminmax()) if amax.numel() else (0.0, 0.0)
    if options.eps or not most <= LARGEST or 0 < least < _SMALL:
        return *scales_of(amax, largest, power_of_two, options.eps), most <= LARGEST
    scale = torch.div(largest, amax)  # not `/`, which would multiply by a reciprocal
    if not least:
        scale.clamp_(max=LARGEST)
    if power_of_two:
        scale.view(torch.int32).bitwise_and_(int32(EXPONENT))
    if not least:
        scale.masked_fill_(amax == 0, 1.0)
    return scale, scale.reciprocal(), True


def _saturate_(scaled: Tensor, largest: float) -> Tensor:
    """Make the cast of ``scaled`` saturate, and give 0x7F for NaN of either sign.

    This is for scales of a larger or a bad amax. Values scaled by their own amax exceed ``largest`` by at most two
    roundings, and are cast to it.
    """
    scaled.clamp_(-largest, largest)
    return scaled.masked_fill_(scaled.isnan(), torch.nan)


# --- one scale per group ----------------------------------------------------------------------------------------------


def quantize_tensor(source: Source, options: Options, out: Components) -> None:
    """Quantise to ``fp8_tensor`` in both directions; see the package for the contract."""
    assert options.dtype is not None
    scale, scratch = source.scale, Scratch()
    groups, rows = source.groups(), source.rows(scratch)
    largest = ELEMENTS[options.dtype].max
    amax = _group_amax(rows, groups)
    if scale is None:
        scale, inverse, fits = _scales(amax, options)
    else:
        inverse, fits = scale.reciprocal(), False
    if not fits:
        amax.masked_fill_(amax.isnan(), torch.nan)  # the same one for all

    def scaled(factor: Tensor, start: int, stop: int, left: int, right: int) -> Tensor:
        values = rows.times(factor, start, stop, left, right)
        return values if fits else _saturate_(values, largest)

    if options.rowwise:
        out.scale.copy_(inverse)
        out.amax.copy_(amax)
        data = out.data.view(groups.rows, rows.columns)
        for start, stop in steps(0, groups.routed, rows.columns, buffers=1):
            factor = groups.of_each_row(scale, start, stop)
            data[start:stop].copy_(scaled(factor, start, stop, 0, rows.columns))
        clear_tail(data, groups)
    if options.columnwise:
        out.columnwise_scale.copy_(inverse)
        out.columnwise_amax.copy_(amax)
        transposed = Transposed(out.columnwise_data, groups, DATA_UNIT, scratch)
        transposed.clear()
        for start, stop in groups.steps(min(step_of(ROWS, buffers=1), rows.columns), buffers=1):
            turned = transposed.rows(start, stop)
            factor = groups.of_each_row(scale, start, stop)
            for left, right in steps(0, rows.columns, stop - start, 4, buffers=1):
                room = turned.room(right - left)
                if options.rowwise:
                    room.copy_(data[start:stop, left:right].view(torch.uint8))
                else:
                    room.view(options.dtype).copy_(scaled(factor, start, stop, left, right))
                turned.write(left, right)
    scratch.keep()


def _group_amax(rows: Float32Rows, groups: Groups) -> Tensor:
    bits = torch.zeros(groups.count, dtype=torch.int32, device="cpu")
    if not rows.columns:
        return bits.view(torch.float32)
    for start, stop in steps(0, groups.routed, -(-rows.columns // 2), buffers=1):
        found = rows.amax(start, stop).view(torch.int32)
        bits.scatter_reduce_(0, groups.of_rows(start, stop), found, "amax")
    return bits.view(torch.float32)


def dequantize_tensor(
    data: Tensor, scale: Tensor, offs: Tensor | None, amax: Tensor | None, *, options: DequantizeOptions, out: Tensor
) -> None:
    """Dequantise ``fp8_tensor``: element times ``scale_inv`` of its group."""
    groups, scratch = Groups(out, offs), Scratch()

    def multiply(wide: Tensor, start: int, stop: int, left: int, right: int) -> None:
        wide.mul_(scale[groups.of_rows(start, stop), None])

    _dequantize(data, groups, options.columnwise, multiply, out, scratch)


# --- one scale per block ----------------------------------------------------------------------------------------------


def quantize_block(source: Source, options: Options, out: Components) -> None:
    """Quantise to ``fp8_block`` in both directions; see the package for the contract."""
    assert options.dtype is not None
    dtype, groups, scratch = options.dtype, source.groups(), Scratch()
    rows, columns = source.rows(scratch), source.x.shape[-1]
    transposed = Transposed(out.columnwise_data, groups, DATA_UNIT, scratch)
    if options.block_2d:
        _quantize_2d(rows, groups, transposed, options, out, scratch)
        scratch.keep()
        return
    rule = functools.partial(_scaled, options=options, scratch=scratch)
    if options.rowwise:
        rowwise(rows, groups, BLOCK, rule, out.data, RowScales(out.scale, groups, -(-columns // BLOCK), False))
    if options.columnwise:
        blocks = groups.blocks(BLOCK)
        scales = BlockScales(out.columnwise_scale, groups, blocks, columns, SCALE_UNIT, False)

        def writer(start: int, stop: int) -> Callable[[int, int, Tensor], None]:
            turned = transposed.rows(start, stop)

            def write(left: int, right: int, values: Tensor) -> None:
                turned.room(right - left).view(dtype).copy_(values)
                turned.write(left, right)

            return write

        transposed.clear()
        columnwise(rows, groups, blocks, rule, writer, scales, height=ROWS)
    scratch.keep()


def _scaled(wide: Tensor, pieces: Pieces, *, options: Options, scratch: Scratch) -> tuple[Tensor, Tensor]:
    """Return values ready to be cast, and ``scale_inv``, of blocks."""
    values = scratch.room("scaled", *wide.shape)
    return _apply(wide, pieces, pieces.amax(magnitude(wide, values)), values, options)


def _apply(wide: Tensor, pieces: Pieces, bits: Tensor, values: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    assert options.dtype is not None
    scale, inverse, finite = _scales(bits.view(torch.float32), options)
    pieces.multiply(wide, scale, values)
    return values if finite else _saturate_(values, ELEMENTS[options.dtype].max), inverse


def _quantize_2d(
    rows: Float32Rows, groups: Groups, transposed: Transposed, options: Options, out: Components, scratch: Scratch
) -> None:
    """Quantise separate matrices in blocks of 128x128, with one scale for both directions."""
    assert options.dtype is not None
    assert groups.each is not None
    blocks, down, across = groups.blocks(BLOCK), -(-groups.each // BLOCK), -(-rows.columns // BLOCK)
    # scale_inv, a 16384th of the data
    stored = torch.empty(groups.count * down, across, dtype=torch.float32, device="cpu")
    data = out.data.view(groups.rows, rows.columns) if options.rowwise else None
    for start, stop in blocks.steps(min(step_of(ROWS, BLOCK), rows.columns), groups.each, 2):
        first, last = blocks.rows(start, stop)
        pieces = along_rows(blocks, start, stop, first, last)
        turned = transposed.rows(first, last) if options.columnwise else None
        for left, right in steps(0, rows.columns, last - first, BLOCK):
            wide = cut(rows.load(first, last, left, right), pieces, BLOCK)
            values = scratch.room("scaled", *wide.shape)
            bits = pieces.amax(magnitude(wide, values))
            square = torch.nn.functional.pad(bits, (0, -(right - left) % BLOCK)).unflatten(-1, (-1, BLOCK)).amax(-1)
            bits = square.repeat_interleave(BLOCK, -1)[..., : right - left].contiguous()
            values, inverse = _apply(wide, pieces, bits, values, options)
            stored[start:stop, left // BLOCK : -(-right // BLOCK)] = inverse.flatten(0, -2)[:, ::BLOCK]
            made = scratch.room("cast", last - first, right - left, dtype=options.dtype)
            made.copy_(values.view(made.shape))
            if data is not None:
                data[first:last, left:right].copy_(made)
            if turned is not None:
                turned.room(right - left).copy_(made.view(torch.uint8))
                turned.write(left, right)
    stored = stored.view(groups.count, down, across)
    if options.rowwise:
        out.scale.copy_(stored)
    if options.columnwise:
        out.columnwise_scale.copy_(stored.transpose(1, 2))


def dequantize_block(
    data: Tensor, scale: Tensor, offs: Tensor | None, amax: Tensor | None, *, options: DequantizeOptions, out: Tensor
) -> None:
    """Dequantise ``fp8_block``: element times ``scale_inv`` of its block."""
    groups, scratch = Groups(out, offs), Scratch()
    columns = out.shape[-1]
    if options.block_2d:
        per_block = (scale.transpose(1, 2) if options.columnwise else scale).flatten(0, 1)
        by_matrix = BlockScales(per_block, groups, groups.blocks(BLOCK), per_block.shape[1], SCALE_UNIT, False)
    elif options.columnwise:
        by_block = BlockScales(scale, groups, groups.blocks(BLOCK), columns, SCALE_UNIT, False)
    else:
        by_row = RowScales(scale, groups, -(-columns // BLOCK), False)

    def multiply(wide: Tensor, start: int, stop: int, left: int, right: int) -> None:
        if options.block_2d:
            multiply_blocks(wide, by_matrix.read_rows(start, stop, left // BLOCK, -(-right // BLOCK)), BLOCK)
        elif options.columnwise:
            wide.mul_(by_block.read_rows(start, stop, left, right))
        else:
            multiply_blocks(wide, by_row.read(start, stop)[:, left // BLOCK : -(-right // BLOCK)], BLOCK)

    _dequantize(data, groups, options.columnwise, multiply, out, scratch)


def _dequantize(
    data: Tensor,
    groups: Groups,
    columnwise: bool,
    multiply: Callable[[Tensor, int, int, int, int], None],
    out: Tensor,
    scratch: Scratch,
) -> None:
    """Decode either direction; ``multiply`` applies the scales of a range of rows and of columns in place."""
    columns, values = out.shape[-1], table(data.dtype)
    result = out.view(groups.rows, columns)
    if columnwise:
        read = Transposed(data, groups, DATA_UNIT, scratch).read
    else:
        stored = data.view(torch.uint8).view(groups.rows, columns)
    for left, right in steps(0, columns, ROWS if columnwise else 1, BLOCK):
        for start, stop in groups.steps(right - left):
            part = read(start, stop, left, right) if columnwise else stored[start:stop, left:right]
            wide = fp8_values(part, values, scratch)
            multiply(wide, start, stop, left, right)
            result[start:stop, left:right].copy_(wide)
    result[groups.routed :].zero_()
    scratch.keep()
