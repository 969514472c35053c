"""``tgl::dispatch``, ``tgl::combine`` and ``tgl::combine_backward``: tokens to rows of experts and back.

The three are closed under differentiation. With ``D(w)`` the dispatch of tokens with weights ``w`` and ``C(w)`` the
combination of rows, ``C(w)`` is the transpose of ``D(w)``. Both are linear in ``w`` too, and the derivative in a weight
is the dot product of a token's row with the row of its top-k slot. ``combine_backward`` forms those products and
``D(w)`` of the gradient as one op, because both read the gradient: two ops would read its ``S H`` elements once more,
besides the ``(2 k + 1) S H`` that are moved, and take another launch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import backends, debug
from ..meta import permutation
from ..meta.permutation import as_rows
from ..meta.remembered import remembered
from ..meta.specs import TensorSpec
from ._define import define
from ._library import Formula

DISPATCH, COMBINE, BACKWARD = "dispatch", "combine", "combine_backward"

_TOKENS = {"token": "tokens", "position": "tokens", "weights": "tokens"}
_checked = remembered(permutation.dispatch, {"x": "rows", **_TOKENS})
_checked_combine = remembered(permutation.combine, {"y": "rows", **_TOKENS})
_checked_backward = remembered(permutation.combine_backward, {"grad": "tokens", "y": "rows", **_TOKENS})

# --- kernels ----------------------------------------------------------------------------------------------------------


def dispatch(x: Tensor, token: Tensor, position: Tensor, top_k: int, weights: Tensor | None = None) -> Tensor:
    spec = _checked(x, token, position, top_k, weights)
    debug.check_places(DISPATCH, token, position, top_k)
    return _produced(DISPATCH, spec, [x, token, position, weights], top_k)


def combine(
    y: Tensor,
    token: Tensor,
    position: Tensor,
    top_k: int,
    weights: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    spec = _checked_combine(y, token, position, top_k, weights, out_dtype=out_dtype)
    debug.check_places(COMBINE, token, position, top_k)
    return _produced(COMBINE, spec, [y, position, weights], top_k)


def _produced(op: str, spec: TensorSpec, operands: list, top_k: int) -> Tensor:
    """Return the output; implementations that write a destination get vectors as rows of one column."""
    device, rows = spec.device, operands[0]
    asked_first = backends.first(op, device)
    if rows.dim() == 2 or (asked_first is not None and asked_first.produce is not None):
        return backends.produce(op, device, spec, operands, top_k=top_k)
    out = spec.empty()
    backends.run(op, device, as_rows(rows), *operands[1:], top_k=top_k, out=as_rows(out))
    return out


def combine_backward(
    grad: Tensor, y: Tensor, token: Tensor, position: Tensor, top_k: int, weights: Tensor
) -> tuple[Tensor, Tensor]:
    dy, dweights = (spec.empty() for spec in _checked_backward(grad, y, token, position, top_k, weights))
    debug.check_places(BACKWARD, token, position, top_k)
    operands = as_rows(grad), as_rows(y), token, position, weights
    backends.run(BACKWARD, y.device, *operands, top_k=top_k, dy=as_rows(dy), dweights=dweights)
    return dy, dweights


def _rows(operands: list, options: dict[str, Any]) -> tuple[list, dict[str, Any]]:
    """Convert a call's vectors to rows of one column for implementations."""
    return [as_rows(operands[0]), *operands[1:]], options | {"out": as_rows(options["out"])}


def _rows_backward(operands: list, options: dict[str, Any]) -> tuple[list, dict[str, Any]]:
    grad, y, *places = operands
    return [as_rows(grad), as_rows(y), *places], options | {"dy": as_rows(options["dy"])}


# --- autograd ---------------------------------------------------------------------------------------------------------


def _save(
    ctx: Any,
    needs: tuple[bool, ...],
    rows: Tensor,
    token: Tensor,
    position: Tensor,
    top_k: int,
    weights: Tensor | None,
    *,
    output: Tensor,
) -> None:
    ctx.save_for_backward(token, position, weights, None if weights is None or not needs[4] else rows)
    ctx.top_k = top_k


