"""Tensor-core instructions: numerics, operand and accumulator layouts.

The functions reach memory only through the CTA object of the machine: ``read_chunks(idx, what)`` for 16-byte chunks of
shared memory and ``tmem_read``/``tmem_write``(``_at``) for tensor memory, which check bounds, visibility and races.
"""

from .tcgen05 import Tcgen05
from .tmem import ld_index, tc_cp, tc_ld, tc_st
from .warp import fragment_in, fragment_out, mma_scaled, mma_sync, wgmma

__all__ = [
    "Tcgen05",
    "fragment_in",
    "fragment_out",
    "ld_index",
    "mma_scaled",
    "mma_sync",
    "tc_cp",
    "tc_ld",
    "tc_st",
    "wgmma",
]
