"""Checks of the buffers that a caller passes to a layer, made before anything is written."""

from __future__ import annotations

import torch
from torch import Tensor

from ..meta.checks import OUT_ALIGNMENT
from ..meta.memory import overlap
from ._errors import fail

# ``Sequential``'s name of a buffer -> the argument of a module's forward.
ARGUMENTS = {"output": "out", "grad_input": "dgrad_out"}


def check_buffer(
    argument: str, buffer: Tensor, shape: tuple | None, dtype: torch.dtype | None, device: torch.device
) -> None:
    """Check that ``buffer`` has this shape and dtype (None: not known yet), is contiguous and requires no grad."""
    if not isinstance(buffer, Tensor):
        fail(f"`{argument}` must be a tensor, but got {type(buffer).__name__}", TypeError)
    if torch._C._are_functorch_transforms_active():
        fail(
            f"`{argument}` must be None under torch.vmap and torch.func, whose tensors have no memory of their own, "
            "but got a buffer"
        )
    if shape is not None and tuple(buffer.shape) != tuple(shape):
        fail(f"`{argument}` must be of shape {tuple(shape)}, but got shape {tuple(buffer.shape)}")
    if dtype is not None and buffer.dtype != dtype:
        fail(f"`{argument}` must be {dtype}, but got {buffer.dtype}", TypeError)
    if buffer.device != device:
        fail(f"`{argument}` must be on {device}, but got {buffer.device}")
    if not buffer.is_contiguous():
        fail(f"`{argument}` must be contiguous, but got strides {buffer.stride()}")
    if buffer.requires_grad:
        fail(f"`{argument}` must be a buffer that requires no grad, but got one that does")
    if not torch.compiler.is_compiling() and (past := buffer.data_ptr() % OUT_ALIGNMENT):
        fail(f"`{argument}` must be aligned to {OUT_ALIGNMENT} bytes, but got an address {past} bytes past one")


def check_disjoint(buffers: dict[str, Tensor | None], others: dict[str, Tensor]) -> None:
    """Check that no buffer shares memory with another buffer or ``others``; in a trace only identity is checked."""
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
    if torch.compiler.is_compiling() or x.is_meta:
        return False  # addresses are not known; the op that writes checks them when it runs
    return overlap(x, y)
