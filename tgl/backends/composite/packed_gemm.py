"""``grouped_gemm_packed`` in pieces: ``group_dequantize`` of some matrices, and a dense GEMM of their groups.

The number of pieces follows from sizes. The rows of a piece are known only on the device: its GEMM gets the row offset
of its first group as a tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import backends
from ...meta.formats import FORMATS
from ...meta.packed import BYTES, Packed, PackedCall, at_a_time, decoded_dtype, decoding
from .. import Implementation, Reason
from . import constituent_ops

NOTE = f"decodes one matrix, or {BYTES >> 20} MiB of them, at a time for a dense GEMM"


def run(*operands: Any, format: str, over_rows: bool, out: Tensor) -> None:
    """Run the op."""
    call, form = PackedCall(*operands), FORMATS[format]
    count, height, width = *call.b.shape[:2], call.b.shape[2] * form.per_byte
    if not count:
        out.zero_()
        return
    many = at_a_time(count, height, width, call.a.dtype)
    room = torch.empty(many, height, width, dtype=decoded_dtype(call.a.dtype), device=out.device)
    for first in range(0, count, many):
        last = min(first + many, count)
        weight = _decoded(call.matrices.part(first, last), format, room[: last - first]).to(call.a.dtype)
        right = weight if over_rows else weight.transpose(1, 2)
        bias = None if call.bias is None else call.bias[first:last]
        rows = call.a, right, call.offs[first:last], bias, call.bias_scale
        begin = {"begin": call.offs[first - 1 : first]} if first else {}
        backends.run("grouped_gemm", out.device, *rows, out=out, zero_tail=last == count, **begin)


def _decoded(matrices: Packed, format: str, room: Tensor) -> Tensor:
    """Decode the matrices ``[G, N, K]`` into ``room``."""
    operands = matrices.data, matrices.scale, None, matrices.amax
    backends.run("group_dequantize", room.device, *operands, options=decoding(FORMATS[format]), out=room)
    return room


def dense(*operands: Any, format: str, over_rows: bool, out: Tensor) -> backends.Explanation:
    """Return the explanation of a piece's dense GEMM."""
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
    begin = {"begin": offs[:1]} if many < call.b.shape[0] else {}
    rows = left, right, offs, bias, scale
    return backends.report("grouped_gemm", call.a.device, *rows, out=made, zero_tail=False, **begin)


def _served(syncs: bool) -> Any:
    """Return ``supports`` for calls whose dense GEMM is served, by one that syncs with the host if ``syncs``."""

    def reason(*operands: Any, **options: Any) -> Reason:
        found = dense(*operands, **options)
        if found.chosen is None or found.syncs == syncs:
            return found.reason()
        return "its dense GEMM reads offs on the host" if found.syncs else "its dense GEMM reads nothing on the host"

    return reason


def implementations(device: str) -> list[Implementation]:
    """Return the implementations: by a dense GEMM, and as a fallback by one that syncs with the host."""
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
            parts=constituent_ops.of_run(run),
        )
        for name, priority, syncs in (
            ("decoded in pieces, dense GEMM", -10, False),
            ("decoded in pieces, loop of mm", -20, True),
        )
    ]
