"""Combinations that GEMM kernels compile for: tiling and architecture, dtypes, the major of B, parts of the epilogue.

All are compiled and disassembled: in ``make test`` usual tilings whose registers are scarce; among the slow tests every
usual tiling and every choice on every architecture, and any two choices in every tiling, which run on the emulator too;
in ``make test-full`` the whole matrix.
"""

import itertools

import pytest

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

from tests.cutlass_kernels.matrix import (
    ACTIVATED,
    EVERY,
    HEADER,
    KINDS,
    PARTS,
    USUAL,
    by_all_cores,
    case,
    checked,
    each,
    every,
    kernel,
    label,
    pairwise,
    run,
    show,
)
from tgl import backends
from tgl.cutlass_kernels.archs import ARCHS
from tgl.testing import emulate

COVER = [(kind, c) for kind in KINDS for c in each({"tiling": USUAL[kind], **PARTS[kind]})]
WIDE_COVER = [(kind, c) for kind in KINDS for c in pairwise({"tiling": EVERY[kind], **PARTS[kind]})]


def registers_are_scarce(kind, choice):
    arch, config = choice["tiling"]  # on sm_100 accumulators are in tensor memory
    return arch == "sm_90" and config.tile_m * config.tile_n >= (128 * 128 if kind == ACTIVATED else 128 * 192)


@pytest.fixture(scope="module")
def table():
    rows = []
    yield rows
    print("\n" + "\n".join([HEADER, *map(show, rows)]))


def compiled(kind, choice):
    """A line of the table of a kernel that is not run, hence without its shared memory."""
    arch, tried = case(choice)
    with emulate(ARCHS[arch].target), backends.emulated_device(arch):
        artifacts = kernel(arch, kind, tried).artifacts
    return checked(kind, choice, artifacts.CUBIN, artifacts.PTX, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_cover_holds_every_choice_on_every_architecture(kind):
    assert {c["tiling"] for k, c in COVER if k == kind} == set(USUAL[kind])
    for arch in ("sm_90", "sm_100"):
        chosen = [c for k, c in COVER if k == kind and c["tiling"][0] == arch]
        assert {name: {c[name] for c in chosen} for name in PARTS[kind]} == {n: set(v) for n, v in PARTS[kind].items()}


def test_the_wide_cover_holds_every_pair():
    for kind in KINDS:
        chosen = [c for k, c in WIDE_COVER if k == kind]
        choices = {"tiling": EVERY[kind], **PARTS[kind]}
        for one, two in itertools.combinations(choices, 2):
            wanted = {(str(x), str(y)) for x in choices[one] for y in choices[two]}
            if {one, two} == {"bias", "bias_scale"}:
                wanted = {(x, y) for x, y in wanted if x != "None" or y == "None"}
            if {one, two} == {"b_row_major", "activation"}:
                wanted -= {("True", "alternating")}
            if {one, two} == {"tiling", "activation"}:
                wanted -= {(str(t), "alternating") for t in choices["tiling"] if t[1].tile_n == 192}
            assert {(str(c[one]), str(c[two])) for c in chosen} == wanted


@pytest.mark.cover(1)
@pytest.mark.parametrize(
    ("kind", "choice"),
    [pytest.param(*m, id=label(*m), marks=[pytest.mark.slow] * (not registers_are_scarce(*m))) for m in COVER],
)
def test_compiles(kind, choice, table):
    table.append(compiled(kind, choice))


@pytest.mark.slices(2)
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "choice"), WIDE_COVER, ids=[label(*m) for m in WIDE_COVER])
def test_compiles_and_is_exact(kind, choice, table):
    arch, tried = case(choice)
    record = run(arch, kind, tried)
    artifacts = kernel(arch, kind, tried).artifacts
    assert record.shared_bytes <= ARCHS[arch].smem_bytes
    table.append(checked(kind, choice, artifacts.CUBIN, artifacts.PTX, record.shared_bytes))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_matrix_compiles(kind, table, some_of):
    table.extend(by_all_cores(compiled, kind, some_of(every({"tiling": EVERY[kind], **PARTS[kind]}))))
