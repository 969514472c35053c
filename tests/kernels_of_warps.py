"""The mma.sync kernels instead of a Hopper's own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from tgl import backends
from tgl.cutlass_kernels import archs
from tgl.cutlass_kernels.archs import ARCHS
from tgl.cutlass_kernels.gemm.mma_sync.tilings import Tilings
from tgl.cutlass_kernels.runtime import launcher

PLACE = "sm_90"
TILINGS = {loads: Tilings(ARCHS[PLACE].smem_bytes, (16, 8), tma=loads == "tma") for loads in ("lanes", "tma")}
"""By what loads operands of 16 bits whose rows are in order: lanes by ``cp.async``, or TMA."""
_plans: dict[str, dict] = {loads: {} for loads in TILINGS}  # compiled ones outlive a block


def _without_warps() -> list[backends.Implementation]:
    """Return the implementations that a Hopper has and no chip limited to mma.sync GEMMs."""
    warps = {name for name, arch in ARCHS.items() if arch.folder == "mma_sync"}
    every = [i for table in backends.registry.implementations.values() for i in table]
    return [i for i in every if i.archs is not None and PLACE in i.archs and not i.archs & warps]


@contextlib.contextmanager
def in_place(loads: str = "lanes") -> Iterator[None]:
    """GEMMs run on them, compiled for sm_90; nothing in them depends on the architecture but what ``loads``.

    Raises:
        KeyError: ``loads`` is no key of ``TILINGS``.
    """
    own, plans = ARCHS[PLACE], launcher.compiled_kernels
    missing = _without_warps()
    ARCHS[PLACE] = replace(own, folder="mma_sync", target=PLACE, kernels=archs.ALL, tilings=TILINGS[loads])
    launcher.compiled_kernels = _plans[loads]
    launcher.forget()
    for implementation in missing:
        backends.remove(implementation)
    try:
        yield
    finally:
        for implementation in missing:
            backends.add(implementation)
        ARCHS[PLACE], launcher.compiled_kernels = own, plans
        launcher.forget()
