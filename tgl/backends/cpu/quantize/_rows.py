"""Groups on the host, rows of ``x`` as float32, and steps of work."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ....meta.slots import on_host
from ...portable.indexed import Indexed
from ..permutation import within
from ..scratch import Scratch

_STEP = 1 << 17  # elements per thread and step: two float32 buffers of them fit a second-level cache
_BUFFERS = 2
_WINDOW = 1 << 13  # rows whose groups are looked up at once


@functools.cache
def int32(value: int) -> Tensor:
    """Return an operand for integer tensors; converting a number takes as long as the call itself."""
    with _disable_current_modes():  # else a fake tensor would be cached if the first caller is a trace
        return torch.tensor(value, dtype=torch.int32, device="cpu")


def step_of(width: int, multiple: int = 1, buffers: int = _BUFFERS) -> int:
    """Return how many items of ``width`` elements make about one step; a multiple of ``multiple``."""
    elements = _STEP * _BUFFERS // buffers * torch.get_num_threads()
    return max(elements // max(width, 1) // multiple, 1) * multiple


def steps(start: int, stop: int, width: int, multiple: int = 1, buffers: int = _BUFFERS) -> Iterator[tuple[int, int]]:
    """Cut ``[start, stop)`` into ranges of about one step; see ``step_of``."""
    count = step_of(width, multiple, buffers)
    for first in range(start, stop, count):
        yield first, min(first + count, stop)


def aligned_steps(stop: int, width: int, unit: int, buffers: int = _BUFFERS) -> Iterator[tuple[int, int]]:
    """Cut ``[0, stop)``, a multiple of ``unit``, into steps of several whole units or of a part of one."""
    for first, last in steps(0, stop, width, max(unit, 1), buffers):
        if last - first > unit:
            yield first, last
        else:
            yield from steps(first, last, width, 1, buffers)


class Groups:
    """Ranges of rows. Matrices ``[G, N, K]``, or G of them at ``slots``, are G groups of N rows each.

    Bad offsets give wrong numbers but never an access out of bounds: ends are clamped to the existing rows, and a
    descending end makes an empty group.

    Attributes:
        count: G.
        rows: number of rows, the tail included.
        routed: rows before the tail.
        each: N for matrices, else None.
        bounds: 0 and the G ends. On the host: with few groups, tensors of G take longer.
    """

    def __init__(self, x: Tensor | Indexed, offs: Tensor | None, slots: Tensor | None = None) -> None:
        self.each: int | None = None
        if offs is None:
            self.count, self.each = (x if slots is None else slots).shape[0], x.shape[1]
            self.rows = self.count * self.each
            self.bounds = [g * self.each for g in range(self.count + 1)]
        else:
            self.count, self.rows = offs.shape[0], x.shape[0]
            self.bounds, end = [0], 0
            for given in offs.tolist():
                end = min(max(given, end), self.rows)
                self.bounds.append(end)
        self.routed = self.bounds[-1]
        self._window: tuple[int, int, Tensor | None] = (0, -1, None)

    @functools.cached_property
    def ends(self) -> Tensor:
        """The ends of the groups, int64 ``[G]``."""
        return torch.tensor(self.bounds[1:], dtype=torch.int64, device="cpu")

    @functools.cached_property
    def firsts(self) -> Tensor:
        """The first rows of the groups, int64 ``[G]``."""
        return torch.tensor(self.bounds[:-1], dtype=torch.int64, device="cpu")

    def steps(self, columns: int, buffers: int = _BUFFERS) -> Iterator[tuple[int, int]]:
        """Yield ranges of rows before the tail, of about one step: several whole matrices or a part of one."""
        return aligned_steps(self.routed, columns, 1 if self.each is None else self.each, buffers)

    def of_rows(self, start: int, stop: int) -> Tensor:
        """Return the group of every row of a range (before the tail), int64."""
        first, last, group = self._window
        if group is None or start < first or stop > last:
            first, last = start, max(stop, min(start + _WINDOW, self.routed))
            group = torch.searchsorted(self.ends, torch.arange(first, last, device="cpu"), right=True)
            self._window = (first, last, group)
        return group if (start, stop) == (first, last) else group[start - first : stop - first]

    def of_each_row(self, values: Tensor, start: int, stop: int) -> Tensor:
        """Return the group's value for every row of a range, ``[rows, 1]``."""
        return values.index_select(0, self.of_rows(start, stop))[:, None]

    def starts(self, u: int) -> list[int]:
        """Return the coordinate of every group's first row under the placement of unit ``u``."""
        return [(first // u + g) * u for g, first in enumerate(self.bounds[:-1])]

    def begins(self, u: int) -> Tensor:
        """Return ``starts`` as int64 ``[G]``."""
        return torch.tensor(self.starts(u), dtype=torch.int64, device="cpu")

    def places(self, start: int, stop: int, u: int) -> Tensor:
        """Return the coordinate of every row of a range under the placement of unit ``u``, int64."""
        shifts = self.begins(u).sub_(self.firsts)
        return shifts.index_select(0, self.of_rows(start, stop)).add_(torch.arange(start, stop, device="cpu"))

    def blocks(self, size: int) -> Blocks:
        """Return blocks of ``size`` rows counted from every group's start, the last one of a group partial."""
        edges: list[int] = []
        before = [0]
        for first, end in zip(self.bounds, self.bounds[1:]):
            edges.extend(range(first, end, size))
            before.append(len(edges))
        return Blocks(size, [*edges, self.routed], before)


@dataclass(frozen=True)
class Blocks:
    """Blocks of rows, in the order of their rows.

    Attributes:
        size: rows of a whole block.
        edges: the first row of every block, which is where the one before it ends; one more than there are blocks.
        before: how many blocks lie before every group, and all.
    """

    size: int
    edges: list[int]
    before: list[int]

    def steps(self, columns: int, each: int | None, buffers: int) -> Iterator[tuple[int, int]]:
        """Yield ranges of blocks of about one step: several matrices of ``each`` rows or a part of one."""
        total = len(self.edges) - 1
        if each is not None:
            yield from aligned_steps(total, self.size * columns, -(-each // self.size), buffers)
            return
        limit, start = step_of(columns, 1, buffers), 0
        while start < total:
            stop = max(bisect.bisect_right(self.edges, self.edges[start] + limit) - 1, start + 1)
            yield start, stop
            start = stop

    def rows(self, start: int, stop: int) -> tuple[int, int]:
        """Return the range of rows that a range of blocks covers."""
        return self.edges[start], self.edges[stop]

    def of_rows(self, start: int, stop: int) -> Tensor:
        """Return the number of every row's block within a range of blocks, int64."""
        edges = torch.tensor(self.edges[start : stop + 1], dtype=torch.int64, device="cpu")
        return torch.repeat_interleave(edges.diff(), output_size=self.edges[stop] - self.edges[start])

    def numbered(self, firsts: list[int]) -> list[int]:
        """Return a number for every block: consecutive ones in a group, starting at its entry of ``firsts``."""
        numbers: list[int] = []
        for first, start, stop in zip(firsts, self.before, self.before[1:]):
            numbers.extend(range(first, first + stop - start))
        return numbers


def matrices_at(x: Tensor, slots: Tensor) -> list[Tensor]:
    """Return the matrix of each group, zeros for a slot out of range."""
    nothing = x.new_zeros(()).expand(x.shape[1:])
    return [nothing if matrix is None else matrix for matrix in on_host(x, slots)]


class Float32Rows:
    """Rows of ``x`` as float32, multiplied by ``row_scale`` and rounded to the dtype of ``x`` if there is one.

    Matrices are seen as one stack of rows, which copies those that are not stacked that way in memory; those at
    ``slots`` are read where they are, and of a step that takes several the parts are put together in a buffer. So are
    rows by an index.

    Attributes:
        as_is: whether ``load`` needs no buffer.
        buffers: float32 buffers that ``load`` and the processing of its result take.
        index: the row of ``x`` for every row, or None.
    """

    def __init__(
        self, x: Tensor | Indexed, row_scale: Tensor | None, scratch: Scratch, slots: Tensor | None = None
    ) -> None:
        self.matrices: list[Tensor] | None = None
        self.index: Tensor | None = None
        if isinstance(x, Indexed):
            self.x, self.index = x.t, x.index
        elif slots is not None:
            self.x, self.matrices = x[0], matrices_at(x, slots)
        else:
            self.x = x if x.dim() == 2 else x.reshape(x.shape[0] * x.shape[1], x.shape[2])
        self.row_scale, self.scratch = row_scale, scratch
        self.columns = self.x.shape[1]
        self.as_is = x.dtype == torch.float32 and row_scale is None and self.x.stride(1) == 1
        self.buffers = 1 if self.as_is else 2

    def load(self, start: int, stop: int, left: int = 0, right: int | None = None, *, width: int = 0) -> Tensor:
        """Load rows ``[start, stop)``, columns ``[left, right)``, zeros up to ``width`` columns."""
        part = self._part(start, stop, left, right)
        columns = part.shape[1]
        width = max(width, columns)
        if self.as_is and width == columns:
            return part
        wide = self.scratch.room("rows", part.shape[0], width)
        if width == columns:
            self._widen(part, start, stop, wide)
        else:
            wide[:, columns:].zero_()
            self._widen(part, start, stop, wide[:, :columns])
        return wide

    def repeated(self, count: int) -> Float32Rows | None:
        """Return the source rows, if the index repeats them (more entries before ``count`` than rows) and is in range.

        Rowwise results are then computed once per source row, and put in order afterwards.
        """
        if self.index is None or self.row_scale is not None or self.x.shape[0] >= count:
            return None
        return Float32Rows(self.x, None, self.scratch) if within(self.index[:count], self.x.shape[0]) else None

    def numbers(self, count: int) -> Iterator[tuple[int, int, Tensor]]:
        """Yield steps of the first ``count`` rows, and their entries of the index."""
        assert self.index is not None
        for start, stop in steps(0, count, self.columns):
            yield start, stop, self.index[start:stop]

    def times(self, factor: Tensor, start: int, stop: int, left: int, right: int) -> Tensor:
        """Return a part of the rows times ``factor``, in a buffer that the next call may reuse."""
        wide = self.load(start, stop, left, right)
        return torch.mul(wide, factor, out=self.scratch.room("scaled", *wide.shape) if self.as_is else wide)

    def amax(self, start: int, stop: int) -> Tensor:
        """Return the largest magnitude of every row as float32: Inf or NaN if the row has one."""
        part = self._part(start, stop, 0, None) if self.row_scale is None else self.load(start, stop)
        if part.dtype == torch.float32:  # reads twice, which is faster than writing the magnitudes
            return torch.maximum(part.amax(1), part.amin(1).neg_()).abs_()
        bits = torch.bitwise_and(part.view(torch.int16), 0x7FFF, out=self._room_for_bits(part))
        return bits.amax(1).view(part.dtype).float()

    def _room_for_bits(self, part: Tensor) -> Tensor:
        return self.scratch.room("rows", -(-part.numel() // 2)).view(torch.int16)[: part.numel()].view(part.shape)

    def _part(self, start: int, stop: int, left: int, right: int | None) -> Tensor:
        if self.matrices is not None:
            return self._gathered(self.matrices, start, stop, left, right)
        if self.index is not None:
            return self._named(self.index[start:stop], left, right)
        rows = self.x if stop - start == self.x.shape[0] else self.x[start:stop]
        whole = not left and (right is None or right == self.columns)
        return rows if whole else rows[:, left:right]

    def _gathered(self, matrices: list[Tensor], start: int, stop: int, left: int, right: int | None) -> Tensor:
        each = max(self.x.shape[0], 1)
        parts = []
        for g in range(start // each, -(-stop // each)):
            first = g * each
            parts.append(matrices[g][max(start - first, 0) : stop - first, left:right])
        if len(parts) == 1:
            return parts[0]
        room = self.scratch.room("gathered", stop - start, parts[0].shape[1], dtype=self.x.dtype)
        return torch.cat(parts, out=room)

    def _named(self, numbers: Tensor, left: int, right: int | None) -> Tensor:
        rows = self.x[:, left:right]
        if rows.numel():
            room = self.scratch.room("gathered", numbers.shape[0], rows.shape[1], dtype=rows.dtype)
            try:
                return torch.index_select(rows, 0, numbers, out=room)
            except IndexError:  # an index out of range
                pass
        return Indexed(rows, numbers).rows(numbers)

    def _widen(self, part: Tensor, start: int, stop: int, wide: Tensor) -> None:
        wide.copy_(part)
        if self.row_scale is not None:
            wide.mul_(self.row_scale[start:stop].float()[:, None])
            if part.dtype != torch.float32:
                wide.copy_(self.scratch.room("rounded", *part.shape, dtype=part.dtype).copy_(wide))


class Source(NamedTuple):
    """The operands of a quantisation; see the package."""

    x: Tensor | Indexed
    offs: Tensor | None
    scale: Tensor | None
    row_scale: Tensor | None
    rng: Tensor | None
    slots: Tensor | None

    def groups(self) -> Groups:
        """The groups of the rows."""
        return Groups(self.x, self.offs, self.slots)

    def rows(self, scratch: Scratch) -> Float32Rows:
        """Return the rows, ready to be loaded."""
        return Float32Rows(self.x, self.row_scale, scratch, self.slots)
