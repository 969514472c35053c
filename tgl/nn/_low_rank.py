"""Low-rank (LoRA) products per group, as separate GEMMs or accumulated in the product with a frozen weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..meta.memory import in_lines
from ..ops._bias import autocast_bias
from ..ops._engine import requested_grads
from ..ops._library import autocast_enabled, autocast_operand
from ..ops._preactivation import backward_may_follow
from ..ops.grouped_activation import Params
from ..ops.grouped_dbias_dscales import grouped_dbias_dscales
from ..ops.grouped_gemm import grouped_gemm
from ..ops.grouped_gemm_low_rank import grouped_gemm_low_rank
from ..ops.grouped_gemm_low_rank_activation import grouped_gemm_low_rank_activation
from ..ops.grouped_gemm_wgrad import grouped_gemm_wgrad
from ._activation import activate, constants
from ._transforms import applier, compiled_for_cpu, is_differentiated


class LowRank(NamedTuple):
    """A low-rank update ``scaling * b[g] a[g]`` of every group's weight.

    Attributes:
        a: ``[G, r, K]``.
        b: ``[G, N, r]``.
        scaling: applied to the product with ``a``, the smallest of the tensors.
    """

    a: Tensor
    b: Tensor
    scaling: float


def add_low_rank(y: Tensor, x: Tensor, update: LowRank, offs: Tensor) -> Tensor:
    """Return ``y[t] + scaling * b[g] a[g] x[t]`` for rows of group ``g``, as two grouped GEMMs and one addition.

    The matrices ``b[g] a[g]`` are never formed. The addition is in place on the second product, so that the call holds
    two tensors of the size of ``y`` instead of three. Autograd saves ``x`` and the ``[T, r]`` between the products
    besides the parameters.

    Args:
        y: ``[T, N]``.
        x: ``[T, K]``; its tail is not read.
        update: dtype of ``x``, or cast by autocast.
        offs: int32 ``[G]``: cumulative group ends.
    """
    hidden = _narrowed(x, update.a, update.scaling, offs)
    return grouped_gemm(hidden, update.b.transpose(1, 2), offs).add_(y)


def product_and_low_rank(
    x: Tensor,
    weight: Tensor,
    update: LowRank,
    offs: Tensor,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
) -> Tensor:
    """Return ``grouped_gemm(x, weight, offs, bias, bias_scale)`` plus the update, as one op if the weight is frozen.

    Forward and input gradient are then ``grouped_gemm_low_rank``, without a second tensor of the size of the result.

    Args:
        x: ``[T, K]``; its tail is not read.
        weight: ``[G, K, N]``.
        update: dtype of ``x``, or cast by autocast.
        offs: int32 ``[G]``: cumulative group ends.
        bias, bias_scale: see ``grouped_gemm``.
    """
    if not _all_frozen(weight, bias):
        return add_low_rank(grouped_gemm(x, weight, offs, bias, bias_scale), x, update, offs)
    tensors = _cast(x, weight, update, bias, bias_scale)
    return _apply(LowRankFunction, _differentiable, (update.scaling, offs, *tensors), tensors)


def activated_product_and_low_rank(
    x: Tensor,
    weight: Tensor,
    update: LowRank,
    offs: Tensor,
    bias: Tensor | None = None,
    probs: Tensor | None = None,
    **activation: Any,
) -> Tensor:
    """Return ``activate`` of ``product_and_low_rank``, as one op if weight and bias are frozen.

    The forward is then ``grouped_gemm_low_rank_activation``. In a graph compiled for a CPU the compiler fuses the
    activation with its neighbours instead.

    Args:
        x, weight, update, offs, bias: see ``product_and_low_rank``.
        probs: ``[T]``, factor of the activation.
        activation: see ``grouped_activation``.
    """
    if compiled_for_cpu(x.device) or not _all_frozen(weight, bias):
        return activate(product_and_low_rank(x, weight, update, offs, bias), offs, probs, **activation)
    tensors = _cast(x, weight, update, bias, probs)
    arguments = (update.scaling, offs, *tensors, *constants(**activation))
    return _apply(ActivatedLowRankFunction, _differentiable_activated, arguments, tensors)


def _all_frozen(weight: Tensor, bias: Tensor | None) -> bool:
    transformed = torch._C._are_functorch_transforms_active()
    return _frozen(weight, transformed) and (bias is None or _frozen(bias, transformed))


def _cast(
    x: Tensor, weight: Tensor, update: LowRank, bias: Tensor | None, scale: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Return ``(x, weight, a, b, bias, scale)``, cast by autocast where it is enabled.

    The cast is here instead of in the ops, because the backward does not run under autocast.
    """
    a, b, _ = update
    if autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight, a, b = (autocast_operand(dtype, t) for t in (x, weight, a, b))
        bias, scale = autocast_bias(dtype, x.dtype, bias, scale)
    return x, weight, a, b, bias, scale


def _apply(function: Any, differentiable: Callable[..., Any], arguments: tuple, tensors: tuple) -> Tensor:
    """Return the first result of ``function``, with an autograd node if a backward may follow."""
    if backward_may_follow(*tensors):
        return differentiable(*arguments)[0]
    return function.forward(*arguments)[0]


def _frozen(t: Tensor, transformed: bool) -> bool:
    """Return whether ``t`` is not differentiated; False where a trace of a transform cannot tell."""
    if t.requires_grad or not transformed:
        return not t.requires_grad
    return not torch.compiler.is_compiling() and not is_differentiated(t)


