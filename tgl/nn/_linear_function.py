"""The autograd function of ``GroupedLinear``, for everything that the plain op's own formula does not do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops import grouped_dbias_dscales
from ._gemms import Gemms, Operand, Operands
from ._saving import restore, save

SLOT_ALIGNMENT = 256  # bytes, of each group's weight gradient when groups have parameters of their own

Stash = Callable[[Operand, Operand, Tensor, Tensor | None], None]


class Call(NamedTuple):
    """What one call of a layer is made of, apart from the tensors it is differentiated by.

    Attributes:
        gemms: the GEMMs to use.
        offs: int32 ``[G]`` cumulative ends.
        weight: the prepared weight; never offloaded.
        bias: ``[G, N]`` or None.
        out_dtype: dtype of the result.
        discrete: whether every group has a weight (and a bias) parameter of its own.
        activation: arguments of ``grouped_activation``, which then comes before the layer; None for none.
        out: buffer ``[T, N]`` of the result, or None.
        dgrad_out: buffer ``[T, K]`` of the input gradient, or None.
        main_grad: ``[G, N, K]`` that takes the weight gradient, or None.
        overwrite_main_grad: replace what ``main_grad`` holds instead of adding to it.
        stash: takes ``(x, dy, offs, dbias)`` in the backward instead of the weight and bias gradients being formed.
        save_original_input: keep the input itself for the backward and prepare (and activate) it again there.
    """

    gemms: Gemms
    offs: Tensor
    weight: Operands
    bias: Tensor | None
    out_dtype: torch.dtype
    discrete: bool = False
    activation: dict[str, Any] | None = None
    out: Tensor | None = None
    dgrad_out: Tensor | None = None
    main_grad: Tensor | None = None
    overwrite_main_grad: bool = False
    stash: Stash | None = None
    save_original_input: bool = False

    def input(self, x: Tensor, offs: Tensor, probs: Tensor | None, *, fprop: bool, wgrad: bool) -> Operands:
        """The layer's input, prepared."""
        if self.activation is None:
            return self.gemms.input(x, offs, fprop=fprop, wgrad=wgrad)
        return self.gemms.activated_input(x, offs, probs, self.activation, fprop=fprop, wgrad=wgrad)


class LinearFunction(torch.autograd.Function):
    """``apply(call, num_weights, x, probs, bias_scale, *parameters)``: the weights, then the biases.

    ``x [T, K]``; with an activation ``x`` is what goes into it and ``probs [T]`` multiplies what comes out. Buffers that
    the backward writes are attributes of ``ctx``: saved tensors must not change in between, these must.
    """

    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        num_weights: int,
        x: Tensor,
        probs: Tensor | None,
        bias_scale: Tensor | None,
        *parameters: Tensor,
    ) -> Tensor:
        needs = ctx.needs_input_grad
        first_bias = 5 + num_weights
        ctx.needs_dgrad = needs[2] or needs[3]
        ctx.needs_wgrad, ctx.needs_dbias = any(needs[5:first_bias]), any(needs[first_bias:])
        again = call.save_original_input
        prepared = call.input(x, call.offs, probs, fprop=True, wgrad=ctx.needs_wgrad and not again)
        y = call.gemms.fprop(
            prepared.fprop, call.weight.fprop, call.offs, call.bias, bias_scale, out_dtype=call.out_dtype, out=call.out
        )
        original: tuple[Tensor, ...] = ()
        if (again and ctx.needs_wgrad) or (call.activation is not None and (ctx.needs_dgrad or ctx.needs_wgrad)):
            original = (x,) if probs is None else (x, probs)
        scale = () if bias_scale is None else (bias_scale,)
        save(ctx, (*prepared.wgrad, *original, *scale), (call.offs, call.bias, *call.weight.dgrad))
        ctx.counts = len(prepared.wgrad), len(original)
        ctx.call = call._replace(offs=None, weight=None, bias=None, out=None)
        ctx.num_weights, ctx.num_biases = num_weights, len(parameters) - num_weights
        ctx.dtypes = x.dtype, parameters[0].dtype, parameters[-1].dtype
        ctx.scale_dtypes = tuple(t.dtype if t is not None else None for t in (probs, bias_scale))
        return y if call.out is None else y.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        call, gemms = ctx.call, ctx.call.gemms
        activations, (offs, bias, *weight) = restore(ctx)
        n_prepared, n_original = ctx.counts
        wgrad_operand, rest = activations[:n_prepared], activations[n_prepared:]
        original, scale = rest[:n_original], rest[n_original:]
        x = original[0] if original else None
        probs = original[1] if len(original) > 1 else None
        dx = dprobs = dscale = None

        dy, dbias = gemms.grad(
            grad, offs, dgrad=ctx.needs_dgrad, wgrad=ctx.needs_wgrad, dbias=ctx.needs_dbias and not scale
        )
        if ctx.needs_dgrad:
            dx = gemms.dgrad(dy.dgrad, tuple(weight), offs, out_dtype=ctx.dtypes[0], out=call.dgrad_out)
            if call.activation is not None:
                dx, dprobs = torch.ops.tgl.grouped_activation_backward(dx, x, offs, probs, **call.activation)
                dprobs = dprobs.to(ctx.scale_dtypes[0]) if probs is not None else None
            elif call.dgrad_out is not None:
                dx = dx.detach()
        if scale and (ctx.needs_dbias or ctx.needs_input_grad[4]):
            dbias, dscale = grouped_dbias_dscales(grad, bias, scale[0], offs)
            dscale = dscale.to(ctx.scale_dtypes[1])
        if ctx.needs_wgrad and call.save_original_input:
            wgrad_operand = call.input(x, offs, probs, fprop=False, wgrad=True).wgrad

        if not ctx.needs_dbias:
            dbias = None
        if call.stash is not None:
            call.stash(wgrad_operand, dy.wgrad, offs, dbias)
            return None, None, dx, dprobs, dscale, *(None,) * (ctx.num_weights + ctx.num_biases)
        dweights = _weight_gradients(ctx, wgrad_operand, dy.wgrad, offs)
        return None, None, dx, dprobs, dscale, *dweights, *_bias_gradients(ctx, dbias)


def _weight_gradients(ctx: Any, x: Operand, dy: Operand, offs: Tensor) -> tuple[Tensor | None, ...]:
    call, gemms = ctx.call, ctx.call.gemms
    if not ctx.needs_wgrad:
        return (None,) * ctx.num_weights
    if call.main_grad is not None:
        gemms.wgrad_into(x, dy, offs, call.main_grad, overwrite=call.overwrite_main_grad)
        return (None,) * ctx.num_weights
    if not call.discrete:
        return (gemms.wgrad(x, dy, offs, out_dtype=ctx.dtypes[1]),)
    # Plain views of one allocation, which the caching allocator and streams know of, as they would not of addresses.
    return gemms.wgrad(x, dy, offs, out_dtype=ctx.dtypes[1], alignment=SLOT_ALIGNMENT).unbind()


def _bias_gradients(ctx: Any, dbias: Tensor | None) -> tuple[Tensor | None, ...]:
    if dbias is None:
        return (None,) * ctx.num_biases
    dbias = dbias.to(ctx.dtypes[2])
    return dbias.unbind() if ctx.call.discrete else (dbias,)
