"""``tgl::moe``: the Mixture-of-Experts block from tokens to tokens, as one op forward and two backward.

``tgl.moe`` passes it the fields of a ``tgl.Routing``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import backends, debug
from ..meta import moe as specs
from ..meta.remembered import remembered
from . import permutation  # noqa: F401 (ops that the second order is made of)
from ._define import Casts, define
from ._library import DIRECT, Formula, unobserved
from ._output_mask import Gradients, requested, results
from .grouped_activation import FLOATS, SCHEMA, Params
from .grouped_mlp import composed_gradients

NAME, HIDDEN, INPUT = "moe", "moe_backward_hidden", "moe_backward_input"

_PLACES = {"source": "tokens", "position": "tokens", "token": "tokens", "weights": "tokens"}

# --- kernels ----------------------------------------------------------------------------------------------------------


def _options(
    *,
    out_dtype: torch.dtype | None = None,
    compute_h: bool = True,
    top_k: int,
    expected_rows: int | None = None,
    **params: Any,
) -> tuple[dict[str, Any], dict[str, Any]]:
    parsed, hint = Params(**params), {} if expected_rows is None else {backends.HINT: expected_rows}
    rule = {"top_k": top_k, "kind": parsed.kind, "out_dtype": out_dtype, "compute_h": compute_h, **hint}
    return rule, {"params": parsed, "top_k": top_k, **hint}


def _options_hidden(
    *, top_k: int, output_mask: Sequence[bool], expected_rows: int | None = None, **params: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    parsed, hint = Params(**params), {} if expected_rows is None else {backends.HINT: expected_rows}
    rule = {"top_k": top_k, "output_mask": tuple(output_mask), "kind": parsed.kind, **hint}
    return rule, {"params": parsed, "top_k": top_k, **hint}


def _options_input(
    *,
    top_k: int,
    output_mask: Sequence[bool],
    out_dtype: torch.dtype | None = None,
    expected_rows: int | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    hint = {} if expected_rows is None else {backends.HINT: expected_rows}
    rule = {"top_k": top_k, "output_mask": tuple(output_mask), "out_dtype": out_dtype, **hint}
    return rule, {"top_k": top_k, **hint}


_checked = remembered(specs.moe, {"x": "rows", **_PLACES}, split=_options, floats=FLOATS, op=NAME)
_checked_hidden = remembered(
    specs.moe_backward_hidden,
    {"dy": "rows", "h": "tokens", **_PLACES},
    split=_options_hidden,
    floats=FLOATS,
    op=HIDDEN,
)
_checked_input = remembered(
    specs.moe_backward_input, {"dh": "rows", "x": "tokens", **_PLACES}, split=_options_input, op=INPUT
)


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
    compute_h: bool = True,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    operands: list[Any] = [x, w1, w2, source, position, token, offs, weights, bias1, bias2]
    (y, h), given, kept = _checked(*operands, compute_h=compute_h, **options)
    if debug.active:
        _check_values(NAME, operands[3:7], options["top_k"])
    wanted = {"y": y, "h": h if compute_h else None}
    made = backends.produce(NAME, x.device, wanted, operands, given, kept)
    return made["y"], made["h"] if compute_h else h.empty()


def _check_values(op: str, places: Sequence[Tensor], top_k: int) -> None:
    source, position, token, offs = places
    debug.check_offs(op, offs, token.shape[0])
    debug.check_places(op, token, position, top_k)
    debug.check_places(op, source, position, 1, "source")


def _kernel_hidden(
    dy: Tensor,
    w2: Tensor,
    source: Tensor,
    position: Tensor,
    token: Tensor,
    offs: Tensor,
    h: Tensor,
    *scales: Tensor | None,
    **options: Any,
) -> tuple[Tensor, ...]:
    weights, bias2 = (*scales, None, None)[:2]  # the dispatcher drops trailing defaults
    return results(
        _OF_HIDDEN, *_hidden_gradients([dy, w2, source, position, token, offs, h, weights, bias2], **options)
    )


def _kernel_input(
    dh: Tensor, x: Tensor | None, w1: Tensor, position: Tensor, token: Tensor, offs: Tensor, **options: Any
) -> tuple[Tensor, ...]:
    return results(_OF_INPUT, *_input_gradients([dh, x, w1, position, token, offs], **options))


_OF_HIDDEN, _OF_INPUT = ("dh", "dw2", "dweights", "dbias2"), ("dx", "dw1", "dbias1")


def _hidden_gradients(operands: list, *, output_mask: Sequence[bool], **options: Any) -> Gradients:
    """Return the gradients of h, w2, weights and bias2; ``operands`` may be empty afterwards."""
    device, mask = operands[0].device, tuple(output_mask)
    made, given, kept = _checked_hidden(*operands, output_mask=mask, **options)
    if debug.active:
        _check_values(HIDDEN, operands[2:6], options["top_k"])
    return backends.produce(HIDDEN, device, requested(_OF_HIDDEN, made, mask), operands, given, kept), made


def _input_gradients(operands: list, *, output_mask: Sequence[bool], **options: Any) -> Gradients:
    """Return the gradients of x, w1 and bias1."""
    device, mask = operands[0].device, tuple(output_mask)
    made, given, kept = _checked_input(*operands, output_mask=mask, **options)
    if debug.active:
        position, token, offs = operands[3:]
        debug.check_offs(INPUT, offs, token.shape[0])
        debug.check_places(INPUT, token, position, options["top_k"])
    return backends.produce(INPUT, device, requested(_OF_INPUT, made, mask), operands, given, kept), made


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
    out_dtype: torch.dtype | None = None,
    compute_h: bool = True,
    expected_rows: int | None = None,
    **params: Any,
) -> None:
    places = source, position, token, offs
    ctx.save_for_backward(x if needs[1] else None, w1, w2, *places, output[1], weights, bias2)
    ctx.set_materialize_grads(False)  # only a second backward has a gradient of h
    ctx.top_k, ctx.params, ctx.dtype = top_k, params, w2.dtype
    ctx.hint = {} if expected_rows is None else {backends.HINT: expected_rows}
    ctx.bias_dtypes = None if bias1 is None else bias1.dtype, None if bias2 is None else bias2.dtype


def _backward(ctx: Any, needs: tuple[bool, ...], dy: Tensor | None, dh: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients: dispatch dy to the rows, run ``grouped_mlp``'s backward, and combine dx.

    As two ops; if a second derivative may follow, or is being computed, as differentiable ops instead.
    """
    mask = [*needs[:3], *needs[7:]]
    dy = None if dy is None else dy.to(ctx.dtype)
    if dy is None or dh is not None or torch.is_grad_enabled():
        grads = _composed(ctx, mask, dy, dh)
    else:
        grads = _by_two_ops(ctx, mask, dy)
    dx, dw1, dw2, dweights, *biases = [g if want else None for g, want in zip(grads, mask)]
    dbias1, dbias2 = [g if g is None else g.to(t) for g, t in zip(biases, ctx.bias_dtypes)]
    return dx, dw1, dw2, None, None, None, None, dweights, dbias1, dbias2


