"""The autograd function of ``GroupedLinear``, for everything that the plain op's own formula does not do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops import grouped_dbias_dscales
from ..ops.after import after
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
        scaled_by_probs: whether ``probs`` multiplies the bias as well; then there is no ``bias_scale``.
        out: buffer ``[T, N]`` of the result, or None.
        dgrad_out: buffer ``[T, K]`` of the input gradient, or None.
        main_grad: ``[G, N, K]`` that takes the weight gradient, or None.
        overwrite_main_grad: replace what ``main_grad`` holds instead of adding to it.
        stash: takes ``(x, dy, offs, dbias)`` in the backward instead of the weight and bias gradients being formed.
        save_original_input: keep the input itself for the backward and prepare (and activate) it again there.
        prepared: the input prepared for the forward, if it is already.
        made: what ``fprop`` returns, if something else has made it.
    """

    gemms: Gemms
    offs: Tensor
    weight: Operands
    bias: Tensor | None
    out_dtype: torch.dtype
    discrete: bool = False
    activation: dict[str, Any] | None = None
    scaled_by_probs: bool = False
    out: Tensor | None = None
    dgrad_out: Tensor | None = None
    main_grad: Tensor | None = None
    overwrite_main_grad: bool = False
    stash: Stash | None = None
    save_original_input: bool = False
    prepared: Operands | None = None
    made: tuple[Tensor, Operand] | None = None

    def input(self, x: Tensor, offs: Tensor, probs: Tensor | None, *, fprop: bool, wgrad: bool) -> Operands:
        """The layer's input, prepared."""
        if self.activation is None:
            return self.gemms.input(x, offs, fprop=fprop, wgrad=wgrad)
        return self.gemms.activated_input(x, offs, probs, self.activation, fprop=fprop, wgrad=wgrad)


def fprop(
    call: Call, x: Tensor, probs: Tensor | None, bias_scale: Tensor | None, *, wgrad: bool = False
) -> tuple[Tensor, Operand]:
    """The result ``[T, N]``, and what the weight gradient will read if ``wgrad``."""
    if call.made is not None:
        return call.made
    prepared = call.prepared
    if prepared is None:
        prepared = call.input(x, call.offs, probs, fprop=True, wgrad=wgrad)
    scale = probs if call.scaled_by_probs else bias_scale
    y = call.gemms.fprop(
        prepared.fprop, call.weight.fprop, call.offs, call.bias, scale, out_dtype=call.out_dtype, out=call.out
    )
    return y, prepared.wgrad


class LinearFunction(torch.autograd.Function):
    """``apply(call, num_weights, x, probs, bias_scale, *parameters)``: the weights, then the biases.

    ``x [T, K]``; with an activation ``x`` is what goes into it and ``probs [T]`` multiplies what comes out. Buffers
    that the backward writes are attributes of ``ctx``: saved tensors must not change in between, these must.
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
        y, wgrad_operand = fprop(call, x, probs, bias_scale, wgrad=ctx.needs_wgrad and not again)
        kept = {}
        if (again and ctx.needs_wgrad) or (call.activation is not None and ctx.needs_dgrad):
            kept["x"] = x
        if probs is not None:
            kept["probs"] = probs
        if bias_scale is not None:
            kept["bias_scale"] = bias_scale
        bias = call.bias if bias_scale is not None or call.scaled_by_probs else None
        save(ctx, (*wgrad_operand, *kept.values()), (call.offs, bias, *call.weight.dgrad))
        ctx.kept = tuple(kept)
        ctx.call = call._replace(
            offs=None,  # type: ignore[arg-type]
            weight=None,  # type: ignore[arg-type]
            bias=None,
            out=None,
            prepared=None,
            made=None,
        )
        ctx.num_weights, ctx.num_biases = num_weights, len(parameters) - num_weights
        ctx.dtypes = x.dtype, parameters[0].dtype, parameters[-1].dtype
        return y if call.out is None and call.made is None else y.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        call, gemms = ctx.call, ctx.call.gemms
        activations, (offs, bias, *weight) = restore(ctx, grad)
        assert offs is not None
        count = len(activations) - len(ctx.kept)
        wgrad_operand, kept = activations[:count], dict(zip(ctx.kept, activations[count:]))
        probs, bias_scale = kept.get("probs"), kept.get("bias_scale")
        scale = probs if call.scaled_by_probs else bias_scale
        needs_dscale = ctx.needs_input_grad[3 if call.scaled_by_probs else 4]
        dx = dprobs = dscale = None

        dy, dbias = gemms.grad(
            grad, offs, dgrad=ctx.needs_dgrad, wgrad=ctx.needs_wgrad, dbias=ctx.needs_dbias and scale is None
        )
        if ctx.needs_dgrad:
            dx = gemms.dgrad(dy.dgrad, tuple(weight), offs, out_dtype=ctx.dtypes[0], out=call.dgrad_out)
            if call.activation is not None:
                dx, dprobs = torch.ops.tgl.grouped_activation_backward(dx, kept["x"], offs, probs, **call.activation)
            elif call.dgrad_out is not None:
                dx = dx.detach()
        if scale is not None and (ctx.needs_dbias or needs_dscale):
            assert bias is not None
            dbias, dscale = grouped_dbias_dscales(grad, bias, scale, offs)
            if call.scaled_by_probs:
                dprobs, dscale = dscale if dprobs is None else dprobs + dscale, None
        if ctx.needs_wgrad and call.save_original_input:
            now = after(offs, grad) if torch.compiler.is_compiling() else offs
            wgrad_operand = call.input(kept["x"], now, probs, fprop=False, wgrad=True).wgrad

        dprobs = dprobs.to(probs.dtype) if dprobs is not None and probs is not None else None
        dscale = dscale.to(bias_scale.dtype) if dscale is not None and bias_scale is not None else None
        if not ctx.needs_dbias:
            dbias = None
        if call.stash is not None and ctx.needs_wgrad:
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
