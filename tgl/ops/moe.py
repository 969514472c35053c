"""``tgl::moe``: the Mixture-of-Experts block from tokens to tokens, as one op forward and one backward.

``tgl.moe`` gives it the parts of a ``tgl.Routing``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import backends, debug
from ..meta import moe as specs
from ..meta.remembered import remembered
from ..meta.specs import TensorSpec
from . import permutation  # noqa: F401 (ops that the second order is made of)
from ._library import Formula, autocast_operand, define, unobserved
from .grouped_activation import SCHEMA, Params
from .grouped_mlp import composed_gradients

NAME, BACKWARD = "moe", "moe_backward"

_PLACES = {"source": "tokens", "position": "tokens", "token": "tokens", "weights": "tokens"}
_checked = remembered(specs.moe, {"x": "rows", **_PLACES})
_checked_backward = remembered(specs.moe_backward, {"dy": "rows", "x": "rows", "h": "tokens", **_PLACES})

# --- kernels ----------------------------------------------------------------------------------------------------------


def _kernel(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    source: Tensor,
    position: Tensor,
    token: Tensor,
    offs: Tensor,
    weights: Tensor | None = None,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    *,
    top_k: int,
    **params: Any,
) -> tuple[Tensor, Tensor]:
    parsed = Params(**params)
    operands: list[Any] = [x, w1, w2, source, position, token, offs, weights, bias1, bias2]
    y, h = _checked(*operands, top_k=top_k, kind=parsed.kind)
    _check_values(NAME, operands[3:7], top_k)
    made = backends.produce(NAME, x.device, {"y": y, "h": h}, operands, params=parsed, top_k=top_k)
    return made["y"], made["h"]


def _check_values(op: str, places: Sequence[Tensor], top_k: int) -> None:
    source, position, token, offs = places
    debug.check_offs(op, offs, token.shape[0])
    debug.check_places(op, token, position, top_k)
    debug.check_places(op, source, position, 1, "source")


def _kernel_backward(
    dy: Tensor,
    x: Tensor | None,
    w1: Tensor,
    w2: Tensor,
    source: Tensor,
    position: Tensor,
    token: Tensor,
    offs: Tensor,
    h: Tensor,
    weights: Tensor | None = None,
    bias2: Tensor | None = None,
    *,
    top_k: int,
    output_mask: Sequence[bool],
    **params: Any,
) -> tuple[Tensor, ...]:
    return _gradients([dy, x, w1, w2, source, position, token, offs, h, weights, bias2], top_k, output_mask, params)


_GRADIENTS = ("dx", "dw1", "dw2", "dweights", "dbias1", "dbias2")


def _gradients(operands: list, top_k: int, mask: Sequence[bool], params: dict[str, Any]) -> tuple[Tensor, ...]:
    """The backward's results; ``operands`` may be empty afterwards."""
    parsed, device = Params(**params), operands[0].device
    made = _checked_backward(*operands, top_k=top_k, output_mask=tuple(mask), kind=parsed.kind)
    _check_values(BACKWARD, operands[4:8], top_k)
    grads = backends.produce(BACKWARD, device, _wanted(made, mask), operands, params=parsed, top_k=top_k)
    return tuple(spec.empty() if grads[name] is None else grads[name] for name, spec in zip(_GRADIENTS, made))


def _wanted(made: Sequence[TensorSpec], mask: Sequence[bool]) -> dict[str, TensorSpec | None]:
    return {name: spec if want else None for name, spec, want in zip(_GRADIENTS, made, mask)}


# --- autograd ---------------------------------------------------------------------------------------------------------


def _save(
    ctx: Any,
    needs: tuple[bool, ...],
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    source: Tensor,
    position: Tensor,
    token: Tensor,
    offs: Tensor,
    weights: Tensor | None,
    bias1: Tensor | None,
    bias2: Tensor | None,
    *,
    output: tuple[Tensor, Tensor],
    top_k: int,
    **params: Any,
) -> None:
    places = source, position, token, offs
    ctx.save_for_backward(x if needs[1] else None, w1, w2, *places, output[1], weights, bias2)
    ctx.set_materialize_grads(False)  # nobody but a second backward has a gradient of h
    ctx.top_k, ctx.params = top_k, params
    ctx.bias_dtypes = [None if bias is None else bias.dtype for bias in (bias1, bias2)]


