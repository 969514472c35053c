"""The GEMMs as ``torch.nn.functional.grouped_mm`` on CUDA, by its kernel that does not synchronise."""

from __future__ import annotations

import torch
from torch import Tensor

from ...meta.memory import address
from .. import Reason


def grouped_gemm(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    *_: Tensor | None,
    out: Tensor,
    zero_tail: bool,
    begin: Tensor | None = None,
) -> None:
    """Launch once, then copy with a mask, since rows past ``offs[-1]`` are uninitialised.

    The kernel takes groups from row 0 on: with another row offset it gets a copy of all rows, the groups' first.
    """
    row = torch.arange(a.shape[0], device=a.device)
    past = row >= (offs[-1] if offs.shape[0] else 0)
    if begin is None:
        value = torch.nn.functional.grouped_mm(a, b, offs=offs)
    else:
        first = begin.clamp(0, a.shape[0])
        moved = a.index_select(0, (row + first).clamp_max(a.shape[0] - 1))
        value = torch.nn.functional.grouped_mm(moved, b, offs=offs - first)
        value = torch.where((row < first)[:, None], out, value.index_select(0, (row - first).clamp_min(0)))
        past &= row >= first
    torch.where(past[:, None], torch.zeros_like(out) if zero_tail else out, value, out=out)


def grouped_gemm_supports(
    a: Tensor, b: Tensor, offs: Tensor, bias: Tensor | None, *_: Tensor | None, out: Tensor, **__: object
) -> Reason:
    if bias is not None:
        return "has no bias epilogue (adding it afterwards would round twice)"
    return _operand_reason(a, b, out)


def grouped_gemm_wgrad(a: Tensor, b: Tensor, offs: Tensor, *, out: Tensor) -> None:
    """Launch once on two matrices, whose empty groups are zero, then copy."""
    out.copy_(torch.nn.functional.grouped_mm(a.t(), b, offs=offs))


def grouped_gemm_wgrad_supports(a: Tensor, b: Tensor, offs: Tensor, *, out: Tensor) -> Reason:
    return _operand_reason(a, b, out)


def _operand_reason(a: Tensor, b: Tensor, out: Tensor) -> Reason:
    """Return why that kernel cannot take these operands, or None."""
    if a.dtype != torch.bfloat16 or out.dtype != torch.bfloat16:
        return f"takes bfloat16 only, got {a.dtype} -> {out.dtype}"
    if out.numel() == 0 or a.numel() == 0 or b.numel() == 0:
        return "does not take empty operands"
    for name, t in (("a", a), ("b", b)):
        strides = sorted(t.stride()[-2:])
        if strides[0] != 1 or any(s * t.element_size() % 16 for s in t.stride() if s != 1):
            return f"needs `{name}` with one unit stride and all others multiples of 16 bytes, got strides {t.stride()}"
        if address(t) % 16:
            return f"needs `{name}` aligned to 16 bytes"
    return None
