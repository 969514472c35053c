"""The device that kernels are tested on; a module that imports this is skipped where there is none."""

from __future__ import annotations

import pytest
import torch

import tgl
from tests import chips, kernel_cases

ARCH = chips.arch()
if ARCH is None:
    pytest.skip("needs a device that the kernels are built for", allow_module_level=True)

DEVICE = torch.device("cuda", 0)
TAIL = 77


def integers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return kernel_cases.integers(*shape, dtype=dtype, device=DEVICE)


def ends(sizes: tuple[int, ...]) -> torch.Tensor:
    return kernel_cases.ends(sizes, DEVICE)


def served(op, *args, **kwargs):
    """The call, after proof that one of our kernels takes it; ``op`` is a function or the name of an op."""
    explained = str(tgl.explain(op, *args, **kwargs))
    assert "runs tgl kernel" in explained, explained
    if isinstance(op, str):
        op = getattr(tgl, op, None) or getattr(torch.ops.tgl, op)
    return op(*args, **kwargs)
