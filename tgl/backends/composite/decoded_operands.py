"""Decode quantised operands for dense GEMMs: to bfloat16, and the exponents that multiply the product.

Used by the GEMMs on quantised operands where the tensor cores lack their format; see ``decoded_gemm`` and
``decoded_wgrad``. Nothing is read on the host. The caller applies float32 scales and group factors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...meta import placement
from ...meta.formats import E4M3, E8M0, Format
from ...meta.placement import ROW_UNIT, TILE_COLUMNS, TILE_ROWS
from ..portable import decode


class Decoded(NamedTuple):
    """A decoded operand.

    Attributes:
        values: bfloat16.
        exponent: int32, for every row, matrix or group of tokens the power of two that multiplies the product; None
            where there is none.
    """

    values: Tensor
    exponent: Tensor | None = None


@dataclass(frozen=True)
class RowGroups:
    """Rows in groups, on the device.

    Attributes:
        ends: int32 ``[G]``, ascending and inside the rows, whatever the caller's were.
        rows: number of rows, the tail included.
    """

    ends: Tensor
    rows: int

    @classmethod
    def of(cls, offs: Tensor, rows: int) -> RowGroups:
        return cls(torch.cummax(offs.clamp(0, rows), 0).values, rows)

    def sizes(self) -> Tensor:
        """Return the sizes of the groups, int64 ``[G]``."""
        return self.ends - placement.first_rows(self.ends)

    def of_rows(self) -> Tensor:
        """Return the group of every row, int64 ``[T]``; the tail counts as the last group's."""
        rows = torch.arange(self.rows, device=self.ends.device, dtype=torch.int32)
        return torch.searchsorted(self.ends, rows, right=True).clamp_max(self.ends.shape[0] - 1)

    def starts(self, unit: int) -> Tensor:
        """Return the placed coordinate of every group's first token, int64 ``[G]``."""
        return placement.starts(self.ends, unit)

    def places(self, unit: int) -> Tensor:
        """Return the placed coordinate of every token, int64 ``[T]``; undefined for the tail."""
        return placement.coordinate(self.ends, self.rows, unit).clamp_min(0)


def of_places(starts: Tensor, places: int, step: int = 1) -> Tensor:
    """Return the group of ``step`` times each coordinate, int64 ``[places]``, from the starts of the groups."""
    place = torch.arange(places, device=starts.device) * step
    return torch.searchsorted(starts, place, right=True) - 1


def tokens(data: Tensor, scale: Tensor, groups: RowGroups, form: Format, scale_layout: str) -> Decoded:
    """Decode rowwise tokens ``[T, K]``; rows past the last group are undefined."""
    values = decode.elements(data)
    if form.scale_type not in _ONE_BYTE or not values.numel():
        return Decoded(values)
    if scale_layout == "blocked":
        across = placement.ceil_div(values.shape[1], form.block)
        padded = scale.shape[0] // (TILE_COLUMNS * placement.ceil_div(across, TILE_COLUMNS))
        scale = placement.from_blocked(scale, padded, across).index_select(0, groups.places(ROW_UNIT))
    return _ONE_BYTE[form.scale_type](values, scale, form, 1)


def matrices(data: Tensor, scale: Tensor, form: Format, direction: str, scale_layout: str) -> Decoded:
    """Decode matrices to ``[G, contraction, width]``."""
    values = decode.elements(data)
    across = direction == "columnwise" and not form.transposed_columnwise
    contraction = 1 if across else 2
    found = Decoded(values)
    if form.scale_type in _ONE_BYTE and values.numel():
        if scale_layout == "blocked":
            blocks = placement.ceil_div(values.shape[contraction], form.block)
            scale = placement.from_blocked(scale, values.shape[3 - contraction], blocks)
            scale = scale.transpose(1, 2) if across else scale
        found = _ONE_BYTE[form.scale_type](values, scale, form, contraction)
    return found if across else found._replace(values=found.values.transpose(1, 2))


def _e4m3(values: Tensor, scale: Tensor, form: Format, dim: int) -> Decoded:
    return Decoded(values.mul_(decode.spread(decode.block_scales(scale), form.block, dim, values.shape[dim])))


