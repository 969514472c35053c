"""Rows by an index, for loops over groups: one group at a time, so that there is never a copy of all rows."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from ...meta.memory import in_lines
from .permutation import taken


class Indexed:
    """The matrix ``[T, columns]`` whose row i is row ``index[i]`` of ``t``, or zeros if ``t`` has no such row.

    Attributes:
        shape, dtype: of that matrix.
    """

    def __init__(self, t: Tensor, index: Tensor) -> None:
        self.t, self.index = t, index
        self.shape, self.dtype = (index.shape[0], t.shape[1]), t.dtype

    def split(self, sizes: tuple[int, ...], done: Collection[int]) -> Iterator[Tensor]:
        """Yield the rows of every group of those sizes (the last is the tail's); none for a group that is ``done``.

        The rows of one group last until the next one is requested.
        """
        parts = torch.split_with_sizes(self.index, sizes)[:-1]
        for g, part in enumerate(parts):
            yield self.t[:0] if g in done or not sizes[g] else self.rows(part)

    def rows(self, index: Tensor) -> Tensor:
        """Return some of the rows, without reading ``index`` on the host."""
        if not self.t.shape[0]:
            return self.t.new_zeros(index.shape[0], self.shape[1])
        rows, absent = taken(self.t, index)
        return rows.masked_fill_(absent, 0)


def indexed(t: Tensor, index: Tensor | None) -> Tensor | Indexed:
    """Return ``t``, or its rows by ``index`` if there is one."""
    return t if index is None else Indexed(t, index)


def split(
    t: Tensor | Indexed, sizes: tuple[int, ...], done: Collection[int] = ()
) -> Iterator[Tensor] | tuple[Tensor, ...]:
    """Return the rows of every group of those sizes (the last is the tail's)."""
    return t.split(sizes, done) if isinstance(t, Indexed) else torch.split_with_sizes(t, sizes)[:-1]


def split_transposed(
    t: Tensor | Indexed, sizes: tuple[int, ...], done: Collection[int] = ()
) -> Iterator[Tensor] | tuple[Tensor, ...]:
    """Return what ``split`` does, with each part transposed."""
    if isinstance(t, Indexed):
        return (rows.t() for rows in t.split(sizes, done))
    if not t.is_contiguous():
        t = in_lines(t)  # a product would copy the transpose, and sum in another order than for contiguous rows
    return torch.split_with_sizes(t.t(), sizes, 1)[:-1]  # one view less for every group
