"""Register the kernels as implementations of the ops; the DSL is imported at the first call."""

from __future__ import annotations

from .. import backends
from .launchers import (
    activation,
    batched_syrk,
    decode_block,
    dequantize,
    expert_parallel,
    gemm,
    gemm_activation,
    gemm_dactivation,
    gemm_low_rank,
    gemm_low_rank_activation,
    gemm_packed,
    gemm_row_scaled,
    gemm_scaled,
    gemm_scaled_quantize,
    permutation,
    quantize,
    reduce,
    requantize,
    route,
    scale_layout,
    topk_router,
)
from .runtime.launcher import Launcher

COPYING: tuple[Launcher, ...] = (
    *gemm.LAUNCHERS,
    *gemm_activation.LAUNCHERS,
    *gemm_dactivation.LAUNCHERS,
    gemm_low_rank.GROUPED_GEMM_LOW_RANK,
    gemm_low_rank_activation.GROUPED_GEMM_LOW_RANK_ACTIVATION,
    *gemm_scaled.LAUNCHERS,
    *gemm_row_scaled.LAUNCHERS,
    *permutation.LAUNCHERS,
    quantize.GROUP_QUANTIZE,
)
"""Launchers that are also registered as an implementation that copies operands whose layout a kernel cannot read."""

LAUNCHERS: tuple[Launcher, ...] = (
    *COPYING,
    *gemm_scaled_quantize.LAUNCHERS,
    gemm_packed.GROUPED_GEMM_PACKED,
    batched_syrk.BATCHED_SYRK,
    *activation.LAUNCHERS,
    *reduce.LAUNCHERS,
    *topk_router.LAUNCHERS,
    *route.LAUNCHERS,
    dequantize.GROUP_DEQUANTIZE,
    requantize.GROUP_REQUANTIZE,
    scale_layout.SCALE_TO_LAYOUT,
    quantize.GROUPED_ACTIVATION_QUANTIZE,
)

for _launcher in LAUNCHERS:
    backends.add(_launcher.implementation())
for _launcher in COPYING:
    backends.add(_launcher.copying())
backends.add(quantize.ELEMENTWISE.implementation("tgl kernel, element by element", priority=8))
backends.add(decode_block.IMPLEMENTATION)
for _op in expert_parallel.OPS:
    backends.add(_op.implementation())
