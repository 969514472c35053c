"""``group_quantize`` as steps of ATen on any device, for E2M1 elements with E8M0 scales: a format of weights.

It reads nothing on the host, and gives the bytes of the CPU implementation, whose arithmetic it shares. Matrices are
quantised one after the other, so that only one is in memory as float32 at a time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import backends
from ...meta import placement
from ...meta.components import Components
from ...meta.formats import E8M0
from ...meta.quantized import Options
from ...meta.slots import gather
from ..cpu.quantize import fp4
from ..cpu.quantize.mxfp4 import block_scales
from ..portable.indexed import Indexed
from .decoded_operands import RowGroups


class _Side(NamedTuple):
    """Data and scales of one direction."""

    data: Tensor
    scale: Tensor


def supports(
    x: Tensor, offs: Tensor | None, *_: Tensor | None, options: Options, out: Components, **__: Tensor
) -> backends.Reason:
    """Return why it does not quantise to a format, or None."""
    form = options.description
    if form.scale_type == E8M0 and form.per_byte == 2:
        return None
    return f"quantises to E2M1 elements with E8M0 scales, got {form.name}"


class _Call(NamedTuple):
    """The tensors of a call of the op, without its tables."""

    x: Tensor
    offs: Tensor | None
    scale: Tensor | None
    row_scale: Tensor | None
    rng: Tensor | None
    noop: Tensor | None


def run(
    *operands: Any, options: Options, out: Components, slots: Tensor | None = None, rows: Tensor | None = None
) -> None:
    """Run the op."""
    call = _Call(*operands)
    x, row_scale = call.x, call.row_scale
    stop = None if call.noop is None else (call.noop != 0).view(())
    if call.offs is None:
        for g in range(out.data.shape[0] if options.rowwise else out.columnwise_data.shape[0]):
            matrix = x[g] if slots is None else gather(x, slots[g : g + 1])[0]
            _write(_matrix(matrix, options), Components(*(t[g] if t.numel() else t for t in out)), stop)
        return
    x = x if rows is None else Indexed(x, rows).rows(rows)
    if row_scale is not None:
        x = (x.float() * row_scale.float()[:, None]).to(x.dtype)
    groups = RowGroups.of(call.offs, x.shape[0])
    if options.dbias:
        sums = torch.empty_like(out.dbias)
        backends.run("grouped_dbias", x.device, x.contiguous(), groups.ends, out=sums)
        _copy(out.dbias, sums, stop)
    _write(_rows(x, groups, options), out, stop)


def _write(sides: tuple[_Side | None, _Side | None], out: Components, stop: Tensor | None) -> None:
    targets = (out.data, out.scale), (out.columnwise_data, out.columnwise_scale)
    for side, (data, scale) in zip(sides, targets):
        if side is not None:
            _copy(data, side.data, stop)
            _copy(scale, side.scale, stop)


def _copy(target: Tensor, made: Tensor, stop: Tensor | None) -> None:
    """Copy ``made`` to ``target``, unless the flag ``stop`` forbids writing."""
    target.copy_(made if stop is None else torch.where(stop, target, made))


def _matrix(x: Tensor, options: Options) -> tuple[_Side | None, _Side | None]:
    """Quantise ``[N, K]`` in both directions."""
    return _laid(x, options) if options.rowwise else None, _laid(x.t(), options) if options.columnwise else None


def _laid(x: Tensor, options: Options) -> _Side:
    side = _blocks(x, options)
    return side._replace(scale=placement.to_blocked(side.scale)) if options.blocked else side


def _rows(x: Tensor, groups: RowGroups, options: Options) -> tuple[_Side | None, _Side | None]:
    """Quantise rows in groups in both directions; the tail of ``x`` is ignored."""
    row = column = None
    if options.rowwise:
        tail = placement.tail(groups.ends, groups.rows)[:, None]
        row = _blocks(x.masked_fill(tail, 0), options)
        if options.blocked:
            row = row._replace(scale=placement.to_blocked(_placed(row.scale, groups, placement.ROW_UNIT)))
    if options.columnwise:
        column = _laid(_placed(x, groups, options.description.unit_data).t(), options)
    return row, column


def _placed(t: Tensor, groups: RowGroups, unit: int) -> Tensor:
    """Return the rows at their places, zeros elsewhere."""
    token = placement.row_of(groups.ends, groups.rows, unit)
    if not groups.rows:
        return t.new_zeros(token.shape[0], t.shape[1])
    return t.index_select(0, token.clamp_min(0)).masked_fill_((token < 0)[:, None], 0)


def _blocks(x: Tensor, options: Options) -> _Side:
    """Return data ``[R, C / 2]`` and scales ``[R, ceil(C / 32)]`` of blocks along columns of ``x [R, C]``, C even."""
    rows, columns = x.shape
    block = options.description.block
    count = -(-columns // block)
    wide = torch.nn.functional.pad(x.float(), (0, count * block - columns)).contiguous().view(rows, count, block)
    scale, multiplier, broken = block_scales(wide.abs().amax(-1), options.scaling)
    codes = fp4.nearest(wide.mul_(multiplier[..., None]))
    pairs = fp4.pack(codes).masked_fill_(broken[..., None], fp4.PAIR_NAN)
    return _Side(pairs.flatten(1)[:, : columns // 2], scale)
