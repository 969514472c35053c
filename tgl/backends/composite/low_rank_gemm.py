"""``grouped_gemm_low_rank`` without a fused kernel: two grouped products, each rounded, and their sum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import backends
from ...meta import placement


def run(*operands: Any, out: Tensor, zero_tail: bool) -> None:
    """Run the op."""
    a, b, low, up, offs, bias, bias_scale = operands
    added = torch.empty_like(out)
    backends.run("grouped_gemm", a.device, low, up, offs, None, None, out=added, zero_tail=True)
    backends.run("grouped_gemm", a.device, a, b, offs, bias, bias_scale, out=out, zero_tail=zero_tail)
    if zero_tail:
        out.add_(added)
        return
    ends = torch.cummax(offs.clamp(0, out.shape[0]), 0).values
    torch.where(placement.tail(ends, out.shape[0])[:, None], out, added.add_(out), out=out)
