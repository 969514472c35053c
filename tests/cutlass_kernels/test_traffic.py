"""Kernels move the bytes that they must and no more, and a gather costs less than a copy: counted on the emulator."""

import re
from dataclasses import replace

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

import tgl
from tests.kernel_cases import ends, integers
from tgl.cutlass_kernels.archs import ARCHS, arch_of
from tgl.cutlass_kernels.runtime import launcher
from tgl.testing import emulate

MXFP8 = {"format": "mxfp8", "scale_layout": "blocked"}
WIDE_LOADS = re.compile(r"ld\.global(\.L2::cache_hint)?\.v4\.b32")  # of x: 16 bytes a lane
SIZES, COLUMNS = (256, 256), 256


@pytest.mark.parametrize("columnwise", [True, False])
def test_quantisation_reads_x_once_and_writes_what_it_makes(columnwise):
    """Operands that every block reads again (offsets, factors) do not count: they come from L1 or L2."""
    x = torch.randn(sum(SIZES), COLUMNS).bfloat16()
    with emulate("sm_100a", detect_races=False) as machine:
        tgl.group_quantize(x, ends(SIZES), columnwise=columnwise, **MXFP8)
    loads = sum(n for r in machine.launches for name, n in r.instructions.items() if WIDE_LOADS.match(name))
    moved = loads * 32 * 16 + sum(r.global_bytes["store"] for r in machine.launches)
    minimum = x.numel() * (2 + (1 + columnwise) * (1 + 1 / 32))
    assert minimum <= moved <= 1.05 * minimum


@pytest.mark.slow
def test_a_gemm_that_quantises_its_activation_does_not_read_it_back():
    """The kernel stores both halves in 16 bits, and codes and scales of both directions."""
    sizes, depth, columns = (256, 128), 128, 256
    offs = ends(sizes)
    x = tgl.group_quantize(torch.randn(sum(sizes), depth).bfloat16(), offs, **MXFP8)
    w = tgl.group_quantize(torch.randn(len(sizes), 2 * columns, depth).bfloat16(), None, **MXFP8)
    with emulate("sm_100a", detect_races=False) as machine:
        tgl.grouped_gemm_scaled_activation_quantize(x.data, x.scale, w.data, w.scale, offs, **MXFP8)
        (launch,) = machine.launches
    elements = sum(sizes) * columns
    moved = sum(launch.global_bytes.values()) + launch.tma_bytes["store"]  # without the MMAs' operands
    assert 1 <= moved / (elements * (4 + 2 + 2 / 32)) <= 1.05


@pytest.mark.slow
def test_a_gather_takes_fewer_instructions_than_a_copy_and_the_gemm(monkeypatch):
    arch, offs = arch_of("sm_100"), ends((512, 300, 0, 77))
    index = torch.randint(0, 256, (889,), dtype=torch.int32)
    tokens, b = integers(256, 128).bfloat16(), integers(4, 128, 128).bfloat16()

    def issued():
        launcher.forget()
        with emulate(arch.target, detect_races=False) as machine:
            found = tgl.grouped_gemm(tokens, b, offs, rows=index)
        return found, [launch.warp_instructions for launch in machine.launches]

    found, (gathering,) = issued()
    monkeypatch.setitem(ARCHS, arch.name, replace(arch, kernels=arch.kernels - {"GatheredGroupedGemm"}))
    wanted, copying = issued()
    launcher.forget()
    assert torch.equal(found, wanted)
    assert copying[-1] < gathering < sum(copying)
