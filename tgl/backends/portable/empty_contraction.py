"""Products with an empty contraction (K = 0), which are the bias alone. Nothing is read on the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...meta.specs import accumulator
from .. import Reason


def supports(a: Tensor, *_: Any, **__: Any) -> Reason:
    return None if a.shape[1] == 0 else f"writes the bias alone, for K = 0, got {a.shape[1]} columns of `a`"


def _bias_alone(
    offs: Tensor,
    bias: Tensor | None,
    bias_scale: Tensor | None,
    *,
    out: Tensor,
    zero_tail: bool,
    begin: Tensor | None = None,
) -> None:
    row = torch.arange(out.shape[0], dtype=torch.int32, device=out.device)
    group = torch.searchsorted(offs, row, right=True)
    routed = (group < offs.shape[0])[:, None]
    value = torch.zeros_like(out)
    if bias is not None and offs.shape[0]:
        dtype = accumulator(out.dtype)
        rows = bias.to(dtype)[group.clamp(max=offs.shape[0] - 1)]
        value = (rows if bias_scale is None else rows * bias_scale.to(dtype)[:, None]).to(out.dtype)
    value = torch.where(routed, value, torch.zeros_like(out) if zero_tail else out)
    out.copy_(value if begin is None else torch.where((row < begin)[:, None], out, value))


def grouped_gemm(*operands: Any, out: Tensor, zero_tail: bool, begin: Tensor | None = None, **_: Any) -> None:
    _bias_alone(*operands[2:5], out=out, zero_tail=zero_tail, begin=begin)


def grouped_gemm_scaled(*operands: Any, out: Tensor, zero_tail: bool, **_: Any) -> None:
    _bias_alone(operands[4], *operands[7:9], out=out, zero_tail=zero_tail)
