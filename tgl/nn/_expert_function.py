"""The autograd function of ``GroupedMLP``: both layers and the activation between them, on any GEMMs.

``tgl::grouped_mlp`` is that for tensors as they are. This one is for a recipe, whose operands are quantised between the
GEMMs, and for what is kept in another way: recomputed, or offloaded by a graph.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops import grouped_dbias_dscales
from ..ops._engine import asked_for
from ..ops._library import unobserved
from ..ops.after import after
from ._gemms import Operand
from ._linear_function import Call, of_first_order
from ._saving import bring_back, restore, save


class Expert(NamedTuple):
    """What one call of an expert is made of, apart from the tensors it is differentiated by.

    Attributes:
        first, second: the calls of the layers. ``second.save_original_input`` keeps what goes into the activation alone
            for the weight gradient, and forms the activation again.
        activation: arguments of ``grouped_activation``.
        fuses_product: whether one op makes the product of the first layer and the operand of the second.
    """

    first: Call
    second: Call
    activation: dict[str, Any]
    fuses_product: bool


class Made(NamedTuple):
    """What a forward makes.

    Attributes:
        y: ``[T, O]``.
        x: what the first weight gradient will read, if asked for.
        hidden: ``[T, 2 I]`` or ``[T, I]``, what goes into the activation.
        act: what the second weight gradient will read, if asked for.
    """

    y: Tensor
    x: Operand
    hidden: Tensor
    act: Operand


def forward(
    expert: Expert, offs: Tensor, x: Tensor, probs: Tensor | None, wgrad: tuple[bool, bool] = (False, False)
) -> Made:
    """Run the expert; ``wgrad``: whether the weight gradient of either layer will read what is made here."""
    first, second, activation, fuses_product = expert
    rows = first.gemms.input(x, offs, fprop=True, wgrad=wgrad[0])
    if fuses_product:
        hidden, act = second.gemms.activated_product(  # type: ignore[attr-defined]
            rows.fprop,
            first.weight.fprop,
            offs,
            first.bias,
            probs,
            activation,
            out_dtype=first.out_dtype,
            wgrad=wgrad[1],
        )
    else:
        hidden = first.gemms.fprop(
            rows.fprop, first.weight.fprop, offs, first.bias, None, out_dtype=first.out_dtype, out=None
        )
        act = second.gemms.activated_input(hidden, offs, probs, activation, fprop=True, wgrad=wgrad[1])
    scale = probs if second.bias is not None else None
    y = second.gemms.fprop(
        act.fprop, second.weight.fprop, offs, second.bias, scale, out_dtype=second.out_dtype, out=second.out
    )
    return Made(y, rows.wgrad, hidden, act.wgrad)


class ExpertFunction(torch.autograd.Function):
    """``apply(expert, offs, x, probs, *parameters)``: weights and biases of the first layer, then of the second.

    ``x [T, H]``, ``offs`` int32 ``[G]``; ``probs [T]`` or None multiplies the activation and the second bias.
    """

    @staticmethod
    def forward(ctx: Any, expert: Expert, offs: Tensor, x: Tensor, probs: Tensor | None, *parameters: Tensor) -> Tensor:
        first, second = expert.first, expert.second
        needs = ctx.needs_input_grad
        n = 4 + first.gradients.num_weights + first.gradients.num_biases
        needs_first = any(needs[4 : 4 + first.gradients.num_weights])
        needs_second = any(needs[n : n + second.gradients.num_weights])
        kept_first = needs_first and not first.save_original_input
        kept_second = needs_second and not second.save_original_input
        made = forward(expert, offs, x, probs, (kept_first, kept_second))
        # Of each layer a unit: what its weight gradient reads, and what is kept as it is.
        first_kept = (x,) if needs_first and not kept_first else ()
        activated_again = needs_second and not kept_second
        second_kept = (made.hidden,) if activated_again or any(needs[2:n]) else ()
        scales = (probs,) if probs is not None else ()
        save(
            ctx,
            ((*made.x, *first_kept), (*made.act, *second_kept, *scales)),
            (offs, second.bias if probs is not None else None, *first.weight.dgrad, *second.weight.dgrad),
        )
        ctx.sizes = len(made.x), len(made.act), len(second_kept), len(first.weight.dgrad)
        ctx.dtypes = x.dtype, made.hidden.dtype
        ctx.expert = expert._replace(first=first.for_backward(), second=second.for_backward())
        return made.y if second.out is None else made.y.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return of_first_order(_backward, ctx, grad)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The second layer, the activation, the first layer."""
    first, second, activation, _ = ctx.expert
    _, _, needs_dx, needs_dprobs, *parameters = asked_for(ctx)
    n = first.gradients.num_weights + first.gradients.num_biases
    wanted1, wanted2 = tuple(parameters[:n]), tuple(parameters[n:])
    wgrad1, wgrad2 = any(wanted1[: first.gradients.num_weights]), any(wanted2[: second.gradients.num_weights])
    dbias1_wanted = any(wanted1[first.gradients.num_weights :])
    dbias2_wanted = any(wanted2[second.gradients.num_weights :])
    into_first = needs_dx or any(wanted1)
    into_hidden = into_first or needs_dprobs

    (rows, acts), (offs, bias, *weights) = restore(ctx)
    assert offs is not None
    acts = bring_back(ctx, 1, acts, grad)
    n_x, n_act, n_hidden, n_weight = ctx.sizes
    weights1, weights2 = tuple(weights[:n_weight]), tuple(weights[n_weight:])
    del weights
    act_operand = acts[:n_act]
    hidden = acts[n_act] if n_hidden else None
    probs = acts[n_act + n_hidden] if len(acts) > n_act + n_hidden else None
    compiling = torch.compiler.is_compiling()
    dx = dprobs = dhidden = None

    gradients1, gradients2 = first.gradients.checked(wanted1), second.gradients.checked(wanted2)
    dy, dbias = second.gemms.grad(
        grad, offs, dgrad=into_hidden, wgrad=wgrad2, dbias=dbias2_wanted and (bias is None or probs is None)
    )
    if into_hidden:
        dact = second.gemms.dgrad(dy.dgrad, weights2, offs, out_dtype=ctx.dtypes[1])
        dhidden, dprobs = torch.ops.tgl.grouped_activation_backward(dact, hidden, offs, probs, **activation)
        del dact
    if bias is not None and probs is not None and (dbias2_wanted or needs_dprobs):
        dbias, dscale = grouped_dbias_dscales(grad, bias, probs, offs)
        dprobs = dscale if dprobs is None else dprobs + dscale
    if wgrad2 and second.save_original_input:
        now = after(offs, grad) if compiling else offs
        act_operand = second.gemms.activated_input(hidden, now, probs, activation, fprop=False, wgrad=True).wgrad
    of_second = gradients2.form(second.gemms, act_operand, dy.wgrad, offs, dbias, wanted2, grad)
    dprobs = dprobs.to(probs.dtype) if probs is not None and dprobs is not None else None
    if not into_first:
        return None, None, None, dprobs, *((None,) * n), *of_second

    # What the second layer has read is not needed any more.
    if not compiling and unobserved(grad):
        ctx.maybe_clear_saved_tensors()
    del hidden, acts, act_operand, dy, dbias, weights2
    assert dhidden is not None
    rows = bring_back(ctx, 0, rows, dhidden)
    x_operand = rows[:n_x]
    dy, dbias = first.gemms.grad(dhidden, offs, dgrad=needs_dx, wgrad=wgrad1, dbias=dbias1_wanted)
    if needs_dx:
        dx = first.gemms.dgrad(dy.dgrad, weights1, offs, out_dtype=ctx.dtypes[0], out=first.dgrad_out)
        if first.dgrad_out is not None:
            dx = dx.detach()
    if wgrad1 and first.save_original_input:
        now = after(offs, dhidden) if compiling else offs
        x_operand = first.gemms.input(rows[n_x], now, fprop=False, wgrad=True).wgrad
    of_first = gradients1.form(first.gemms, x_operand, dy.wgrad, offs, dbias, wanted1, dhidden)
    return None, None, dx, dprobs, *of_first, *of_second
