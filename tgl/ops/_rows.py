"""What ops that read rows by an index have in common."""

from __future__ import annotations

import torch
from torch import Tensor

from ..meta.specs import Dim

_BEHIND = 2**31 - 1  # what sorts behind all numbers of rows


def given(**tables: Tensor | None) -> dict[str, Tensor]:
    """The tables that a call has, which are keywords of implementations."""
    return {name: table for name, table in tables.items() if table is not None}


def summed(values: Tensor, index: Tensor, count: Dim) -> Tensor:
    """``[T, columns] -> [count, columns]``: row s is the sum of the rows t of ``values`` with ``index[t] = s``.

    The gradient of rows that an index names. It adds in an order that does not change, in the accumulator's dtype, and
    rounds once. A stable sort finds a token's rows, since an index alone does not tell where they are.
    """
    owner, order = torch.sort(index.masked_fill(index < 0, _BEHIND), stable=True)
    tokens = torch.arange(count, dtype=torch.int32, device=index.device)  # type: ignore[arg-type]
    ends = torch.searchsorted(owner, tokens, right=True, out_int32=True)
    return torch.ops.tgl.grouped_dbias(values.index_select(0, order), ends).to(values.dtype)
