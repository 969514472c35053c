"""Sharding rules of the ops on quantised operands, for compact scales.

The components of one operand are sharded together along one of its logical dimensions, whichever dimension of theirs
that is. A rank must get whole blocks: where a dimension does not divide that way, and for ``scale_layout="blocked"``,
the operands are replicated. Per-group scales and amax belong to the whole tensor and are replicated, so
``group_quantize``, which makes them, is only sharded for formats without them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from ..meta import activations
from ..meta.formats import FORMATS, Format
from ..meta.packed import PackedCall
from .sharding_rules import Rule, replicated, rule

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


def _activation_divides(f: Format, width: int, mesh: Any, *, kind: str, interleaved: bool, scale_layout: str) -> bool:
    """Return whether ranks can share the activation's ``width`` input columns in whole pairs and output blocks."""
    gated = activations.named(kind).gated
    if scale_layout != "compact" or f.has_amax or (gated and not interleaved):
        return False
    return _divides(width // 2 if gated else width, f.block, mesh)


# --- rules ------------------------------------------------------------------------------------------------------------


def _grouped_gemm_scaled(
    a: Any,
    a_scale: Any,
    b: Any,
    b_scale: Any,
    offs: Any,
    a_amax: Any = None,
    b_amax: Any = None,
    bias: Any = None,
    bias_scale: Any = None,
    *,
    format: str,
    b_direction: str = "rowwise",
    scale_layout: str = "compact",
    **_: Any,
) -> list[Rule]:
    f, columnwise = FORMATS[format], b_direction == "columnwise"
    rules = [replicated(1, a, a_scale, b, b_scale, offs, a_amax, b_amax, bias, bias_scale)]
    if scale_layout != "compact":
        return rules
    contracted, kept = (1, 2) if columnwise else (2, 1)
    rest = (offs, WHOLE), (a_amax, WHOLE), (b_amax, WHOLE)
    width = b.shape[2] if columnwise and not f.transposed_columnwise else b.shape[1]
    depth = a.shape[1] * f.per_byte
    if _divides(width, f.block if f.square_scales else 1, a.mesh):
        data, scale = _matrix(f, columnwise, kept)
        rules.append(
            rule(
                [Shard(1)],
                *((a, WHOLE), (a_scale, WHOLE), (b, data), (b_scale, scale), *rest),
                *((bias, Shard(1)), (bias_scale, WHOLE)),
            )
        )
    if _divides(depth, f.block or f.per_byte, a.mesh):
        data, scale = _matrix(f, columnwise, contracted)
        rules.append(
            rule(
                [Partial()],
                *((a, Shard(1)), (a_scale, Shard(1) if f.block else WHOLE), (b, data), (b_scale, scale), *rest),
                *((bias, Partial()), (bias_scale, WHOLE)),
            )
        )
    return rules


def _grouped_gemm_packed(*operands: Any, format: str, over_rows: bool = False, **_: Any) -> list[Rule]:
    """Return the rules for rows N or columns K of the matrices, one of which is contracted."""
    f, call = FORMATS[format], PackedCall(*operands)
    rules, b, mesh = [replicated(1, *call)], call.b, call.a.mesh  # type: ignore[attr-defined]
    rest = (call.offs, WHOLE), (call.b_amax, WHOLE)
    sides = (1, b.shape[1], f.block if f.square_scales else 1), (2, b.shape[2] * f.per_byte, f.block or f.per_byte)
    for dim, size, unit in sides:
        if not _divides(size, unit, mesh):
            continue
        data, scale = _matrix(f, False, dim)
        contracted = (dim == 1) == over_rows
        of_a, result = (Shard(1), Partial()) if contracted else (WHOLE, Shard(1))
        matrices = (b, data), (call.b_scale, scale)
        bias = (call.bias, result), (call.bias_scale, WHOLE)
        rules.append(rule([result], (call.a, of_a), *matrices, *rest, *bias))
    return rules


def _grouped_gemm_scaled_activation_quantize(
    a: Any,
    a_scale: Any,
    b: Any,
    b_scale: Any,
    offs: Any,
    a_amax: Any = None,
    b_amax: Any = None,
    bias: Any = None,
    probs: Any = None,
    scale: Any = None,
    *,
    format: str,
    b_direction: str = "rowwise",
    rowwise: bool = True,
    columnwise: bool = True,
    scale_layout: str = "compact",
    kind: str = "swiglu",
    interleaved: bool = False,
    **_: Any,
) -> list[Rule]:
    """Return the rules for columns of the weights, in whole pairs, and of the activation, in whole blocks."""
    f, across = FORMATS[format], b_direction == "columnwise"
    rules = [replicated(7, a, a_scale, b, b_scale, offs, a_amax, b_amax, bias, probs, scale)]
    width = b.shape[2] if across and not f.transposed_columnwise else b.shape[1]
    if _activation_divides(f, width, a.mesh, kind=kind, interleaved=interleaved, scale_layout=scale_layout):
        data, b_scales = _matrix(f, across, 2 if across else 1)
        columns = Shard(1)
        rules.append(
            rule(
                [columns, *_results((columns, columns), _features(f), rowwise, columnwise)],
                *((a, WHOLE), (a_scale, WHOLE), (b, data), (b_scale, b_scales), (offs, WHOLE)),
                *((a_amax, WHOLE), (b_amax, WHOLE), (bias, columns), (probs, WHOLE), (scale, WHOLE)),
            )
        )
    return rules


def _grouped_activation_quantize(
    x: Any,
    offs: Any,
    probs: Any = None,
    scale: Any = None,
    *,
    format: str,
    rowwise: bool = True,
    columnwise: bool = True,
    scale_layout: str = "compact",
    kind: str = "swiglu",
    interleaved: bool = False,
    **_: Any,
) -> list[Rule]:
    f = FORMATS[format]
    rules = [replicated(6, x, offs, probs, scale)]
    if _activation_divides(f, x.shape[1], x.mesh, kind=kind, interleaved=interleaved, scale_layout=scale_layout):
        results = _results((Shard(1), Shard(1)), _features(f), rowwise, columnwise)
        rules.append(rule(results, (x, Shard(1)), (offs, WHOLE), (probs, WHOLE), (scale, WHOLE)))
    return rules


def _wgrad(
    a: Any,
    a_scale: Any,
    b: Any,
    b_scale: Any,
    offs: Any,
    a_amax: Any = None,
    b_amax: Any = None,
    *,
    format: str,
    scale_layout: str = "compact",
    **_: Any,
) -> list[Rule]:
    rules = [replicated(1, a, a_scale, b, b_scale, offs, a_amax, b_amax)]
    if scale_layout == "compact":
        data, scale = _features(FORMATS[format])
        rest = (offs, WHOLE), (a_amax, WHOLE), (b_amax, WHOLE)
        rules += [
            rule([Shard(1)], (a, data), (a_scale, scale), (b, WHOLE), (b_scale, WHOLE), *rest),
            rule([Shard(2)], (a, WHOLE), (a_scale, WHOLE), (b, data), (b_scale, scale), *rest),
        ]
    return rules


def _group_quantize(
    x: Any,
    offs: Any,
    scale: Any = None,
    row_scale: Any = None,
    rng: Any = None,
    slots: Any = None,
    rows: Any = None,
    *,
    format: str,
    rowwise: bool = True,
    columnwise: bool = True,
    scale_layout: str = "compact",
    block_2d: bool = False,
    dbias: bool = False,
    **_: Any,
) -> list[Rule]:
    f = FORMATS[format]
    rules = [replicated(7, x, offs, scale, row_scale, rng, slots, rows)]
    if scale_layout != "compact" or f.has_amax:
        return rules
    for dim in range(1, len(x.shape)):
        if not _divides(x.shape[dim], f.block, x.mesh):
            continue
        by_rows = Shard(dim), Shard(dim)
        columns = _features(f) if offs is not None else _matrix(f, True, dim)
        turned = f.transposed_scale or (f.square_scales and block_2d)
        if offs is None and f.transposed_columnwise and not turned:  # unlike the data
            columns = columns[0], Shard(dim)
        results = [*_results(by_rows, columns, rowwise, columnwise), Shard(1) if dbias else WHOLE]
        whole = [(t, WHOLE) for t in (offs, scale, row_scale, rng, slots, rows)]
        rules.append(rule(results, (x, Shard(dim)), *whole))
    return rules


def _grouped_gemm_row_scaled(a: Any, a_scale: Any, b: Any, b_scale: Any, offs: Any, **_: Any) -> list[Rule]:
    """Return the rules for rows of the matrices, or for columns of both, which are contracted."""
    return [
        replicated(1, a, a_scale, b, b_scale, offs),
        rule([Shard(1)], (a, WHOLE), (a_scale, WHOLE), (b, Shard(1)), (b_scale, Shard(1)), (offs, WHOLE)),
        rule([Partial()], (a, Shard(1)), (a_scale, WHOLE), (b, Shard(2)), (b_scale, WHOLE), (offs, WHOLE)),
    ]


def _grouped_gemm_row_scaled_wgrad(a: Any, a_scale: Any, b: Any, b_scale: Any, offs: Any, **_: Any) -> list[Rule]:
    """Return the rules for the rows of either operand."""
    return [
        replicated(1, a, a_scale, b, b_scale, offs),
        rule([Shard(1)], (a, Shard(0)), (a_scale, Shard(1)), (b, WHOLE), (b_scale, WHOLE), (offs, WHOLE)),
        rule([Shard(2)], (a, WHOLE), (a_scale, WHOLE), (b, Shard(0)), (b_scale, Shard(1)), (offs, WHOLE)),
    ]


RULES: dict[torch._ops.OpOverload, Callable[..., list[Rule]]] = {
    _ops.grouped_gemm_packed.default: _grouped_gemm_packed,
    _ops.grouped_gemm_row_scaled.default: _grouped_gemm_row_scaled,
    _ops.grouped_gemm_row_scaled_wgrad.default: _grouped_gemm_row_scaled_wgrad,
    _ops.grouped_gemm_scaled.default: _grouped_gemm_scaled,
    _ops.grouped_gemm_scaled_activation_quantize.default: _grouped_gemm_scaled_activation_quantize,
    _ops.grouped_gemm_scaled_wgrad.default: _wgrad,
    _ops.grouped_activation_quantize.default: _grouped_activation_quantize,
    _ops.group_quantize.default: _group_quantize,
}
