"""``grouped_gemm_scaled_wgrad`` where the tensor cores lack the format: see ``decoded_gemm``."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import backends
from ...meta import placement
from ...meta.calls import ScaledWgradCall, taking
from ...meta.formats import FORMATS, Format
from ...meta.scaled import most_tokens
from ...meta.slots import gather, scatter
from ..cpu.quantize import GROUP_FACTORS
from ..portable import decode
from .decoded_gemm import Operands
from .decoded_operands import RowGroups, columns, of_places

_AT_A_TIME = 8  # blocks of tokens whose sums are in memory at the same time


def form_products(call: ScaledWgradCall) -> None:
    """Run the op with a few passes over float32 ``[G, M, N]``; a group without tokens is zeroed, or left as it is."""
    a, a_scale, b, b_scale, offs, a_amax, b_amax, format, layout, out, accumulate, slots = call
    if not out.numel() or not offs.shape[0]:
        return
    form = FORMATS[format]
    groups = RowGroups.of(offs, int(most_tokens(a, offs.shape[0], format)))
    shape = offs.shape[0], *out.shape[1:]
    total = (_by_blocks if form.scales_sums else _whole)((a, a_scale, b, b_scale), groups, form, layout, shape)
    factor = GROUP_FACTORS[format](a_scale, b_scale, a_amax, b_amax)
    if factor is not None:
        total.mul_(factor[:, None, None])
    total.masked_fill_((groups.sizes() == 0)[:, None, None], 0)
    _store(total, out, accumulate, slots)


run = taking(ScaledWgradCall, form_products)


def _store(total: Tensor, out: Tensor, accumulate: bool, table: Tensor | None) -> None:
    if table is None:
        out.copy_(total.add_(out) if accumulate else total)
        return
    if accumulate:
        total.add_(gather(out, table))
    scatter(out, table, total.to(out.dtype))


def dense(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    offs: Tensor,
    *_: Tensor | None,
    format: str,
    **__: object,
) -> backends.Explanation:
    """Return the explanation of the dense GEMM that a call needs."""
    transposed = FORMATS[format].transposed_columnwise
    places = a.shape[1] * FORMATS[format].per_byte if transposed else a.shape[0]
    features = [t.shape[0] if transposed else t.shape[1] for t in (a, b)]
    left, right = (torch.empty(places, f, dtype=torch.bfloat16, device="meta") for f in features)
    wide = torch.empty(offs.shape[0], *features, dtype=torch.float32, device="meta")
    return backends.report("grouped_gemm_wgrad", a.device, left, right, offs, out=wide)


def _dense(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Return float32 ``[G, M, N]``: the sum over every group's rows of their outer products."""
    out = torch.empty(ends.shape[0], left.shape[1], right.shape[1], dtype=torch.float32, device=left.device)
    backends.run("grouped_gemm_wgrad", left.device, left, right, ends, out=out)
    return out


def _whole(operands: Operands, groups: RowGroups, form: Format, layout: str, shape: tuple[int, ...]) -> Tensor:
    """Form the product with one GEMM over all tokens."""
    a, a_scale, b, b_scale = operands
    left, ends = columns(a, a_scale, groups, form, layout)
    right, _ = columns(b, b_scale, groups, form, layout)
    total = _dense(left.values, right.values, ends)
    if left.exponent is None or right.exponent is None:
        return total
    return decode.scale_by_power(total, (left.exponent + right.exponent)[:, None, None])


def _by_blocks(operands: Operands, groups: RowGroups, form: Format, layout: str, shape: tuple[int, ...]) -> Tensor:
    """Form the product of every block of tokens separately, scale it and add it to its group's, in order."""
    a, a_scale, b, b_scale = operands
    total = torch.zeros(shape, dtype=torch.float32, device=a.device)
    if not groups.rows:
        return total
    token = placement.row_of(groups.ends, groups.rows, form.block)
    absent, blocks = token < 0, token.shape[0] // form.block
    place = groups.places(form.unit_data).index_select(0, token.clamp_min(0))
    group = of_places(groups.starts(form.block), blocks, form.block)
    empty = absent.view(blocks, form.block).all(1)[:, None]
    left, right = (
        decode.elements(t.view(torch.uint8).index_select(1, place).view(t.dtype)).masked_fill_(absent, 0).t()
        for t in (a, b)
    )
    factors = [scale[:blocks].masked_fill(empty, 0) for scale in (a_scale, b_scale)]
    step = torch.arange(1, _AT_A_TIME + 1, dtype=torch.int32, device=a.device) * form.block
    for first in range(0, blocks, _AT_A_TIME):
        last = min(first + _AT_A_TIME, blocks)
        rows = slice(first * form.block, last * form.block)
        part = _dense(left[rows], right[rows], step[: last - first])
        part.mul_(factors[0][first:last, :, None]).mul_(factors[1][first:last, None, :])
        for block in range(first, last):
            total.index_add_(0, group[block : block + 1], part[block - first : block - first + 1])
    return total
