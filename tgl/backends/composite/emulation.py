"""The GEMMs on quantised operands as an emulation, on CUDA devices without a kernel of the format."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor

from .. import Explanation, Implementation, Reason, device_arch
from . import constituent_ops, decoded_gemm, decoded_wgrad

NOTE = "an emulation: operands decoded to bfloat16 for a dense GEMM; slower than a kernel of the format"


@functools.cache
def _say(format: str, arch: str) -> None:
    warnings.warn(
        f"tgl: {arch} has no kernel for GEMMs on {format}, which are emulated: operands are decoded to bfloat16, which "
        f"is correct but slower than bfloat16 without a recipe; a recipe with emulate=False raises instead",
        stacklevel=2,
    )


def _warn_once(run: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``run`` to report once per format and architecture that it emulates."""

    def emulated(a: Tensor, *operands: Tensor | None, format: str, **options: Any) -> None:
        _say(format, device_arch(a.device))
        run(a, *operands, format=format, **options)

    return emulated


def _supports(dense: Callable[..., Explanation], syncs: bool) -> Callable[..., Reason]:
    """Return ``supports`` for calls whose dense GEMM is served, by one that syncs with the host if ``syncs``."""

    def supports(*args: Any, **options: Any) -> Reason:
        found = dense(*args, **options)
        if found.chosen is None or found.syncs == syncs:
            return found.reason()
        return "its dense GEMM reads offs on the host" if found.syncs else "its dense GEMM reads nothing on the host"

    return supports


def implementations(device: str) -> list[Implementation]:
    """Return the emulations of all three ops: by a dense GEMM, and as a fallback by one that syncs with the host."""
    made = []
    for op, module, slots in (
        ("grouped_gemm_scaled", decoded_gemm, False),
        ("grouped_gemm_scaled_wgrad", decoded_wgrad, False),
        ("grouped_gemm_scaled_wgrad_accumulate_", decoded_wgrad, True),
    ):
        for name, priority, syncs in (("decoded, dense GEMM", -10, False), ("decoded, loop of mm", -20, True)):
            made.append(
                Implementation(
                    op,
                    name,
                    device,
                    _warn_once(module.run),
                    _supports(module.dense, syncs),
                    priority=priority,
                    syncs=syncs,
                    note=NOTE,
                    slots=slots,
                    emulates=True,
                    parts=constituent_ops.of_run(module.run),
                )
            )
    return made
