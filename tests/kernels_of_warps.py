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
TILINGS = {loads: Tilings(ARCHS[PLACE].smem_bytes, (16, 8), tma=loads == "tma") for loads in ("lanes", "tma")}
"""By what loads operands of 16 bits whose rows are in order: lanes by ``cp.async``, or TMA."""
_plans: dict[str, dict] = {loads: {} for loads in TILINGS}  # compiled ones outlive a block


@contextlib.contextmanager
def in_place(loads: str = "lanes") -> Iterator[None]:
    """GEMMs run on them, compiled for sm_90; nothing in them depends on the architecture but what ``loads``.

    Raises:
        KeyError: ``loads`` is no key of ``TILINGS``.
    """
    own, plans = ARCHS[PLACE], launcher.plans
    ARCHS[PLACE] = replace(own, folder="warp", target=PLACE, kernels=archs.ALL, tilings=TILINGS[loads])
    launcher.plans = _plans[loads]
    launcher.forget()
    try:
        yield
    finally:
        ARCHS[PLACE], launcher.plans = own, plans
        launcher.forget()
