"""``tgl::ep_route``, ``tgl::ep_dispatch`` and ``tgl::ep_combine``: tokens to the ranks of their experts and back.

All sizes are fixed by the arguments, and every count stays on the device, so that one graph is valid for all routings.
The ops are collective: all ranks of a group call them in the same order, with matching arguments.

Dispatch and combine are each other's transpose, hence each other's derivative, to any order. Both exchange the routing
weights together with the rows: the exchanges of one call have a fixed order, while a compiler may order two calls
differently on each rank. Rows of bytes can be dispatched too, and have no derivative.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .. import debug
from ..meta import expert_parallel as meta
from ._define import define
from ._library import Formula

ROUTE, DISPATCH, COMBINE = "ep_route", "ep_dispatch", "ep_combine"
Pair = tuple[Tensor, Tensor]

# --- autograd ---------------------------------------------------------------------------------------------------------


def _save(
    ctx: Any,
    needs: tuple[bool, ...],
    t: Tensor,
    *operands: Any,
    output: Pair,
    **options: Any,
) -> None:
    weights, token, position, top_k = operands
    ctx.save_for_backward(token, position)
    ctx.group = {name: value for name, value in options.items() if name != "out_dtype"}
    ctx.top_k, ctx.weighted, ctx.of_rows, ctx.dtype = top_k, weights is not None, t.is_floating_point(), t.dtype


def _transposed(op: str) -> Any:
    """Return the backward that calls ``op``."""

    def backward(ctx: Any, needs: tuple[bool, ...], grad: Tensor, grad_weights: Tensor) -> tuple[Tensor | None, ...]:
        call = getattr(torch.ops.tgl, op)
        if not ctx.of_rows:  # bytes: only the gradient of the weights is exchanged
            return None, call(grad_weights, None, *ctx.saved_tensors, ctx.top_k, **ctx.group)[0], None, None, None
        weights = grad_weights if ctx.weighted else None
        dt, dweights = call(grad.to(ctx.dtype), weights, *ctx.saved_tensors, ctx.top_k, **ctx.group)
        return dt, dweights if ctx.weighted else None, None, None, None

    return backward


# --- registration -----------------------------------------------------------------------------------------------------


def _options_route(
    *, group_name: str, engine: str = meta.ALL_TO_ALL, sentinels: bool = False, invariant: bool = False, **sizes: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    meta.check_engine(ROUTE, engine)
    sizes["invariant"] = invariant
    return sizes, {**sizes, "group_name": group_name, "engine": engine}


def _options(
    op: str, *, group_name: str, engine: str = meta.ALL_TO_ALL, **rounded: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the keywords of dispatch and combine; implementations take the dtype of sums from the destination."""
    meta.check_engine(op, engine)
    return rounded, {"group_name": group_name, "engine": engine}


def _values(op: str, top_k_index: Tensor, num_experts: int, *, sentinels: bool = False, **options: Any) -> None:
    if not sentinels:
        debug.check_choices(op, top_k_index, num_experts)


define(
    f"{ROUTE}(Tensor top_k_index, SymInt num_experts, *, int group_size, SymInt pair_rows, SymInt expert_rows, "
    "bool invariant=False, bool sentinels=False, str group_name, str engine='all_to_all') -> "
    "(Tensor position, Tensor token, Tensor index, Tensor needed)",
    meta.ep_route,
    rows={"top_k_index": "tokens"},
    options=_options_route,
    values=_values,
)
_PLACES = {"weights": "tokens", "token": "tokens", "position": "tokens"}
_ARGUMENTS = "Tensor? weights, Tensor token, Tensor position, SymInt top_k, *, str group_name, str engine='all_to_all'"
define(
    f"{DISPATCH}(Tensor x, {_ARGUMENTS}) -> (Tensor out, Tensor out_weights)",
    meta.ep_dispatch,
    rows={"x": "rows", **_PLACES},
    options=functools.partial(_options, DISPATCH),
    tables=("top_k",),
    formula=Formula(_save, _transposed(COMBINE)),
)
define(
    f"{COMBINE}(Tensor y, {_ARGUMENTS}, ScalarType? out_dtype=None) -> (Tensor out, Tensor out_weights)",
    meta.ep_combine,
    rows={"y": "rows", **_PLACES},
    options=functools.partial(_options, COMBINE),
    tables=("top_k",),
    formula=Formula(_save, _transposed(DISPATCH)),
)
