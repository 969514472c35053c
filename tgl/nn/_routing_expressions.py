"""Routing, dispatch and combine in a graph compiled for a CPU: aten expressions, which Inductor fuses into one loop.

An op would end that loop. Forward and backward are gathers, never scatter-adds. An index out of range reads some row
and yields zeros.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..meta import specs
from ..meta import topk_slots as steps
from ._transforms import applier


def route(top_k_index: Tensor, num_experts: int, num_rows: int | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the results of ``tgl::route``: source, position, token, offs."""
    specs.route(top_k_index, num_experts, num_rows)
    choices, pairs = steps.flattened(top_k_index), top_k_index.numel()
    sortable = steps.narrow if num_experts < torch.iinfo(torch.uint8).max else steps.behind
    experts, order = torch.sort(sortable(choices, num_experts), stable=True)
    groups = torch.arange(num_experts, dtype=experts.dtype, device=experts.device)
    offs = torch.searchsorted(experts, groups, right=True, out_int32=True)
    of_none, rows = experts >= num_experts, torch.arange(pairs, dtype=torch.int32, device=order.device)
    if num_rows is not None:
        of_none, offs = of_none | (rows >= num_rows), offs.clamp(max=num_rows)
    source = order.int().masked_fill(of_none, -1)
    position = torch.empty_like(source).scatter(0, order, rows.masked_fill(of_none, -1))
    if num_rows is not None:
        source = steps.resized(source, num_rows)
    return source, position, source // top_k_index.shape[1], offs


def taken(t: Tensor, places: Tensor) -> Tensor:
    """Return the rows of ``t`` at ``places``; zeros for indices out of range."""
    absent = (places < 0) | (places >= t.shape[0])
    rows = t.index_select(0, places.masked_fill(absent, 0))
    return rows.masked_fill(absent if t.dim() == 1 else absent[:, None], 0)


def sum_slots(rows: Tensor, position: Tensor, top_k: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return ``[S, ...]``, the sum of every token's ``top_k`` rows, accumulated in float32 and rounded once.

    ``dtype``: dtype of the result, that of the rows or float32; None for that of the rows.
    """
    chosen = taken(rows, position)
    if top_k == 1:
        return chosen if dtype is None else chosen.to(dtype)
    return chosen.unflatten(0, (-1, top_k)).sum(1, dtype=dtype)


class _Dispatch(torch.autograd.Function):
    """Gather: row ``t`` of the result is row ``token[t]`` of ``x``."""

    @staticmethod
    def forward(x: Tensor, token: Tensor, position: Tensor, top_k: int) -> Tensor:
        return taken(x, token)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        _, token, position, ctx.top_k = inputs
        ctx.save_for_backward(token, position)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return sum_slots(grad, ctx.saved_tensors[1], ctx.top_k), None, None, None


class _Sum(torch.autograd.Function):
    """The transpose of ``_Dispatch``."""

    @staticmethod
    def forward(y: Tensor, token: Tensor, position: Tensor, top_k: int) -> Tensor:
        return sum_slots(y, position, top_k)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        _, token, position, ctx.top_k = inputs
        ctx.save_for_backward(token, position)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return taken(grad, ctx.saved_tensors[0]), None, None, None


dispatch, combine = applier(_Dispatch), applier(_Sum)
