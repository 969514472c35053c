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
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from ..meta import activations
from . import sharding_scaled
from .sharding_rules import OpCall, Rule, Rules

_ops = torch.ops.tgl


def _grouped_gemm(c: OpCall) -> list[Rule]:
    return [
        c.whole(),
        c.rule([Shard(1)], b=Shard(2), bias=Shard(1)),
        c.rule([Partial()], a=Shard(1), b=Shard(1), bias=Partial()),
    ]


def _grouped_gemm_low_rank(c: OpCall) -> list[Rule]:
    """Return the rules; where K is sharded, ``low``, itself a product over K, is a partial sum."""
    return [
        c.whole(),
        c.rule([Shard(1)], b=Shard(2), up=Shard(2), bias=Shard(1)),
        c.rule([Partial()], a=Shard(1), b=Shard(1), low=Partial(), bias=Partial()),
        c.rule([Partial()], a=Shard(1), b=Shard(1), low=Shard(1), up=Shard(1), bias=Partial()),
    ]


def _wgrad(c: OpCall) -> list[Rule]:
    return [c.whole(), c.rule([Shard(1)], a=Shard(1)), c.rule([Shard(2)], b=Shard(1))]


def _wgrad_accumulate(c: OpCall) -> list[Rule]:
    """Return the rules of ``grouped_gemm_wgrad`` that keep the placement of ``main_grad``, as a copy would be lost.

    DTensor treats the first operand as the one that is written, and does not redistribute it either.
    """
    placements = set(c.main_grad.placements)
    if len(placements) != 1:
        raise NotImplementedError(
            f"tgl::grouped_gemm_wgrad_accumulate_: `main_grad` must have one placement on all dimensions of its mesh, "
            f"but got {c.main_grad.placements}"
        )
    ways: dict[Placement, dict[str, Placement]]
    ways = {Replicate(): {}, Shard(1): {"a": Shard(1)}, Shard(2): {"b": Shard(1)}}
    return [c.rule([], main_grad=way, **operands) for way, operands in ways.items() if way in placements]


def _grouped_dbias(c: OpCall) -> list[Rule]:
    return [c.whole(), c.rule([Shard(1)], dy=Shard(1))]


def _grouped_dbias_dscales(c: OpCall) -> list[Rule]:
    return [c.whole(), c.rule([Shard(1), Partial()], dy=Shard(1), bias=Shard(1))]


def _by_columns(x: str, results: int = 0, /, **placements: Placement) -> Rules:
    """Return the rules of an op with an activation, whose columns can be sharded in whole pairs.

    Args:
        x: the argument whose last dimension has the columns of the activation's input.
        results: number of results, all sharded in columns; 0: the gradient in columns, and that of ``probs``.
        placements: those of the arguments where columns are sharded.
    """

    def rules(c: OpCall) -> list[Rule]:
        t = getattr(c, x)
        if activations.named(c.kind).gated and not (c.interleaved and t.shape[-1] % (2 * t.mesh.size()) == 0):
            return [c.whole()]
        dprobs = Replicate() if c.probs is None else Partial()  # of shape [0] without probs
        return [c.whole(), c.rule([Shard(1)] * results or [Shard(1), dprobs], **placements)]

    return rules


def _permutation(c: OpCall) -> list[Rule]:
    name = "x" if hasattr(c, "x") else "y"
    ways: list[Placement] = [Replicate(), Partial(), *([Shard(1)] if len(getattr(c, name).shape) == 2 else [])]
    return [c.rule([way], **{name: way}) for way in ways]


def _combine_backward(c: OpCall) -> list[Rule]:
    in_columns = c.rule([Shard(1), Partial()], grad=Shard(1), y=Shard(1))
    return [c.whole(), in_columns] if len(c.y.shape) == 2 else [c.whole()]


def _batched_syrk(c: OpCall) -> list[Rule]:
    return [c.whole(), c.rule([Shard(0)], x=Shard(0), c=Shard(0)), c.rule([Partial()], x=Shard(2), c=Partial())]


