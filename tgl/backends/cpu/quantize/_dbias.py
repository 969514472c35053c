"""Sums of the quantised rows of every group."""

from __future__ import annotations

import torch
from torch import Tensor

from ...portable.indexed import Indexed
from ...portable.segments import segment_sizes
from ..permutation import rows_at
from ..scratch import Scratch
from ._rows import Float32Rows, steps


def dbias(x: Tensor | Indexed, offs: Tensor, row_scale: Tensor | None, *, out: Tensor) -> None:
    """Write ``out[g] = sum of the rows of group g``, float32, after ``row_scale``; as ``grouped_dbias`` without it."""
    scratch = Scratch()
    rows, first = Float32Rows(x, row_scale, scratch), 0
    for size, total in zip(segment_sizes(offs, x.shape[0]), out.unbind()):
        if row_scale is None:
            part = rows_at(x.t, x.index[first : first + size]) if isinstance(x, Indexed) else x[first : first + size]
            torch.sum(part, 0, dtype=torch.float32, out=total)
        else:
            total.zero_()
            for start, stop in steps(first, first + size, x.shape[1]):
                total.add_(rows.load(start, stop).sum(0))
        first += size
    scratch.keep()
