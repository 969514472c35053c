"""``grouped_gemm_packed`` by ``group_dequantize`` of some matrices at a time, and a dense GEMM of their groups.

Which rows a piece of the matrices has is known on the device alone, so a piece copies as many rows as there are, its
own first, and multiplies these; the number of pieces follows from sizes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import backends
from ..backends import Implementation, Reason
from ..meta import placement
from ..meta.formats import FORMATS
from ..meta.packed import BYTES, Packed, PackedCall, at_a_time, decoded_dtype, decoding
from . import parts
from .decoded_operands import Groups

NOTE = (
    f"decodes one matrix, or {BYTES >> 20} MiB of them, at a time for a dense GEMM; slower than a kernel of the format"
)


def run(*operands: Any, format: str, over_rows: bool, out: Tensor) -> None:
    """The op."""
    call, form = PackedCall(*operands), FORMATS[format]
    groups, count = Groups.of(call.offs, call.a.shape[0]), call.b.shape[0]
    if not count:
        out.zero_()
        return
    many = at_a_time(count, call.b.shape[1], call.b.shape[2] * form.per_byte, call.a.dtype)
    row = torch.arange(groups.rows, device=out.device)
    for first in range(0, count, many):
        last = min(first + many, count)
        weight = _decoded(call.matrices.part(first, last), format, call.a.dtype)
        right = weight if over_rows else weight.transpose(1, 2)
        bias = None if call.bias is None else call.bias[first:last]
        if many >= count:
            _dense(call.a, right, groups.ends, bias, call.bias_scale, out)
            break
        before = groups.ends[first - 1] if first else torch.zeros_like(groups.ends[0])
        taken = (row + before).clamp_max(groups.rows - 1)
        scale = None if call.bias_scale is None else call.bias_scale.index_select(0, taken)
        part = torch.empty_like(out)
        _dense(call.a.index_select(0, taken), right, groups.ends[first:last] - before, bias, scale, part)
        inside = (row >= before) & (row < groups.ends[last - 1])
        found = part.index_select(0, (row - before).clamp_min(0))
        out.copy_(torch.where(inside[:, None], found, out))
    out.masked_fill_(placement.tail(groups.ends, groups.rows)[:, None], 0)


def _decoded(matrices: Packed, format: str, dtype: torch.dtype) -> Tensor:
    """``[G, N, K]`` in ``dtype``."""
    form, data = FORMATS[format], matrices.data
    shape = *data.shape[:2], data.shape[2] * form.per_byte
    weight = torch.empty(shape, dtype=decoded_dtype(dtype), device=data.device)
    operands = data, matrices.scale, None, matrices.amax
    backends.run("group_dequantize", data.device, *operands, options=decoding(form), out=weight)
    return weight.to(dtype)


def _dense(a: Tensor, b: Tensor, ends: Tensor, bias: Tensor | None, bias_scale: Tensor | None, out: Tensor) -> None:
    backends.run("grouped_gemm", a.device, a, b, ends, bias, bias_scale, out=out, zero_tail=False)


def dense(*operands: Any, format: str, over_rows: bool, out: Tensor) -> backends.Explanation:
    """What serves the dense GEMM of a piece."""
    call = PackedCall(*operands)
    depth, columns = call.a.shape[1], out.shape[1]
    many = at_a_time(call.b.shape[0], depth, columns, call.a.dtype)
    left = torch.empty(call.a.shape, dtype=call.a.dtype, device="meta")
    shape = (many, depth, columns) if over_rows else (many, columns, depth)
    right = torch.empty(shape, dtype=call.a.dtype, device="meta")
    right = right if over_rows else right.transpose(1, 2)
    bias = None if call.bias is None else torch.empty(many, columns, dtype=call.bias.dtype, device="meta")
    scale = None if call.bias_scale is None else torch.empty_like(call.bias_scale, device="meta")
    made = torch.empty(out.shape, dtype=out.dtype, device="meta")
    offs = torch.empty(many, dtype=call.offs.dtype, device="meta")
    return backends.report("grouped_gemm", call.a.device, left, right, offs, bias, scale, out=made, zero_tail=False)


def _served(syncs: bool) -> Any:
    """Whether a dense GEMM serves a call, and reads the device on the host or not."""

    def reason(*operands: Any, **options: Any) -> Reason:
        found = dense(*operands, **options)
        if found.chosen is None or found.syncs == syncs:
            return found.reason()
        return "its dense GEMM reads offs on the host" if found.syncs else "its dense GEMM reads nothing on the host"

    return reason


def implementations(device: str) -> list[Implementation]:
    """By a dense GEMM, and where there is only one that reads the device, by that."""
    return [
        Implementation(
            "grouped_gemm_packed",
            name,
            device,
            run,
            _served(syncs),
            priority=priority,
            syncs=syncs,
            note=NOTE,
            parts=parts.of_run(run),
        )
        for name, priority, syncs in (
            ("decoded in pieces, dense GEMM", -10, False),
            ("decoded in pieces, loop of mm", -20, True),
        )
    ]
