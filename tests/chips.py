"""Capabilities of the GPU at hand, for tests that run on one, and the architectures of tests on the emulator."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from tgl import backends
from tgl.cutlass_kernels.archs import ARCHS, serving

FP8 = ("none", "current", "delayed", "block")

# Recipes by the names of ``examples.train_moe``, by the architecture whose kernels take their formats.
RECIPES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(ARCHS, ("none",)),
    **dict.fromkeys(("sm_89", "sm_90"), FP8),
    **dict.fromkeys(("sm_100", "sm_120", "sm_121"), (*FP8, "mxfp8", "nvfp4")),
}

EVERY = tuple(dict.fromkeys(name for names in RECIPES.values() for name in names))
"""All of them: where a chip quantises and has no kernels for a format, its GEMMs are emulated."""


def arch() -> str | None:
    """The architecture of the first CUDA device if there are kernels for it, else None."""
    if not torch.cuda.is_available():
        return None
    found = serving(backends.device_arch(torch.device("cuda", 0)))
    return None if found is None else found.name


def parameters(names: Iterable[str] = ARCHS, *facts: str) -> list:
    """Architectures for ``parametrize``, those marked slow that have the GEMM kernels of one before them.

    Args:
        facts: attributes of ``Arch`` that matter, too: chips with equal ones are slow.
    """
    marked, seen = [], set()
    for name in names:
        kind = tuple(getattr(ARCHS[name], fact) for fact in ("folder", *facts))
        marked.append(pytest.param(name, marks=pytest.mark.slow if kind in seen else ()))
        seen.add(kind)
    return marked
