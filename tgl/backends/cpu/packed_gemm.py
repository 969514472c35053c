"""``grouped_gemm_packed`` on a CPU, which decodes one matrix at a time, if its group has rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...meta.formats import FORMATS
from ...meta.packed import PackedCall, decoded_dtype, decoding
from ..portable.segments import segment_sizes
from .gemm import grouped_gemm
from .quantize import DEQUANTIZE


def gemm(*operands: Any, format: str, over_rows: bool, out: Tensor) -> None:
    """Run ``grouped_gemm`` for every group separately."""
    call, form = PackedCall(*operands), FORMATS[format]
    a, bias, bias_scale = call.a, call.bias, call.bias_scale
    shape = 1, call.b.shape[1], call.b.shape[2] * form.per_byte
    weight = torch.empty(shape, dtype=decoded_dtype(a.dtype), device="cpu")
    right = weight if over_rows else weight.transpose(1, 2)
    start = 0
    for g, size in enumerate(segment_sizes(call.offs, a.shape[0])[:-1]):
        if not size:
            continue
        part, rows = call.matrices.part(g, g + 1), slice(start, start + size)
        DEQUANTIZE[format](part.data, part.scale, None, part.amax, options=decoding(form), out=weight)
        grouped_gemm(
            a[rows],
            right.to(a.dtype),
            torch.tensor([size], dtype=torch.int32, device="cpu"),
            None if bias is None else bias[g : g + 1],
            None if bias_scale is None else bias_scale[rows],
            out=out[rows],
            zero_tail=False,
        )
        start += size
    out[start:].zero_()
