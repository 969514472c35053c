"""Data stored transposed: ``[K, Tp]`` of placed groups, or ``[G, K, N]`` of matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from ._rows import Groups, Scratch

ROWS = 512  # of a step, at least: what is written are runs of so many bytes


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
        rows = self.scratch.room("straight", *rows.shape, dtype=torch.uint8).copy_(rows)  # turns three times as fast
        target = self._part(start, stop, left, right)
        if isinstance(target, Tensor):
            target.copy_(rows.view(*target.transpose(-1, -2).shape).transpose(-1, -2))
        else:
            turned = self.scratch.room("turned", right - left, stop - start, dtype=torch.uint8).copy_(rows.t())
            self.memory[left:right].index_copy_(1, target[0], turned)

    def read(self, start: int, stop: int, left: int, right: int) -> Tensor:
        """What ``write`` has written."""
        source = self._part(start, stop, left, right)
        if isinstance(source, Tensor):
            return source.transpose(-1, -2).reshape(stop - start, right - left)
        return self.memory[left:right].index_select(1, source[0]).t()

    def _part(self, start: int, stop: int, left: int, right: int) -> Tensor | tuple[Tensor]:
        """A view ``[columns, rows]`` or ``[matrices, columns, rows]``; or the places, where these do not adjoin."""
        each = self.groups.each
        if each is None:
            places = self.groups.places(start, stop, self.unit)
            first = int(places[0])
            adjoining = int(places[-1]) - first == stop - start - 1
            return self.memory[left:right, first : first + stop - start] if adjoining else (places,)
        matrix = start // each
        if stop <= (matrix + 1) * each:
            return self.memory[matrix, left:right, start - matrix * each : stop - matrix * each]
        return self.memory[matrix : stop // each, left:right]