def _backward(ctx: Any, needs: tuple[bool, ...], dy: Tensor | None, dh: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradient of the tokens' results goes to the rows, through ``grouped_mlp``'s backward, and is summed.

    As one op; where a second order may follow, or comes, as the differentiable ones that it is made of.
    """
    mask = [needs[i] for i in (0, 1, 2, 7, 8, 9)]
    if dy is None or dh is not None or torch.is_grad_enabled():
        grads = _composed(ctx, mask, dy, dh)
    elif unobserved(dy):
        # Past the dispatcher, which would hold all operands to the end.
        operands = [dy, *ctx.saved_tensors]
        ctx.maybe_clear_saved_tensors()
        grads = _gradients(operands, ctx.top_k, mask, ctx.params)
    else:
        grads = _op_backward(dy, *ctx.saved_tensors, top_k=ctx.top_k, output_mask=mask, **ctx.params)
    dx, dw1, dw2, dweights, dbias1, dbias2 = (g if want else None for g, want in zip(grads, mask))
    biases = (None if g is None else g.to(t) for g, t in zip((dbias1, dbias2), ctx.bias_dtypes))
    return dx, dw1, dw2, None, None, None, None, dweights, *biases


def _composed(ctx: Any, mask: Sequence[bool], dy: Tensor | None, dh: Tensor | None) -> tuple[Tensor | None, ...]:
    """Differentiable in the saved tensors, ``h`` (an output of this very node) among them."""
    x, w1, w2, source, position, token, offs, h, weights, bias2 = ctx.saved_tensors
    ops, places = torch.ops.tgl, (token, position, ctx.top_k)
    rows = ops.dispatch(x, *places) if mask[1] else None
    answers = None if dy is None else ops.dispatch(dy, *places)
    probs = None if weights is None else ops.dispatch(weights.reshape(-1), source, position, 1)
    saved = rows, w1, w2, offs, h, None, probs, bias2
    dx, dw1, dw2, dprobs, *biases = composed_gradients(saved, mask, answers, dh, None, ctx.params)
    dx = None if dx is None else ops.combine(dx, *places)
    dweights = None if dprobs is None else ops.combine(dprobs, source, position, 1).view(weights.shape)
    return dx, dw1, dw2, dweights, *biases


def _autocast(
    dtype: torch.dtype,
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    source: Tensor,
    position: Tensor,
    token: Tensor,
    offs: Tensor,
    weights: Tensor | None = None,
    *biases: Tensor | None,
    **kwargs: Any,
) -> tuple[tuple, dict]:
    """Operands and biases in the autocast dtype; ``weights`` keep their own."""
    x, w1, w2 = (autocast_operand(dtype, t) for t in (x, w1, w2))
    if weights is not None and weights.dtype not in (x.dtype, torch.float32):
        weights = weights.float()
    cast = (None if b is None else autocast_operand(dtype, b) for b in biases)
    return (x, w1, w2, source, position, token, offs, weights, *cast), kwargs


# --- registration -----------------------------------------------------------------------------------------------------

_SCHEMA_PLACES = "Tensor source, Tensor position, Tensor token, Tensor offs"
define(
    f"{NAME}(Tensor x, Tensor w1, Tensor w2, {_SCHEMA_PLACES}, Tensor? weights=None, Tensor? bias1=None, "
    f"Tensor? bias2=None, *, SymInt top_k, {SCHEMA}) -> (Tensor y, Tensor h)",
    _kernel,
    lambda *args, top_k, kind="swiglu", **_: tuple(spec.empty() for spec in specs.moe(*args, top_k=top_k, kind=kind)),
    formula=Formula(_save, _backward),
    autocast=_autocast,
)
_op_backward = define(
    f"{BACKWARD}(Tensor dy, Tensor? x, Tensor w1, Tensor w2, {_SCHEMA_PLACES}, Tensor h, Tensor? weights=None, "
    f"Tensor? bias2=None, *, SymInt top_k, bool[] output_mask, {SCHEMA}) -> "
    "(Tensor dx, Tensor dw1, Tensor dw2, Tensor dweights, Tensor dbias1, Tensor dbias2)",
    _kernel_backward,
    lambda *args, top_k, output_mask, kind="swiglu", **_: tuple(
        spec.empty() for spec in specs.moe_backward(*args, top_k=top_k, output_mask=output_mask, kind=kind)
    ),
    no_derivative="the backward of tgl::moe is differentiable under create_graph=True",
)


def _call(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    source: Tensor,
    position: Tensor,
    token: Tensor,
    offs: Tensor,
    weights: Tensor | None = None,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    *,
    top_k: int,
    **params: Any,
) -> tuple[torch.device, tuple, dict[str, Any]]:
    parsed, operands = Params(**params), (x, w1, w2, source, position, token, offs, weights, bias1, bias2)
    y, h = specs.moe(*operands, top_k=top_k, kind=parsed.kind)
    return x.device, operands, {"params": parsed, "top_k": top_k, "y": y.meta(), "h": h.meta()}


def _call_backward(
    dy: Tensor,
    x: Tensor | None,
    w1: Tensor,
    w2: Tensor,
    source: Tensor,
    position: Tensor,
    token: Tensor,
    offs: Tensor,
    h: Tensor,
    weights: Tensor | None = None,
    bias2: Tensor | None = None,
    *,
    top_k: int,
    output_mask: Sequence[bool],
    **params: Any,
) -> tuple[torch.device, tuple, dict[str, Any]]:
    parsed, operands = Params(**params), (dy, x, w1, w2, source, position, token, offs, h, weights, bias2)
    made = specs.moe_backward(*operands, top_k=top_k, output_mask=output_mask, kind=parsed.kind)
    destinations = {name: spec and spec.meta() for name, spec in _wanted(made, output_mask).items()}
    return dy.device, operands, {"params": parsed, "top_k": top_k, **destinations}


backends.describe_op(NAME, _call)
backends.describe_op(BACKWARD, _call_backward)
