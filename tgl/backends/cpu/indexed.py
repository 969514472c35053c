"""Rows by an index on a CPU, one group at a time into memory that the next group and the next call reuse."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from ..portable.indexed import Indexed
from .permutation import within
from .scratch import Scratch


class InScratch(Indexed):
    """``Indexed`` that checks the index: if every row before the tail is in range, one pass copies a group.

    Args:
        t, index: see ``Indexed``.
        routed: rows before the tail.
        scratch: lends the memory of a group's rows.
        name: name of that memory.

    Attributes:
        within: whether ``t`` has all rows before the tail.
    """

    def __init__(self, t: Tensor, index: Tensor, routed: int, scratch: Scratch, name: str) -> None:
        super().__init__(t, index)
        self.within = within(index[:routed], t.shape[0])
        self.scratch, self.name = scratch, name

    def split(self, sizes: tuple[int, ...], done: Collection[int]) -> Iterator[Tensor]:
        """See ``Indexed``."""
        if not self.within:
            yield from super().split(sizes, done)
            return
        most = max((size for g, size in enumerate(sizes[:-1]) if g not in done), default=0)
        room = self.scratch.room(self.name, most, self.shape[1], dtype=self.dtype)
        for g, part in enumerate(torch.split_with_sizes(self.index, sizes)[:-1]):
            rows = room[: 0 if g in done else sizes[g]]
            if rows.shape[0]:
                torch.index_select(self.t, 0, part, out=rows)
            yield rows

    def index_select(self, dim: int, places: Tensor) -> Tensor:
        """Return the rows at ``places``, as for a tensor; any row for an ``index`` out of range (in the tail)."""
        named = self.index.index_select(dim, places).clamp_(0, self.t.shape[0] - 1)
        return self.t.index_select(dim, named)
