"""``grouped_gemm_scaled`` where the tensor cores lack the format: operands decoded to bfloat16, and a dense GEMM.

This is an emulation, to try, debug and capture a recipe on the GPU at hand. Products are exact in float32. Factors that
bfloat16 does not hold are applied to float32 sums: powers of two beyond its range, group factors, and the float32
scales of blocks, for which every block of the contraction is a GEMM of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ... import backends
from ...meta import placement
from ...meta.calls import ScaledGemmCall, taking
from ...meta.formats import FORMATS, Format
from ..cpu.quantize import GROUP_FACTORS
from ..portable import decode
from .decoded_operands import RowGroups, matrices, tokens

Operands = tuple[Tensor, Tensor, Tensor, Tensor]
"""The operands ``a``, ``a_scale``, ``b`` and ``b_scale`` of the op."""


def form_products(call: ScaledGemmCall) -> None:
    """Run the op with a few passes over float32 ``[T, N]``."""
    a, a_scale, b, b_scale, offs, a_amax, b_amax, bias, bias_scale, format, direction, layout, out, zero_tail = call
    if not out.numel():
        return
    if not offs.shape[0]:
        if zero_tail:
            out.zero_()
        return
    form, groups = FORMATS[format], RowGroups.of(offs, a.shape[0])
    group = groups.of_rows()
    product = _by_blocks if form.scales_sums else _whole
    total = product((a, a_scale, b, b_scale), groups, group, form, direction, layout)
    factor = GROUP_FACTORS[format](a_scale, b_scale, a_amax, b_amax)
    if factor is not None:
        total.mul_(factor.index_select(0, group)[:, None])
    if bias is not None:
        shift = bias.float().index_select(0, group)
        total.add_(shift if bias_scale is None else shift.mul_(bias_scale.float()[:, None]))
    tail = placement.tail(groups.ends, groups.rows)[:, None]
    out.copy_(total.masked_fill_(tail, 0) if zero_tail else torch.where(tail, out, total.to(out.dtype)))


run = taking(ScaledGemmCall, form_products)


def dense(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    offs: Tensor,
    *_: Tensor | None,
    format: str,
    out: Tensor,
    **__: object,
) -> backends.Explanation:
    """Return the explanation of the dense GEMM that a call needs."""
    rows, columns, depth = *out.shape, a.shape[1] * FORMATS[format].per_byte
    left = torch.empty(rows, depth, dtype=torch.bfloat16, device="meta")
    right = torch.empty(offs.shape[0], depth, columns, dtype=torch.bfloat16, device="meta")
    wide = torch.empty(rows, columns, dtype=torch.float32, device="meta")
    return backends.report("grouped_gemm", a.device, left, right, offs, None, None, out=wide, zero_tail=False)


def _dense(left: Tensor, right: Tensor, groups: RowGroups) -> Tensor:
    """Return float32 ``[T, N]``: every row times the matrix of its group; rows of the tail are undefined."""
    out = torch.empty(left.shape[0], right.shape[2], dtype=torch.float32, device=left.device)
    backends.run("grouped_gemm", left.device, left, right, groups.ends, None, None, out=out, zero_tail=False)
    return out


def _whole(operands: Operands, groups: RowGroups, group: Tensor, form: Format, direction: str, layout: str) -> Tensor:
    """Form the product with one GEMM over the whole contraction."""
    a, a_scale, b, b_scale = operands
    left = tokens(a, a_scale, groups, form, layout)
    right = matrices(b, b_scale, form, direction, layout)
    total = _dense(left.values, right.values, groups)
    if left.exponent is None or right.exponent is None:
        return total
    exponent = left.exponent + right.exponent.index_select(0, group)
    return decode.scale_by_power(total, exponent[:, None])


def _by_blocks(
    operands: Operands, groups: RowGroups, group: Tensor, form: Format, direction: str, layout: str
) -> Tensor:
    """Form the product with one GEMM per block of the contraction, and add the scaled sums."""
    a, a_scale, b, b_scale = operands
    left, right = decode.elements(a), decode.elements(b).transpose(1, 2)
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float32, device=a.device)
    for block, start in enumerate(range(0, a.shape[1], form.block)):
        stop = min(start + form.block, a.shape[1])
        part = _dense(left[:, start:stop], right[:, start:stop], groups)
        across = decode.spread(b_scale[:, :, block], form.block, 1, b.shape[1])
        part.mul_(across.index_select(0, group)).mul_(a_scale[:, block, None])
        total.add_(part)
    return total
