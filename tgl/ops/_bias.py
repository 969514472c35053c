"""Autocast and gradients of the bias of GEMMs, which may be scaled per row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._library import autocast_factor, autocast_operand


def autocast_bias(
    dtype: torch.dtype, rows: torch.dtype, bias: Tensor | None, bias_scale: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Cast the bias to the autocast dtype; ``bias_scale`` (routing probabilities) keeps its own if ``rows`` allows."""
    bias = autocast_operand(dtype, bias) if bias is not None else None
    return bias, autocast_factor(rows, bias_scale) if bias_scale is not None else None


def save_bias_dtypes(ctx: Any, bias: Tensor | None, bias_scale: Tensor | None) -> None:
    """Save the dtypes of the gradients that ``bias_gradients`` returns."""
    ctx.bias_dtype = bias.dtype if bias is not None else None
    ctx.scale_dtype = bias_scale.dtype if bias_scale is not None else None


def bias_gradients(
    ctx: Any,
    needs: tuple[bool, ...],
    dy: Tensor,
    operand: Tensor,
    offs: Tensor,
    bias: Tensor | None,
    bias_scale: Tensor | None,
) -> tuple[Tensor | None, Tensor | None]:
    """Return dbias = sum of dy (times ``bias_scale``) per group and dbias_scale = dy . bias per row; None if unneeded.

    Args:
        ctx: the op's context, with the dtypes of ``save_bias_dtypes``.
        needs: whether the gradients of the bias and of its scale are needed.
        operand: ``dy`` in the dtype of the op's rows.
        bias, bias_scale: the saved tensors: both, or neither without a scale.
    """
    if not any(needs):
        return None, None
    if bias_scale is None:
        return torch.ops.tgl.grouped_dbias(dy, offs).to(ctx.bias_dtype) if needs[0] else None, None
    dbias, dscale = torch.ops.tgl.grouped_dbias_dscales(operand, bias, bias_scale, offs)
    return dbias.to(ctx.bias_dtype) if needs[0] else None, dscale.to(ctx.scale_dtype) if needs[1] else None
