"""Properties of the ops for other parts of PyTorch: FLOP formulas, and outputs for checkpointing to save."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..meta.formats import FORMATS
from ..utils.post_import import after_import
from . import (  # noqa: F401  (the ops must exist first)
    batched_syrk,
    expert_parallel,
    grouped_gemm,
    grouped_gemm_activation,
    grouped_gemm_dactivation,
    grouped_gemm_low_rank,
    grouped_gemm_low_rank_activation,
    grouped_gemm_packed,
    grouped_gemm_row_scaled,
    grouped_gemm_scaled,
    grouped_gemm_scaled_activation_quantize,
    grouped_gemm_scaled_wgrad,
    grouped_gemm_wgrad,
    grouped_mlp,
    moe,
    offload,
)

_ops = torch.ops.tgl
_formulas: list[tuple[torch._ops.OpOverloadPacket, Callable[..., int]]] = []
Shape = list[int]

SAC_SAVE_LIST: list[torch._ops.OpOverload] = [
    _ops.grouped_gemm.default,
    _ops.grouped_gemm_activation.default,
    _ops.grouped_gemm_low_rank.default,
    _ops.grouped_gemm_low_rank_activation.default,
    _ops.grouped_gemm_packed.default,
    _ops.grouped_gemm_row_scaled.default,
    _ops.grouped_gemm_scaled.default,
    _ops.grouped_gemm_scaled_activation_quantize.default,
    _ops.grouped_mlp.default,
    _ops.moe.default,
    _ops.ep_route.default,
    _ops.ep_dispatch.default,
    _ops.ep_combine.default,
    _ops.offload.default,
]
"""Op overloads whose outputs selective activation checkpointing should save rather than recompute.

Offloaded tensors are already on the host; recomputing them would copy them there and back again. Results of exchanges
between ranks would be exchanged once more.

Pass it to ``torch.utils.checkpoint.create_selective_checkpoint_contexts``.
"""


def _flops(*ops: torch._ops.OpOverloadPacket) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Register the decorated function, which takes arguments by name and tensors as shapes, as FLOP formula of ``ops``.

    Every row counts, because only the device knows which of them are routed.
    """

    def keep(formula: Callable[..., int]) -> Callable[..., int]:
        _formulas.extend((op, formula) for op in ops)
        return formula

    return keep


def _by_name(op: torch._ops.OpOverloadPacket, formula: Callable[..., int]) -> Callable[..., int]:
    """Return ``formula`` for the arguments of a call of either overload of ``op``."""

    def flops(*shapes: Any, out_shape: Any, **keywords: Any) -> int:
        overload = op.out if "out" in keywords else op.default
        names = [argument.name for argument in overload._schema.arguments]
        return formula(**dict(zip(names, shapes)), **keywords)

    return flops


@_flops(_ops.grouped_gemm, _ops.grouped_gemm_activation)
def _gemm(a: Shape, b: Shape, rows: Shape | None = None, **_: Any) -> int:
    return 2 * (rows or a)[0] * a[1] * b[2]


@_flops(_ops.grouped_gemm_dactivation)
def _gemm_dactivation(dy: Shape, b: Shape, rows: Shape | None = None, **_: Any) -> int:
    return _gemm(dy, b, rows)


@_flops(_ops.grouped_gemm_low_rank, _ops.grouped_gemm_low_rank_activation)
def _gemm_low_rank(a: Shape, b: Shape, low: Shape, **_: Any) -> int:
    return 2 * a[0] * (a[1] + low[1]) * b[2]


@_flops(_ops.grouped_gemm_wgrad, _ops.grouped_gemm_wgrad_accumulate_)
def _wgrad(a: Shape, b: Shape, a_rows: Shape | None = None, **_: Any) -> int:
    return 2 * (a_rows or a)[0] * a[1] * b[1]


@_flops(_ops.batched_syrk)
def _syrk(x: Shape, **_: Any) -> int:
    """Return ``2 G M M K``, as for any product; a kernel that computes one triangle does half."""
    return 2 * x[0] * x[1] ** 2 * x[2]


@_flops(_ops.grouped_mlp)
def _mlp(x: Shape, w1: Shape, w2: Shape, **_: Any) -> int:
    return 2 * x[0] * (w1[1] * w1[2] + w2[1] * w2[2])


@_flops(_ops.grouped_mlp_backward)
def _mlp_backward(dy: Shape, w1: Shape, w2: Shape, output_mask: list[bool], **_: Any) -> int:
    dx, dw1, dw2, dprobs, dbias1, _dbias2 = output_mask
    first, second = (2 * dy[0] * w[1] * w[2] for w in (w1, w2))
    return first * (dx + dw1) + second * (dw2 + (dx or dw1 or dprobs or dbias1))


@_flops(_ops.moe)
def _moe(source: Shape, w1: Shape, w2: Shape, **_: Any) -> int:
    return _mlp(source, w1, w2)


@_flops(_ops.moe_backward_hidden)
def _moe_backward_hidden(w2: Shape, source: Shape, output_mask: list[bool], **_: Any) -> int:
    dh, dw2, dweights, _dbias2 = output_mask
    return 2 * source[0] * w2[1] * w2[2] * (dw2 + (dh or dweights))


@_flops(_ops.moe_backward_input)
def _moe_backward_input(dh: Shape, w1: Shape, output_mask: list[bool], **_: Any) -> int:
    return 2 * dh[0] * w1[1] * w1[2] * (output_mask[0] + output_mask[1])


@_flops(_ops.grouped_gemm_packed)
def _gemm_packed(a: Shape, b: Shape, format: str, **_: Any) -> int:
    return 2 * a[0] * b[1] * b[2] * FORMATS[format].per_byte


@_flops(_ops.grouped_gemm_row_scaled)
def _gemm_row_scaled(a: Shape, b: Shape, **_: Any) -> int:
    return 2 * a[0] * b[1] * b[2]


@_flops(_ops.grouped_gemm_row_scaled_wgrad)
def _wgrad_row_scaled(a: Shape, b: Shape, **_: Any) -> int:
    return 2 * a[0] * a[1] * b[0]


@_flops(_ops.grouped_gemm_scaled, _ops.grouped_gemm_scaled_activation_quantize)
def _gemm_scaled(a: Shape, b: Shape, format: str, b_direction: str = "rowwise", **_: Any) -> int:
    form = FORMATS[format]
    across = b_direction == "columnwise" and not form.transposed_columnwise
    return 2 * a[0] * a[1] * form.per_byte * b[2 if across else 1]


@_flops(_ops.grouped_gemm_scaled_wgrad, _ops.grouped_gemm_scaled_wgrad_accumulate_)
def _wgrad_scaled(a: Shape, b: Shape, format: str, **_: Any) -> int:
    """Return ``2 T M N``; for padded transposed data ``2 Tp M N``, because T does not follow from the padded size."""
    form = FORMATS[format]
    return 2 * a[0] * a[1] * form.per_byte * b[0 if form.transposed_columnwise else 1]


def _register(flop_counter: Any) -> None:
    for op, formula in _formulas:
        flop_counter.register_flop_formula(op)(_by_name(op, formula))


after_import("torch.utils.flop_counter", _register)  # importing it here would import triton
