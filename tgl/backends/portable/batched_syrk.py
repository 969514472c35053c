"""``batched_syrk`` as torch's batched products, which compute both triangles."""

from __future__ import annotations

import torch
from torch import Tensor


def batched_syrk(x: Tensor, c: Tensor | None, *, alpha: float, beta: float, out: Tensor) -> None:
    """One product; of an ``x`` that is ``c``, and so symmetric, as it lies: a transpose may be summed otherwise."""
    other = x if c is not None and _same(x, c) else x.mT
    if c is not None:
        torch.baddbmm(c, x, other, beta=beta, alpha=alpha, out=out)
    elif alpha == 1:
        torch.bmm(x, other, out=out)
    else:
        torch.baddbmm(out, x, other, beta=0, alpha=alpha, out=out)


def _same(x: Tensor, c: Tensor) -> bool:
    """Whether two tensors are one."""
    return x.shape == c.shape and x.stride() == c.stride() and x.data_ptr() == c.data_ptr()
