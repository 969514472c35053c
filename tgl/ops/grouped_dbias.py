"""``tgl::grouped_dbias`` and ``tgl::grouped_dbias_dscales``: sums over the rows of each group (bias gradient)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import backends, debug
from ..meta import specs
from ..meta.remembered import remembered
from ._library import Formula, define

NAME = "grouped_dbias"
SCALED = "grouped_dbias_dscales"

_checked = remembered(specs.grouped_dbias, {"dy": "rows"})
_checked_scaled = remembered(specs.grouped_dbias_dscales, {"dy": "rows", "bias_scale": "vector"})

# --- kernels ----------------------------------------------------------------------------------------------------------


def _kernel(dy: Tensor, offs: Tensor) -> Tensor:
    out = _checked(dy, offs).empty()
    debug.check_offs(NAME, offs, dy.shape[0])
    backends.run(NAME, dy.device, dy, offs, out=out)
    return out


def _kernel_scaled(dy: Tensor, bias: Tensor, bias_scale: Tensor, offs: Tensor) -> tuple[Tensor, Tensor]:
    dbias, dscales = (spec.empty() for spec in _checked_scaled(dy, bias, bias_scale, offs))
    debug.check_offs(SCALED, offs, dy.shape[0])
    backends.run(SCALED, dy.device, dy, bias, bias_scale, offs, dbias=dbias, dscales=dscales)
    return dbias, dscales


# --- autograd ---------------------------------------------------------------------------------------------------------


def _save(ctx: Any, needs: tuple[bool, ...], dy: Tensor, offs: Tensor, *, output: Tensor) -> None:
    ctx.save_for_backward(offs)
    ctx.rows, ctx.dtype = dy.shape[0], dy.dtype


def _backward(ctx: Any, needs: tuple[bool, ...], g: Tensor) -> tuple[Tensor | None, ...]:
    """Every row of a group gets the group's gradient: a product with a column of ones, whose tail is zero."""
    (offs,) = ctx.saved_tensors
    ones = g.new_ones(ctx.rows, 1)
    return torch.ops.tgl.grouped_gemm(ones, g[:, None, :], offs).to(ctx.dtype), None


def _save_scaled(
    ctx: Any,
    needs: tuple[bool, ...],
    dy: Tensor,
    bias: Tensor,
    bias_scale: Tensor,
    offs: Tensor,
    *,
    output: tuple[Tensor, Tensor],
) -> None:
    ctx.save_for_backward(dy, bias, bias_scale, offs)


def _backward_scaled(ctx: Any, needs: tuple[bool, ...], u: Tensor, v: Tensor) -> tuple[Tensor | None, ...]:
    """ddy[t] = bias_scale[t] u[g] + v[t] bias[g], a product of depth two; the rest is the op itself on (u, v)."""
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


# --- registration -----------------------------------------------------------------------------------------------------

_op = define(
    f"{NAME}(Tensor dy, Tensor offs) -> Tensor",
    _kernel,
    lambda *args: specs.grouped_dbias(*args).empty(),
    formula=Formula(_save, _backward),
)
_op_scaled = define(
    f"{SCALED}(Tensor dy, Tensor bias, Tensor bias_scale, Tensor offs) -> (Tensor dbias, Tensor dscales)",
    _kernel_scaled,
    lambda *args: tuple(spec.empty() for spec in specs.grouped_dbias_dscales(*args)),
    formula=Formula(_save_scaled, _backward_scaled),
)


def _call(dy: Tensor, offs: Tensor) -> tuple[torch.device, tuple, dict[str, Any]]:
    return dy.device, (dy, offs), {"out": specs.grouped_dbias(dy, offs).meta()}


def _call_scaled(
    dy: Tensor, bias: Tensor, bias_scale: Tensor, offs: Tensor
) -> tuple[torch.device, tuple, dict[str, Any]]:
    dbias, dscales = (spec.meta() for spec in specs.grouped_dbias_dscales(dy, bias, bias_scale, offs))
    return dy.device, (dy, bias, bias_scale, offs), {"dbias": dbias, "dscales": dscales}


backends.describe_op(NAME, _call)
backends.describe_op(SCALED, _call_scaled)


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
    return _op_scaled(dy, bias, bias_scale, offs)
