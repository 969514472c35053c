"""E2M1 formats on the CPU: which blocks there are, and in which group.

Everything is a stack of planes: rows in groups are one, weights are G. Rowwise, a step takes some rows of a plane, or
some whole planes, ``[P, R, K]``. Columnwise it takes runs of as many rows as a block has elements, ``[P * R, block,
K]``, zero-filled where a group ends; runs of rows in groups begin where the placement says. Either way a block's
elements lie along one dimension and all others are vectorised over.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ....meta import placement
from ....meta.formats import Format
from ...portable.indexed import Indexed
from ..permutation import rows_at
from ._rows import Groups, Source, matrices_at

_STEP = 1 << 17  # elements per thread: the float32 and int32 temporaries of a step stay in the cache

Step = tuple[slice, slice]


def steps(planes: int, rows: int, width: int, multiple: int) -> Iterator[Step]:
    """Slices of planes and rows of about a step's elements: whole planes, or ``multiple`` rows (or more) of one."""
    if not planes or not rows or not width:
        return
    size = _STEP * torch.get_num_threads()
    whole = size // (rows * width)
    if whole > 0:
        for p in range(0, planes, whole):
            yield slice(p, min(p + whole, planes)), slice(0, rows)
        return
    some = max(size // (width * multiple), 1) * multiple
    for p in range(planes):
        for r in range(0, rows, some):
            yield slice(p, p + 1), slice(r, min(r + some, rows))


class Stack:
    """Planes of rows, and the groups that their rows belong to.

    Attributes:
        block, unit: elements of a block, and the unit of the placement of columnwise components.
        groups: of the rows; those of weights are the planes.
        grouped: whether it is rows in groups.
        planes: how many.
        columns: K.
        routed: rows to be quantised in each plane.
        runs: runs of ``block`` rows in each plane, those in the gaps of the placement included; 0 without rows.
        runs_of_unit: runs in a unit.
    """

    def __init__(self, form: Format, x: Tensor | Indexed, offs: Tensor | None, slots: Tensor | None = None) -> None:
        self.block, self.unit, self.runs_of_unit = form.block, form.unit_data, form.unit_data // form.block
        self.groups = Groups(x, offs, slots)
        self.grouped = offs is not None
        self.columns = x.shape[-1]
        if offs is None:
            self.planes, self.routed = self.groups.count, x.shape[1]
            self.runs = -(-self.routed // self.block)
        else:
            self.planes, self.routed = 1, self.groups.routed
            self.runs = (
                self.runs_of_unit * int(placement.units(x.shape[0], self.groups.count, self.unit)) if self.routed else 0
            )

    def stacked(self, t: Tensor) -> Tensor:
        """Return a tensor that has a plane dimension for weights only, with one in any case."""
        return t[None] if self.grouped else t

    def group_of_rows(self, step: Step) -> Tensor:
        """Return the group of every row of a step, int64 ``[P, R]`` or ``[P, 1]``."""
        planes, rows = step
        if self.grouped:
            return self.groups.of_rows(rows.start, rows.stop)[None]
        return torch.arange(planes.start, planes.stop, device="cpu")[:, None]

    def group_of_runs(self, step: Step) -> Tensor:
        """Return the group of every run of a step, int64 ``[P * R]``."""
        planes, runs = step
        if not self.grouped:
            return torch.arange(planes.start, planes.stop, device="cpu").repeat_interleave(runs.stop - runs.start)
        first = self.groups.begins(self.unit) // self.block
        return torch.searchsorted(first, torch.arange(runs.start, runs.stop, device="cpu"), right=True) - 1

    def rows_of_runs(self, step: Step) -> Tensor:
        """Return the rows of each run, int64 ``[R, block]`` for rows in groups, -1 where there is none."""
        group = self.group_of_runs(step)[:, None]
        place = torch.arange(step[1].start * self.block, step[1].stop * self.block, device="cpu").view(-1, self.block)
        rows = place + (self.groups.firsts - self.groups.begins(self.unit))[group]
        return torch.where(rows < self.groups.ends[group], rows, -1)

    def flat(self, step: Step) -> tuple[int, int]:
        """Return the range of rows of a step, all planes stacked; steps are whole planes or part of one."""
        planes, rows = step
        return planes.start * self.routed + rows.start, (planes.stop - 1) * self.routed + rows.stop


@dataclass(frozen=True)
class Stacked:
    """The quantised rows: ``x`` in a stack, times ``row_scale``; ``matrices`` are the planes by slots, or None."""

    x: Tensor | Indexed
    row_scale: Tensor | None
    stack: Stack
    matrices: list[Tensor] | None

    def rows(self, step: Step) -> Tensor:
        """Return the rows of a step, ``[P, R, K]``, contiguous, in x's dtype."""
        planes, rows = step
        if self.matrices is not None:
            return torch.stack([matrix[rows] for matrix in self.matrices[planes]])
        if isinstance(self.x, Indexed):
            x = rows_at(self.x.t, self.x.index[rows])[None]
        else:
            x = self.stack.stacked(self.x)[step].contiguous()
        if self.row_scale is None:
            return x
        return (x.float() * self.row_scale[rows].float()[:, None]).to(x.dtype)

    def runs(self, step: Step) -> tuple[Tensor, Tensor | None]:
        """Return the runs ``[., block, K]`` that have a row, zero-filled, and which they are (None: all).

        With ragged groups up to three runs in four have none.
        """
        (planes, runs), block = step, self.stack.block
        if not self.stack.grouped:
            rows = slice(runs.start * block, min(runs.stop * block, self.stack.routed))
            x = self.rows((planes, rows))
            missing = (runs.stop - runs.start) * block - x.shape[1]
            x = torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x
            return x.reshape(-1, block, x.shape[-1]), None
        index = self.stack.rows_of_runs(step)
        first, last = int(index[0, 0]), int(index[-1, -1])
        if first >= 0 and last - first == index.numel() - 1:
            return self.rows((planes, slice(first, last + 1))).view(*index.shape, self.x.shape[-1]), None
        used = index[:, 0] >= 0
        some = None if bool(used.all()) else used.nonzero().flatten()
        index = index if some is None else index[some]
        flat = index.flatten().clamp_min(0)
        if isinstance(self.x, Indexed):
            x = rows_at(self.x.t, self.x.index.index_select(0, flat))
        else:
            x = self.x.index_select(0, flat)
        if self.row_scale is not None:
            x = (x.float() * self.row_scale.index_select(0, flat).float()[:, None]).to(x.dtype)
        return x.view(*index.shape, x.shape[1]).masked_fill_((index < 0)[..., None], 0.0), some

    @classmethod
    def of(cls, source: Source, form: Format) -> Stacked:
        """Return the rows of a call, in blocks of ``form``."""
        x, slots = source.x, source.slots
        matrices = None if slots is None or isinstance(x, Indexed) else matrices_at(x, slots)
        return cls(x, source.row_scale, Stack(form, x, source.offs, slots), matrices)
