"""``tgl::grouped_dbias_dscales``: gradients of a bias with a factor for each row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..meta import specs
from ._define import define
from ._library import Formula


def _save(ctx: Any, needs: tuple[bool, ...], *operands: Tensor, output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*operands)


def _backward(ctx: Any, needs: tuple[bool, ...], u: Tensor, v: Tensor) -> tuple[Tensor | None, ...]:
    """Return ddy[t] = bias_scale[t] u[g] + v[t] bias[g], a GEMM with K = 2; the rest is the op itself on (u, v)."""
    dy, bias, bias_scale, offs = ctx.saved_tensors
    ddy = dbias = dscale = None
    if needs[0]:
        rows = torch.stack([bias_scale.to(u.dtype), v], dim=1)
        columns = torch.stack([u, bias.to(u.dtype)], dim=1)
        ddy = torch.ops.tgl.grouped_gemm(rows, columns, offs).to(dy.dtype)
    if needs[1] or needs[2]:
        dbias, dscale = torch.ops.tgl.grouped_dbias_dscales(dy, u, v, offs)
        dbias, dscale = dbias.to(bias.dtype), dscale.to(bias_scale.dtype)
    return ddy, dbias if needs[1] else None, dscale if needs[2] else None, None


_op = define(
    "grouped_dbias_dscales(Tensor dy, Tensor bias, Tensor bias_scale, Tensor offs) -> (Tensor dbias, Tensor dscales)",
    specs.grouped_dbias_dscales,
    rows={"dy": "rows", "bias_scale": "vector"},
    formula=Formula(_save, _backward),
)


def grouped_dbias_dscales(dy: Tensor, bias: Tensor, bias_scale: Tensor, offs: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of ``bias[g] * bias_scale[t]`` in both factors.

    Args:
        dy: ``[T, N]``, float64, float32, bfloat16 or float16.
        bias: ``[G, N]``, dtype of ``dy`` or float32.
        bias_scale: ``[T]``, dtype of ``dy`` or float32.
        offs: int32 ``[G]`` on the same device: cumulative group ends.

    Returns:
        ``dbias [G, N]``, the sum over the group's rows of ``bias_scale[t] * dy[t]``, and ``dscales [T]``, the dot
        product ``dy[t] . bias[g]``, zero past ``offs[-1]``; both in float32 (float64 for float64).

    Raises:
        TypeError, ValueError: arguments that do not fit.
        RuntimeError: a forward-mode derivative is requested.
    """
    return _op(dy, bias, bias_scale, offs)
