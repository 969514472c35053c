"""Data stored transposed: ``[K, Tp]`` of placed groups, or ``[G, K, N]`` of matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from ._rows import Groups, Scratch

ROWS = 512  # of a step, at least: what is written are runs of so many bytes
_SPARSE = 2  # places per row up to which gaps are written as well


class Transposed:
    """Rows of bytes behind a transposed memory; ranges of rows are those of ``Groups.steps``."""

    def __init__(self, memory: Tensor, groups: Groups, unit: int, scratch: Scratch) -> None:
        self.memory, self.groups, self.unit, self.scratch = memory.view(torch.uint8), groups, unit, scratch

    def clear(self) -> None:
        """Zero what no write will reach."""
        if self.groups.each is None:
            self.memory.zero_()

    def write(self, start: int, stop: int, left: int, right: int, rows: Tensor) -> None:
        """Bytes ``[rows, columns]`` of a range of rows and of columns."""
        each, columns = self.groups.each, right - left
        if each is not None:
            target = self._matrices(start, stop, left, right)
            straight = self._room("straight", stop - start, columns).copy_(rows)  # turns three times as fast
            target.copy_(straight.view(*target.transpose(-1, -2).shape).transpose(-1, -2))
            return
        places = self.groups.places(start, stop, self.unit)
        first, last = int(places[0]), int(places[-1]) + 1
        if last - first > _SPARSE * (stop - start):  # many empty groups
            turned = self._room("turned", columns, stop - start).copy_(rows.t())
            self.memory[left:right].index_copy_(1, places, turned)
            return
        straight = self._room("straight", last - first, columns)
        if last - first == stop - start:
            straight.copy_(rows)
        else:
            straight.zero_().index_copy_(0, places - first, rows)
        self.memory[left:right, first:last].copy_(straight.t())

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
