"""Names of dtypes in a key, as ``torch`` has them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def dtype(t: Tensor | None) -> torch.dtype | None:
    """Return the dtype of a tensor; None for None."""
    return None if t is None else t.dtype


def name(value: Tensor | torch.dtype | None) -> Any:
    """Return the ``torch`` name of a dtype; None for None."""
    if value is None:
        return None
    return str(value.dtype if isinstance(value, Tensor) else value).removeprefix("torch.")
