"""Problems of FP8 operands with a scale for each row, and their answers in float64.

Elements are -1, 0 and 1 and scales powers of two, so that results are exact in float32. What belongs to no group is
NaN, in operands and in scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tests.kernel_cases import ends, integers, spans

E4M3 = torch.float8_e4m3fn


class RowScaled(NamedTuple):
    """A call of one of the ops, and what it is to return."""

    op: str
    operands: tuple[Tensor, ...]
    wanted: Tensor

    def to(self, device: torch.device) -> RowScaled:
        """Return the problem with operands on the device."""
        return self._replace(operands=tuple(t.to(device) for t in self.operands))


def powers(*shape: int) -> Tensor:
    """Return random powers of two from 1/4 to 4."""
    return torch.exp2(torch.randint(-2, 3, shape).float())


def of_rows(sizes: Sequence[int], depth: int, columns: int, tail: int, elements: Sequence = (E4M3, E4M3)) -> RowScaled:
    """A call of ``grouped_gemm_row_scaled``."""
    rows, groups = sum(sizes) + tail, len(sizes)
    a, b = integers(rows, depth, dtype=torch.float32), integers(groups, columns, depth, dtype=torch.float32)
    a_scale, b_scale = powers(rows), powers(groups, columns)
    wanted = torch.zeros(rows, columns, dtype=torch.float64)
    for g, span in spans(sizes):
        sums = a[span].double() @ b[g].double().t()
        wanted[span] = sums * a_scale[span, None].double() * b_scale[g].double()
    a[sum(sizes) :] = a_scale[sum(sizes) :] = torch.nan
    operands = (a.to(elements[0]), a_scale, b.to(elements[1]), b_scale, ends(sizes))
    return RowScaled("grouped_gemm_row_scaled", operands, wanted)


def of_columns(
    sizes: Sequence[int], rows: int, columns: int, tail: int, elements: Sequence = (E4M3, E4M3), spoiled: int = -1
) -> RowScaled:
    """A call of ``grouped_gemm_row_scaled_wgrad``; the scales of groups without columns are NaN.

    Args:
        spoiled: a group whose columns are NaN, and its results, too.
    """
    tokens, groups = sum(sizes) + tail, len(sizes)
    a, b = (integers(lines, tokens, dtype=torch.float32) for lines in (rows, columns))
    a_scale, b_scale = powers(groups, rows), powers(groups, columns)
    wanted = torch.zeros(groups, rows, columns, dtype=torch.float64)
    for g, span in spans(sizes):
        if g == spoiled:
            a[:, span] = b[:, span] = torch.nan
        sums = a[:, span].double() @ b[:, span].double().t()
        wanted[g] = sums * a_scale[g, :, None].double() * b_scale[g].double()
        if not sizes[g]:
            a_scale[g] = b_scale[g] = torch.nan
    a[:, sum(sizes) :] = b[:, sum(sizes) :] = torch.nan
    operands = (a.to(elements[0]), a_scale, b.to(elements[1]), b_scale, ends(sizes))
    return RowScaled("grouped_gemm_row_scaled_wgrad", operands, wanted)
