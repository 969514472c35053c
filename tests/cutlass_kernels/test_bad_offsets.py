"""Offsets that make no sense give wrong numbers, and nothing else: no access outside a tensor, no write around one.

Where groups overlap, several CTAs write a row, in any order: races are not looked for.
"""

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

from tests import chips
from tests.cutlass_kernels.gemm_cases import CLUSTERS, Case, kernel
from tests.kernel_cases import framed, integers, stored
from tgl import backends
from tgl.cutlass_kernels import tilings
from tgl.cutlass_kernels.archs import ARCHS
from tgl.cutlass_kernels.config import VARLEN_K, VARLEN_M
from tgl.testing import emulate

LOW, HIGH = -(1 << 31), (1 << 31) - 1
OFFSETS = [(-5, 90, 40, 1 << 30), (HIGH, LOW, HIGH, 7), (-1, -2, -3, -4), (140, 141, HIGH, HIGH)]


@pytest.mark.parametrize("arch", chips.parameters())
@pytest.mark.parametrize("kind", [VARLEN_M, VARLEN_K])
def test_nothing_is_touched_outside(arch, kind):
    tile = tilings.choose(arch, kind, 64, 64, 64)
    case = Case(tile, (20, 30, 40, 50), tail=0, depth=72, columns=72, out=torch.float32, zero_tail=False)
    groups = len(case.sizes)
    a = stored(integers(case.rows, case.depth, dtype=case.dtype), True)
    if kind == VARLEN_M:
        b = stored(integers(groups, case.depth, case.columns, dtype=case.dtype), True)
        frame = framed(case.rows, case.columns, dtype=case.out)
    else:
        b = stored(integers(case.rows, case.columns, dtype=case.dtype), True)
        frame = framed(groups, case.depth, case.columns, dtype=case.out)
    with emulate(ARCHS[arch].target, detect_races=False), backends.emulated_device(arch):
        call = kernel(arch, kind, case)
        for offs in OFFSETS:
            frame.refill()
            call(a, b, torch.tensor(offs, dtype=torch.int32), frame.inside, None, None, None, None, CLUSTERS)
            assert frame.intact(), offs


@pytest.mark.parametrize("arch", chips.parameters())
def test_ends_are_clamped(arch):
    """An end past T is T, a negative one 0, and a group that would end before it begins is empty."""
    tile = tilings.choose(arch, VARLEN_M, 64, 64, 64)
    case = Case(tile, (64,), tail=0, depth=40, columns=40, out=torch.float32)
    a = stored(integers(64, 40, dtype=case.dtype), True)
    b = stored(integers(4, 40, 40, dtype=case.dtype), True)
    out = framed(64, 40, dtype=case.out).inside
    with emulate(ARCHS[arch].target, detect_races=False), backends.emulated_device(arch):
        offs = torch.tensor([-5, 10, 3, 1 << 30], dtype=torch.int32)
        kernel(arch, VARLEN_M, case)(a, b, offs, out, None, None, None, None, CLUSTERS)
    # Rows 3 to 9 belong to two groups, which may write them in any order.
    assert torch.equal(out[:3].double(), a[:3].double() @ b[1].double())
    assert torch.equal(out[10:].double(), a[10:].double() @ b[3].double())
