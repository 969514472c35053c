"""``tgl::topk_router``: experts, chosen or given, and their weights from logits, and the sums of its losses.

The weights and both sums are differentiable in the logits; ranks, groups and the bias have no gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import debug
from ..meta import router as specs
from ..meta.router import Router, Weighing
from ._define import define
from ._library import Formula, autocast_nothing

NAME, BACKWARD = "topk_router", "topk_router_backward"
_WEIGHING = 'str score_function="softmax", bool renormalize=False, float scale=1.0'
SCHEMA = f'{_WEIGHING}, int num_groups=1, int topk_groups=1, str group_score="max", bool sums=False'

Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _save(
    ctx: Any,
    needs: tuple[bool, ...],
    logits: Tensor,
    *operands: Any,
    output: Outputs,
    **options: Any,
) -> None:
    _top_k, _bias, mask, _index = operands
    ctx.mark_non_differentiable(output[1], output[2])
    ctx.save_for_backward(logits, output[1], mask)
    ctx.options = {name: options[name] for name in Weighing._fields}
    ctx.sums = options["sums"]


def _backward(
    ctx: Any,
    needs: tuple[bool, ...],
    grad: Tensor,
    _index: Any,
    _counts: Any,
    grad_prob_sum: Tensor,
    grad_z_sum: Tensor,
) -> tuple[Tensor | None, ...]:
    sums = (grad_prob_sum, grad_z_sum) if ctx.sums else (None, None)
    logits, index, mask = ctx.saved_tensors
    made = None
    if needs[0]:
        made = torch.ops.tgl.topk_router_backward(grad, logits, index, *sums, mask, **ctx.options)
    return made, None, None, None, None


def _save_backward(
    ctx: Any,
    needs: tuple[bool, ...],
    *operands: Tensor | None,
    output: Tensor,
    **options: Any,
) -> None:
    ctx.save_for_backward(*operands)
    ctx.weighing = Weighing(**options)


def _second_backward(ctx: Any, needs: tuple[bool, ...], cotangent: Tensor) -> tuple[Tensor | None, ...]:
    """Return second derivatives by autograd of the formula, which is differentiable to any order."""
    grad_weights, logits, top_k_index, *sums, mask = ctx.saved_tensors
    index, weighing = top_k_index.long(), ctx.weighing
    given = (grad_weights, logits, *(t for t in sums if t is not None))

    def first(grad: Tensor, x: Tensor, of_probs: Tensor | None = None, of_z: Tensor | None = None) -> Tensor:
        return specs.gradient(grad, x, index, of_probs, of_z, mask, weighing)

    pull = torch.func.vjp(first, *given)[1]
    d_grad, d_logits, *d_sums = pull(cotangent)
    made = (d_grad, d_logits, None, *(d_sums or (None, None)), None)
    return tuple(t if wanted else None for t, wanted in zip(made, needs, strict=True))


def _options(**options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    router = {"router": Router(**options)}
    return router, router


def _options_backward(**options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    weighing = {"weighing": Weighing(**options)}
    return weighing, weighing


def _values(
    op: str,
    logits: Tensor,
    top_k: int,
    bias: Tensor | None,
    mask: Tensor | None,
    index: Tensor | None,
    **options: Any,
) -> None:
    debug.check_numbers(op, logits=logits, bias=bias)
    debug.check_replayed(op, index, logits.shape[1])


_op = define(
    f"{NAME}(Tensor logits, int top_k, Tensor? bias=None, Tensor? mask=None, Tensor? index=None, *, {SCHEMA}) -> "
    "(Tensor weights, Tensor top_k_index, Tensor tokens_per_expert, Tensor prob_sum, Tensor z_sum)",
    specs.topk_router,
    options=_options,
    values=_values,
    masked=True,
    formula=Formula(_save, _backward),
    autocast=autocast_nothing,
)
define(
    f"{BACKWARD}(Tensor grad_weights, Tensor logits, Tensor top_k_index, Tensor? grad_prob_sum=None, "
    f"Tensor? grad_z_sum=None, Tensor? mask=None, *, {_WEIGHING}) -> Tensor",
    specs.topk_router_backward,
    options=_options_backward,
    formula=Formula(_save_backward, _second_backward),
    autocast=autocast_nothing,
)
