"""Packed NVFP4 with few rows: which groups are decoded by products in bfloat16 alone, on the emulator."""

import itertools
import re

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

from tests.cutlass_kernels.packed_cases import NUDGED, SEAMS, Case, kernel
from tests.kernel_cases import ends
from tgl import backends
from tgl.cutlass_kernels.archs import ARCHS, SWAPPED
from tgl.cutlass_kernels.gemm.sm90.swap_ab_split import NUDGES
from tgl.testing import emulate

BF16, F32 = torch.bfloat16, torch.float32


def seamless(factor):
    """Return whether products with two bfloat16 parts of ``NUDGES`` equal the products with the factors.
    ``[nudges, factors]``, for the 16 pairs of significands of codes and scales."""
    high = factor.bfloat16()
    rest = (factor - high.float()).bfloat16().view(torch.int16)
    found = []
    for nudge in NUDGES:
        low, same = (rest + nudge).view(BF16).double(), torch.ones_like(factor, dtype=torch.bool)
        for code, scale in itertools.product((1.0, 1.5), range(8, 16)):
            wanted = (code * (scale * factor)).bfloat16().double()
            mantissa, exponent = torch.frexp(code * scale * high.double() + (code * scale * low).bfloat16().double())
            same &= torch.ldexp((mantissa * 256).round(), exponent - 8) == wanted
        found.append(same)
    return torch.stack(found)


def test_few_factors_have_no_parts():
    """With the nearest number as lower part, 1 factor in 100 has no parts; with its neighbours 8 of a million."""
    tried = seamless(torch.arange(1 << 23, 1 << 24, 16).float() * 2.0**-23)
    assert 0.009 < (~tried[0]).double().mean() < 0.011
    assert (~tried.any(0)).double().mean() < 2e-5
    of_amax = seamless(1 / (2688 / torch.tensor([*SEAMS, *NUDGED])))
    assert of_amax.any(0).tolist() == [False] * len(SEAMS) + [True] * len(NUDGED)
    assert not of_amax[0].any()


PATHS = {
    "usual": (1.0, 0x38, True),
    "a factor that does not split": (SEAMS[0], 0x38, False),
    "a factor that is large": (688128.0, 0x38, False),
    "a factor that is small": (2.0**-70, 0x38, False),
    "a negative scale": (1.0, 0xB8, False),
    "a scale that is NaN": (1.0, 0x7F, False),
    "a negative NaN": (1.0, 0xFF, False),
    "a scale of zero": (1.0, 0x00, True),
    "the smallest scale": (1.0, 0x01, True),
    "the largest scale": (1.0, 0x7E, True),
}


@pytest.mark.parametrize("name", PATHS)
def test_nvfp4_widens_no_scale_unless_it_must(name):
    """The result of widening matters only where scales are widened to float32."""
    amax, byte, usual = PATHS[name]
    torch.manual_seed(0)
    data = torch.randint(256, (1, 256, 80), dtype=torch.uint8)
    scale = torch.full((1, 256, 10), 0x38, dtype=torch.uint8)
    scale[0, :, 9] = byte
    a, offs = torch.randn(5, 160, dtype=BF16), ends((5,))
    outs = [torch.empty(5, 256), torch.empty(5, 256)]
    replaced = []

    def edit(ptx):
        found, count = re.subn(r"cvt\.rn\.f16x2\.e4m3x2\s+(%\w+), %\w+;", r"mov.b32 \1, 0;", ptx)
        replaced.append(count)
        return found

    case = Case((8, 256), (5,), "nvfp4", kernel=SWAPPED, out=F32)
    for out, editing in zip(outs, (None, edit), strict=True):
        with emulate(ARCHS["sm_90"].target) as machine, backends.emulated_device("sm_90"):
            machine.edit_ptx = editing
            kernel("sm_90", case)(a, data, scale, torch.tensor([amax]), offs, out, None, None, 1)
    assert replaced[0] > 0
    assert torch.equal(*(out.view(torch.int32) for out in outs)) == usual
