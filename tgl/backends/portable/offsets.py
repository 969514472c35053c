"""Group sizes to cumulative group ends."""

from __future__ import annotations

import torch
from torch import Tensor


def splits_to_offsets(m_splits: Tensor, *, out: Tensor) -> None:
    torch.cumsum(m_splits, 0, dtype=torch.int32, out=out)
