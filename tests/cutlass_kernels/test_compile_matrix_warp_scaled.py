"""Combinations that scaled mma.sync kernels compile for, as in ``test_compile_matrix_warp``.

The kernels are slow tests: any two choices meet in some kernel, those of kind, target, format and tile among them, and
in every tiling of every format on every target. ``make test-full`` compiles the whole matrix.
"""

import itertools

import pytest

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

from tests.covers import covering
from tests.cutlass_kernels import sass, scaled_cases
from tests.cutlass_kernels.matrix import REGISTER_FILE, apart, by_all_cores, every, pairs_of, pairwise
from tests.cutlass_kernels.scaled_matrix import PARTS, allowed, key, label
from tests.cutlass_kernels.test_gemm_warp_scaled import FORMATS, fits
from tgl import backends
from tgl.cutlass_kernels.archs import ARCHS
from tgl.cutlass_kernels.config import KINDS, VARLEN_K
from tgl.cutlass_kernels.gemm.mma_sync.tilings import WARPS, factor_count
from tgl.cutlass_kernels.gemm.operand_formats import OPERANDS
from tgl.testing import emulate

SCALED = "mma.sync.aligned.kind::mxf8f6f4.block_scale.scale_vec::1X.m16n8k32.row.col.f32.{a}.{b}.f32.ue8m0"
MMA = {
    "fp8_tensor": ("QMMA.16832", "mma.sync.aligned.m16n8k32.row.col.f32.{a}.{b}.f32"),
    "fp8_block": ("QMMA.16832", "mma.sync.aligned.m16n8k32.row.col.f32.{a}.{b}.f32"),
    "mxfp8": ("QMMA.SF", SCALED),
    "unit scales": ("QMMA.SF", SCALED),
    "nvfp4": (
        "OMMA.SF",
        "mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3",
    ),
}
"""The machine instruction, and the one of PTX that it comes from."""


def tiled(kind, targets):
    """Every tiling that there is a kernel of, for each format and target."""
    shapes = [(arch, name, m, n) for name, here in targets.items() for arch in here for m, n in WARPS]
    return [
        (arch, name, ARCHS[arch].tilings.deepest(m, n, kind, OPERANDS[name]))
        for arch, name, m, n in shapes
        if fits(arch, kind, (m, n), name)
    ]


CHOICES = {
    (kind, name): {"tiling": tiled(kind, {name: here}), **PARTS[kind]}
    for kind in KINDS
    for name, here in FORMATS.items()
    if here
}
EVERY = [(kind, c) for (kind, _), choices in CHOICES.items() for c in every(choices, allowed)]
COVER = covering(EVERY, apart)
WIDE_COVER = [(kind, c) for (kind, _), choices in CHOICES.items() for c in pairwise(choices, allowed)]


def check(kind, choice):
    """Nothing in local memory, and no more MMAs, copies and reads of matrices than the shape needs."""
    (arch, name, tiling), plan = choice["tiling"], key(kind, choice)
    with emulate(ARCHS[arch].target), backends.emulated_device(arch):
        artifacts = scaled_cases.build(plan).artifacts
    report = sass.inspect(artifacts.CUBIN)
    down, across = WARPS[tiling.tile_m, tiling.tile_n]
    threads = 32 * down * across
    assert (report.spills, report.frame) == (0, 0)
    assert report.registers * threads <= REGISTER_FILE
    instruction, ptx = MMA["unit scales" if tiling.unit_scales else name]
    assert tiling.unit_scales == (ARCHS[arch].tilings.scales_blocks and not OPERANDS[name].vector)
    assert ptx.format(a=plan.a_element[7:11], b=plan.b_element[7:11]) in artifacts.PTX
    assert f".target {ARCHS[arch].target}\n" in artifacts.PTX
    high, wide = tiling.tile_m // down // 16, tiling.tile_n // across // 16
    # Four steps of a stage and one of its end; the first rows and columns of a tile are read before its loop.
    assert report.count(instruction) == 5 * high * 2 * wide
    assert report.count("LDSM") == 5 * (high + wide) + high + 1
    form = OPERANDS[name]
    pieces = (form.scale_bytes(tiling.tile_m) + form.scale_bytes(tiling.tile_n)) // 16
    turns = -(-(factor_count(kind, tiling, form) or pieces) // threads)
    assert report.count("LDGSTS") == 3 * ((tiling.tile_m + tiling.tile_n) * 8 // threads + turns)
    if form.vector:
        return
    # Every sum of a stage is added once where stages are whole, and once at their end: by factors or without.
    sums = tiling.tile_m * tiling.tile_n // threads
    assert report.count("FFMA" if form.block else "FADD") >= 2 * sums
    assert report.count("FMUL") >= (2 * sums if form.block and kind == VARLEN_K else 0)


def test_the_cover_holds_every_pair():
    for one, two in itertools.combinations(dict.fromkeys(name for made in EVERY for name in apart(made)), 2):
        assert pairs_of(COVER, one, two) == pairs_of(EVERY, one, two)
    assert pairs_of(COVER, "arch", "format") == {(arch, name) for name, here in FORMATS.items() for arch in here}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "choice"), COVER, ids=[label(*m) for m in COVER])
def test_compiles(kind, choice):
    check(kind, choice)


@pytest.mark.slices(2)
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "choice"), WIDE_COVER, ids=[label(*m) for m in WIDE_COVER])
def test_compiles_in_every_tiling(kind, choice):
    check(kind, choice)


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "name"), [(arch, name) for name, here in FORMATS.items() for arch in here])
def test_the_whole_matrix_compiles(arch, name, some_of):
    for kind in KINDS:
        by_all_cores(check, kind, some_of([c for k, c in EVERY if k == kind and c["tiling"][:2] == (arch, name)]))
