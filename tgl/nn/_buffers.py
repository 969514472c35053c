"""Checks of the buffers a caller hands to a layer, made before anything is written."""

from __future__ import annotations

import torch
from torch import Tensor

from ..meta.memory import overlap
from ._errors import fail

# What ``Sequential`` calls a buffer, and the argument of a module's forward that takes it.
ARGUMENTS = {"output": "out", "grad_input": "dgrad_out"}


def check_buffer(
    argument: str, buffer: Tensor, shape: tuple | None, dtype: torch.dtype | None, device: torch.device
) -> None:
    """``buffer`` has exactly this form (None: not known yet), is contiguous, and takes no part in autograd."""

    def require(condition: bool, must: str, got: object, error: type[Exception] = ValueError) -> None:
        if not condition:
            fail(f"`{argument}` must be {must}, but got {got}", error)

    require(isinstance(buffer, Tensor), "a tensor", type(buffer).__name__, TypeError)
    if shape is not None:
        require(tuple(buffer.shape) == tuple(shape), f"of shape {tuple(shape)}", f"shape {tuple(buffer.shape)}")
    if dtype is not None:
        require(buffer.dtype == dtype, str(dtype), buffer.dtype, TypeError)
    require(buffer.device == device, f"on {device}", buffer.device)
    require(buffer.is_contiguous(), "contiguous", f"strides {buffer.stride()}")
    require(not buffer.requires_grad, "a buffer that requires no grad", "one that does")


def check_disjoint(buffers: dict[str, Tensor | None], others: dict[str, Tensor]) -> None:
    """No buffer shares memory with another one or with one of ``others``; in a trace, none is the same tensor."""
    seen = dict(others)
    for name, buffer in buffers.items():
        if buffer is None:
            continue
        for other, t in seen.items():
            if _shared(buffer, t):
                fail(f"`{name}` must be disjoint from `{other}`, but got overlapping memory")
        seen[name] = buffer


def _shared(x: Tensor, y: Tensor) -> bool:
    if x is y:
        return True
    if torch.compiler.is_compiling():
        return False  # addresses are not known; the op that writes looks at them when it runs
    return overlap(x, y)
