"""``grouped_gemm_row_scaled`` and its weight gradient as a dense GEMM of the elements, whose sums are scaled.

bfloat16 holds every FP8 element and float32 every product, so the sums are those of an FP8 kernel. On a CPU, elements
are widened to float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ... import backends
from ...meta import placement
from ...meta.row_scaled import OP, WGRAD
from .. import Implementation, Reason
from . import constituent_ops
from .decoded_operands import RowGroups

NOTE = "elements widened for a dense GEMM, whose float32 sums are scaled"
_DENSE = {OP: "grouped_gemm", WGRAD: "grouped_gemm_wgrad"}


def run(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, offs: Tensor, *, out: Tensor) -> None:
    """Run ``grouped_gemm_row_scaled``."""
    if not out.numel() or not offs.shape[0]:
        out.zero_()
        return
    groups, wide = RowGroups.of(offs, a.shape[0]), _widened(a.device.type)
    total = torch.empty(out.shape, dtype=torch.float32, device=out.device)
    operands = a.to(wide), b.to(wide).transpose(1, 2), groups.ends, None, None
    backends.run("grouped_gemm", a.device, *operands, out=total, zero_tail=False)
    total.mul_(a_scale[:, None]).mul_(b_scale.index_select(0, groups.of_rows()))
    out.copy_(total.masked_fill_(placement.tail(groups.ends, groups.rows)[:, None], 0))


def run_wgrad(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, offs: Tensor, *, out: Tensor) -> None:
    """Run ``grouped_gemm_row_scaled_wgrad``."""
    wide = _widened(a.device.type)
    total = torch.empty(out.shape, dtype=torch.float32, device=out.device)
    backends.run("grouped_gemm_wgrad", a.device, a.to(wide).t(), b.to(wide).t(), offs, out=total)
    ends = RowGroups.of(offs, a.shape[1])
    empty = (ends.sizes() == 0)[:, None, None]  # scales of empty groups are undefined
    out.copy_(total.mul_(a_scale[:, :, None]).mul_(b_scale[:, None, :]).masked_fill_(empty, 0))


def _widened(device_type: str) -> torch.dtype:
    """Return the dtype that elements are widened to."""
    return torch.float32 if device_type == "cpu" else torch.bfloat16


def dense(op: str, a: Tensor, b: Tensor, offs: Tensor, out: Tensor) -> backends.Explanation:
    """Return the explanation of the dense GEMM that a call needs."""
    left, right = (torch.empty(t.shape, dtype=_widened(a.device.type), device="meta") for t in (a, b))
    wide = torch.empty(out.shape, dtype=torch.float32, device="meta")
    if op == OP:
        operands = left, right.transpose(1, 2), offs, None, None
        return backends.report(_DENSE[op], a.device, *operands, out=wide, zero_tail=False)
    return backends.report(_DENSE[op], a.device, left.t(), right.t(), offs, out=wide)


def _served(op: str, syncs: bool) -> Callable[..., Reason]:
    """Return ``supports`` for calls whose dense GEMM is served, by one that syncs with the host if ``syncs``."""

    def reason(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, offs: Tensor, *, out: Tensor) -> Reason:
        found = dense(op, a, b, offs, out)
        if found.chosen is None or found.syncs == syncs:
            return found.reason()
        return "its dense GEMM reads offs on the host" if found.syncs else "its dense GEMM reads nothing on the host"

    return reason


def implementations(device: str) -> list[Implementation]:
    """Return the implementations of both ops: by a dense GEMM, and on a GPU as a fallback by one that syncs."""
    made: list[Implementation] = []
    for op, of_op in ((OP, run), (WGRAD, run_wgrad)):
        options: dict[str, Any] = {"note": NOTE, "parts": constituent_ops.of_run(of_op)}
        if device == "cpu":
            made.append(Implementation(op, "widen and mm", device, of_op, **options))
            continue
        for name, priority, syncs in (("widened, dense GEMM", -10, False), ("widened, loop of mm", -20, True)):
            served = _served(op, syncs)
            made.append(Implementation(op, name, device, of_op, served, priority=priority, syncs=syncs, **options))
    return made
