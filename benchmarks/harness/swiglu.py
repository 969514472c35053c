"""SwiGLU as models write it with torch operators, on rows ``[T, 2 I]``, halves side by side."""

from __future__ import annotations

import torch
from torch import Tensor


def forward(x: Tensor) -> Tensor:
    """In the dtype of the rows."""
    gate, linear = x.chunk(2, 1)
    return torch.nn.functional.silu(gate) * linear


def backward(dy: Tensor, x: Tensor) -> Tensor:
    """Return the gradient as autograd computes it, in the dtype of the rows."""
    gate, linear = x.chunk(2, 1)
    s = torch.sigmoid(gate)
    return torch.cat([dy * linear * s * (1 + gate * (1 - s)), dy * gate * s], 1)


def backward_with_probs(da: Tensor, h: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``dh`` and ``dprobs`` of ``silu(gate) * linear * probs``, computed in float32."""
    gate, linear = h.float().chunk(2, 1)
    s = torch.sigmoid(gate)
    a = gate * s
    da = da.float()
    dprobs = (da * a * linear).sum(1)
    da = da * probs[:, None]
    return torch.cat([da * linear * s * (1 + gate * (1 - s)), da * a], 1).to(h.dtype), dprobs


compiled = torch.compile(forward, dynamic=False)
compiled_backward = torch.compile(backward, dynamic=False)
compiled_backward_with_probs = torch.compile(backward_with_probs, dynamic=False)
