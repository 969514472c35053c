"""Properties of the ops for other parts of PyTorch: FLOP formulas, and outputs for checkpointing to save."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
_formulas: list[tuple[list[torch._ops.OpOverloadPacket], Callable[..., int]]] = []

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
    """Register the decorated function as the FLOP formula of ``ops``."""

    def keep(formula: Callable[..., int]) -> Callable[..., int]:
        _formulas.append((list(ops), formula))
        return formula

    return keep


def _rows(a_shape: list[int], tables: Sequence[list[int] | None], place: int) -> int:
    """Return T: the length of the index of ``a``, argument ``place`` of ``tables``, or the rows of ``a`` without it."""
    index = tables[place] if len(tables) > place else None
    return (index or a_shape)[0]


@_flops(_ops.grouped_gemm)
def grouped_gemm_flop(a_shape: list[int], b_shape: list[int], *tables: Any, **kwargs: Any) -> int:
    """Return ``2 T K N``: every row counts, because only the device knows which of them are routed."""
    return 2 * _rows(a_shape, tables, 4) * a_shape[1] * b_shape[2]


@_flops(_ops.grouped_gemm_low_rank, _ops.grouped_gemm_low_rank_activation)
def grouped_gemm_low_rank_flop(
    a_shape: list[int], b_shape: list[int], low_shape: list[int], *args: Any, **kwargs: Any
) -> int:
    """Return ``2 T (K + R) N``: every row counts."""
    return 2 * a_shape[0] * (a_shape[1] + low_shape[1]) * b_shape[2]


@_flops(_ops.grouped_gemm_activation, _ops.grouped_gemm_dactivation)
def grouped_gemm_and_activation_flop(a_shape: list[int], b_shape: list[int], *tables: Any, **kwargs: Any) -> int:
    """Return the FLOPs of the GEMM."""
    return 2 * _rows(a_shape, tables, 3) * a_shape[1] * b_shape[2]


@_flops(_ops.grouped_gemm_wgrad)
def grouped_gemm_wgrad_flop(a_shape: list[int], b_shape: list[int], *tables: Any, out: Any = None, **_: Any) -> int:
    """Return ``2 T M N``: every row counts. With ``out``, ``slots`` precedes the indices."""
    return 2 * _rows(a_shape, tables, 1 if out is None else 2) * a_shape[1] * b_shape[1]


@_flops(_ops.grouped_gemm_wgrad_accumulate_)
def grouped_gemm_wgrad_accumulate_flop(a_shape: list[int], b_shape: list[int], *tables: Any, **kwargs: Any) -> int:
    """Return the FLOPs of the product."""
    return 2 * _rows(a_shape, tables, 3) * a_shape[1] * b_shape[1]


@_flops(_ops.batched_syrk)
def batched_syrk_flop(x_shape: list[int], *args: Any, **kwargs: Any) -> int:
    """Return ``2 G M M K``, as for any product; a kernel that computes one triangle does half."""
    return 2 * x_shape[0] * x_shape[1] ** 2 * x_shape[2]


@_flops(_ops.grouped_mlp)
def grouped_mlp_flop(x_shape: list[int], w1_shape: list[int], w2_shape: list[int], *args: Any, **kwargs: Any) -> int:
    """Return the FLOPs of both GEMMs."""
    return 2 * x_shape[0] * (w1_shape[1] * w1_shape[2] + w2_shape[1] * w2_shape[2])


@_flops(_ops.grouped_mlp_backward)
def grouped_mlp_backward_flop(
    dy_shape: list[int],
    x_shape: list[int] | None,
    w1_shape: list[int],
    w2_shape: list[int],
    *args: Any,
    output_mask: list[bool],
    **kwargs: Any,
) -> int:
    """Return the FLOPs of the GEMMs for the requested gradients."""
    dx, dw1, dw2, dprobs, dbias1, _ = output_mask
    first, second = (2 * dy_shape[0] * shape[1] * shape[2] for shape in (w1_shape, w2_shape))
    return first * (dx + dw1) + second * (dw2 + (dx or dw1 or dprobs or dbias1))


@_flops(_ops.moe)
def moe_flop(
    x_shape: list[int],
    w1_shape: list[int],
    w2_shape: list[int],
    source_shape: list[int],
    *args: Any,
    **kwargs: Any,
) -> int:
    """Return the FLOPs of both GEMMs, for the rows of the top-k slots."""
    return grouped_mlp_flop(source_shape, w1_shape, w2_shape)


@_flops(_ops.moe_backward_hidden)
def moe_backward_hidden_flop(
    dy_shape: list[int],
    w2_shape: list[int],
    source_shape: list[int],
    *args: Any,
    output_mask: list[bool],
    **kwargs: Any,
) -> int:
    """Return the FLOPs of the GEMMs for the requested gradients."""
    dh, dw2, dweights, _ = output_mask
    return 2 * source_shape[0] * w2_shape[1] * w2_shape[2] * (dw2 + (dh or dweights))


@_flops(_ops.moe_backward_input)
def moe_backward_input_flop(
    dh_shape: list[int],
    x_shape: list[int] | None,
    w1_shape: list[int],
    *args: Any,
    output_mask: list[bool],
    **kwargs: Any,
) -> int:
    """Return the FLOPs of the GEMMs for the requested gradients."""
    dx, dw1, _ = output_mask
    return 2 * dh_shape[0] * w1_shape[1] * w1_shape[2] * (dx + dw1)


@_flops(_ops.grouped_gemm_packed)
def grouped_gemm_packed_flop(a_shape: list[int], b_shape: list[int], *args: Any, format: str, **kwargs: Any) -> int:
    """Return ``2 T N K``: every row counts."""
    return 2 * a_shape[0] * b_shape[1] * b_shape[2] * FORMATS[format].per_byte


@_flops(_ops.grouped_gemm_row_scaled)
def grouped_gemm_row_scaled_flop(
    a_shape: list[int], a_scale_shape: list[int], b_shape: list[int], *args: Any, **kwargs: Any
) -> int:
    """Return ``2 T N K``: every row counts."""
    return 2 * a_shape[0] * b_shape[1] * b_shape[2]


@_flops(_ops.grouped_gemm_row_scaled_wgrad)
def grouped_gemm_row_scaled_wgrad_flop(
    a_shape: list[int], a_scale_shape: list[int], b_shape: list[int], *args: Any, **kwargs: Any
) -> int:
    """Return ``2 T M N``: every column counts."""
    return 2 * a_shape[0] * a_shape[1] * b_shape[0]


@_flops(_ops.grouped_gemm_scaled, _ops.grouped_gemm_scaled_activation_quantize)
def grouped_gemm_scaled_flop(
    a_shape: list[int],
    a_scale_shape: list[int],
    b_shape: list[int],
    *args: Any,
    format: str,
    b_direction: str = "rowwise",
    **kwargs: Any,
) -> int:
    """Return ``2 T K N``: every row counts."""
    form = FORMATS[format]
    across = b_direction == "columnwise" and not form.transposed_columnwise
    return 2 * a_shape[0] * a_shape[1] * form.per_byte * b_shape[2 if across else 1]


@_flops(_ops.grouped_gemm_scaled_wgrad, _ops.grouped_gemm_scaled_wgrad_accumulate_)
def grouped_gemm_scaled_wgrad_flop(
    a_shape: list[int], a_scale_shape: list[int], b_shape: list[int], *args: Any, format: str, **kwargs: Any
) -> int:
    """Return ``2 T M N``; for padded transposed data ``2 Tp M N``, because T does not follow from the padded size."""
    form = FORMATS[format]
    return 2 * a_shape[0] * a_shape[1] * form.per_byte * b_shape[0 if form.transposed_columnwise else 1]


def _register(flop_counter: Any) -> None:
    for ops, formula in _formulas:
        flop_counter.register_flop_formula(ops)(formula)


after_import("torch.utils.flop_counter", _register)  # importing it here would import triton
