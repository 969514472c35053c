"""Loops over steps of work for formats with blocks of elements; a ``Rule`` computes a block's scale."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ._rows import Blocks, Float32Rows, Groups, int32, step_of, steps
from ._scales import BlockScales, RowScales

SIGN_OFF = 0x7FFFFFFF  # mask of the bits of a float32 magnitude


class Pieces(Protocol):
    """The division of a step's elements into blocks."""

    def amax(self, bits: Tensor) -> Tensor:
        """Return the maximum of every block, of magnitudes given by their bits (int32)."""

    def spread(self, of_blocks: Tensor) -> Tensor:
        """Return one value per block, as ``amax`` returns them, so that it broadcasts to the elements."""

    def multiply(self, wide: Tensor, of_blocks: Tensor, out: Tensor) -> Tensor:
        """Return ``wide`` times ``spread(of_blocks)``, both float32, in ``out``."""


@dataclass(frozen=True)
class Even(Pieces):
    """Blocks of equal size, along one dimension."""

    dim: int

    def amax(self, bits: Tensor) -> Tensor:
        return bits.amax(self.dim, keepdim=True)

    def spread(self, of_blocks: Tensor) -> Tensor:
        return of_blocks

    def multiply(self, wide: Tensor, of_blocks: Tensor, out: Tensor) -> Tensor:
        return torch.mul(wide, of_blocks, out=out)


@dataclass(frozen=True)
class Ragged(Pieces):
    """Blocks of different numbers of rows, one after the other; ``of_row`` has the block of every row."""

    of_row: Tensor
    count: int

    def amax(self, bits: Tensor) -> Tensor:
        found = torch.zeros(self.count, bits.shape[1], dtype=torch.float32, device="cpu")
        found.scatter_reduce_(0, self.of_row[:, None].expand_as(bits), bits.view(torch.float32), "amax")
        return found.view(torch.int32).bitwise_and_(int32(SIGN_OFF))  # vectorised, a maximum of NaN comes with its sign

    def spread(self, of_blocks: Tensor) -> Tensor:
        return of_blocks.index_select(0, self.of_row)

    def multiply(self, wide: Tensor, of_blocks: Tensor, out: Tensor) -> Tensor:
        return torch.index_select(of_blocks, 0, self.of_row, out=out).mul_(wide)


Rule = Callable[[Tensor, Pieces], tuple[Tensor, Tensor]]
"""``rule(wide, pieces) -> (scaled, scale)``: float32 elements (to be read only) to values ready to be cast, in a
buffer, and the scales to be stored, as ``pieces.amax`` returns them."""


def magnitude(wide: Tensor, room: Tensor) -> Tensor:
    """Return the bits of ``|wide|`` as int32, in ``room``: ordered like the values, NaN above Inf."""
    return torch.bitwise_and(wide.view(torch.int32), int32(SIGN_OFF), out=room.view(torch.int32))


def rowwise(rows: Float32Rows, groups: Groups, block: int, rule: Rule, data: Tensor, scales: RowScales) -> None:
    """Quantise blocks along the columns. With an index of more rows than tokens, every token is quantised once."""
    data = data.view(groups.rows, rows.columns)
    across, count = scales.columns, groups.routed
    scales.clear()
    tokens = rows.repeated(count)
    if tokens is None:
        for start, stop, scaled, scale in _by_rows(rows, count, across, block, rule):
            data[start:stop].copy_(scaled)
            scales.write(start, stop, scale)
    else:
        found = tokens.x.shape[0]
        codes = torch.empty(found, rows.columns, dtype=data.dtype, device="cpu")
        factors = torch.empty(found, across, dtype=scales.memory.dtype, device="cpu")
        for start, stop, scaled, scale in _by_rows(tokens, found, across, block, rule):
            codes[start:stop].copy_(scaled)
            factors[start:stop].copy_(scale)
        for start, stop, numbers in rows.numbers(count):
            torch.index_select(codes.view(torch.uint8), 0, numbers, out=data[start:stop].view(torch.uint8))
            scales.write(start, stop, factors.index_select(0, numbers))
    clear_tail(data, groups)


def _by_rows(
    rows: Float32Rows, count: int, across: int, block: int, rule: Rule
) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """Yield steps of the first ``count`` rows: their range, values ready to be cast, scales."""
    for start, stop in steps(0, count, across * block, buffers=rows.buffers):
        wide = rows.load(start, stop, width=across * block).view(stop - start, across, block)
        scaled, scale = rule(wide, Even(2))
        yield start, stop, scaled.view(stop - start, -1)[:, : rows.columns], scale.squeeze(2)


def clear_tail(data: Tensor, groups: Groups) -> None:
    """Zero the rows past the last group."""
    if groups.routed < groups.rows:
        data[groups.routed :].view(torch.uint8).zero_()


def along_rows(blocks: Blocks, start: int, stop: int, first: int, last: int) -> Pieces:
    """Return a range of blocks, which is the range of rows ``[first, last)``."""
    if last - first == (stop - start) * blocks.size:
        return Even(1)
    return Ragged(blocks.of_rows(start, stop), stop - start)


def cut(wide: Tensor, pieces: Pieces, size: int) -> Tensor:
    """Return rows in the shape that ``pieces`` takes: ``[blocks, size, columns]`` if they are even."""
    return wide.view(-1, size, wide.shape[1]) if isinstance(pieces, Even) else wide


def columnwise(
    rows: Float32Rows,
    groups: Groups,
    blocks: Blocks,
    rule: Rule,
    writer: Callable[[int, int], Callable[[int, int, Tensor], object]],
    scales: BlockScales,
    height: int = 1,
) -> None:
    """Quantise blocks along the rows, from each group's start; ``writer(start, stop)(left, right, scaled)`` stores
    rows.
    """
    scales.clear()
    size = blocks.size
    across = min(step_of(max(size, height), 1, rows.buffers), rows.columns)
    for start, stop in blocks.steps(across, groups.each, rows.buffers):
        first, last = blocks.rows(start, stop)
        pieces, write = along_rows(blocks, start, stop, first, last), writer(first, last)
        for left, right in steps(0, rows.columns, last - first, 4, rows.buffers):
            scaled, scale = rule(cut(rows.load(first, last, left, right), pieces, size), pieces)
            write(left, right, scaled.view(last - first, right - left))
            scales.write(start, stop, left, right, scale.view(stop - start, right - left))
