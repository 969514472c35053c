"""Groups as row ranges on the host, for the implementations that loop over groups."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor


def segment_sizes(offs: Tensor, rows: int) -> tuple[int, ...]:
    """Return the sizes of the G groups and, last, of the tail; they always add up to ``rows``."""
    return sizes_of(offs.tolist(), rows)


def sizes_of(ends: Sequence[int], rows: int) -> tuple[int, ...]:
    """Return the sizes of the G groups and of the tail, from the values of ``offs``."""
    ends = (*ends, rows)
    sizes = (ends[0], *map(int.__sub__, ends[1:], ends))
    if min(sizes) >= 0:
        return sizes
    clamped, previous = [], 0
    for end in ends[:-1]:
        end = min(max(end, previous), rows)
        clamped.append(end - previous)
        previous = end
    return (*clamped, rows - previous)


below_autograd = torch._C._AutoDispatchBelowAutograd
"""Context for loops over groups. Above it, a view of an operand that requires grad is tracked even in no-grad mode,
which makes a loop of small products 10 % slower."""


@functools.cache
def _cpu_has_bf16_gemm() -> bool:
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def native_matmul(t: Tensor) -> bool:
    """Return whether ``torch.mm`` on this dtype and device is fast, sums in float32 (or wider) and rounds once."""
    if t.device.type != "cpu" or t.dtype in (torch.float32, torch.float64):
        return True
    return t.dtype == torch.bfloat16 and _cpu_has_bf16_gemm()
