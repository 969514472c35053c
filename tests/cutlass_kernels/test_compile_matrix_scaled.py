"""Combinations that scaled GEMM kernels compile for: format, tiling and architecture, types, epilogue.

All are compiled and disassembled: in ``make test`` where registers are scarcest; among the slow tests every usual
tiling and every choice with every format on every architecture, and any two choices in every tiling; in
``make test-full`` the whole matrix.
"""

import itertools

import pytest

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

from tests.cutlass_kernels.matrix import HEADER, by_all_cores, each, every, pairwise, show
from tests.cutlass_kernels.scaled_matrix import PARTS, QUANTIZING, TILINGS, USUAL, allowed, checked, key, label
from tgl import backends
from tgl.cutlass_kernels.archs import ARCHS
from tgl.cutlass_kernels.config import VARLEN_K, VARLEN_M
from tgl.cutlass_kernels.launchers import gemm_scaled, gemm_scaled_quantize
from tgl.testing import emulate

KINDS = (VARLEN_M, VARLEN_K, QUANTIZING)
BUILD = {
    VARLEN_M: gemm_scaled.GROUPED_GEMM_SCALED.build,
    VARLEN_K: gemm_scaled.GROUPED_GEMM_SCALED_WGRAD.build,
    QUANTIZING: gemm_scaled_quantize.GROUPED_GEMM_SCALED_ACTIVATION_QUANTIZE.build,
}
COVER = [(kind, c) for kind in KINDS for c in each({"tiling": USUAL[kind], **PARTS[kind]}, allowed)]
WIDE_COVER = [(kind, c) for kind in KINDS for c in pairwise({"tiling": TILINGS[kind], **PARTS[kind]}, allowed)]


@pytest.fixture(scope="module")
def table():
    rows = []
    yield rows
    print("\n" + "\n".join([HEADER, *map(show, rows)]))


def compiled(kind, choice):
    plan = key(kind, choice)
    with emulate(ARCHS[plan.arch].target), backends.emulated_device(plan.arch):
        artifacts = BUILD[kind](plan).artifacts
    return checked(kind, choice, artifacts.CUBIN, artifacts.PTX)


def occurring(kind, tilings):
    """Every combination there is of the tilings."""
    return every({"tiling": tilings, **PARTS[kind]}, allowed)


@pytest.mark.parametrize("kind", KINDS)
def test_the_cover_holds_every_choice_with_every_format(kind):
    chosen = [c for k, c in COVER if k == kind]
    possible = occurring(kind, USUAL[kind])
    assert {c["tiling"] for c in chosen} == {c["tiling"] for c in possible}
    for name in PARTS[kind]:
        assert {(*c["tiling"][:2], c[name]) for c in chosen} == {(*c["tiling"][:2], c[name]) for c in possible}


@pytest.mark.parametrize("kind", KINDS)
def test_the_wide_cover_holds_every_pair(kind):
    chosen = [c for k, c in WIDE_COVER if k == kind]
    possible = occurring(kind, TILINGS[kind])
    for one, two in itertools.combinations(("tiling", *PARTS[kind]), 2):
        assert {(str(c[one]), str(c[two])) for c in chosen} == {(str(c[one]), str(c[two])) for c in possible}


def test_every_format_is_there_on_every_architecture():
    for kind in (VARLEN_M, VARLEN_K):
        assert {(arch, name) for k, c in COVER if k == kind for arch, name, _ in [c["tiling"]]} == {
            ("sm_90", "fp8_tensor"),
            ("sm_90", "fp8_block"),
            ("sm_100", "fp8_tensor"),
            ("sm_100", "fp8_block"),
            ("sm_100", "mxfp8"),
            ("sm_100", "nvfp4"),
        }


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "choice"), COVER, ids=[label(*m) for m in COVER])
def test_compiles(kind, choice, table):
    table.append(compiled(kind, choice))


def test_compiles_where_registers_are_scarcest(table):
    """A clamped gate in float16, whose exponentials could begin before the linear half is loaded."""
    one = {"out": "float16", "activation": "clamped", "directions": "rows", "scaling": "rceil"}
    tiling = next(t for t in TILINGS[QUANTIZING] if t[2].tile_m == t[2].tile_n == 256)
    table.append(compiled(QUANTIZING, {"tiling": tiling, **one, "vectors": False, "b_rowwise": True}))


@pytest.mark.slices(2)
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "choice"), WIDE_COVER, ids=[label(*m) for m in WIDE_COVER])
def test_compiles_in_every_tiling(kind, choice, table):
    table.append(compiled(kind, choice))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_matrix_compiles(kind, table, some_of):
    table.extend(by_all_cores(compiled, kind, some_of(occurring(kind, TILINGS[kind]))))
