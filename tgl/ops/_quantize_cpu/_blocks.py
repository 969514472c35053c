"""Loops over the steps of work that formats with blocks of elements share; a ``Rule`` says what a block's scale is."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ._rows import Blocks, Groups, Rows, Scratch, steps
from ._scales import BlockScales, RowScales

Rule = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""``rule(wide, dim) -> (scaled, scale)``: float32 blocks along ``dim`` (to be read only) to values ready to be cast, in
a buffer, and the scales to be stored, with ``dim`` kept."""


def rowwise(rows: Rows, groups: Groups, block: int, rule: Rule, data: Tensor, scales: RowScales) -> None:
    """Blocks along the columns."""
    data = data.view(groups.rows, rows.columns)
    across = scales.columns
    scales.clear()
    for start, stop in steps(0, groups.routed, across * block):
        wide = rows.load(start, stop, width=across * block).unflatten(1, (across, block))
        scaled, scale = rule(wide, 2)
        data[start:stop].copy_(scaled.view(stop - start, -1)[:, : rows.columns])
        scales.write(start, stop, scale.squeeze(2))
    data[groups.routed :].view(torch.uint8).zero_()


def columnwise(
    rows: Rows,
    groups: Groups,
    blocks: Blocks,
    rule: Rule,
    write: Callable[[int, int, int, int, Tensor], object],
    scales: BlockScales,
    scratch: Scratch,
    height: int = 1,
) -> None:
    """Blocks along the rows, from each group's start; ``write(start, stop, left, right, scaled)`` stores rows.

    A step has at least ``height`` rows, if there are as many.
    """
    scales.clear()
    for left, right in steps(0, rows.columns, max(blocks.size, height)):
        for start, stop in blocks.steps(right - left, groups.each):
            holes = blocks.holes(start, stop)
            scaled, scale = rule(rows.load_blocks(blocks, start, stop, left, right, holes), 1)
            first, last = blocks.rows(start, stop)
            write(first, last, left, right, present(scaled, holes, last - first, scratch))
            scales.write(start, stop, left, right, scale.squeeze(1))


def present(places: Tensor, holes: Tensor | None, rows: int, scratch: Scratch) -> Tensor:
    """``[blocks, size, columns]`` as rows, without the places that have none."""
    flat = places.flatten(0, 1)
    if holes is None:
        return flat
    filled = (~holes).view(-1).nonzero().view(-1)
    return torch.index_select(flat, 0, filled, out=scratch.room("present", rows, flat.shape[1]))