def _e8m0(values: Tensor, scale: Tensor, form: Format, dim: int) -> Decoded:
    """Decode relative to the largest scale of each row or matrix."""
    largest = decode.finite(scale).flatten(1).amax(1)
    factors = decode.powers(scale, largest.view(-1, *[1] * (scale.dim() - 1)))
    return Decoded(values.mul_(decode.spread(factors, form.block, dim, values.shape[dim])), decode.exponent_of(largest))


_ONE_BYTE: dict[torch.dtype, Callable[[Tensor, Tensor, Format, int], Decoded]] = {E4M3: _e4m3, E8M0: _e8m0}
"""Decoders of elements times the scales of blocks along a dimension, by the dtype of the scales."""


def columns(data: Tensor, scale: Tensor, groups: RowGroups, form: Format, scale_layout: str) -> tuple[Decoded, Tensor]:
    """Decode columnwise tokens to ``[places, features]``; also return the placed ends of the groups, int32 ``[G]``."""
    if scale_layout == "blocked" and scale.numel():
        features = data.shape[0] if form.transposed_columnwise else data.shape[1]
        scale = placement.from_blocked(
            scale, features, scale.shape[0] // (TILE_ROWS * placement.ceil_div(features, TILE_ROWS))
        )
        scale = scale if form.transposed_scale else scale.t()
    if form.transposed_columnwise:
        return _by_place(data, scale, groups, form)
    return _by_token(data, scale, groups, form), groups.ends


def _by_place(data: Tensor, scale: Tensor, groups: RowGroups, form: Format) -> tuple[Decoded, Tensor]:
    """Decode data ``[features, places]``; values in the gaps of the placement are ignored."""
    values = decode.elements(data)
    starts, sizes, places = groups.starts(form.unit_data), groups.sizes(), values.shape[1]
    filled = starts + ((sizes + form.block - 1) // form.block * form.block if form.fills_blocks else sizes)
    place = torch.arange(places, device=starts.device)
    past = place >= filled[of_places(starts, places)]
    found = Decoded(values)
    if form.scale_type in _BY_PLACE and values.numel():
        found = _BY_PLACE[form.scale_type](values, scale, form, starts, past)
    ends = torch.cat((starts[1:], filled[-1:])).to(torch.int32)
    return found._replace(values=found.values.masked_fill_(past, 0).t()), ends


def _e4m3_by_place(values: Tensor, scale: Tensor, form: Format, starts: Tensor, past: Tensor) -> Decoded:
    return _e4m3(values, scale, form, 1)


def _e8m0_by_place(values: Tensor, scale: Tensor, form: Format, starts: Tensor, past: Tensor) -> Decoded:
    """Decode relative to the largest scale of each group; scales of blocks without a token are ignored."""
    group = of_places(starts, scale.shape[1], form.block)
    of_block = decode.finite(scale).amax(0).int().masked_fill(past[:: form.block], 0)
    largest = torch.zeros_like(starts, dtype=torch.int32).scatter_reduce(0, group, of_block, "amax")
    factors = decode.powers(scale, largest.index_select(0, group))
    return Decoded(values.mul_(decode.spread(factors, form.block, 1, values.shape[1])), decode.exponent_of(largest))


_BY_PLACE: dict[torch.dtype, Callable[[Tensor, Tensor, Format, Tensor, Tensor], Decoded]] = {
    E4M3: _e4m3_by_place,
    E8M0: _e8m0_by_place,
}
"""Decoders of elements ``[features, places]`` times the scales of placed blocks, by the dtype of the scales."""


def _by_token(data: Tensor, scale: Tensor, groups: RowGroups, form: Format) -> Decoded:
    """Decode data ``[T, features]`` relative to the largest scale of each group."""
    values, group = decode.elements(data), groups.of_rows()
    if not values.numel():
        return Decoded(values)
    scale = scale.index_select(0, groups.places(form.unit_scale) // form.block)
    of_row = decode.finite(scale).amax(1).int().masked_fill(placement.tail(groups.ends, groups.rows), 0)
    largest = torch.zeros_like(groups.ends).scatter_reduce(0, group, of_row, "amax")
    factors = decode.powers(scale, largest.index_select(0, group)[:, None])
    return Decoded(values.mul_(factors), decode.exponent_of(largest))
