"""Weights quantised by another package, such as torchao: the layers multiply their dequantised values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..tensor import GroupedTensor
from ._errors import fail

PLAIN = (nn.Parameter, Tensor)  # types of weights that are certainly not quantised


def is_quantized_elsewhere(weight: Tensor) -> bool:
    """Return whether ``weight`` is of another package's tensor class with a ``dequantize`` of its own."""
    cls: Any = type(weight)
    return cls.dequantize is not Tensor.dequantize and not isinstance(weight, GroupedTensor)


def values_of(weight: Tensor) -> Tensor:
    """Return the dequantised values of a weight quantised by another package; any other weight unchanged.

    Raises:
        NotImplementedError: the weight's scheme quantises or scales the rows as well.
        RuntimeError: its gradient is requested.
    """
    if type(weight) in PLAIN or not is_quantized_elsewhere(weight):
        return weight
    quantized: Any = weight
    for name in ("act_quant_kwargs", "act_pre_scale"):
        if getattr(quantized, name, None) is not None:
            fail(
                f"`weight` must be quantised alone, but is a {type(weight).__name__} with `{name}`, which quantises "
                "or scales the layer's input too; take a weight-only configuration (Float8WeightOnlyConfig), the "
                "values (`weight.dequantize()`) with a recipe of tgl.recipes, or, for a transformers model, "
                "experts_implementation='grouped_mm' and tgl.integrations.torch.enable()",
                NotImplementedError,
            )
    if weight.requires_grad and torch.is_grad_enabled():
        fail(f"`weight` must not require grad: a {type(weight).__name__} is frozen", RuntimeError)
    return quantized.dequantize()
