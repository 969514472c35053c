"""Whether an op of the expert's MLP has to return what goes into the activation, ``h``: for a backward alone.

It is most of what a forward writes beside its weights' products, ``T N`` elements, so that inference does without.
"""

from __future__ import annotations

import torch
from torch import Tensor


def backward_may_follow(*tensors: Tensor | None) -> bool:
    """Whether autograd, or a transform of ``torch.func``, may go back through a call of these now."""
    if torch._C._are_functorch_transforms_active():
        return True  # what a transform wraps says nothing of the levels outside
    if torch.is_grad_enabled():
        for t in tensors:  # a generator would be one more call for each
            if isinstance(t, Tensor) and t.requires_grad:  # what is no tensor is refused by the op
                return True
    return False
