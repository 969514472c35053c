"""Combinations that mma.sync kernels compile for: target, tiling, dtypes, the major of B, parts of the epilogue.

All are compiled and disassembled: in ``make test`` where registers are scarcest; among the slow tests every choice on
every target, and any two choices in every tiling of every target, which are run on the emulator too; in
``make test-full`` the whole matrix.
"""

import pytest

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

import torch

from tests.covers import covering
from tests.cutlass_kernels import sass
from tests.cutlass_kernels.matrix import (
    ACTIVATED,
    KINDS,
    PARTS,
    REGISTER_FILE,
    apart,
    by_all_cores,
    case,
    every,
    kernel,
    label,
    pairs_of,
    pairwise,
    run,
)
from tgl import backends
from tgl.cutlass_kernels.archs import ARCHS
from tgl.cutlass_kernels.config import LINE
from tgl.cutlass_kernels.gemm.mma_sync.tilings import WARPS
from tgl.testing import emulate

TARGETS = [name for name, arch in ARCHS.items() if arch.folder == "mma_sync"]
TILINGS = [(arch, ARCHS[arch].tilings.deepest(*shape)) for arch in TARGETS for shape in WARPS]
CHOICES = {
    kind: {"tiling": [t for t in TILINGS if kind != ACTIVATED or t[1].tile_n % (2 * LINE) == 0], **PARTS[kind]}
    for kind in KINDS
}
EVERY = [(kind, choice) for kind in KINDS for choice in every(CHOICES[kind])]
COVER = covering(EVERY, apart, beside="arch")
WIDE_COVER = [(kind, choice) for kind in KINDS for choice in pairwise(CHOICES[kind])]


def check(arch, tried, artifacts):
    """Nothing in local memory, and no more MMAs, copies and reads of matrices than the shape needs."""
    down, across = WARPS[tried.config.tile_m, tried.config.tile_n]
    report = sass.inspect(artifacts.CUBIN)
    assert (report.spills, report.frame) == (0, 0)
    assert report.registers * 32 * down * across <= REGISTER_FILE
    element = "bf16" if tried.dtype == torch.bfloat16 else "f16"
    assert f"mma.sync.aligned.m16n8k16.row.col.f32.{element}.{element}.f32" in artifacts.PTX
    assert f".target {ARCHS[arch].target}\n" in artifacts.PTX
    high, wide = tried.config.tile_m // down // 16, tried.config.tile_n // across // 16
    # Four steps of a stage and one of its end; the first rows and columns of a tile are read before its loop.
    assert report.count("HMMA.16816") == 5 * high * 2 * wide
    assert report.count("LDSM") == 5 * (high + wide) + high + 1
    copies = 3 * (tried.config.tile_m + tried.config.tile_n) * 8 // (32 * down * across)
    assert report.count("LDGSTS") == (0 if tried.config.tma else copies)
    assert (report.count("UTMALDG") > 0) == tried.config.tma


def test_the_cover_holds_every_choice_on_every_target():
    for axis in dict.fromkeys(name for made in EVERY for name in apart(made)):
        if axis != "arch":
            assert pairs_of(COVER, "arch", axis) == pairs_of(EVERY, "arch", axis)
    assert pairs_of(COVER, "arch", "shape") == {(arch, str(shape)) for arch in TARGETS for shape in WARPS}


def compiled(kind, choice):
    arch, tried = case(choice)
    with emulate(ARCHS[arch].target), backends.emulated_device(arch):
        artifacts = kernel(arch, kind, tried).artifacts
    check(arch, tried, artifacts)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "choice"), COVER, ids=[label(*m) for m in COVER])
def test_compiles(kind, choice):
    compiled(kind, choice)


@pytest.mark.parametrize("arch", ["sm_80", "sm_89"])
def test_compiles_where_registers_are_scarcest(arch):
    """Halves that alternate, whose sums are rounded to nothing less, without a bias to wait for in between."""
    one = {"dtype": torch.bfloat16, "wide_out": True, "b_row_major": False, "bias": None, "probs": True}
    tiling = arch, ARCHS[arch].tilings.deepest(128, 256)
    compiled(ACTIVATED, {"tiling": tiling, **one, "activation": "alternating"})


@pytest.mark.slices(2)
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "choice"), WIDE_COVER, ids=[label(*m) for m in WIDE_COVER])
def test_compiles_and_is_exact(kind, choice):
    arch, tried = case(choice)
    record = run(arch, kind, tried)
    assert record.shared_bytes <= ARCHS[arch].smem_bytes
    check(arch, tried, kernel(arch, kind, tried).artifacts)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arch", TARGETS)
def test_the_whole_matrix_compiles(arch, kind, some_of):
    by_all_cores(compiled, kind, some_of([c for k, c in EVERY if k == kind and c["tiling"][0] == arch]))
