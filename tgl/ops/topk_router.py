"""``tgl::topk_router``: experts and their weights from a router's logits; ``tgl.topk_router`` makes losses of its sums.

The gradient of the logits is that of the weights and of the two sums that losses are made of; ranks, groups and the
bias have none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import backends, debug
from ..meta import router as specs
from ..meta.router import Router, Weighing
from ..meta.specs import empty_all
from ._library import Formula, autocast_nothing, define

NAME, BACKWARD = "topk_router", "topk_router_backward"
OUTPUTS = ("weights", "top_k_index", "tokens_per_expert", "prob_sum", "z_sum")
_WEIGHING = 'str score_function="softmax", bool renormalize=False, float scale=1.0'
SCHEMA = f'{_WEIGHING}, int num_groups=1, int topk_groups=1, str group_score="max", bool sums=False'

Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]

# --- kernels ----------------------------------------------------------------------------------------------------------


def _named(outputs: tuple | list, router: Router) -> dict[str, Any]:
    """Destinations by their names; None for a sum that is not asked for."""
    named = dict(zip(OUTPUTS, outputs))
    return named if router.sums else named | dict.fromkeys(OUTPUTS[2:])


def _kernel(
    logits: Tensor, top_k: int, bias: Tensor | None = None, mask: Tensor | None = None, **options: Any
) -> Outputs:
    router = Router(**options)
    made = empty_all(specs.topk_router(logits, top_k, bias, mask, router))
    if debug.active:
        debug.check_numbers(NAME, logits=logits, bias=bias)
    backends.run(NAME, logits.device, logits, top_k, bias, mask, router=router, **_named(made, router))
    return tuple(made)  # type: ignore[return-value]


def _fake(
    logits: Tensor, top_k: int, bias: Tensor | None = None, mask: Tensor | None = None, **options: Any
) -> Outputs:
    return tuple(empty_all(specs.topk_router(logits, top_k, bias, mask, Router(**options))))  # type: ignore[return-value]


def _kernel_backward(
    grad_weights: Tensor,
    logits: Tensor,
    top_k_index: Tensor,
    grad_prob_sum: Tensor | None = None,
    grad_z_sum: Tensor | None = None,
    mask: Tensor | None = None,
    **options: Any,
) -> Tensor:
    operands, weighing = (grad_weights, logits, top_k_index, grad_prob_sum, grad_z_sum, mask), Weighing(**options)
    out = specs.topk_router_backward(*operands, weighing).empty()
    backends.run(BACKWARD, logits.device, *operands, weighing=weighing, out=out)
    return out


def _fake_backward(
    grad_weights: Tensor,
    logits: Tensor,
    top_k_index: Tensor,
    grad_prob_sum: Tensor | None = None,
    grad_z_sum: Tensor | None = None,
    mask: Tensor | None = None,
    **options: Any,
) -> Tensor:
    operands = (grad_weights, logits, top_k_index, grad_prob_sum, grad_z_sum, mask)
    return specs.topk_router_backward(*operands, Weighing(**options)).empty()


# --- autograd ---------------------------------------------------------------------------------------------------------


def _save(
    ctx: Any,
    needs: tuple[bool, ...],
    logits: Tensor,
    top_k: int,
    bias: Tensor | None,
    mask: Tensor | None,
    *,
    output: Outputs,
    **options: Any,
) -> None:
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
    return made, None, None, None


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
    """By the formula, which is differentiable to any order."""
    grad_weights, logits, top_k_index, *sums, mask = ctx.saved_tensors
    index, weighing = top_k_index.long(), ctx.weighing
    given = (grad_weights, logits, *(t for t in sums if t is not None))

    def first(grad: Tensor, x: Tensor, of_probs: Tensor | None = None, of_z: Tensor | None = None) -> Tensor:
        return specs.gradient(grad, x, index, of_probs, of_z, mask, weighing)

    pull = torch.func.vjp(first, *given)[1]
    d_grad, d_logits, *d_sums = pull(cotangent)
    made = (d_grad, d_logits, None, *(d_sums or (None, None)), None)
    return tuple(t if wanted else None for t, wanted in zip(made, needs, strict=True))


# --- registration -----------------------------------------------------------------------------------------------------


_op = define(
    f"{NAME}(Tensor logits, int top_k, Tensor? bias=None, Tensor? mask=None, *, {SCHEMA}) -> "
    "(Tensor weights, Tensor top_k_index, Tensor tokens_per_expert, Tensor prob_sum, Tensor z_sum)",
    _kernel,
    _fake,
    formula=Formula(_save, _backward),
    autocast=autocast_nothing,
)
_op_backward = define(
    f"{BACKWARD}(Tensor grad_weights, Tensor logits, Tensor top_k_index, Tensor? grad_prob_sum=None, "
    f"Tensor? grad_z_sum=None, Tensor? mask=None, *, {_WEIGHING}) -> Tensor",
    _kernel_backward,
    _fake_backward,
    formula=Formula(_save_backward, _second_backward),
    autocast=autocast_nothing,
)


def _call(
    logits: Tensor, top_k: int, bias: Tensor | None = None, mask: Tensor | None = None, **options: Any
) -> tuple[torch.device, tuple, dict[str, Any]]:
    router = Router(**options)
    made = [spec.meta() for spec in specs.topk_router(logits, top_k, bias, mask, router)]
    return logits.device, (logits, top_k, bias, mask), {"router": router, **_named(made, router)}


def _call_backward(
    grad_weights: Tensor,
    logits: Tensor,
    top_k_index: Tensor,
    grad_prob_sum: Tensor | None = None,
    grad_z_sum: Tensor | None = None,
    mask: Tensor | None = None,
    **options: Any,
) -> tuple[torch.device, tuple, dict[str, Any]]:
    operands, weighing = (grad_weights, logits, top_k_index, grad_prob_sum, grad_z_sum, mask), Weighing(**options)
    out = specs.topk_router_backward(*operands, weighing).meta()
    return logits.device, operands, {"weighing": weighing, "out": out}


backends.describe_op(NAME, _call)
backends.describe_op(BACKWARD, _call_backward)