def _backward(ctx: Any, needs: tuple[bool, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    token, position, weights, x = ctx.saved_tensors
    ops, dx, dweights = torch.ops.tgl, None, None
    if needs[0]:
        dx = ops.combine(grad, token, position, ctx.top_k, weights)
    if weights is not None and needs[4]:
        _, dweights = ops.combine_backward(x, grad, token, position, ctx.top_k, weights)
        dweights = dweights.to(weights.dtype)
    return dx, None, None, None, dweights


def _save_combine(
    ctx: Any,
    needs: tuple[bool, ...],
    rows: Tensor,
    *args: Any,
    out_dtype: torch.dtype | None = None,
    **kwargs: Any,
) -> None:
    _save(ctx, needs, rows, *args, **kwargs)
    ctx.dtype = rows.dtype


def _backward_combine(ctx: Any, needs: tuple[bool, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients: copies are in the dtype of the rows, products in the wider dtype of rows and sums."""
    token, position, weights, y = ctx.saved_tensors
    places = token, position, ctx.top_k
    if weights is None:
        return torch.ops.tgl.dispatch(grad.to(ctx.dtype), *places), None, None, None, None
    wide = torch.promote_types(grad.dtype, ctx.dtype)
    grad, factors = grad.to(wide), weights if wide == ctx.dtype else weights.to(wide)
    if needs[4]:
        dy, dweights = torch.ops.tgl.combine_backward(grad, y.to(wide), *places, factors)
        return dy.to(ctx.dtype) if needs[0] else None, None, None, None, dweights.to(weights.dtype)
    return torch.ops.tgl.dispatch(grad, *places, factors).to(ctx.dtype), None, None, None, None


def _save_backward(
    ctx: Any,
    needs: tuple[bool, ...],
    grad: Tensor,
    y: Tensor,
    token: Tensor,
    position: Tensor,
    top_k: int,
    weights: Tensor,
    *,
    output: tuple[Tensor, Tensor],
) -> None:
    ctx.save_for_backward(grad, y, token, position, weights)
    ctx.top_k = top_k


def _second_backward(ctx: Any, needs: tuple[bool, ...], u: Tensor, v: Tensor) -> tuple[Tensor | None, ...]:
    """Return the derivatives of ``<D(w) g, u> + sum over slots of v <g, y>`` in g, y and w.

    They are ``C(w) u + C(v) y``, ``D(v) g`` and ``<g, u>``.
    """
    grad, y, token, position, weights = ctx.saved_tensors
    ops, places = torch.ops.tgl, (token, position, ctx.top_k)
    d_grad = d_y = d_weights = None
    if needs[0]:
        d_grad = ops.combine(u, *places, weights) + ops.combine(y, *places, v)
    if needs[5]:
        d_y, d_weights = ops.combine_backward(grad, u, *places, v)
        d_weights = d_weights.to(weights.dtype)
    elif needs[1]:
        d_y = ops.dispatch(grad, *places, v)
    return d_grad, d_y if needs[1] else None, None, None, None, d_weights


# --- registration -----------------------------------------------------------------------------------------------------

_PLACES = "Tensor token, Tensor position, SymInt top_k"
define(
    f"{DISPATCH}(Tensor x, {_PLACES}, Tensor? weights=None) -> Tensor",
    permutation.dispatch,
    tables=("top_k",),
    kernel=dispatch,
    adapt=_rows,
    formula=Formula(_save, _backward),
)
define(
    f"{COMBINE}(Tensor y, {_PLACES}, Tensor? weights=None, *, ScalarType? out_dtype=None) -> Tensor",
    permutation.combine,
    tables=("top_k",),
    unseen=("token",),
    kernel=combine,
    adapt=_rows,
    formula=Formula(_save_combine, _backward_combine),
)
define(
    f"{BACKWARD}(Tensor grad, Tensor y, {_PLACES}, Tensor weights) -> (Tensor dy, Tensor dweights)",
    permutation.combine_backward,
    tables=("top_k",),
    kernel=combine_backward,
    adapt=_rows_backward,
    formula=Formula(_save_backward, _second_backward),
)
