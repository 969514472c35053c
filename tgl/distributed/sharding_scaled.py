"""Sharding rules of the ops on quantised operands, for compact scales.

The components of one operand are sharded together along one of its logical dimensions, whichever dimension of theirs
that is. A rank must get whole blocks: where a dimension does not divide that way, and for ``scale_layout="blocked"``,
the operands are replicated. Per-group scales and amax belong to the whole tensor and are replicated, so
``group_quantize``, which makes them, is only sharded for formats without them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from ..meta import activations
from ..meta.formats import FORMATS, Format
from .sharding_rules import OpCall, Rule, Rules

_ops = torch.ops.tgl
WHOLE = Replicate()

# --- placements of a logical dimension --------------------------------------------------------------------------------


def _matrix(f: Format, columnwise: bool, dim: int) -> tuple[Placement, Placement]:
    """Return the placements of data and scale of a weight ``[G, N, K]``, sharded in N (``dim`` 1) or K (2)."""
    stored = Shard(3 - dim if columnwise and f.transposed_columnwise else dim)
    return stored, stored if f.block else WHOLE


def _features(f: Format) -> tuple[Placement, Placement]:
    """Return the placements of data and scale of columnwise rows ``[T, K]``, sharded in K."""
    data = Shard(0 if f.transposed_columnwise else 1)
    return data, WHOLE if not f.block else Shard(0 if f.transposed_scale else 1)


def _results(
    rows: tuple[Placement, Placement], columns: tuple[Placement, Placement], rowwise: bool, columnwise: bool
) -> list[Placement]:
    """Return the placements of all components but ``dbias``, from data's and scale's; empty ones are replicated."""
    nothing = WHOLE, WHOLE
    return [*(rows if rowwise else nothing), WHOLE, *(columns if columnwise else nothing), WHOLE]


def _divides(size: int, unit: int, mesh: Any) -> bool:
    """Return whether every rank gets whole units, however many dimensions of the mesh share them."""
    return size % (max(unit, 1) * mesh.size()) == 0


def _activation_divides(c: OpCall, width: int, mesh: Any) -> bool:
    """Return whether ranks can share the activation's ``width`` input columns in whole pairs and output blocks."""
    f, gated = FORMATS[c.format], activations.named(c.kind).gated
    if c.scale_layout != "compact" or f.has_amax or (gated and not c.interleaved):
        return False
    return _divides(width // 2 if gated else width, f.block, mesh)


def _width(c: OpCall) -> int:
    """Return N of the weights ``b`` of a scaled GEMM."""
    turned = c.b_direction == "columnwise" and not FORMATS[c.format].transposed_columnwise
    return c.b.shape[2 if turned else 1]  # type: ignore[no-any-return]


# --- rules ------------------------------------------------------------------------------------------------------------


def _grouped_gemm_scaled(c: OpCall) -> list[Rule]:
    f, columnwise, rules = FORMATS[c.format], c.b_direction == "columnwise", [c.whole()]
    if c.scale_layout != "compact":
        return rules
    contracted, kept = (1, 2) if columnwise else (2, 1)
    if _divides(_width(c), f.block if f.square_scales else 1, c.a.mesh):
        data, scale = _matrix(f, columnwise, kept)
        rules.append(c.rule([Shard(1)], b=data, b_scale=scale, bias=Shard(1)))
    if _divides(c.a.shape[1] * f.per_byte, f.block or f.per_byte, c.a.mesh):
        data, scale = _matrix(f, columnwise, contracted)
        a_scale = Shard(1) if f.block else WHOLE
        rules.append(c.rule([Partial()], a=Shard(1), a_scale=a_scale, b=data, b_scale=scale, bias=Partial()))
    return rules


def _grouped_gemm_packed(c: OpCall) -> list[Rule]:
    """Return the rules for rows N or columns K of the matrices, one of which is contracted."""
    f, b, rules = FORMATS[c.format], c.b, [c.whole()]
    sides = (1, b.shape[1], f.block if f.square_scales else 1), (2, b.shape[2] * f.per_byte, f.block or f.per_byte)
    for dim, size, unit in sides:
        if _divides(size, unit, c.a.mesh):
            data, scale = _matrix(f, False, dim)
            contracted = (dim == 1) == c.over_rows
            a, result = (Shard(1), Partial()) if contracted else (WHOLE, Shard(1))
            rules.append(c.rule([result], a=a, b=data, b_scale=scale, bias=result))
    return rules


def _grouped_gemm_scaled_activation_quantize(c: OpCall) -> list[Rule]:
    """Return the rules for columns of the weights, in whole pairs, and of the activation, in whole blocks."""
    f, across, rules = FORMATS[c.format], c.b_direction == "columnwise", [c.whole()]
    if _activation_divides(c, _width(c), c.a.mesh):
        data, b_scale = _matrix(f, across, 2 if across else 1)
        results = [Shard(1), *_results((Shard(1), Shard(1)), _features(f), c.rowwise, c.columnwise)]
        rules.append(c.rule(results, b=data, b_scale=b_scale, bias=Shard(1)))
    return rules


def _grouped_activation_quantize(c: OpCall) -> list[Rule]:
    rules = [c.whole()]
    if _activation_divides(c, c.x.shape[1], c.x.mesh):
        results = _results((Shard(1), Shard(1)), _features(FORMATS[c.format]), c.rowwise, c.columnwise)
        rules.append(c.rule(results, x=Shard(1)))
    return rules


def _wgrad(c: OpCall) -> list[Rule]:
    if c.scale_layout != "compact":
        return [c.whole()]
    data, scale = _features(FORMATS[c.format])
    return [
        c.whole(),
        c.rule([Shard(1)], a=data, a_scale=scale),
        c.rule([Shard(2)], b=data, b_scale=scale),
    ]


def _group_quantize(c: OpCall) -> list[Rule]:
    f, x, rules = FORMATS[c.format], c.x, [c.whole()]
    if c.scale_layout != "compact" or f.has_amax:
        return rules
    for dim in range(1, len(x.shape)):
        if not _divides(x.shape[dim], f.block, x.mesh):
            continue
        by_rows = Shard(dim), Shard(dim)
        columns = _features(f) if c.offs is not None else _matrix(f, True, dim)
        turned = f.transposed_scale or (f.square_scales and c.block_2d)
        if c.offs is None and f.transposed_columnwise and not turned:  # unlike the data
            columns = columns[0], Shard(dim)
        results = [*_results(by_rows, columns, c.rowwise, c.columnwise), Shard(1) if c.dbias else WHOLE]
        rules.append(c.rule(results, x=Shard(dim)))
    return rules


def _grouped_gemm_row_scaled(c: OpCall) -> list[Rule]:
    """Return the rules for rows of the matrices, or for columns of both, which are contracted."""
    return [
        c.whole(),
        c.rule([Shard(1)], b=Shard(1), b_scale=Shard(1)),
        c.rule([Partial()], a=Shard(1), b=Shard(2)),
    ]


def _grouped_gemm_row_scaled_wgrad(c: OpCall) -> list[Rule]:
    """Return the rules for the rows of either operand."""
    return [
        c.whole(),
        c.rule([Shard(1)], a=Shard(0), a_scale=Shard(1)),
        c.rule([Shard(2)], b=Shard(0), b_scale=Shard(1)),
    ]


RULES: dict[torch._ops.OpOverload, Rules] = {
    _ops.grouped_gemm_packed.default: _grouped_gemm_packed,
    _ops.grouped_gemm_row_scaled.default: _grouped_gemm_row_scaled,
    _ops.grouped_gemm_row_scaled_wgrad.default: _grouped_gemm_row_scaled_wgrad,
    _ops.grouped_gemm_scaled.default: _grouped_gemm_scaled,
    _ops.grouped_gemm_scaled_activation_quantize.default: _grouped_gemm_scaled_activation_quantize,
    _ops.grouped_gemm_scaled_wgrad.default: _wgrad,
    _ops.grouped_activation_quantize.default: _grouped_activation_quantize,
    _ops.group_quantize.default: _group_quantize,
}
