"""ATen's ``grouped_mm`` on a CPU: the same ``mm`` per group as our loop, at a third of what a turn costs in Python.

It takes fewer layouts, trusts ``offs``, leaves the tail uninitialised and pads the rows of some results.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

NOTE = "small bfloat16 groups in one batch; the loop of torch.nn.functional.grouped_mm where that takes the operands"
_ALIGNMENT = 16  # bytes


def serves(a: Tensor, b: Tensor, columns: int, offs: Tensor, sizes: list[int]) -> bool:
    """Whether it takes these operands, and returns exactly what the loop of ``torch.mm`` does but for the tail.

    Args:
        a, b: the operands of ``grouped_mm`` or their transposes.
        columns: of the result, which has their dtype.
        offs, sizes: as given, and as ``segment_sizes`` read them.
    """
    if a.dtype not in (torch.float32, torch.bfloat16) or columns * a.dtype.itemsize % _ALIGNMENT:
        return False
    if not _regular(a) or not _regular(b):
        return False
    return list(accumulate(sizes[:-1])) == offs.tolist()  # neither descending nor out of range


def _regular(t: Tensor) -> bool:
    """Not empty, row- or column-major without overlap, every row and matrix on 16 bytes."""
    if t.data_ptr() % _ALIGNMENT or not t.numel():
        return False
    *outer, row, column = t.stride()
    rows, columns = t.shape[-2:]
    pitch, width = (row, columns) if column == 1 else (column, rows)
    if (column != 1 and row != 1) or pitch < width:
        return False
    step = _ALIGNMENT // t.element_size()
    return not pitch % step and not any(stride % step for stride in outer)