def _topk_router(c: OpCall) -> list[Rule]:
    tokens = Shard(0)
    return [c.whole(), c.rule([tokens] * 2 + [Partial()] * 3, logits=tokens, mask=tokens, index=tokens)]


def _topk_router_backward(c: OpCall) -> list[Rule]:
    by_token = dict.fromkeys(("grad_weights", "logits", "top_k_index", "mask"), Shard(0))
    return [c.whole(), c.rule([Shard(0)], **by_token)]


def _of_any_placement(other: str) -> Rules:
    """Return the rules of an op that returns ``x``, placed as it is, and depends on another tensor."""

    def rules(c: OpCall) -> list[Rule]:
        names = [name for name in ("x", other) if getattr(c, name, None) is not None]
        every = itertools.product(*(_any_placement(getattr(c, name)) for name in names))
        return [c.rule([placements[0]], **dict(zip(names, placements))) for placements in every]

    return rules


def _any_placement(t: Any) -> list[Placement]:
    return [Replicate(), Partial(), *(Shard(dim) for dim in range(len(t.shape)))]


_WHOLE = (
    _ops.grouped_mlp.default,
    _ops.grouped_mlp_backward.default,
    _ops.moe.default,
    _ops.moe_backward_hidden.default,
    _ops.moe_backward_input.default,
    _ops.route.default,
    _ops.splits_to_offsets.default,
)
_RULES: dict[torch._ops.OpOverload, Rules] = {
    _ops.grouped_gemm.default: _grouped_gemm,
    _ops.grouped_gemm_activation.default: _by_columns("b", 2, b=Shard(2), bias=Shard(1)),
    _ops.grouped_gemm_wgrad.default: _wgrad,
    _ops.grouped_gemm_wgrad_accumulate_.default: _wgrad_accumulate,
    _ops.grouped_gemm_wgrad_accumulate_.requested: _wgrad_accumulate,
    _ops.batched_syrk.default: _batched_syrk,
    _ops.grouped_dbias.default: _grouped_dbias,
    _ops.grouped_gemm_low_rank.default: _grouped_gemm_low_rank,
    _ops.grouped_gemm_low_rank_activation.default: _by_columns("b", 2, b=Shard(2), up=Shard(2), bias=Shard(1)),
    _ops.grouped_dbias_dscales.default: _grouped_dbias_dscales,
    _ops.grouped_activation.default: _by_columns("x", 1, x=Shard(1)),
    _ops.grouped_activation_backward.default: _by_columns("x", dy=Shard(1), x=Shard(1)),
    _ops.grouped_gemm_dactivation.default: _by_columns("h", b=Shard(2), h=Shard(1)),
    _ops.dispatch.default: _permutation,
    _ops.combine.default: _permutation,
    _ops.combine_backward.default: _combine_backward,
    _ops.topk_router.default: _topk_router,
    _ops.topk_router_backward.default: _topk_router_backward,
    _ops.offload.default: _of_any_placement(""),
    _ops.reload.default: _of_any_placement("after"),
    _ops.after.default: _of_any_placement("dependency"),
    **dict.fromkeys(_WHOLE, lambda c: [c.whole()]),
    **sharding_scaled.RULES,
}


@functools.cache
def register_sharding_rules() -> None:
    """Register the sharding rules with DTensor; importing ``tgl.distributed`` does it."""
    schemas = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    for op, rules in _RULES.items():
        register_sharding(op)(functools.partial(_rules_of_call, op, rules))
        # DTensor caches the result of a rule. Its key contains no keyword arguments but integers, while ours decide on
        # the dtype, the shape and the placement of the result.
        schemas[op].static_kwargkey = [a.name for a in op._schema.arguments if a.kwarg_only]


def _rules_of_call(op: torch._ops.OpOverload, rules: Rules, *args: Any, **keywords: Any) -> list[Rule]:
    return rules(OpCall(op, args, keywords))