def _by_two_ops(ctx: Any, mask: Sequence[bool], dy: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients by two ops, only the first of which reads ``h``.

    A graph holds the operands of an op to its end: one op would hold ``h`` together with the gradients of x and w1. In
    eager mode without the dispatcher, ``h`` is freed inside the first op.
    """
    plain = unobserved(dy)
    of_x, of_w1, of_w2, of_weights, of_bias1, of_bias2 = mask
    further = of_x or of_w1 or of_bias1
    x, w1, w2, source, position, token, offs, h, weights, bias2 = ctx.saved_tensors
    if plain:
        ctx.maybe_clear_saved_tensors()
    operands = [dy, w2, source, position, token, offs, h, weights, bias2]
    del h
    options = {"top_k": ctx.top_k, **ctx.hint}
    given: dict[str, Any] = {**options, "output_mask": [further, of_w2, of_weights, of_bias2], **ctx.params}
    if plain:
        dh, dw2, dweights, dbias2 = map(_hidden_gradients(operands, **given)[0].get, _OF_HIDDEN)
    else:
        dh, dw2, dweights, dbias2 = _op_hidden(*operands, **given)
    if not further:
        return None, None, dw2, dweights, None, dbias2
    operands = [dh, x, w1, position, token, offs]
    given = {**options, "output_mask": [of_x, of_w1, of_bias1]}
    if plain:
        dx, dw1, dbias1 = map(_input_gradients(operands, **given)[0].get, _OF_INPUT)
    else:
        dx, dw1, dbias1 = _op_input(*operands, **given)
    return dx, dw1, dw2, dweights, dbias1, dbias2


def _composed(ctx: Any, mask: Sequence[bool], dy: Tensor | None, dh: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return gradients that are differentiable in the saved tensors, including the node's own output ``h``."""
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


# --- registration -----------------------------------------------------------------------------------------------------

_SCHEMA_PLACES = "Tensor source, Tensor position, Tensor token, Tensor offs"
_op = define(
    f"{NAME}(Tensor x, Tensor w1, Tensor w2, {_SCHEMA_PLACES}, Tensor? weights=None, Tensor? bias1=None, "
    f"Tensor? bias2=None, *, SymInt top_k, {SCHEMA}, ScalarType? out_dtype=None, bool compute_h=True, "
    "SymInt? expected_rows=None) -> (Tensor y, Tensor h)",
    specs.moe,
    options=_options,
    kernel=_kernel,
    formula=Formula(_save, _backward, only_with="compute_h"),
    autocast=Casts(("x", "w1", "w2", "bias1", "bias2"), "weights"),
)
moe = DIRECT[_op]
_NO_DERIVATIVE = "the backward of tgl::moe is differentiable under create_graph=True"
_op_hidden = define(
    f"{HIDDEN}(Tensor dy, Tensor w2, {_SCHEMA_PLACES}, Tensor h, Tensor? weights=None, Tensor? bias2=None, *, "
    f"SymInt top_k, bool[] output_mask, {SCHEMA}, SymInt? expected_rows=None) -> "
    "(Tensor dh, Tensor dw2, Tensor dweights, Tensor dbias2)",
    specs.moe_backward_hidden,
    options=_options_hidden,
    kernel=_kernel_hidden,
    no_derivative=_NO_DERIVATIVE,
)
_op_input = define(
    f"{INPUT}(Tensor dh, Tensor? x, Tensor w1, Tensor position, Tensor token, Tensor offs, *, SymInt top_k, "
    "bool[] output_mask, ScalarType? out_dtype=None, SymInt? expected_rows=None) -> "
    "(Tensor dx, Tensor dw1, Tensor dbias1)",
    specs.moe_backward_input,
    options=_options_input,
    kernel=_kernel_input,
    no_derivative=_NO_DERIVATIVE,
)
