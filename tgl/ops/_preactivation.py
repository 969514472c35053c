"""Decides whether an op of the expert MLP returns the pre-activation ``h``, which only a backward reads.

``h`` has ``T N`` elements, a large part of the memory that a forward writes, so inference does not write it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def backward_may_follow(*tensors: Tensor | None) -> bool:
    """Return whether autograd or a transform of ``torch.func`` may differentiate a call with ``tensors``."""
    if torch._C._are_functorch_transforms_active():
        return True  # a wrapped tensor does not show whether outer levels require grad
    if torch.is_grad_enabled():
        for t in tensors:  # a generator would cost one more call per tensor
            if isinstance(t, Tensor) and t.requires_grad:  # the op raises for other objects
                return True
    return False
