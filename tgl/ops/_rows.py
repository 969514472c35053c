"""Helpers of ops that gather rows by an index."""

from __future__ import annotations

import torch
from torch import Tensor

from ..meta.specs import Dim

_BEHIND = 2**31 - 1  # sorts after all row indices


def given(**tables: Tensor | None) -> dict[str, Tensor]:
    """Return the tables that are not None, as keyword arguments of implementations."""
    return {name: table for name, table in tables.items() if table is not None}


def sum_by_index(values: Tensor, index: Tensor, count: Dim) -> Tensor:
    """Sum ``values [T, columns]`` to ``[count, columns]``: row s is the sum of the rows t with ``index[t] = s``.

    The gradient of a gather. It adds in a fixed order, in the accumulator's dtype, and rounds once. A stable sort finds
    each token's rows, because an index has no inverse.
    """
    owner, order = torch.sort(index.masked_fill(index < 0, _BEHIND), stable=True)
    tokens = torch.arange(count, dtype=torch.int32, device=index.device)  # type: ignore[arg-type]
    ends = torch.searchsorted(owner, tokens, right=True, out_int32=True)
    return torch.ops.tgl.grouped_dbias(values.index_select(0, order), ends).to(values.dtype)
