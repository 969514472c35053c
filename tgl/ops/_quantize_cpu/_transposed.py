"""Data stored transposed: ``[K, Tp]`` of placed groups, or ``[G, K, N]`` of matrices."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ._rows import Groups, Scratch, steps

ROWS = 512  # of a step, at least: what is written are runs of so many bytes
_SPARSE = 8  # places per row up to which gaps are written as well
_WORD = 4  # bytes that are turned together


class Transposed:
    """Rows of bytes behind a transposed memory; ranges of rows are those of ``Groups.steps``."""

    def __init__(self, memory: Tensor, groups: Groups, unit: int, scratch: Scratch) -> None:
        self.memory, self.groups, self.unit, self.scratch = memory.view(torch.uint8), groups, unit, scratch

    def clear(self) -> None:
        """Zero what no write will reach."""
        if self.groups.each is None:
            self.memory.zero_()

    def writer(self, start: int, stop: int) -> Callable[[int, int, Tensor], None]:
        """``write(left, right, rows)`` stores the bytes ``[rows, columns]`` of a range of rows and of columns."""
        if self.groups.each is not None:
            return functools.partial(self._write_matrices, start, stop)
        places = self.groups.places(start, stop, self.unit)
        first, last = int(places[0]), int(places[-1]) + 1
        if last - first > _SPARSE * (stop - start):  # many empty groups
            return functools.partial(self._write_sparse, places)
        row = None
        if last - first > stop - start:
            row = torch.full((last - first,), stop - start).scatter_(0, places - first, torch.arange(stop - start))
        return functools.partial(self._write_placed, first, last, row)

    def _write_matrices(self, start: int, stop: int, left: int, right: int, rows: Tensor) -> None:
        target = self._matrices(start, stop, left, right)
        if target.dim() == 3:  # [columns, matrices, rows]
            target = target.transpose(0, 1)
        self._turn(self._straight(rows)[:-1], target)

    def _write_sparse(self, places: Tensor, left: int, right: int, rows: Tensor) -> None:
        turned = self._room("turned", right - left, rows.shape[0])
        self._turn(self._straight(rows)[:-1], turned)
        self.memory[left:right].index_copy_(1, places, turned)

    def _write_placed(self, first: int, last: int, row: Tensor | None, left: int, right: int, rows: Tensor) -> None:
        straight = self._straight(rows)
        if row is None:
            self._turn(straight[:-1], self.memory[left:right, first:last])
            return
        for start, stop in steps(0, last - first, right - left):
            placed = self._room("placed", stop - start, straight.shape[1])
            torch.index_select(straight, 0, row[start:stop], out=placed)
            self._turn(placed, self.memory[left:right, first + start : first + stop])

    def _straight(self, rows: Tensor) -> Tensor:
        """Rows of whole words, and a row of zeros behind them."""
        count, columns = rows.shape
        straight = self._room("straight", count + 1, -(-columns // _WORD) * _WORD)
        straight[:count, :columns].copy_(rows)
        straight[count].zero_()
        return straight

    def _turn(self, rows: Tensor, target: Tensor) -> None:
        """Rows of whole words into ``[columns, rows]`` (rows of any shape).

        Words are turned, which is three times as fast as bytes, then each of their bytes makes its column.
        """
        words = rows.view(torch.int32)
        shape = words.shape[1], words.shape[0]
        turned = self.scratch.room("words", *shape, dtype=torch.int32).copy_(words.t())
        shifted = self.scratch.room("shifted", *shape, dtype=torch.int32)
        for byte in range(_WORD):
            columns = target[byte::_WORD]
            if byte:
                torch.bitwise_right_shift(turned, 8 * byte, out=shifted)
            values = (shifted if byte else turned)[: columns.shape[0]]
            columns.copy_(values.view(columns.shape))  # a conversion to uint8 keeps the lowest byte

    def read(self, start: int, stop: int, left: int, right: int) -> Tensor:
        """What ``write`` has written."""
        if self.groups.each is not None:
            return self._matrices(start, stop, left, right).transpose(-1, -2).reshape(stop - start, right - left)
        places = self.groups.places(start, stop, self.unit)
        first, last = int(places[0]), int(places[-1]) + 1
        if last - first == stop - start:
            return self.memory[left:right, first:last].t()
        return self.memory[left:right].index_select(1, places).t()

    def _matrices(self, start: int, stop: int, left: int, right: int) -> Tensor:
        """A view ``[columns, rows]`` of a part of one matrix, or ``[matrices, columns, rows]`` of several."""
        each = self.groups.each
        assert each is not None
        matrix = start // each
        if stop <= (matrix + 1) * each:
            return self.memory[matrix, left:right, start - matrix * each : stop - matrix * each]
        return self.memory[matrix : stop // each, left:right]

    def _room(self, name: str, rows: int, columns: int) -> Tensor:
        return self.scratch.room(name, rows, columns, dtype=torch.uint8)
