"""``tgl::grouped_dbias``: sums over the rows of each group (bias gradient)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..meta import specs
from ._define import define
from ._library import Formula


def _save(ctx: Any, needs: tuple[bool, ...], dy: Tensor, offs: Tensor, *, output: Tensor) -> None:
    ctx.save_for_backward(offs)
    ctx.rows, ctx.dtype = dy.shape[0], dy.dtype


def _backward(ctx: Any, needs: tuple[bool, ...], g: Tensor) -> tuple[Tensor | None, ...]:
    """Broadcast the group's gradient to its rows, as a product with a column of ones, whose tail is zero."""
    (offs,) = ctx.saved_tensors
    ones = g.new_ones(ctx.rows, 1)
    return torch.ops.tgl.grouped_gemm(ones, g[:, None, :], offs).to(ctx.dtype), None


_op = define(
    "grouped_dbias(Tensor dy, Tensor offs) -> Tensor",
    specs.grouped_dbias,
    rows={"dy": "rows"},
    formula=Formula(_save, _backward),
)


def grouped_dbias(dy: Tensor, offs: Tensor) -> Tensor:
    """Sum the rows of every group.

    Args:
        dy: ``[T, N]``, float64, float32, bfloat16 or float16, at any strides.
        offs: int32 ``[G]`` on the same device: cumulative group ends.

    Returns:
        ``[G, N]`` in float32 (float64 for float64), summed in a fixed order; exactly zero for an empty group. Rows past
        ``offs[-1]`` are never read.

    Raises:
        TypeError, ValueError: arguments that do not fit.
        RuntimeError: a forward-mode derivative is requested.
    """
    return _op(dy, offs)
