"""The state of delayed scaling; nothing is read on the host."""

from __future__ import annotations

import torch
from torch import Tensor

from ...meta.formats import ELEMENTS
from .fp8_scales import scales_of


def scale_from_history(
    history: Tensor,
    scale: Tensor,
    *,
    algorithm: str,
    dtype: torch.dtype,
    power_of_two: bool,
    margin: int,
    out: Tensor,
) -> None:
    amax = history.amax(0) if algorithm == "max" else history[0]
    made, _ = scales_of(amax, ELEMENTS[dtype].max * 2.0**-margin, power_of_two, 0.0)
    torch.where((amax > 0) & amax.isfinite(), made, scale, out=out)


def update_history(amax: Tensor, history: Tensor) -> None:
    history.copy_(torch.cat([amax[None], history[:-1]]))