def _narrowed(x: Tensor, a: Tensor, scaling: float, offs: Tensor) -> Tensor:
    """Return ``scaling * a[g] x[t]``, ``[T, r]``."""
    return _scaled(grouped_gemm(x, a.transpose(1, 2), offs), scaling)


def _scaled(t: Tensor, scaling: float) -> Tensor:
    return t if scaling == 1 else t * scaling


class LowRankFunction(torch.autograd.Function):
    """``apply(scaling, offs, x, weight, a, b, bias, bias_scale)``: the product, and ``scaling * a[g] x[t]``.

    The second is a result so that a double backward can pass a gradient to it.
    """

    @staticmethod
    def forward(scaling: float, offs: Tensor, *tensors: Any) -> tuple[Tensor, Tensor]:
        x, weight, a, b, bias, bias_scale = tensors
        low = _narrowed(x, a, scaling, offs)
        return grouped_gemm_low_rank(x, weight, low, b.transpose(1, 2), offs, bias, bias_scale), low

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        ctx.scaling, offs, x, weight, a, b, bias, bias_scale = inputs
        _, _, needs_x, _, needs_a, needs_b, _, needs_scale = ctx.needs_input_grad
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            x if needs_a else None,
            weight if needs_x else None,
            a if needs_x else None,
            b if needs_x or needs_a else None,
            output[1] if needs_b else None,
            offs,
            bias if needs_scale else None,
            bias_scale if needs_scale else None,
        )

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dlow: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return ``_gradients`` and the gradient of ``bias_scale``."""
        dy, dlow = (None if grad is None else in_lines(grad) for grad in (dy, dlow))
        *kept, offs, bias, bias_scale = ctx.saved_tensors
        _, _, needs_x, _, needs_a, needs_b, _, needs_scale = requested_grads(ctx)
        dx, da, db = _gradients((needs_x, needs_a, needs_b), dy, dlow, kept, offs, ctx.scaling)
        dscale = None
        if needs_scale and dy is not None:
            dscale = grouped_dbias_dscales(dy, bias, bias_scale, offs)[1].to(bias_scale.dtype)
        return None, None, dx, None, da, db, None, dscale


class ActivatedLowRankFunction(torch.autograd.Function):
    """``apply(scaling, offs, x, weight, a, b, bias, probs, *constants)``: activation, pre-activation, low-rank part.

    The pre-activation and ``scaling * a[g] x[t]`` are results so that a double backward can pass gradients to them.
    """

    @staticmethod
    def forward(scaling: float, offs: Tensor, *tensors: Any) -> tuple[Tensor, Tensor, Tensor]:
        x, weight, a, b, bias, probs, *rest = tensors
        low = _narrowed(x, a, scaling, offs)
        y, h = grouped_gemm_low_rank_activation(
            x, weight, low, b.transpose(1, 2), offs, bias, probs, **Params(*rest)._asdict()
        )
        return y, h, low

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
        ctx.scaling, offs, x, weight, a, b, _, probs, *rest = inputs
        _, _, needs_x, _, needs_a, needs_b, *_ = ctx.needs_input_grad
        ctx.activation = Params(*rest)._asdict()
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            x if needs_a else None,
            weight if needs_x else None,
            a if needs_x else None,
            b if needs_x or needs_a else None,
            output[2] if needs_b else None,
            offs,
            probs,
            output[1],
        )

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dh: Tensor | None, dlow: Tensor | None) -> tuple[Tensor | None, ...]:
        """Add the activation backward to dh; return ``_gradients`` of dh and the gradient of ``probs``."""
        dy, dh, dlow = (None if grad is None else in_lines(grad) for grad in (dy, dh, dlow))
        *kept, offs, probs, h = ctx.saved_tensors
        _, _, needs_x, _, needs_a, needs_b, _, needs_probs, *rest = requested_grads(ctx)
        dprobs = None
        if dy is not None:
            through, dprobs = torch.ops.tgl.grouped_activation_backward(dy, h, offs, probs, **ctx.activation)
            dh = through if dh is None else dh + through
            dprobs = dprobs.to(probs.dtype) if needs_probs else None
        dx, da, db = _gradients((needs_x, needs_a, needs_b), dh, dlow, kept, offs, ctx.scaling)
        return None, None, dx, None, da, db, None, dprobs, *(None for _ in rest)


def _gradients(
    needs: tuple[bool, bool, bool],
    dy: Tensor | None,
    dlow: Tensor | None,
    kept: Sequence[Any],
    offs: Tensor,
    scaling: float,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the requested of dx = dy w^T + d a, da = d^T x and db = dy^T low, with ``d = scaling (dy b + dlow)``.

    Args:
        needs: whether dx, da and db are requested.
        kept: x, weight, a, b and low; None for tensors that no requested gradient needs.
    """
    needs_x, needs_a, needs_b = needs
    x, weight, a, b, low = kept
    dx = da = db = None
    narrow = dlow
    if dy is not None and (needs_x or needs_a):
        through = grouped_gemm(dy, b, offs)
        narrow = through if dlow is None else through + dlow
    narrow = None if narrow is None else _scaled(narrow, scaling)
    if needs_b and dy is not None:
        db = grouped_gemm_wgrad(dy, low, offs)
    if needs_a and narrow is not None:
        da = grouped_gemm_wgrad(narrow, x, offs)
    if needs_x and narrow is not None:
        if dy is None:
            dx = grouped_gemm(narrow, a, offs)
        else:
            dx = grouped_gemm_low_rank(dy, weight.transpose(1, 2), narrow, a, offs)
    return dx, da, db


_differentiable = applier(LowRankFunction)
_differentiable_activated = applier(ActivatedLowRankFunction)
