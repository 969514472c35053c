"""The autograd function of ``GroupedLinear``, for everything that the plain op's own formula does not do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops import allocate_wgrad, grouped_dbias_dscales
from ._gemms import Gemms, Operand, Operands
from ._saving import restore, save

Stash = Callable[[Operand, Operand, Tensor, Tensor | None], None]


class Call(NamedTuple):
    """What one call of a layer is made of, apart from the tensors it is differentiated by.

    Attributes:
        gemms: the GEMMs to use.
        offs: int32 ``[G]`` cumulative ends.
        weight: the prepared weight; never offloaded.
        bias: ``[G, N]`` or None.
        discrete: whether every group has a weight (and a bias) parameter of its own.
        out: buffer ``[T, N]`` of the result, or None.
        dgrad_out: buffer ``[T, K]`` of the input gradient, or None.
        main_grad: ``[G, N, K]`` that takes the weight gradient, or None.
        overwrite_main_grad: replace what ``main_grad`` holds instead of adding to it.
        stash: takes ``(x, dy, offs, dbias)`` in the backward instead of the weight and bias gradients being formed.
        save_original_input: keep the input itself for the backward and prepare it again there.
    """

    gemms: Gemms
    offs: Tensor
    weight: Operands
    bias: Tensor | None = None
    discrete: bool = False
    out: Tensor | None = None
    dgrad_out: Tensor | None = None
    main_grad: Tensor | None = None
    overwrite_main_grad: bool = False
    stash: Stash | None = None
    save_original_input: bool = False


class LinearFunction(torch.autograd.Function):
    """``apply(call, x, bias_scale, num_weights, *parameters)``, the parameters being the weights, then the biases.

    Buffers that the backward writes are attributes of ``ctx``: saved tensors must not change in between, these must.
    """

    @staticmethod
    def forward(
        ctx: Any, call: Call, x: Tensor, bias_scale: Tensor | None, num_weights: int, *parameters: Tensor
    ) -> Tensor:
        gemms, offs = call.gemms, call.offs
        needs_wgrad = any(ctx.needs_input_grad[4 : 4 + num_weights])
        prepared = gemms.input(x, offs, fprop=True, wgrad=needs_wgrad and not call.save_original_input)
        y = gemms.fprop(
            prepared.fprop, call.weight.fprop, offs, call.bias, bias_scale, dtype=x.dtype, out=call.out
        )
        if not needs_wgrad:
            kept: Operand = ()
        else:
            kept = (x,) if call.save_original_input else prepared.wgrad
        save(ctx, kept, (offs, call.bias, bias_scale, *call.weight.dgrad))
        ctx.call = call._replace(offs=None, weight=None, bias=None, out=None)  # what is saved, and what is done
        ctx.num_weights, ctx.needs_wgrad = num_weights, needs_wgrad
        ctx.dtype = x.dtype
        ctx.weight_dtype, ctx.bias_dtype = parameters[0].dtype, parameters[-1].dtype
        ctx.weight_shape = tuple(parameters[0].shape[-2:])
        ctx.scale_dtype = bias_scale.dtype if bias_scale is not None else None
        return y if call.out is None else y.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept, (offs, bias, bias_scale, *weight) = restore(ctx)
        call, gemms = ctx.call, ctx.call.gemms
        needs_dgrad, needs_dscale = ctx.needs_input_grad[1], ctx.needs_input_grad[2]
        needs_dbias = any(ctx.needs_input_grad[4 + ctx.num_weights :])
        fused = needs_dbias and bias_scale is None
        dy, dbias = gemms.grad(grad, offs, dgrad=needs_dgrad, wgrad=ctx.needs_wgrad, dbias=fused)
        dx = dscale = None
        if needs_dgrad:
            dx = gemms.dgrad(dy.dgrad, tuple(weight), offs, dtype=ctx.dtype, out=call.dgrad_out)
            dx = dx if call.dgrad_out is None else dx.detach()
        if bias_scale is not None and (needs_dbias or needs_dscale):
            dbias, dscale = grouped_dbias_dscales(grad, bias, bias_scale, offs)
            dscale = dscale.to(ctx.scale_dtype)
        x: Operand = kept
        if ctx.needs_wgrad and call.save_original_input:
            x = gemms.input(kept[0], offs, fprop=False, wgrad=True).wgrad
        gradients: tuple[Tensor | None, ...]
        if call.stash is not None:
            call.stash(x, dy.wgrad, offs, dbias if needs_dbias else None)
            gradients = (None,) * len(ctx.needs_input_grad[4:])
        else:
            gradients = _weight_gradients(ctx, x, dy.wgrad, offs)
            if needs_dbias:
                dbias = dbias.to(ctx.bias_dtype)
                gradients += tuple(dbias.unbind()) if call.discrete else (dbias,)
            else:
                gradients += (None,) * (len(ctx.needs_input_grad) - 4 - ctx.num_weights)
        return None, dx, dscale if needs_dscale else None, None, *gradients


def _weight_gradients(ctx: Any, x: Operand, dy: Operand, offs: Tensor) -> tuple[Tensor | None, ...]:
    call, gemms = ctx.call, ctx.call.gemms
    if not ctx.needs_wgrad:
        return (None,) * ctx.num_weights
    if call.main_grad is not None:
        gemms.wgrad_into(x, dy, offs, call.main_grad, overwrite=call.overwrite_main_grad)
        return (None,) * ctx.num_weights
    if not call.discrete:
        return (gemms.wgrad(x, dy, offs, dtype=ctx.weight_dtype),)
    packed = allocate_wgrad(offs.shape[0], ctx.weight_shape, ctx.weight_dtype, offs.device)
    gemms.wgrad_into(x, dy, offs, packed, overwrite=True)
    return packed.unbind()
