"""The scales of the FP8 formats from amaxes, as stated in ``group_quantize``; nothing is read on the host."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = torch.finfo(torch.float32).max
EXPONENT = -0x800000  # mask of sign and exponent


def scales_of(amax: Tensor, largest: float, power_of_two: bool, eps: float) -> tuple[Tensor, Tensor]:
    """Return ``scale`` and ``scale_inv`` for float32 magnitudes."""
    if eps:
        amax = amax.clamp(min=eps)  # keeps NaN
    scale = torch.full_like(amax, largest).div_(amax).clamp_(max=LARGEST)
    if power_of_two:
        scale.view(torch.int32).bitwise_and_(EXPONENT)
    bad = ~amax.isfinite()
    scale.masked_fill_((amax == 0) | bad, 1.0)
    return scale, scale.reciprocal().masked_fill_(bad, torch.nan)
