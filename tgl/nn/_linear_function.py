"""The autograd function of ``GroupedLinear``, for all options that the plain op's own formula does not support."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..meta.memory import in_lines
from ..ops import grouped_dbias_dscales
from ..ops._engine import compiled_autograd_key, in_dynamo, requested_grads
from ..ops.after import after
from ._gemms import DenseGemms, Destination, Gemms, Operand, Operands
from ._parameter_gradients import ParameterGradients
from ._saving import bring_back, restore, save
from ._transforms import first_order, inside_of, outside


class Call(NamedTuple):
    """The non-differentiable arguments of one call of a layer.

    Attributes:
        gemms: the GEMMs to use.
        weight: the prepared weight; never offloaded.
        bias: ``[G, N]`` or None.
        out_dtype: dtype of the result.
        gradients: where the gradients of the parameters go.
        out: buffer ``[T, N]`` of the result, or None.
        dgrad_out: buffer ``[T, K]`` of the input gradient, or None.
        save_original_input: keep the input itself for the backward and prepare it again there.
    """

    gemms: Gemms
    weight: Operands
    bias: Tensor | None
    out_dtype: torch.dtype
    gradients: ParameterGradients
    out: Tensor | None = None
    dgrad_out: Tensor | None = None
    save_original_input: bool = False

    def has_second_order(self) -> bool:
        """Return whether the backward consists only of differentiable ops, provided it writes into no buffer."""
        return isinstance(self.gemms, DenseGemms) and self.gradients.main_grad is None and self.gradients.stash is None

    def for_backward(self) -> Call:
        """Return the call without tensors that only the forward reads, or that are saved."""
        return self._replace(weight=None, bias=None, out=None)  # type: ignore[arg-type]


def fprop(
    call: Call, offs: Tensor, x: Tensor, bias_scale: Tensor | None, *, wgrad: bool = False
) -> tuple[Tensor, Operand]:
    """Return the result ``[T, N]``, and the operand to save for the weight gradient if ``wgrad``.

    With ``save_original_input`` that is the input and the state that it was prepared with.
    """
    again = wgrad and call.save_original_input
    state = call.gemms.state_of_input() if again else ()
    prepared = call.gemms.input(x, offs, fprop=True, wgrad=wgrad and not again, state=state)
    to: Destination = {"out_dtype": call.out_dtype, "out": call.out, "zero_tail": True}
    y = call.gemms.fprop(prepared.fprop, call.weight.fprop, offs, call.bias, bias_scale, to)
    return y, (x, *state) if again else prepared.wgrad


class LinearFunction(torch.autograd.Function):
    """``apply(call, offs, x, bias_scale, *parameters)``: one layer.

    ``parameters`` are the weights, the biases and ``call.gradients.edge``; ``x [T, K]``, ``offs`` int32 ``[G]``.
    Buffers that the backward writes are attributes of ``ctx`` instead of saved tensors, which must not be modified.
    """

    _compiled_autograd_key = staticmethod(compiled_autograd_key)

    @staticmethod
    def forward(
        ctx: Any, call: Call, offs: Tensor, x: Tensor, bias_scale: Tensor | None, *parameters: Tensor
    ) -> Tensor | tuple[Tensor, Tensor]:
        needs_wgrad = any(ctx.needs_input_grad[4 : 4 + call.gradients.num_weights])
        y, operand = fprop(call, offs, x, bias_scale, wgrad=needs_wgrad)
        anchor = None if in_dynamo() else y.new_empty(0)  # see ``of_first_order``
        _keep(ctx, call, offs, operand, x, bias_scale, anchor)
        y = y if call.out is None else y.detach()
        return y if anchor is None else (y, anchor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor | None = None) -> tuple[Tensor | None, ...]:
        call = ctx.call
        if not grad.is_contiguous():
            grad = in_lines(grad)
        if in_dynamo() or not torch.is_grad_enabled() or (call.dgrad_out is None and call.has_second_order()):
            return _backward(ctx, grad)
        return of_first_order(_backward, ctx, grad)


linear_function = super(torch.autograd.Function, LinearFunction).apply
"""``LinearFunction.apply`` without its search of every argument for transforms; only outside traces and transforms."""


def result(made: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    """Return the first result of an autograd function, which also returns an anchor in eager mode."""
    return made[0] if isinstance(made, tuple) else made


class TransformedFunction(torch.autograd.Function):
    """``LinearFunction`` under ``torch.func.grad``, with ``(call, made)`` instead of ``call``.

    ``made`` is the result of ``fprop``, which was run outside the transforms.
    """

    @staticmethod
    def forward(
        called: tuple[Call, tuple[Tensor, Operand]],
        offs: Tensor,
        x: Tensor,
        bias_scale: Tensor | None,
        *parameters: Tensor,
    ) -> Tensor:
        return called[1][0].detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        (call, (_, operand)), offs, *ctx.tensors = inputs
        x, bias_scale, *_ = ctx.tensors
        call = call._replace(
            weight=call.weight._replace(dgrad=inside_of_all(call.weight.dgrad)), bias=inside_of(call.bias)
        )
        _keep(ctx, call, inside_of(offs), inside_of_all(operand), inside_of(x), inside_of(bias_scale))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inner = in_lines(inside_of(grad))
        with outside():
            gradients = _backward(ctx, inner)
        return first_order(gradients, (grad, *ctx.tensors)) if torch.is_grad_enabled() else gradients


def inside_of_all(tensors: Any) -> tuple:
    """Return ``inside_of`` of each tensor."""
    return tuple([inside_of(t) for t in tensors])


def of_first_order(backward: Any, ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Return ``backward(ctx, grad)`` with results that raise if they are differentiated; any strides of ``grad``.

    ``torch.autograd.grad`` runs only the nodes between its outputs and its inputs. So the node that raises must lead
    everywhere the node of ``ctx`` leads; it does so through the anchor, an empty result of that node that is saved
    last.
    """
    if not grad.is_contiguous():
        grad = in_lines(grad)
    if in_dynamo() or not torch.is_grad_enabled():
        return backward(ctx, grad)
    anchor = ctx.saved_tensors[-1]
    with torch.no_grad():
        gradients = backward(ctx, grad)
    return first_order(gradients, (grad, anchor))


