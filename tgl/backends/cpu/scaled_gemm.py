"""The CPU kernels of the GEMMs on quantised operands: decode to float32, multiply group by group, round once.

MXFP8 and FP8 blockwise operands are dequantised, as ``group_dequantize`` does. NVFP4 and FP8 tensor-wise products are
formed from the elements (times their block scales, which is exact), and the float32 factor of the group,
``S_decA * S_decB``, is applied to the sum: what a tensor core with an epilogue does.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ...meta import placement
from ...meta.formats import E8M0, FORMATS, Format
from ...meta.placement import ROW_UNIT
from ...meta.scaled import most_tokens
from ...meta.slots import on_host
from ..portable.decode import spread
from ..portable.segments import segment_sizes
from .quantize import GROUP_FACTORS

# --- elements and scales to float32 -----------------------------------------------------------------------------------


@functools.cache
def _fp8_table(dtype: torch.dtype) -> Tensor:
    return torch.arange(256, dtype=torch.uint8, device="cpu").view(dtype).float()


@functools.cache
def _fp4_table() -> Tensor:
    """Return both elements of every byte, as a complex number, so that one gather moves the pair."""
    positive = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float32, device="cpu")
    value = torch.cat([positive, -positive])
    byte = torch.arange(256, device="cpu")
    return torch.complex(value[byte % 16], value[byte // 16])


def elements(data: Tensor) -> Tensor:
    """Return FP8 data, or FP4 data two per byte along the last dimension, as float32."""
    if data.dtype != torch.uint8:
        table = _fp8_table(data.dtype)
        return table.index_select(0, data.reshape(-1).view(torch.uint8).int()).view(data.shape)
    pairs = _fp4_table().index_select(0, data.reshape(-1).int())
    return torch.view_as_real(pairs).view(*data.shape[:-1], data.shape[-1] * 2)


def scales(scale: Tensor, form: Format) -> Tensor:
    """Return block scales as float32: E8M0 (byte 0 is 2^-127, 255 is NaN), E4M3, or float32 already."""
    if form.scale_type == form.scale_dtype:
        return scale
    return scale.view(form.scale_type).float() if form.scale_type == E8M0 else elements(scale.view(form.scale_type))


# --- operands of one group --------------------------------------------------------------------------------------------


def _place(g: int, start: int, u: int) -> int:
    """Return the coordinate of the first token of group ``g``; see ``placement``."""
    return (start // u + g) * u


def rows(data: Tensor, scale: Tensor, sizes: tuple[int, ...], form: Format, scale_layout: str) -> Tensor:
    """Return rowwise tokens as float32 ``[routed, K]``, without the factor of their group."""
    values = elements(data[: sum(sizes[:-1])])
    if form.block == 0 or not values.numel():
        return values
    if scale_layout == "blocked":
        columns = placement.ceil_div(values.shape[1], form.block)
        padded = scale.shape[0] // (placement.TILE_COLUMNS * placement.ceil_div(columns, placement.TILE_COLUMNS))
        scale = placement.from_blocked(scale, padded, columns).index_select(0, _coordinates(sizes, ROW_UNIT))
    else:
        scale = scale[: values.shape[0]]
    return values.mul_(spread(scales(scale, form), form.block, 1, values.shape[1]))


def _coordinates(sizes: tuple[int, ...], u: int) -> Tensor:
    """Return the coordinate of every token, int64 ``[routed]``."""
    runs, start = [], 0
    for g, size in enumerate(sizes[:-1]):
        first = _place(g, start, u)
        runs.append(torch.arange(first, first + size, device="cpu"))
        start += size
    return torch.cat(runs)


def matrix(data: Tensor, scale: Tensor, form: Format, direction: str, scale_layout: str) -> Tensor:
    """Return one matrix as float32 ``[contraction, width]``, without the factor of its group."""
    values = elements(data)
    if form.block == 0:
        return values.t()
    if form.square_scales:
        scale = spread(scale, form.block, 0, values.shape[0])
    across = direction == "columnwise" and not form.transposed_columnwise
    if scale_layout == "blocked":
        width, depth = values.shape if not across else values.shape[::-1]
        scale = placement.from_blocked(scale, width, placement.ceil_div(depth, form.block))
        scale = scale.t() if across else scale
    dim = 0 if across else 1
    values.mul_(spread(scales(scale.contiguous(), form), form.block, dim, values.shape[dim]))
    return values if across else values.t()


class Columns:
    """Columnwise tokens of one operand; ``group`` decodes those of one group."""

    def __init__(self, data: Tensor, scale: Tensor, form: Format, scale_layout: str) -> None:
        self.data, self.scale, self.form = data, scale, form
        if scale_layout == "blocked" and scale.numel():
            features = data.shape[0] if form.transposed_columnwise else data.shape[1]
            padded = placement.TILE_ROWS * placement.ceil_div(features, placement.TILE_ROWS)
            matrix = placement.from_blocked(scale, features, scale.shape[0] // padded)
            self.scale = matrix if form.transposed_scale else matrix.t()

    def group(self, g: int, start: int, size: int) -> Tensor:
        """Return float32 ``[tokens, features]``; tokens is ``size``, up to whole blocks where the format fills them."""
        form = self.form
        if form.fills_blocks:
            size = -(-size // form.block) * form.block
        if form.transposed_columnwise:
            at = _place(g, start, form.unit_data)
            items = -(-size // form.per_byte)
            values = elements(self.data.narrow(1, at // form.per_byte, items))[:, :size].t()
        else:
            values = elements(self.data.narrow(0, start, size))
        if form.block == 0 or not values.numel():  # blocked scales without features have no block count
            return values
        dim = 1 if form.transposed_scale else 0
        blocks = placement.ceil_div(size, form.block)
        scale = self.scale.narrow(dim, _place(g, start, form.unit_scale) // form.block, blocks).contiguous()
        factor = spread(scales(scale, form), form.block, dim, size)
        return values.mul_(factor.t() if dim else factor)


# --- kernels ----------------------------------------------------------------------------------------------------------


def gemm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    offs: Tensor,
    a_amax: Tensor | None,
    b_amax: Tensor | None,
    bias: Tensor | None,
    bias_scale: Tensor | None,
    *,
    format: str,
    b_direction: str,
    scale_layout: str,
    out: Tensor,
    zero_tail: bool,
) -> None:
    """Form one float32 matrix product per group, in the order of the groups."""
    form = FORMATS[format]
    sizes = segment_sizes(offs, a.shape[0])
    if zero_tail:
        out[out.shape[0] - sizes[-1] :].zero_()
    factors = GROUP_FACTORS[format](a_scale, b_scale, a_amax, b_amax)
    alpha = [] if factors is None else factors.tolist()
    start = 0
    x = rows(a, a_scale, sizes, form, scale_layout)
    for g, size in enumerate(sizes[:-1]):
        if not size:
            continue
        group = slice(start, start + size)
        value = torch.mm(x[group], matrix(b[g], b_scale[g], form, b_direction, scale_layout))
        if alpha:
            value.mul_(alpha[g])
        if bias is not None:
            shift = bias[g].float()
            value.add_(shift if bias_scale is None else torch.outer(bias_scale[group].float(), shift))
        out[group].copy_(value)
        start += size


def wgrad(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    offs: Tensor,
    a_amax: Tensor | None,
    b_amax: Tensor | None,
    *,
    format: str,
    scale_layout: str,
    out: Tensor,
    accumulate: bool,
    slots: Tensor | None = None,
) -> None:
    """Form one float32 weight gradient per group: zero without tokens, or left alone when accumulating."""
    form = FORMATS[format]
    sizes = segment_sizes(offs, int(most_tokens(a, offs.shape[0], format)))
    factors = GROUP_FACTORS[format](a_scale, b_scale, a_amax, b_amax)
    alpha = [] if factors is None else factors.tolist()
    places = out.unbind() if slots is None else on_host(out, slots)
    left, right = Columns(a, a_scale, form, scale_layout), Columns(b, b_scale, form, scale_layout)
    start = 0
    for g, size in enumerate(sizes[:-1]):
        slot = places[g]
        if not size or slot is None:
            if not accumulate and slot is not None:
                slot.zero_()
            start += size
            continue
        value = torch.mm(left.group(g, start, size).t(), right.group(g, start, size))
        if alpha:
            value.mul_(alpha[g])
        slot.copy_(value.add_(slot) if accumulate else value)
        start += size
