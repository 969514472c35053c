"""Output spec of ``batched_syrk``; see ``specs``."""

from __future__ import annotations

from torch import Tensor

from . import checks
from .specs import TensorSpec

OP = "batched_syrk"


def batched_syrk(x: Tensor, c: Tensor | None = None) -> TensorSpec:
    """Return the spec of ``[G, M, K]`` times its transpose, plus ``c [G, M, M]`` -> ``[G, M, M]``."""
    checks.ndim(OP, "x", x, 3, "[G, M, K]")
    checks.floating(OP, "x", x)
    groups, rows, _ = x.shape
    if c is not None:
        checks.shape(OP, "c", c, (groups, rows, rows), "[G, M, M]")
        checks.like(OP, "c", c, "x", x.dtype, x.device)
    return TensorSpec((groups, rows, rows), x.dtype, x.device)
