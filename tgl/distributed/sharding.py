"""Sharding rules of the ops on DTensors: the placement of the result by the placements of the operands.

For one dimension of the mesh, besides all operands replicated:

| op | sharded | result |
|---|---|---|
| ``grouped_gemm`` | N of ``b`` and ``bias`` (column parallel) | sharded in N |
| | K of ``a`` and ``b``, ``bias`` a partial sum (row parallel) | partial sum |
| ``grouped_gemm_low_rank`` | N of ``b``, ``up`` and ``bias`` | sharded in N |
| | K of ``a`` and ``b``, ``low`` and ``bias`` partial sums | partial sum |
| | K of ``a`` and ``b`` and R of ``low`` and ``up``, ``bias`` a partial sum | partial sum |
| ``grouped_gemm_activation`` | N of ``b`` and ``bias``, in whole pairs | both sharded in columns |
| ``grouped_gemm_low_rank_activation`` | N of ``b``, ``up`` and ``bias``, in whole pairs | both sharded in columns |
| ``grouped_gemm_wgrad`` and ``..._accumulate_`` | M of ``a`` or N of ``b`` | sharded in that dimension |
| ``grouped_dbias`` | N | sharded in N |
| ``grouped_dbias_dscales`` | N of ``dy`` and ``bias`` | ``dbias`` sharded in N, ``dscales`` a partial sum |
| ``grouped_activation``, ``..._backward`` | columns, in whole pairs | sharded in columns, ``dprobs`` a partial sum |
| ``grouped_gemm_dactivation`` | I of ``b`` and columns of ``h``, pairs | ``dh`` in columns, ``dprobs`` a partial sum |
| ``dispatch``, ``combine`` | H, or ``x`` (``y``) a partial sum | sharded in H, or a partial sum |
| ``combine_backward`` | H of ``grad`` and ``y`` | ``dy`` sharded in H, ``dweights`` a partial sum |
| ``topk_router``, ``..._backward`` | tokens | sharded in tokens, sums partial sums |
| ``batched_syrk`` | matrices | sharded in matrices |
| | K of ``x``, ``c`` a partial sum | partial sum |
| ``offload``, ``reload``, ``after`` | any dimension | the placement of the operand |

Ops on quantised operands follow this pattern, with all components of an operand sharded together: see
``sharding_scaled``.

DTensor redistributes operands with other placements. ``offs`` is always replicated, and rows of experts and groups
are never sharded: a shard of cumulative ends does not know where its first group starts. Ranks that hold different
experts or different tokens work on local tensors with ends of their own; see ``expert_parallel_host``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from ..meta import activations
from ..meta.low_rank import LowRankActivationCall
from . import sharding_scaled
from .sharding_rules import Rule, replicated, rule

_ops = torch.ops.tgl


def _grouped_gemm(
    a: Any,
    b: Any,
    offs: Any,
    bias: Any = None,
    bias_scale: Any = None,
    slots: Any = None,
    rows: Any = None,
    **_: Any,
) -> list[Rule]:
    whole = Replicate()
    rest = (bias_scale, whole), (slots, whole), (rows, whole)
    return [
        replicated(1, a, b, offs, bias, bias_scale, slots, rows),
        rule([Shard(1)], (a, whole), (b, Shard(2)), (offs, whole), (bias, Shard(1)), *rest),
        rule([Partial()], (a, Shard(1)), (b, Shard(1)), (offs, whole), (bias, Partial()), *rest),
    ]


def _grouped_gemm_low_rank(
    a: Any, b: Any, low: Any, up: Any, offs: Any, bias: Any = None, bias_scale: Any = None, **_: Any
) -> list[Rule]:
    """Return the rules; where K is sharded, ``low``, itself a product over K, is a partial sum."""
    whole, operands = Replicate(), (a, b, low, up, offs, bias, bias_scale)

    def sharded(result: Placement, *placements: Placement) -> Rule:
        return rule([result], *zip(operands, (*placements[:4], whole, placements[4], whole)))

    return [
        replicated(1, *operands),
        sharded(Shard(1), whole, Shard(2), whole, Shard(2), Shard(1)),
        sharded(Partial(), Shard(1), Shard(1), Partial(), whole, Partial()),
        sharded(Partial(), Shard(1), Shard(1), Shard(1), Shard(1), Partial()),
    ]


def _wgrad(a: Any, b: Any, offs: Any, a_rows: Any = None, b_rows: Any = None, **_: Any) -> list[Rule]:
    whole = Replicate()
    rest = (offs, whole), (a_rows, whole), (b_rows, whole)
    return [
        replicated(1, a, b, offs, a_rows, b_rows),
        rule([Shard(1)], (a, Shard(1)), (b, whole), *rest),
        rule([Shard(2)], (a, whole), (b, Shard(1)), *rest),
    ]


def _wgrad_accumulate(
    a: Any,
    b: Any,
    offs: Any,
    main_grad: Any,
    slots: Any = None,
    a_rows: Any = None,
    b_rows: Any = None,
    **_: Any,
) -> list[Rule]:
    """Return the rules of ``grouped_gemm_wgrad`` that keep the placement of ``main_grad``, as a copy would be lost.

    DTensor treats the first operand as the one that is written, and does not redistribute it either.
    """
    placements = set(main_grad.placements)
    if len(placements) != 1:
        raise NotImplementedError(
            f"tgl::grouped_gemm_wgrad_accumulate_: `main_grad` must have one placement on all dimensions of its mesh, "
            f"but got {main_grad.placements}"
        )
    table = None if slots is None else Replicate()
    rules: list[Rule] = []
    for result, (*inputs, a_index, b_index) in _wgrad(a, b, offs, a_rows, b_rows):
        if result[0] in placements:
            rules.append(([], [*inputs, *result, table, a_index, b_index]))
    return rules


def _wgrad_accumulate_requested(*arguments: Any, edge: Any, **options: Any) -> list[Rule]:
    """Return the rules of ``_wgrad_accumulate`` in a compiled graph, where the gradient edge has no elements."""
    rules = _wgrad_accumulate(*arguments, **options)
    return [(results, [*placements, Replicate()]) for results, placements in rules]


def _grouped_dbias(dy: Any, offs: Any) -> list[Rule]:
    return [replicated(1, dy, offs), rule([Shard(1)], (dy, Shard(1)), (offs, Replicate()))]


def _grouped_dbias_dscales(dy: Any, bias: Any, bias_scale: Any, offs: Any) -> list[Rule]:
    whole = Replicate()
    return [
        replicated(2, dy, bias, bias_scale, offs),
        rule([Shard(1), Partial()], (dy, Shard(1)), (bias, Shard(1)), (bias_scale, whole), (offs, whole)),
    ]


def _columns_can_be_sharded(x: Any, kind: str, interleaved: bool) -> bool:
    if not activations.named(kind).gated:
        return True
    return interleaved and x.shape[-1] % (2 * x.mesh.size()) == 0


def _grouped_activation(
    x: Any, offs: Any, probs: Any = None, *, kind: str = "swiglu", interleaved: bool = False, **_: Any
) -> list[Rule]:
    whole = Replicate()
    rules = [replicated(1, x, offs, probs)]
    if _columns_can_be_sharded(x, kind, interleaved):
        rules.append(rule([Shard(1)], (x, Shard(1)), (offs, whole), (probs, whole)))
    return rules


def _grouped_gemm_activation(
    a: Any,
    b: Any,
    offs: Any,
    bias: Any = None,
    probs: Any = None,
    rows: Any = None,
    *,
    kind: str = "swiglu",
    interleaved: bool = False,
    **_: Any,
) -> list[Rule]:
    whole = Replicate()
    rules = [replicated(2, a, b, offs, bias, probs, rows)]
    if _columns_can_be_sharded(b, kind, interleaved):
        columns = (b, Shard(2)), (offs, whole), (bias, Shard(1)), (probs, whole), (rows, whole)
        rules.append(rule([Shard(1), Shard(1)], (a, whole), *columns))
    return rules


def _grouped_gemm_low_rank_activation(
    *operands: Any, kind: str = "swiglu", interleaved: bool = False, **_: Any
) -> list[Rule]:
    call, whole = LowRankActivationCall(*operands), Replicate()
    rules = [replicated(2, *call)]
    if _columns_can_be_sharded(call.b, kind, interleaved):
        placements = whole, Shard(2), whole, Shard(2), whole, Shard(1), whole
        rules.append(rule([Shard(1), Shard(1)], *zip(call, placements)))
    return rules


def _grouped_activation_backward(
    dy: Any, x: Any, offs: Any, probs: Any = None, *, kind: str = "swiglu", interleaved: bool = False, **_: Any
) -> list[Rule]:
    whole = Replicate()
    rules = [replicated(2, dy, x, offs, probs)]
    if _columns_can_be_sharded(x, kind, interleaved):
        dprobs = Partial() if probs is not None else whole  # of shape [0] without probs
        rules.append(rule([Shard(1), dprobs], (dy, Shard(1)), (x, Shard(1)), (offs, whole), (probs, whole)))
    return rules


def _grouped_gemm_dactivation(
    dy: Any,
    b: Any,
    h: Any,
    offs: Any,
    probs: Any = None,
    rows: Any = None,
    *,
    kind: str = "swiglu",
    interleaved: bool = False,
    **_: Any,
) -> list[Rule]:
    whole = Replicate()
    rules = [replicated(2, dy, b, h, offs, probs, rows)]
    if _columns_can_be_sharded(h, kind, interleaved):
        dprobs = Partial() if probs is not None else whole  # of shape [0] without probs
        operands = ((dy, whole), (b, Shard(2)), (h, Shard(1)), (offs, whole), (probs, whole), (rows, whole))
        rules.append(rule([Shard(1), dprobs], *operands))
    return rules


def _whole(op: torch._ops.OpOverload) -> Callable[..., list[Rule]]:
    """Return the rule of an op that takes all of its operands whole."""
    operands = [a.name for a in op._schema.arguments if not a.kwarg_only]

    def rules(*given: Any, **_: Any) -> list[Rule]:
        dropped = [None] * (len(operands) - len(given))  # optional operands that the call leaves out
        return [replicated(len(op._schema.returns), *given, *dropped)]

    return rules


def _permutation(t: Any, token: Any, position: Any, top_k: int, weights: Any = None, **_: Any) -> list[Rule]:
    whole = Replicate()
    rest = (token, whole), (position, whole), (None, whole), (weights, whole)
    ways = (whole, Partial(), *([Shard(1)] if len(t.shape) == 2 else []))
    return [rule([way], (t, way), *rest) for way in ways]


def _combine_backward(grad: Any, y: Any, token: Any, position: Any, top_k: int, weights: Any) -> list[Rule]:
    whole = Replicate()
    rest = (token, whole), (position, whole), (None, whole), (weights, whole)
    rules = [rule([whole, whole], (grad, whole), (y, whole), *rest)]
    if len(y.shape) == 2:
        rules.append(rule([Shard(1), Partial()], (grad, Shard(1)), (y, Shard(1)), *rest))
    return rules


def _batched_syrk(x: Any, c: Any = None, **_: Any) -> list[Rule]:
    return [
        replicated(1, x, c),
        rule([Shard(0)], (x, Shard(0)), (c, Shard(0))),
        rule([Partial()], (x, Shard(2)), (c, Partial())),
    ]


def _route(top_k_index: Any, num_experts: int, num_rows: int | None = None) -> list[Rule]:
    results, operands = replicated(4, top_k_index)
    return [(results, [*operands, None, None])]


def _topk_router(
    logits: Any, top_k: int, bias: Any = None, mask: Any = None, index: Any = None, **_: Any
) -> list[Rule]:
    whole, tokens = Replicate(), Shard(0)
    return [
        rule(results, (logits, way), (None, whole), (bias, whole), (mask, way), (index, way))
        for way, results in ((whole, [whole] * 5), (tokens, [tokens] * 2 + [Partial()] * 3))
    ]


def _topk_router_backward(
    grad_weights: Any,
    logits: Any,
    top_k_index: Any,
    grad_prob_sum: Any = None,
    grad_z_sum: Any = None,
    mask: Any = None,
    **_: Any,
) -> list[Rule]:
    by_token, sums = (grad_weights, logits, top_k_index), (grad_prob_sum, grad_z_sum)
    ways = (Replicate(), Shard(0))
    return [rule([way], *((t, way) for t in by_token), *((t, Replicate()) for t in sums), (mask, way)) for way in ways]


def _any_placement(t: Any) -> list[Placement]:
    return [Replicate(), Partial(), *(Shard(dim) for dim in range(len(t.shape)))]


def _offload(x: Any) -> list[Rule]:
    return [([placement], [placement]) for placement in _any_placement(x)]


def _reload(x: Any, device: Any, after: Any = None) -> list[Rule]:
    if after is None:
        return [([placement], [placement, None]) for placement in _any_placement(x)]
    both = itertools.product(_any_placement(x), _any_placement(after))
    return [([placement], [placement, None, other]) for placement, other in both]


def _after(x: Any, dependency: Any) -> list[Rule]:
    both = itertools.product(_any_placement(x), _any_placement(dependency))
    return [([placement], [placement, other]) for placement, other in both]


_WHOLE = (
    _ops.grouped_mlp.default,
    _ops.grouped_mlp_backward.default,
    _ops.moe.default,
    _ops.moe_backward_hidden.default,
    _ops.moe_backward_input.default,
    _ops.splits_to_offsets.default,
)
_RULES: dict[torch._ops.OpOverload, Callable[..., list[Rule]]] = {
    _ops.grouped_gemm.default: _grouped_gemm,
    _ops.grouped_gemm_activation.default: _grouped_gemm_activation,
    _ops.grouped_gemm_wgrad.default: _wgrad,
    _ops.grouped_gemm_wgrad_accumulate_.default: _wgrad_accumulate,
    _ops.grouped_gemm_wgrad_accumulate_.requested: _wgrad_accumulate_requested,
    _ops.batched_syrk.default: _batched_syrk,
    _ops.grouped_dbias.default: _grouped_dbias,
    _ops.grouped_gemm_low_rank.default: _grouped_gemm_low_rank,
    _ops.grouped_gemm_low_rank_activation.default: _grouped_gemm_low_rank_activation,
    _ops.grouped_dbias_dscales.default: _grouped_dbias_dscales,
    _ops.grouped_activation.default: _grouped_activation,
    _ops.grouped_activation_backward.default: _grouped_activation_backward,
    _ops.grouped_gemm_dactivation.default: _grouped_gemm_dactivation,
    _ops.dispatch.default: _permutation,
    _ops.combine.default: _permutation,
    _ops.combine_backward.default: _combine_backward,
    _ops.route.default: _route,
    _ops.topk_router.default: _topk_router,
    _ops.topk_router_backward.default: _topk_router_backward,
    _ops.offload.default: _offload,
    _ops.reload.default: _reload,
    _ops.after.default: _after,
    **{op: _whole(op) for op in _WHOLE},
    **sharding_scaled.RULES,
}


@functools.cache
def register_sharding_rules() -> None:
    """Register the sharding rules with DTensor; importing ``tgl.distributed`` does it."""
    schemas = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    for op, rules in _RULES.items():
        register_sharding(op)(rules)
        # DTensor caches the result of a rule. Its key contains no keyword arguments but integers, while ours decide on
        # the dtype, the shape and the placement of the result.
        schemas[op].static_kwargkey = [a.name for a in op._schema.arguments if a.kwarg_only]
