"""The autograd function of ``GroupedMLP`` and ``MoE``: both layers and the activation between them, on any GEMMs.

``tgl::grouped_mlp`` and ``tgl::moe`` do the same for dense tensors. This function is for recipes, which quantise
operands between the GEMMs, for gradients that bypass autograd, and for activations that are recomputed or offloaded by
a graph.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..meta.memory import in_lines
from ..ops import grouped_activation, grouped_dbias_dscales, grouped_gemm
from ..ops._engine import compiled_autograd_key, in_dynamo, requested_grads
from ..ops._library import unobserved
from ..ops.after import after
from ._gemms import Destination, Operand
from ._linear_function import Call, of_first_order
from ._saving import bring_back, restore, save
from ._token_permutation import LocalPermutation, TokenPermutation


class Expert(NamedTuple):
    """The non-differentiable arguments of one call of an expert MLP.

    Attributes:
        first, second: the calls of the layers. ``second.save_original_input`` saves only the pre-activation for the
            weight gradient, and recomputes the activation.
        activation: arguments of ``grouped_activation``.
        fuses_product: whether one op makes the product of the first layer and the operand of the second.
        places: token permutation, if input and output are tokens; None if they are rows. With it,
            ``save_original_input`` is true for both calls, because tokens take less memory than operands of rows.
    """

    first: Call
    second: Call
    activation: dict[str, Any]
    fuses_product: bool
    places: TokenPermutation | None = None


class Made(NamedTuple):
    """Results of a forward.

    Attributes:
        y: ``[T, O]``, or ``[S, O]`` of tokens.
        x: the operand of the first weight gradient, if requested; with ``save_original_input`` the input, and the state
            that it was prepared with.
        hidden: ``[T, 2 I]`` or ``[T, I]``, the pre-activation; undefined past ``offs[-1]``.
        act: the operand of the second weight gradient, if requested; with ``save_original_input`` only the state.
    """

    y: Tensor
    x: Operand
    hidden: Tensor
    act: Operand


def forward(
    expert: Expert, offs: Tensor, x: Tensor, probs: Tensor | None, wgrad: tuple[bool, bool] = (False, False)
) -> Made:
    """Run the expert; ``wgrad``: whether to return the operands of each layer's weight gradient.

    Intermediate products are undefined past ``offs[-1]``: the pre-activation, and from tokens to tokens the second
    layer's rows. The same holds in the backward.
    """
    first, second, activation, fuses_product, places = expert
    again1, again2 = wgrad[0] and first.save_original_input, wgrad[1] and second.save_original_input
    state1 = first.gemms.state_of_input() if again1 else ()
    state2 = second.gemms.state_of_input() if again2 else ()
    wgrad1, wgrad2 = wgrad[0] and not again1, wgrad[1] and not again2

    x = x if places is None else places.kept(x)
    wanted: dict[str, Any] = {"fprop": True, "wgrad": wgrad1, "state": state1}
    prepared = first.gemms.input(x, offs, **wanted) if places is None else places.input(x, first.gemms, offs, **wanted)
    operand, x_kept = prepared.fprop, (x, *state1) if again1 else prepared.wgrad
    del x, prepared
    if fuses_product:
        hidden, act = second.gemms.activated_product(  # type: ignore[attr-defined]
            operand,
            first.weight.fprop,
            offs,
            first.bias,
            probs,
            activation,
            out_dtype=first.out_dtype,
            wgrad=wgrad2,
        )
    else:
        inside: Destination = {"out_dtype": first.out_dtype, "out": None, "zero_tail": False}
        hidden = first.gemms.fprop(operand, first.weight.fprop, offs, first.bias, None, inside)
        act = second.gemms.activated_input(hidden, offs, probs, activation, fprop=True, wgrad=wgrad2, state=state2)
    operand, act_kept = act.fprop, state2 if again2 else act.wgrad
    del act
    scale = probs if second.bias is not None else None
    to: Destination = {"out_dtype": second.out_dtype, "out": second.out, "zero_tail": places is None}
    y = second.gemms.fprop(operand, second.weight.fprop, offs, second.bias, scale, to)
    del operand
    y = y if places is None else places.combined(y)
    return Made(y, x_kept, hidden, act_kept)


class ExpertFunction(torch.autograd.Function):
    """``apply(expert, offs, x, probs, *parameters)``: an expert MLP on rows or tokens.

    ``parameters`` are weights, biases and edge of the first layer, then of the second. ``x [T, H]``, or ``[S, H]`` of
    tokens; ``offs`` int32 ``[G]``; ``probs [T]`` or None multiplies the activation and the second bias.
    """

    _compiled_autograd_key = staticmethod(compiled_autograd_key)

    @staticmethod
    def forward(
        ctx: Any, expert: Expert, offs: Tensor, x: Tensor, probs: Tensor | None, *parameters: Tensor
    ) -> Tensor | tuple[Tensor, Tensor]:
        first, second, _, _, places = expert
        needs = ctx.needs_input_grad
        n = 4 + first.gradients.num_weights + first.gradients.num_biases + len(first.gradients.edge)
        needs_first = any(needs[4 : 4 + first.gradients.num_weights])
        needs_second = any(needs[n : n + second.gradients.num_weights])
        made = forward(expert, offs, x, probs, (needs_first, needs_second))
        # One unit per layer: the operands of its weight gradient, with its other activations.
        activated_again = needs_second and second.save_original_input
        second_kept = (made.hidden,) if activated_again or any(needs[2:n]) else ()
        scales = (probs,) if probs is not None else ()
        bias = second.bias if probs is not None else None
        routing = () if places is None else places.tensors
        anchor = None if in_dynamo() else made.y.new_empty(0)  # see ``of_first_order``
        save(
            ctx,
            (made.x, (*made.act, *second_kept, *scales)),
            (offs, bias, *routing, *first.weight.dgrad, *second.weight.dgrad),
            anchor,
        )
        ctx.sizes = len(made.act), len(second_kept), len(routing), len(first.weight.dgrad)
        ctx.dtypes = x.dtype, made.hidden.dtype
        ctx.places = None if places is None else places.bare()
        ctx.expert = expert._replace(first=first.for_backward(), second=second.for_backward(), places=None)
        y = made.y if second.out is None else made.y.detach()
        return y if anchor is None else (y, anchor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor | None = None) -> tuple[Tensor | None, ...]:
        if not in_dynamo() and torch.is_grad_enabled() and _has_second_order(ctx):
            return _differentiable_backward(ctx, in_lines(grad))
        return of_first_order(_backward, ctx, grad)


expert_function = super(torch.autograd.Function, ExpertFunction).apply
"""``ExpertFunction.apply`` without checks for transforms, like ``linear_function``."""


def _has_second_order(ctx: Any) -> bool:
    """Return whether the expert consists only of differentiable ops, and its input was saved."""
    first, second = ctx.expert[:2]
    kept = ctx.units[0][0] == 1 and (ctx.places is None or type(ctx.places) is LocalPermutation)
    return kept and first.dgrad_out is None and first.has_second_order() and second.has_second_order()


def _differentiable_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Return differentiable gradients, by running the expert again from its input and parameters."""
    first, second, activation = ctx.expert[:3]
    requested = requested_grads(ctx)
    ((x,), acts), (offs, _, *kept) = restore(ctx)
    assert offs is not None
    n_act, n_hidden, n_places, _ = ctx.sizes
    probs = acts[n_act + n_hidden] if len(acts) > n_act + n_hidden else None
    routing = None if ctx.places is None else (*kept[:n_places], ctx.places.top_k)
    w1, bias1 = first.gradients.packed(x.dtype)
    w2, bias2 = second.gradients.packed(x.dtype)
    ops = torch.ops.tgl

    rows = x if routing is None else ops.dispatch(x, *routing)
    act = grouped_activation(grouped_gemm(rows, w1.transpose(1, 2), offs, bias1), offs, probs, **activation)
    y = grouped_gemm(act, w2.transpose(1, 2), offs, bias2, probs if bias2 is not None else None)
    y = y if routing is None else ops.combine(y, *routing)

    inputs = (None, None, x, probs, *first.gradients.parameters, *second.gradients.parameters)
    wanted = [t for t, want in zip(inputs, requested) if want]
    gradients = iter(torch.autograd.grad(y, wanted, grad, create_graph=True, allow_unused=True))
    return tuple([next(gradients) if want else None for want in requested])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients: backward of the second layer, the activation, the first layer."""
    _, _, needs_dx, needs_dprobs, *parameters = requested_grads(ctx, returned=True)
    first, second, activation = ctx.expert[:3]
    count1, count2 = first.gradients.num_weights, second.gradients.num_weights
    biases1, biases2 = first.gradients.num_biases, second.gradients.num_biases
    n = count1 + biases1 + len(first.gradients.edge)
    wanted1, wanted2 = tuple(parameters[:n]), tuple(parameters[n:])
    wgrad1, wgrad2 = any(wanted1[:count1]), any(wanted2[:count2])
    dbias1_wanted = any(wanted1[count1 : count1 + biases1])
    dbias2_wanted = any(wanted2[count2 : count2 + biases2])
    into_first = needs_dx or any(wanted1)
    into_hidden = into_first or needs_dprobs

    (x_operand, acts), (offs, bias, *kept) = restore(ctx)
    assert offs is not None
    n_act, n_hidden, n_places, n_weight = ctx.sizes
    places = None if ctx.places is None else ctx.places.with_tensors(*kept[:n_places])
    acts = bring_back(ctx, 1, acts, grad)
    weights1, weights2 = tuple(kept[n_places : n_places + n_weight]), tuple(kept[n_places + n_weight :])
    del kept
    act_operand = acts[:n_act]
    hidden = acts[n_act] if n_hidden else None
    probs = acts[n_act + n_hidden] if len(acts) > n_act + n_hidden else None
    compiling = torch.compiler.is_compiling()
    dx = dprobs = dhidden = None

    gradients1, gradients2 = first.gradients.checked(wanted1), second.gradients.checked(wanted2)
    wanted = {"dgrad": into_hidden, "wgrad": wgrad2, "dbias": dbias2_wanted and (bias is None or probs is None)}
    answers = None  # without a permutation the rows are ``grad``
    if places is None:
        dy, dbias = second.gemms.grad(grad, offs, **wanted)
    else:
        answers = places.answers(grad, second.gemms, read=into_hidden or wgrad2)
        dy, dbias = places.grad(answers, second.gemms, offs, **wanted)
    if into_hidden:
        inside: Destination = {"out_dtype": ctx.dtypes[1], "out": None, "zero_tail": False}
        dact = second.gemms.dgrad(dy.dgrad, weights2, offs, inside)
        dhidden, dprobs = torch.ops.tgl.grouped_activation_backward(dact, hidden, offs, probs, **activation)
        del dact
    if bias is not None and probs is not None and (dbias2_wanted or needs_dprobs):
        rows = grad if places is None or answers is None else places.dense(answers, offs)
        dbias, dscale = grouped_dbias_dscales(rows, bias, probs, offs)
        del rows
        dprobs = dscale if dprobs is None else dprobs + dscale
    del answers
    if wgrad2 and second.save_original_input:
        now = after(offs, grad) if compiling else offs
        act_operand = second.gemms.activated_input(
            hidden, now, probs, activation, fprop=False, wgrad=True, state=act_operand
        ).wgrad
    of_second = gradients2.form(second.gemms, act_operand, dy.wgrad, offs, dbias, wanted2, grad)
    dprobs = dprobs.to(probs.dtype) if probs is not None and dprobs is not None else None
    if not into_first:
        return None, None, None, dprobs, *((None,) * n), *of_second

    # Free the tensors of the second layer before the first layer allocates.
    if not compiling and unobserved(grad):
        ctx.maybe_clear_saved_tensors()
    del hidden, acts, act_operand, dy, dbias, weights2
    assert dhidden is not None
    last = dhidden
    x_operand = bring_back(ctx, 0, x_operand, dhidden)
    dy, dbias = first.gemms.grad(dhidden, offs, dgrad=needs_dx, wgrad=wgrad1, dbias=dbias1_wanted)
    if needs_dx:
        to: Destination = {"out_dtype": ctx.dtypes[0], "out": first.dgrad_out, "zero_tail": places is None}
        dx = first.gemms.dgrad(dy.dgrad, weights1, offs, to)
        if places is not None:
            last = dx = places.combined(dx)
        if first.dgrad_out is not None:
            dx = dx.detach()
    if wgrad1 and first.save_original_input:
        x, *state = x_operand
        now, wanted = after(offs, dhidden) if compiling else offs, {"fprop": False, "wgrad": True}
        if places is None:
            x_operand = first.gemms.input(x, now, state=tuple(state), **wanted).wgrad
        else:
            places = places.after(last) if compiling else places
            x_operand = places.input(x, first.gemms, now, state=tuple(state), **wanted).wgrad
            last = x_operand[0]
    if compiling and places is not None and dprobs is not None:
        dprobs = places.ordered(dprobs, last)
    of_first = gradients1.form(first.gemms, x_operand, dy.wgrad, offs, dbias, wanted1, dhidden)
    return None, None, dx, dprobs, *of_first, *of_second
