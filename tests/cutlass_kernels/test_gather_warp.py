"""Rows by an index in kernels of MMAs by warps: exact on integers, where rows of no token are zeros."""

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

import tgl
from tests.cutlass_kernels import sass
from tests.cutlass_kernels.gather_cases import Case, kernel, run
from tests.kernel_cases import integers
from tgl.cutlass_kernels.archs import ARCHS
from tgl.cutlass_kernels.config import VARLEN_K, VARLEN_M
from tgl.cutlass_kernels.gemm.mma_sync.tilings import WARPS, Tilings, gathering_reason
from tgl.testing import emulate

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SHORT = (5, 0, 130, 1)
LARGE, SMALL = 163 * 1024, 99 * 1024  # shared memory


def tiling(tile_m, tile_n, shared=SMALL, tma=False):
    return Tilings(shared, tma=tma).deepest(tile_m, tile_n)


CASES = {
    "rows": ("sm_80", VARLEN_M, "a", Case(tiling(128, 128, LARGE), SHORT, bias=BF16, tail=150)),
    "rows, float32 out, odd K": ("sm_86", VARLEN_M, "a", Case(tiling(64, 64), SHORT, out=F32, depth=67)),
    "rows, at slots": ("sm_120", VARLEN_M, "a", Case(tiling(128, 64, tma=True), SHORT, slots=True, columns=40)),
    "deeper than the ring": ("sm_89", VARLEN_M, "a", Case(tiling(64, 64), (70, 0, 3), depth=520, b_row_major=False)),
    "contraction of a": ("sm_80", VARLEN_K, "a", Case(tiling(128, 128, LARGE), (64, 0, 63, 165), columns=264)),
    "contraction of b": ("sm_121", VARLEN_K, "b", Case(tiling(64, 128, tma=True), (64, 0, 63, 65), columns=264)),
    "by TMA, deeper than the ring": (
        "sm_120",
        VARLEN_M,
        "a",
        Case(tiling(128, 128, tma=True), (70, 0, 3), depth=328, b_row_major=False),
    ),
    "contraction of a, by TMA": (
        "sm_120",
        VARLEN_K,
        "a",
        Case(tiling(64, 64, tma=True), (1, 0, 330), dtype=F16, out=F16),
    ),
    "odd columns": ("sm_86", VARLEN_K, "a", Case(tiling(64, 64), SHORT, depth=37, columns=205, dtype=F16, out=F16)),
    "accumulate": ("sm_89", VARLEN_K, "b", Case(tiling(64, 64), (3, 0, 330), out=F32, accumulate=True)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_exact(case):
    arch, kind, gathered, tried = case
    record = run(arch, kind, gathered, tried, seeds=(0,))
    assert record.bank_conflicts == 0
    assert record.copied_bytes > 0
    assert (record.tma_bytes["load"] > 0) == tried.config.tma


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_exact_under_many_schedules(case):
    arch, kind, gathered, tried = case
    run(arch, kind, gathered, tried, seeds=range(1, 7))


def test_the_op_gathers_without_a_copy():
    tokens, b, index = integers(20, 48), integers(2, 48, 64), torch.randint(0, 20, (70,), dtype=torch.int32)
    offs = torch.tensor([30, 70], dtype=torch.int32)
    with emulate("sm_120", detect_races=False) as machine:
        assert tgl.explain(tgl.grouped_gemm, tokens, b, offs, rows=index).chosen.name == "tgl kernel"
        found = tgl.grouped_gemm(tokens, b, offs, rows=index)
        assert torch.equal(found[30:], tokens[index[30:].long()] @ b[1])
        assert len(machine.launches) == 1


@pytest.mark.slow
@pytest.mark.parametrize("arch", [name for name, arch in ARCHS.items() if arch.folder == "mma_sync"])
@pytest.mark.parametrize("shape", [s for s in WARPS if s[0] * s[1] <= 128 * 128], ids=str)
def test_machine_code(arch, shape):
    """Nothing in local memory."""
    config = ARCHS[arch].tilings.deepest(*shape)
    assert gathering_reason(config) is None
    for kind, gathered in ((VARLEN_M, "a"), (VARLEN_K, "a"), (VARLEN_K, "b")):
        with emulate(arch):  # keeps what was compiled
            report = sass.inspect(kernel(arch, kind, gathered, Case(config, SHORT)).artifacts.CUBIN)
        assert (report.spills, report.frame) == (0, 0)


def test_large_tiles_gather_nothing():
    usual = Tilings(LARGE).choose(VARLEN_M, 1024, 1024, 1024)
    assert (usual.tile_m, usual.tile_n) == (128, 256)
    assert "do not fit in registers" in Tilings(LARGE).gathering_reason(usual)
    chosen = Tilings(LARGE).choose_gathering(VARLEN_M, 1024, 1024, 1024, "a")
    assert (chosen.tile_m, chosen.tile_n) == (128, 128)
