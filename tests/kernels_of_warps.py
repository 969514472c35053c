"""The kernels with MMAs of warps in place of a Hopper's own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from tgl.cutlass_kernels import archs
from tgl.cutlass_kernels.archs import ARCHS
from tgl.cutlass_kernels.gemm.warp.tilings import Tilings
from tgl.cutlass_kernels.runtime import launcher

PLACE = "sm_90"
TILINGS = Tilings(ARCHS[PLACE].smem_bytes, (16, 8))
_plans: dict = {}  # compiled ones outlive a block


@contextlib.contextmanager
def in_place() -> Iterator[None]:
    """GEMMs run on them, compiled for sm_90; nothing in them depends on the architecture."""
    own, plans = ARCHS[PLACE], launcher.plans
    ARCHS[PLACE] = replace(own, folder="warp", target=PLACE, kernels=archs.ALL, tilings=TILINGS)
    launcher.plans = _plans
    launcher.forget()
    try:
        yield
    finally:
        ARCHS[PLACE], launcher.plans = own, plans
        launcher.forget()
