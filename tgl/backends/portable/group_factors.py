"""Group factors of a GEMM: float32 ``[G]``, from the scales and amaxes of both operands."""

from __future__ import annotations

import torch
from torch import Tensor

FP4_RANGE = 2688.0  # 448 * 6, the largest E4M3 times the largest E2M1


def fp4_scales(amax: Tensor) -> tuple[Tensor, Tensor]:
    """Return NVFP4's encoding and decoding scale of every group, from its finite amax, in float32."""
    full = torch.full_like(amax, FP4_RANGE)
    encode = torch.where(amax == 0, 1.0, torch.div(full, amax).clamp_max(torch.finfo(torch.float32).max))
    return encode, torch.div(torch.ones_like(amax), encode)


def no_factors(*_: Tensor | None) -> None:
    """Return None: all scales belong to blocks."""
    return None


def of_amaxes(a_scale: Tensor, b_scale: Tensor, a_amax: Tensor, b_amax: Tensor) -> Tensor:
    """Return ``S_decA * S_decB`` of NVFP4."""
    return fp4_scales(a_amax)[1] * fp4_scales(b_amax)[1]


def of_scales(a_scale: Tensor, b_scale: Tensor, a_amax: Tensor | None, b_amax: Tensor | None) -> Tensor:
    """Return the product of both operands' ``scale_inv``, each of a whole group."""
    return a_scale * b_scale
