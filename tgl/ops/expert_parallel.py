"""``tgl::ep_route``, ``tgl::ep_dispatch`` and ``tgl::ep_combine``: tokens to the ranks of their experts and back.

All sizes are fixed by the arguments, and every count stays on the device, so that a graph holds them for all routings.
The ranks take part in every call: those of a group make the calls of one order, with arguments of one meaning.

Dispatch and combine are each other's transpose, hence each other's derivative, to any order. Both take the routing
weights beside the rows: the exchanges of one call have one order, where a compiler may order two calls as it likes, and
another way on another rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import backends
from ..meta import expert_parallel as meta
from ..meta import specs
from ._library import Formula, define

ROUTE, DISPATCH, COMBINE = "ep_route", "ep_dispatch", "ep_combine"
_PLAN = ("position", "token", "index", "needed")
_OUTPUTS = ("out", "out_weights")  # of dispatch and combine
_SPECS = {DISPATCH: meta.ep_dispatch, COMBINE: meta.ep_combine}

Plan = tuple[Tensor, Tensor, Tensor, Tensor]
Pair = tuple[Tensor, Tensor]

# --- kernels ----------------------------------------------------------------------------------------------------------


def _route(top_k_index: Tensor, num_experts: int, *, group_name: str, invariant: bool = False, **sizes: int) -> Plan:
    plan = _route_fake(top_k_index, num_experts, group_name=group_name, invariant=invariant, **sizes)
    options = {"invariant": invariant, "group_name": group_name, **sizes, **dict(zip(_PLAN, plan))}
    backends.run(ROUTE, top_k_index.device, top_k_index, num_experts, **options)
    return plan


def _route_fake(top_k_index: Tensor, num_experts: int, *, group_name: str, **options: Any) -> Plan:
    position, token, index, needed = specs.empty_all(meta.ep_route(top_k_index, num_experts, **options))
    return position, token, index, needed


def _moving(op: str) -> tuple[Any, Any]:
    """Kernel and fake of dispatch or combine."""
    check = _SPECS[op]

    def fake(
        t: Tensor, weights: Tensor | None, token: Tensor, position: Tensor, top_k: int, *, group_name: str
    ) -> Pair:
        made, made_weights = specs.empty_all(check(t, weights, token, position, top_k))
        return made, made_weights

    def kernel(
        t: Tensor, weights: Tensor | None, token: Tensor, position: Tensor, top_k: int, *, group_name: str
    ) -> Pair:
        made = fake(t, weights, token, position, top_k, group_name=group_name)
        options = {"top_k": top_k, "group_name": group_name, **dict(zip(_OUTPUTS, made))}
        backends.run(op, t.device, t, weights, token, position, **options)
        return made

    return kernel, fake


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
    group_name: str,
) -> None:
    ctx.save_for_backward(token, position)
    ctx.top_k, ctx.group_name, ctx.weighted = top_k, group_name, weights is not None


def _transposed(op: str) -> Any:
    """The backward that is a call of ``op``."""

    def backward(ctx: Any, needs: tuple[bool, ...], grad: Tensor, grad_weights: Tensor) -> tuple[Tensor | None, ...]:
        call = getattr(torch.ops.tgl, op)
        weights = grad_weights if ctx.weighted else None
        dt, dweights = call(grad, weights, *ctx.saved_tensors, ctx.top_k, group_name=ctx.group_name)
        return dt, dweights if ctx.weighted else None, None, None, None

    return backward


# --- registration -----------------------------------------------------------------------------------------------------

define(
    f"{ROUTE}(Tensor top_k_index, SymInt num_experts, *, int group_size, SymInt pair_rows, SymInt expert_rows, "
    "bool invariant=False, str group_name) -> (Tensor position, Tensor token, Tensor index, Tensor needed)",
    _route,
    _route_fake,
)
_ARGUMENTS = "Tensor? weights, Tensor token, Tensor position, SymInt top_k, *, str group_name"
define(
    f"{DISPATCH}(Tensor x, {_ARGUMENTS}) -> (Tensor out, Tensor out_weights)",
    *_moving(DISPATCH),
    formula=Formula(_save, _transposed(COMBINE)),
)
define(
    f"{COMBINE}(Tensor y, {_ARGUMENTS}) -> (Tensor out, Tensor out_weights)",
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
    group_name: str,
) -> tuple[torch.device, tuple, dict[str, Any]]:
    sizes = {"group_size": group_size, "pair_rows": pair_rows, "expert_rows": expert_rows}
    made = (spec.meta() for spec in meta.ep_route(top_k_index, num_experts, **sizes, invariant=invariant))
    options = {"invariant": invariant, "group_name": group_name, **sizes, **dict(zip(_PLAN, made))}
    return top_k_index.device, (top_k_index, num_experts), options


def _call_dispatch(
    x: Tensor, weights: Tensor | None, token: Tensor, position: Tensor, top_k: int, *, group_name: str
) -> tuple[torch.device, tuple, dict[str, Any]]:
    return _call(DISPATCH, (x, weights, token, position), top_k, group_name)


def _call_combine(
    y: Tensor, weights: Tensor | None, token: Tensor, position: Tensor, top_k: int, *, group_name: str
) -> tuple[torch.device, tuple, dict[str, Any]]:
    return _call(COMBINE, (y, weights, token, position), top_k, group_name)


def _call(
    op: str, operands: tuple[Tensor, Tensor | None, Tensor, Tensor], top_k: int, group_name: str
) -> tuple[torch.device, tuple, dict[str, Any]]:
    made = (spec.meta() for spec in _SPECS[op](*operands, top_k))
    options = {"top_k": top_k, "group_name": group_name, **dict(zip(_OUTPUTS, made))}
    return operands[0].device, operands, options


backends.describe_op(ROUTE, _call_route)
backends.describe_op(DISPATCH, _call_dispatch)
backends.describe_op(COMBINE, _call_combine)
