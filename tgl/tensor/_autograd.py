"""Straight-through estimator: gradients pass a quantisation unchanged.

The gradient of a GroupedTensor is a dense tensor with zeros in the rows past ``offs[-1]``: every op that reads a
GroupedTensor returns such a gradient, except ``copy_`` into a dense tensor, whose derivative is torch's own. So
``Wrap`` can pass the gradient on without an op. It must do so, because Dynamo traces a backward with a gradient of the
output's type, on which no op is defined.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import _structure

if TYPE_CHECKING:
    from .grouped_tensor import GroupedTensor, Shapes, Static


def wrap(
    x: Tensor, format: str, static: Static, shapes: Shapes | None, names: tuple[str, ...], parts: Sequence[Tensor]
) -> GroupedTensor:
    """Wrap ``parts``, the components ``names`` of ``x``, as one tensor whose gradient goes to ``x``."""
    if x.requires_grad and torch.is_grad_enabled():
        return Wrap.apply(x, format, static, shapes, names, *parts)
    return _structure.CLASSES[format](x.shape, x.dtype, static, dict(zip(names, parts)), shapes)


class Wrap(torch.autograd.Function):
    """Wrap components as one tensor, whose gradient is passed to the ``x`` they were made from."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        format: str,
        static: Static,
        shapes: Shapes | None,
        names: tuple[str, ...],
        *parts: Tensor,
    ) -> GroupedTensor:
        return _structure.CLASSES[format](x.shape, x.dtype, static, dict(zip(names, parts)), shapes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, *(None,) * (len(ctx.needs_input_grad) - 1)


class RowScale(torch.autograd.Function):
    """Carries the derivative of ``x * row_scale[:, None]``; the product itself is formed where ``x`` is quantised."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, row_scale: Tensor, offs: Tensor) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, row_scale, offs)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, row_scale, offs = ctx.saved_tensors
        dx = dscale = None
        if ctx.needs_input_grad[0]:
            dx = _structure.zero_tail(grad * row_scale.to(grad.dtype)[:, None], offs)
        if ctx.needs_input_grad[1]:
            dot = torch.linalg.vecdot(grad.float(), x.float())
            dscale = _structure.zero_tail(dot[:, None], offs)[:, 0].to(row_scale.dtype)
        return dx, dscale, None


class Dequantize(torch.autograd.Function):
    """Return the values of a GroupedTensor; the gradient is zero in the tail."""

    @staticmethod
    def forward(ctx: Any, t: GroupedTensor, dtype: torch.dtype, columnwise: bool | None) -> Tensor:
        ctx.save_for_backward(t.offs)
        ctx.dtype = t.dtype
        return t._read(dtype, columnwise)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (offs,) = ctx.saved_tensors
        grad = grad.to(ctx.dtype)
        return grad if offs is None else _structure.zero_tail(grad, offs), None, None
