"""Transposed data: ``[K, Tp]`` of placed groups, or ``[G, K, N]`` of matrices."""

from __future__ import annotations

import bisect
import functools

import torch
from torch import Tensor

from ..scratch import Scratch
from ._rows import Groups, steps

ROWS = 512  # rows per step, at least: writes are runs of so many bytes
_SPARSE = 8  # places per row up to which gaps are written as well
_WORD = 4  # bytes that are transposed together


@functools.cache
def _shifts() -> Tensor:
    """Return the first bit of every byte of a word."""
    return torch.arange(0, 8 * _WORD, 8, dtype=torch.int32, device="cpu")[:, None, None]


class Transposed:
    """Rows of bytes behind a transposed memory; ranges of rows are those of ``Groups.steps``."""

    def __init__(self, memory: Tensor, groups: Groups, unit: int, scratch: Scratch) -> None:
        self.memory, self.groups, self.unit, self.scratch = memory.view(torch.uint8), groups, unit, scratch

    @functools.cached_property
    def _moves(self) -> list[int]:
        """Return the distance by which the placement moves each group."""
        return [start - first for start, first in zip(self.groups.starts(self.unit), self.groups.bounds)]

    def place(self, row: int) -> int:
        """Return the coordinate of a row."""
        return row + self._moves[bisect.bisect_right(self.groups.bounds, row) - 1]

    def places(self, start: int, stop: int) -> Tensor:
        """Return the coordinate of every row of a range, int64."""
        return self.moved(torch.arange(start, stop, device="cpu"), start, stop, 0)

    def moved(self, numbers: Tensor, start: int, stop: int, by: int) -> Tensor:
        """Numbers of the rows of a range, moved as their groups are and by another ``by``."""
        moves = torch.tensor([move + by for move in self._moves], dtype=torch.int64, device="cpu")
        return moves.index_select(0, self.groups.of_rows(start, stop)).add_(numbers)

    def clear(self) -> None:
        """Zero everything that no write reaches."""
        if self.groups.each is None:
            self.memory.zero_()

    def rows(self, start: int, stop: int) -> _RowsToTurn:
        """Return a range of rows to be written."""
        return _RowsToTurn(self, start, stop)

    def turn(self, rows: Tensor, target: Tensor) -> None:
        """Transpose rows of whole words into ``[columns, rows]`` (or ``[columns, matrices, rows]``).

        Transposing words is three times as fast as bytes; then each of their bytes makes its column. A conversion to
        uint8 keeps the lowest byte of a shifted word. The result lies in the buffer of scaled rows, which have been
        cast by now.
        """
        words = rows.view(torch.int32)
        down, across = words.shape
        turned = self._room("words", across, down, torch.int32).copy_(words.t())
        columns = self.scratch.room("scaled", _WORD, across, down).view(torch.int32)
        torch.bitwise_right_shift(turned, _shifts(), out=columns)
        columns = columns.view(_WORD, across, *target.shape[1:])
        whole, rest = divmod(target.shape[0], _WORD)
        if rest:
            target[-rest:].copy_(columns[:rest, whole])
            target, columns = target[:-rest], columns[:, :whole]
        target.view(whole, _WORD, *target.shape[1:]).transpose(0, 1).copy_(columns)

    def read(self, start: int, stop: int, left: int, right: int) -> Tensor:
        """Return data that ``write`` has written."""
        if self.groups.each is not None:
            part = self.matrices(start, stop, left, right)
            return part.flatten(1).t() if part.dim() == 3 else part.t()
        first, last = self.place(start), self.place(stop - 1) + 1
        if last - first == stop - start:
            return self.memory[left:right, first:last].t()
        return self.memory[left:right].index_select(1, self.places(start, stop)).t()

    def matrices(self, start: int, stop: int, left: int, right: int) -> Tensor:
        """Return a view ``[columns, rows]`` of a part of one matrix, or ``[columns, matrices, rows]`` of several."""
        each = self.groups.each
        assert each is not None
        matrix = start // each
        if stop <= (matrix + 1) * each:
            return self.memory[matrix, left:right, start - matrix * each : stop - matrix * each]
        return self.memory[matrix : stop // each, left:right].transpose(0, 1)

    def _room(self, name: str, rows: int, columns: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return self.scratch.room(name, rows, columns, dtype=dtype)


class _RowsToTurn:
    """Some rows to transpose: fill ``room``, then ``write``, for one range of columns after the other."""

    def __init__(self, transposed: Transposed, start: int, stop: int) -> None:
        self.into, self.start, self.stop = transposed, start, stop
        self.places: Tensor | None = None
        self._zeroed: Tensor | None = None
        if transposed.groups.each is not None:
            return
        self.first, self.last = transposed.place(start), transposed.place(stop - 1) + 1
        have, want = stop - start, self.last - self.first
        self.row: Tensor | None = None
        if want > _SPARSE * have:  # many empty groups
            self.places = transposed.places(start, stop)
        elif want > have:  # the row at every place, the one behind the last in gaps
            row = torch.arange(have, device="cpu")
            places = transposed.moved(row, start, stop, start - self.first)
            self.row = torch.full((want,), have, dtype=torch.int64, device="cpu").scatter_(0, places, row)

    def room(self, columns: int) -> Tensor:
        """Return memory for bytes ``[rows, columns]``."""
        rows = self._straight(columns)[:-1]
        return rows if rows.shape[1] == columns else rows[:, :columns]

    def write(self, left: int, right: int) -> None:
        """Store the bytes in ``room``."""
        into, straight = self.into, self._straight(right - left)
        if into.groups.each is not None:
            into.turn(straight[:-1], into.matrices(self.start, self.stop, left, right))
        elif self.places is not None:
            turned = into.scratch.room("turned", right - left, self.stop - self.start, dtype=torch.uint8)
            into.turn(straight[:-1], turned)
            into.memory[left:right].index_copy_(1, self.places, turned)
        elif self.row is None:
            into.turn(straight[:-1], into.memory[left:right, self.first : self.last])
        else:
            if straight is not self._zeroed:
                straight[-1].zero_()
                self._zeroed = straight
            # Mostly at once: gaps seldom make more than half as many places again.
            for start, stop in steps(0, self.last - self.first, -(-2 * straight.shape[1] // 3), buffers=1):
                placed = into.scratch.room("placed", stop - start, straight.shape[1], dtype=torch.uint8)
                torch.index_select(straight, 0, self.row[start:stop], out=placed)
                into.turn(placed, into.memory[left:right, self.first + start : self.first + stop])

    def _straight(self, columns: int) -> Tensor:
        width = -(-columns // _WORD) * _WORD
        return self.into.scratch.room("straight", self.stop - self.start + 1, width, dtype=torch.uint8)