def _keep(
    ctx: Any,
    call: Call,
    offs: Tensor,
    operand: Operand,
    x: Tensor,
    bias_scale: Tensor | None,
    anchor: Tensor | None = None,
) -> None:
    """Save the tensors and values that the backward reads in ``ctx``."""
    bias = call.bias if bias_scale is not None else None
    scales = (bias_scale,) if bias_scale is not None else ()
    save(ctx, ((*operand, *scales),), (offs, bias, *call.weight.dgrad), anchor)
    ctx.call, ctx.size, ctx.dtype = call.for_backward(), len(operand), x.dtype


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    call, gemms = ctx.call, ctx.call.gemms
    _, _, needs_dgrad, needs_dscale, *parameters = requested_grads(ctx, returned=True)
    wanted, count = tuple(parameters), call.gradients.num_weights
    needs_wgrad, needs_dbias = any(wanted[:count]), any(wanted[count : count + call.gradients.num_biases])
    (unit,), (offs, bias, *weight) = restore(ctx)
    assert offs is not None
    by_parameters = torch.is_grad_enabled() and not in_dynamo()
    if by_parameters and any(p.requires_grad for p in call.gradients.parameters):
        # A second derivative is with respect to the parameters, not the packed tensor that was saved.
        packed_weight, packed_bias = call.gradients.packed(next((w.dtype for w in weight if w is not None), grad.dtype))
        weight, bias = [packed_weight] if weight else [], packed_bias if bias is not None else None
    unit = bring_back(ctx, 0, unit, grad)
    operand, scales = unit[: ctx.size], unit[ctx.size :]
    bias_scale = scales[0] if scales else None
    dx = dscale = None

    gradients = call.gradients.checked(wanted)
    dy, dbias = gemms.grad(grad, offs, dgrad=needs_dgrad, wgrad=needs_wgrad, dbias=needs_dbias and bias_scale is None)
    if needs_dgrad:
        to: Destination = {"out_dtype": ctx.dtype, "out": call.dgrad_out, "zero_tail": True}
        dx = gemms.dgrad(dy.dgrad, tuple(weight), offs, to)
        if call.dgrad_out is not None:
            dx = dx.detach()
    if bias_scale is not None and (needs_dbias or needs_dscale):
        assert bias is not None
        dbias, dscale = grouped_dbias_dscales(grad, bias, bias_scale, offs)
        dscale = dscale.to(bias_scale.dtype)
    if needs_wgrad and call.save_original_input:
        now = after(offs, grad) if torch.compiler.is_compiling() else offs
        operand = gemms.input(operand[0], now, fprop=False, wgrad=True, state=operand[1:]).wgrad
    return None, None, dx, dscale, *gradients.form(gemms, operand, dy.wgrad, offs, dbias, wanted, grad)
