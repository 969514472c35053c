"""What the kernels of GEMMs ask of operands, in words for ``explain``."""

from __future__ import annotations

import torch
from torch import Tensor

from . import host
from .host import ALIGNMENT, MAX_ROWS


def unit_dimension(strides: tuple[int, ...]) -> int:
    """Which of the last two dimensions is contiguous; the last one if both are."""
    last = len(strides) - 1
    return last if strides[last] == 1 else last - 1


def matrix_reason(name: str, t: Tensor) -> str | None:
    """Why a tensor map cannot describe ``t``; one without elements needs none."""
    if not t.numel():
        return None
    strides = t.stride()
    unit = unit_dimension(strides)
    if strides[unit] != 1:
        return f"needs `{name}` with a unit stride in one of its last two dimensions, got strides {strides}"
    step = ALIGNMENT // t.element_size()
    for i, stride in enumerate(strides):
        if i != unit and (stride % step or (stride == 0 and t.shape[i] > 1)):
            return f"needs strides of `{name}` that are multiples of {ALIGNMENT} bytes and not 0, got {strides}"
    return address_reason(name, t)


def address_reason(name: str, t: Tensor) -> str | None:
    """Why 16 bytes cannot be loaded from where ``t`` begins, if it has any."""
    return f"needs `{name}` aligned to {ALIGNMENT} bytes" if t.numel() and host.address(t) % ALIGNMENT else None


def matrices_reason(**matrices: Tensor) -> str | None:
    """Why the tensor maps of ``matrices`` cannot be made; the first reason there is."""
    for name, t in matrices.items():
        reason = matrix_reason(name, t)
        if reason is not None:
            return reason
    return None


def dense_reason(a: Tensor, out: Tensor) -> str | None:
    """Why no kernel takes the dtypes and the rows of a dense call."""
    reason = host.packages_reason()
    if reason is not None:
        return reason
    if a.dtype is not torch.bfloat16 and a.dtype is not torch.float16:
        return f"takes bfloat16 and float16, got {a.dtype}"
    if out.dtype is not a.dtype and out.dtype is not torch.float32:
        return f"writes {a.dtype} or torch.float32, not {out.dtype}"
    if a.shape[0] > MAX_ROWS:
        return f"takes up to {MAX_ROWS} rows, got {a.shape[0]}"
    return None
