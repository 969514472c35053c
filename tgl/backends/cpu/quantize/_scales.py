"""Storage of scales: compact or blocked, per row or per block of rows, in placed groups or in separate matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from ....meta.placement import ROW_UNIT, blocked_offset, blocked_size, padded_rows
from ._rows import Blocks, Groups


class RowScales:
    """Scales ``[rows, columns]`` of rowwise blocks, in either layout."""

    def __init__(self, memory: Tensor, groups: Groups, columns: int, blocked: bool) -> None:
        self.groups, self.columns, self.blocked = groups, columns, blocked
        self.memory = memory.view(-1) if blocked else memory.view(groups.rows, columns)

    def clear(self) -> None:
        """Zero everything that no write reaches."""
        if self.blocked:
            self.memory.zero_()
        elif self.groups.routed < self.groups.rows:
            self.memory[self.groups.routed :].zero_()

    def write(self, start: int, stop: int, values: Tensor) -> None:
        """Write the scales of a range of rows."""
        if self.blocked:
            self.memory.scatter_(0, self._offsets(start, stop).view(-1), values.reshape(-1).to(self.memory.dtype))
        else:
            self.memory[start:stop].copy_(values)

    def read(self, start: int, stop: int) -> Tensor:
        """Return scales that ``write`` has written."""
        return self.memory[self._offsets(start, stop)] if self.blocked else self.memory[start:stop]

    def _offsets(self, start: int, stop: int) -> Tensor:
        groups, x = self.groups, torch.arange(self.columns, device="cpu")
        if groups.each is None:
            return _blocked(groups.places(start, stop, ROW_UNIT)[:, None], x, self.columns)
        row = torch.arange(start, stop, device="cpu")
        matrix = row // max(groups.each, 1)
        base = matrix * int(blocked_size(groups.each, self.columns))
        return base[:, None] + _blocked((row - matrix * groups.each)[:, None], x, self.columns)


class BlockScales:
    """Scales ``[blocks of rows, columns]`` of columnwise blocks, behind either layout.

    A block's row in the compact matrix ``[Tp / size, K]`` follows from the placement of unit ``u``; of matrices
    ``[G, ceil(N / size), K]`` from its number. Blocked, the scale of block b and column k is at y = k, x = b.
    """

    def __init__(self, memory: Tensor, groups: Groups, blocks: Blocks, columns: int, u: int, blocked: bool) -> None:
        self.groups, self.columns, self.blocked, self.size = groups, columns, blocked, blocks.size
        self.memory = memory.view(-1) if blocked else memory.flatten(0, -2)
        if groups.each is None:
            self.across = int(padded_rows(groups.rows, groups.count, u)) // blocks.size
            self.firsts, self.per_matrix = [start // blocks.size for start in groups.starts(u)], 0
        else:
            self.across = self.per_matrix = -(-groups.each // blocks.size)
            self.firsts = [g * self.per_matrix for g in range(groups.count)]
        self.row = blocks.numbered(self.firsts)

    def clear(self) -> None:
        """Zero everything, since writes do not reach all of it."""
        self.memory.zero_()

    def write(self, start: int, stop: int, left: int, right: int, values: Tensor) -> None:
        """Write the scales ``[blocks, columns]`` of a range of blocks and of columns."""
        first, last = self.row[start], self.row[stop - 1]
        if not self.blocked and last - first == stop - 1 - start:
            self.memory[first : last + 1, left:right].copy_(values)
            return
        row, values = torch.tensor(self.row[start:stop], dtype=torch.int64, device="cpu"), values.to(self.memory.dtype)
        if self.blocked:
            self.memory.scatter_(0, self._offsets(row, left, right).view(-1), values.reshape(-1))
        else:
            self.memory[:, left:right].index_copy_(0, row, values)

    def read_rows(self, start: int, stop: int, left: int, right: int) -> Tensor:
        """Return the scale of every element of a range of rows and of columns."""
        group = self.groups.of_rows(start, stop)
        within = torch.arange(start, stop, device="cpu") - self.groups.firsts[group]
        row = torch.tensor(self.firsts, dtype=torch.int64, device="cpu")[group] + within // self.size
        if self.blocked:
            return self.memory[self._offsets(row, left, right)]
        return self.memory[:, left:right].index_select(0, row)

    def _offsets(self, row: Tensor, left: int, right: int) -> Tensor:
        y = torch.arange(left, right, device="cpu")
        if self.groups.each is None:
            return _blocked(y, row[:, None], self.across)
        matrix = row // max(self.per_matrix, 1)
        base = matrix * int(blocked_size(self.columns, self.across))
        return base[:, None] + _blocked(y, (row - matrix * self.per_matrix)[:, None], self.across)


def _blocked(y: Tensor, x: Tensor, columns: int) -> Tensor:
    offset = blocked_offset(y, x, columns)
    assert isinstance(offset, Tensor)
    return offset
