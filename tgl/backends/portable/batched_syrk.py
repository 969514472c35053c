"""``batched_syrk`` as torch's batched products, which compute both triangles."""

from __future__ import annotations

import torch
from torch import Tensor


def batched_syrk(x: Tensor, c: Tensor | None, *, alpha: float, beta: float, out: Tensor) -> None:
    """Form one product; a symmetric ``x`` that is ``c`` is not transposed, which could change the order of sums."""
    other = x if c is not None and _same(x, c) else x.mT
    if c is not None:
        torch.baddbmm(c, x, other, beta=beta, alpha=alpha, out=out)
    elif alpha == 1:
        torch.bmm(x, other, out=out)
    else:
        torch.baddbmm(out, x, other, beta=0, alpha=alpha, out=out)


def _same(x: Tensor, c: Tensor) -> bool:
    """Return whether two tensors are the same."""
    return x.shape == c.shape and x.stride() == c.stride() and x.data_ptr() == c.data_ptr()
