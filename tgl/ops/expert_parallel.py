"""``tgl::ep_route``, ``tgl::ep_dispatch`` and ``tgl::ep_combine``: tokens to the ranks of their experts and back.

All sizes are fixed by the arguments, and every count stays on the device, so that a graph holds them for all routings.
The ranks take part in every call: those of a group make the calls of one order, with arguments of one meaning.

Dispatch and combine are each other's transpose, hence each other's derivative, to any order. Both take the routing
weights beside the rows: the exchanges of one call have one order, where a compiler may order two calls as it likes, and
another way on another rank. Rows of bytes are dispatched too, and have no derivative.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import backends, debug
from ..meta import expert_parallel as meta
from ..meta import specs
from ._library import Formula, define

ROUTE, DISPATCH, COMBINE = "ep_route", "ep_dispatch", "ep_combine"
_PLAN = ("position", "token", "index", "needed")
_OUTPUTS = ("out", "out_weights")  # of dispatch and combine
_SPECS: dict[str, Callable[..., tuple[specs.TensorSpec, ...]]] = {DISPATCH: meta.ep_dispatch, COMBINE: meta.ep_combine}

Plan = tuple[Tensor, Tensor, Tensor, Tensor]
Pair = tuple[Tensor, Tensor]

# --- kernels ----------------------------------------------------------------------------------------------------------


def _route(
    top_k_index: Tensor, num_experts: int, *, invariant: bool = False, sentinels: bool = False, **options: Any
) -> Plan:
    if debug.active and not sentinels:
        debug.check_choices(ROUTE, top_k_index, num_experts)
    options = {"invariant": invariant, "engine": meta.ALL_TO_ALL, **options}
    plan = _route_fake(top_k_index, num_experts, **options)
    backends.run(ROUTE, top_k_index.device, top_k_index, num_experts, **options, **dict(zip(_PLAN, plan)))
    return plan


def _route_fake(
    top_k_index: Tensor,
    num_experts: int,
    *,
    sentinels: bool = False,
    group_name: str,
    engine: str = meta.ALL_TO_ALL,
    **options: Any,
) -> Plan:
    meta.check_engine(ROUTE, engine)
    position, token, index, needed = specs.empty_all(meta.ep_route(top_k_index, num_experts, **options))
    return position, token, index, needed


def _moving(op: str) -> tuple[Any, Any]:
    """Kernel and fake of dispatch or combine."""
    check = _SPECS[op]

    def fake(t: Tensor, weights: Tensor | None, token: Tensor, position: Tensor, top_k: int, **options: Any) -> Pair:
        group, rounded = _split(options)
        meta.check_engine(op, group.get("engine", meta.ALL_TO_ALL))
        made, made_weights = specs.empty_all(check(t, weights, token, position, top_k, **rounded))
        return made, made_weights

    def kernel(t: Tensor, weights: Tensor | None, token: Tensor, position: Tensor, top_k: int, **options: Any) -> Pair:
        made = fake(t, weights, token, position, top_k, **options)
        group, _ = _split(options)
        given = {"top_k": top_k, "engine": meta.ALL_TO_ALL, **group, **dict(zip(_OUTPUTS, made))}
        backends.run(op, t.device, t, weights, token, position, **given)
        return made

    return kernel, fake


def _split(options: dict[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    """Names of the group and the engine, and the dtype of sums if a combine is given one."""
    rounded = {name: value for name, value in options.items() if name == "out_dtype"}
    return {name: value for name, value in options.items() if name not in rounded}, rounded


# --- autograd ---------------------------------------------------------------------------------------------------------


def _save(
    ctx: Any,
    needs: tuple[bool, ...],
    t: Tensor,
    weights: Tensor | None,
    token: Tensor,
    position: Tensor,
    top_k: int,
    *,
    output: Pair,
    **options: Any,
) -> None:
    ctx.save_for_backward(token, position)
    ctx.group, _ = _split(options)
    ctx.top_k, ctx.weighted, ctx.of_rows, ctx.dtype = top_k, weights is not None, t.is_floating_point(), t.dtype


def _transposed(op: str) -> Any:
    """The backward that is a call of ``op``."""

    def backward(ctx: Any, needs: tuple[bool, ...], grad: Tensor, grad_weights: Tensor) -> tuple[Tensor | None, ...]:
        call = getattr(torch.ops.tgl, op)
        if not ctx.of_rows:  # bytes: the gradient of the weights travels alone
            return None, call(grad_weights, None, *ctx.saved_tensors, ctx.top_k, **ctx.group)[0], None, None, None
        weights = grad_weights if ctx.weighted else None
        dt, dweights = call(grad.to(ctx.dtype), weights, *ctx.saved_tensors, ctx.top_k, **ctx.group)
        return dt, dweights if ctx.weighted else None, None, None, None

    return backward


# --- registration -----------------------------------------------------------------------------------------------------

define(
    f"{ROUTE}(Tensor top_k_index, SymInt num_experts, *, int group_size, SymInt pair_rows, SymInt expert_rows, "
    "bool invariant=False, bool sentinels=False, str group_name, str engine='all_to_all') -> "
    "(Tensor position, Tensor token, Tensor index, Tensor needed)",
    _route,
    _route_fake,
)
_ARGUMENTS = "Tensor? weights, Tensor token, Tensor position, SymInt top_k, *, str group_name, str engine='all_to_all'"
define(
    f"{DISPATCH}(Tensor x, {_ARGUMENTS}) -> (Tensor out, Tensor out_weights)",
    *_moving(DISPATCH),
    formula=Formula(_save, _transposed(COMBINE)),
)
define(
    f"{COMBINE}(Tensor y, {_ARGUMENTS}, ScalarType? out_dtype=None) -> (Tensor out, Tensor out_weights)",
    *_moving(COMBINE),
    formula=Formula(_save, _transposed(DISPATCH)),
)


def _call_route(
    top_k_index: Tensor,
    num_experts: int,
    *,
    group_size: int,
    pair_rows: int,
    expert_rows: int,
    invariant: bool = False,
    sentinels: bool = False,
    group_name: str,
    engine: str = meta.ALL_TO_ALL,
) -> tuple[torch.device, tuple, dict[str, Any]]:
    meta.check_engine(ROUTE, engine)
    sizes: dict[str, Any] = {"group_size": group_size, "pair_rows": pair_rows, "expert_rows": expert_rows}
    sizes["invariant"] = invariant
    made = (spec.meta() for spec in meta.ep_route(top_k_index, num_experts, **sizes))
    options = {**sizes, "group_name": group_name, "engine": engine, **dict(zip(_PLAN, made))}
    return top_k_index.device, (top_k_index, num_experts), options


def _calling(op: str) -> Any:
    """What describes a call of dispatch or combine."""

    def call(
        t: Tensor,
        weights: Tensor | None,
        token: Tensor,
        position: Tensor,
        top_k: int,
        *,
        group_name: str,
        engine: str = meta.ALL_TO_ALL,
        **rounded: Any,
    ) -> tuple[torch.device, tuple, dict[str, Any]]:
        meta.check_engine(op, engine)
        operands = t, weights, token, position
        made = (spec.meta() for spec in _SPECS[op](*operands, top_k, **rounded))
        options = {"top_k": top_k, "group_name": group_name, "engine": engine, **dict(zip(_OUTPUTS, made))}
        return t.device, operands, options

    return call


backends.describe_op(ROUTE, _call_route)
backends.describe_op(DISPATCH, _calling(DISPATCH))
backends.describe_op(COMBINE, _calling(COMBINE))
