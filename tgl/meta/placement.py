"""Placement of groups that must start on multiples of ``u`` tokens, and the blocked layout of scales.

One rule is used everywhere: group g starts at unit ``start // u + g``, where ``start`` is its first token. So a start
follows from ``offs``, and the size from the number of rows (including the tail) and of groups: nothing is read on the
host and no shape depends on data. Groups never overlap, at most one unit is wasted per group, and padding is zero.
``p`` is a token's coordinate under this rule.

Tensor cores read the one-byte scales of a matrix in tiles of 128 rows x 4 columns, 512 bytes each, the tiles
row-major: ``offset(y, x) = ((y // 128) * ceil(cols / 4) + x // 4) * 512 + (y % 32) * 16 + (y % 128) // 32 * 4 + x % 4``
(cuBLAS documentation, "1D block scaling factors layout"). Padding bytes are zero.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .specs import Dim, ceil_div

TILE_ROWS, TILE_COLUMNS = 128, 4
TILE_BYTES = TILE_ROWS * TILE_COLUMNS
ROW_UNIT = 128  # unit of the placement of blocked rowwise scales


def units(rows: Dim, groups: Dim, u: int) -> Dim:
    """Return the number of units of ``u`` tokens to allocate for ``rows`` rows in ``groups`` groups."""
    if isinstance(groups, int) and groups > 0:
        return ceil_div(rows, u) + groups - 1  # never negative, which the symbolic solver cannot tell
    return torch.sym_max(ceil_div(rows, u) + groups - 1, 0)


def padded_rows(rows: Dim, groups: Dim, u: int) -> Dim:
    """Return Tp, the number of tokens to allocate: ``u`` per unit."""
    return u * units(rows, groups, u)


def room(groups: Dim, u: int) -> Callable[[Dim], Dim]:
    """Return ``padded_rows`` as a function of the rows; with groups it needs no clamp, as it is never negative."""
    if isinstance(groups, int) and groups > 0:
        spare = groups - 1
        return lambda rows: (-(-rows // u) + spare) * u  # ``ceil_div``, inlined
    return lambda rows: padded_rows(rows, groups, u)


def starts(offs: Tensor, u: int) -> Tensor:
    """Return int64 ``[G]``: the coordinate of every group's first token."""
    return (first_rows(offs) // u + torch.arange(offs.shape[0], device=offs.device)) * u


def first_rows(offs: Tensor) -> Tensor:
    """Return int64 ``[G]``: every group's first token, given cumulative ends."""
    ends = offs.to(torch.int64)
    return torch.cat([ends.new_zeros(1), ends])[: offs.shape[0]]


def coordinate(offs: Tensor, rows: Dim, u: int) -> Tensor:
    """Return int64 ``[T]``: the coordinate p of every token, -1 for those past the last group."""
    token = torch.arange(rows, device=offs.device)  # type: ignore[arg-type]
    group = torch.searchsorted(offs.to(torch.int64), token, right=True)
    shift = torch.cat([starts(offs, u) - first_rows(offs), token.new_zeros(1)])
    return torch.where(group < offs.shape[0], token + shift[group], -1)


def tail(offs: Tensor, rows: int) -> Tensor:
    """Return bool ``[T]``: whether a row is past the last group, without reading ``offs`` on the host."""
    end = offs[-1] if offs.shape[0] else 0
    return torch.arange(rows, device=offs.device) >= end


def row_of(offs: Tensor, rows: Dim, u: int) -> Tensor:
    """Return int64 ``[Tp]``: the token at every coordinate, -1 where there is none."""
    p = coordinate(offs, rows, u)
    places = padded_rows(rows, offs.shape[0], u)
    tokens = torch.full((places + 1,), -1, dtype=torch.int64, device=offs.device)  # the last place takes the tail
    tokens[p.masked_fill(p < 0, places)] = torch.arange(rows, device=offs.device)  # type: ignore[arg-type]
    return tokens[:places]


def blocked_size(rows: Dim, columns: Dim) -> Dim:
    """Return the number of bytes of a blocked scale matrix."""
    return TILE_BYTES * ceil_div(rows, TILE_ROWS) * ceil_div(columns, TILE_COLUMNS)


def blocked_offset(y: Dim | Tensor, x: Dim | Tensor, columns: Dim) -> Dim | Tensor:
    """Return the byte offset of the scale in row ``y``, column ``x`` of ``columns`` columns; tensors broadcast."""
    row = y // TILE_ROWS * (ceil_div(columns, TILE_COLUMNS) * TILE_BYTES) + y % 32 * 16 + y % TILE_ROWS // 32 * 4
    return row + (x // TILE_COLUMNS * TILE_BYTES + x % TILE_COLUMNS)


def tiles(flat: Tensor, rows: Dim, columns: Dim) -> Tensor:
    """View blocked bytes ``[..., bytes]`` as ``[..., tile row, y // 32 % 4, y % 32, tile column, x % 4]``.

    Flattened to ``[..., rows, columns]`` (rounded up to tiles), the view is the matrix; writing to it blocks scales.
    """
    down, across = ceil_div(rows, TILE_ROWS), ceil_div(columns, TILE_COLUMNS)
    memory = flat.view(*flat.shape[:-1], down, across, 32, 4, 4)
    lead = memory.dim() - 5
    return memory.permute(*range(lead), lead, lead + 3, lead + 2, lead + 1, lead + 4)


def to_blocked(scales: Tensor) -> Tensor:
    """Convert one-byte scales ``[..., rows, columns]`` to blocked ``[..., bytes]``, with zero padding."""
    rows, columns = scales.shape[-2:]
    down, across = ceil_div(rows, TILE_ROWS) * TILE_ROWS, ceil_div(columns, TILE_COLUMNS) * TILE_COLUMNS
    whole = torch.nn.functional.pad(scales, (0, across - columns, 0, down - rows))  # type: ignore[arg-type]
    flat = scales.new_empty((*scales.shape[:-2], blocked_size(rows, columns)))
    view = tiles(flat, rows, columns)
    view.copy_(whole.view(view.shape))
    return flat


def from_blocked(flat: Tensor, rows: Dim, columns: Dim) -> Tensor:
    """Invert ``to_blocked``: ``[..., bytes]`` to ``[..., rows, columns]``."""
    view = tiles(flat, rows, columns)
    whole = view.reshape(
        *flat.shape[:-1], ceil_div(rows, TILE_ROWS) * TILE_ROWS, ceil_div(columns, TILE_COLUMNS) * TILE_COLUMNS
    )
    return whole[..., :rows, :columns].contiguous()
