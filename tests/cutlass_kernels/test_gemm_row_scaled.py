"""Kernels on FP8 operands with a scale for each row: exact, canaries intact, under adversarial timing."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

import tgl
from tests import kernels_of_warps
from tests.cutlass_kernels import sass
from tests.kernel_cases import framed
from tests.memory import same_bytes
from tests.row_scaled_cases import E4M3, RowScaled, of_columns, of_rows
from tgl import backends
from tgl.cutlass_kernels import tilings
from tgl.cutlass_kernels.archs import ARCHS
from tgl.cutlass_kernels.config import KINDS, VARLEN_K, VARLEN_M, GemmConfig
from tgl.cutlass_kernels.epilogue import EpilogueSpec
from tgl.cutlass_kernels.gemm.mma_sync.tilings import WARPS
from tgl.cutlass_kernels.gemm.operand_formats import ROW_SCALED, ROW_SCALED_WGRAD
from tgl.cutlass_kernels.launchers import gemm_row_scaled
from tgl.cutlass_kernels.runtime import launcher
from tgl.testing import emulate

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
E5M2 = torch.float8_e5m2
CPU = torch.device("cpu")
RAGGED = (5, 0, 129, 128, 1, 0, 40)
OTHERS = [name for name in ROW_SCALED.archs if name != "sm_90"]
TAIL = 23  # together with the groups a multiple of 16


@dataclass(frozen=True)
class Case:
    """A kernel and the sizes it is run on."""

    arch: str
    tile_m: int
    tile_n: int
    sizes: tuple[int, ...] = RAGGED
    lines: int = 192  # K, or M of a weight gradient
    columns: int = 160
    tail: int = 9
    out: torch.dtype = BF16
    elements: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3)
    cluster_n: int = 1

    @property
    def config(self) -> GemmConfig:
        if not ARCHS[self.arch].wider_mmas:
            return ARCHS[self.arch].tilings.deepest(self.tile_m, self.tile_n, None, ROW_SCALED)
        pair = self.arch == "sm_100" and self.tile_m == 256
        return GemmConfig(self.tile_m, self.tile_n, ROW_SCALED.tile_k, two_cta=pair, cluster_n=self.cluster_n)


GEMM = {
    "sm_90": Case("sm_90", 128, 128, lines=336),
    "sm_90, wide": Case("sm_90", 128, 192, (130, 0, 1), columns=208, out=F16),
    "sm_90, pair, mixed": Case("sm_90", 128, 128, columns=272, cluster_n=2, out=F32, elements=(E4M3, E5M2)),
    "sm_90, two blocks, deeper than the ring": Case("sm_90", 256, 128, (257, 0, 255, 1), lines=1040, tail=300),
    "sm_90, few rows": Case("sm_90", 64, 64, columns=40, tail=70),
    "sm_90, all empty": Case("sm_90", 64, 128, (0, 0, 0), tail=140),
    "sm_100": Case("sm_100", 128, 128, elements=(E5M2, E4M3)),
    "sm_100, wide pair": Case("sm_100", 256, 256, (257, 0, 255, 1), columns=272, out=F32),
    "sm_100, all empty": Case("sm_100", 128, 128, (0, 0), tail=20),
    "sm_120, few rows, deeper than the ring": Case("sm_120", 64, 64, (70, 0, 1), 1040, 40, out=F32),
    "sm_89": Case("sm_89", 128, 128, lines=336, elements=(E4M3, E5M2)),
    "sm_121, all empty": Case("sm_121", 64, 128, (0, 0, 0), tail=140, out=F16),
}
WGRAD = {
    "sm_90": Case("sm_90", 128, 128, out=F32, tail=TAIL),
    "sm_90, pair, mixed": Case("sm_90", 128, 128, columns=272, cluster_n=2, elements=(E5M2, E4M3), tail=TAIL),
    "sm_90, two blocks": Case("sm_90", 256, 64, (33, 0, 200, 31, 32), lines=272, tail=8),
    "sm_90, wide, deeper than the ring": Case("sm_90", 128, 192, (1, 1100, 0, 97), 144, 208, tail=18),
    "sm_90, few rows": Case("sm_90", 64, 64, (16, 48, 128), 40, 72, tail=0, out=F16),
    "sm_90, all empty": Case("sm_90", 128, 128, (0, 0), tail=32),
    "sm_90, within 16": Case("sm_90", 128, 64, (3, 4, 0, 2, 1, 5, 17, 8), tail=8),
    "sm_100": Case("sm_100", 128, 128, out=F32, tail=TAIL),
    "sm_100, wide, mixed": Case("sm_100", 128, 256, (33, 0, 200, 31, 32), 144, 272, tail=8, elements=(E4M3, E5M2)),
    "sm_100, within 16": Case("sm_100", 128, 128, (3, 4, 0, 2, 1, 5, 17, 8), tail=8),
    "sm_121, within 16": Case("sm_121", 64, 64, (3, 4, 0, 17), 72, 40, tail=8),
    "sm_120": Case("sm_120", 128, 128, out=F32, tail=TAIL, elements=(E5M2, E4M3)),
    "sm_89, deeper than the ring": Case("sm_89", 128, 64, (1, 700, 0, 97), 144, 72, tail=18),
    "sm_89, all empty": Case("sm_89", 64, 64, (0, 0), tail=32, out=F16),
}
CASES = [(of_rows, case) for case in GEMM.values()] + [(of_columns, case) for case in WGRAD.values()]
NAMES = [f"rows: {name}" for name in GEMM] + [f"columns: {name}" for name in WGRAD]
QUICK = {"rows: sm_120, few rows, deeper than the ring", "columns: sm_121, within 16"}  # of mma.sync kernels
RARER = {"rows: sm_90", "columns: sm_90", "rows: sm_100", "columns: sm_100", "columns: sm_90, two blocks"}
RARER |= {"columns: sm_90, all empty", "rows: sm_100, all empty"}
"""Cases whose paths through the kernels other cases take too."""


def usual(case, name):
    return name in QUICK or (ARCHS[case.arch].wider_mmas and name not in RARER)


USUALLY = [
    pytest.param(*case, id=name, marks=[] if usual(case[1], name) else [pytest.mark.slow])
    for case, name in zip(CASES, NAMES)
]


def run(monkeypatch, case: Case, problem: RowScaled, seeds=(0,)) -> torch.Tensor:
    """The result, after every seed has given the same bytes and left what is around the output."""
    monkeypatch.setattr(tilings, "choose_scaled", lambda *_: case.config)
    monkeypatch.setattr(launcher, "warm_plans", {})
    frame = framed(*problem.wanted.shape, dtype=case.out)
    first = None
    with emulate(ARCHS[case.arch].target) as machine:
        for seed in seeds:
            frame.refill()
            machine.seed = seed
            backends.run(problem.op, CPU, *problem.operands, out=frame.inside)
            assert "ScaledGemm" in machine.launches[-1].kernel
            assert frame.intact(), f"seed {seed}: written around the output"
            first = frame.inside.clone() if first is None else first
            assert same_bytes(first, frame.inside), f"seed {seed}"
    return first


def check(monkeypatch, make, case, seeds=(0,)):
    torch.manual_seed(sum(case.sizes))
    problem = make(case.sizes, case.lines, case.columns, case.tail, case.elements)
    found = run(monkeypatch, case, problem, seeds)
    differ = (found != problem.wanted.to(case.out)).sum()
    assert torch.equal(found, problem.wanted.to(case.out)), f"{differ} elements differ"


@pytest.mark.parametrize(("make", "case"), USUALLY)
def test_exact(monkeypatch, make, case):
    check(monkeypatch, make, case)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "case"), CASES, ids=NAMES)
def test_exact_under_many_schedules(monkeypatch, make, case):
    check(monkeypatch, make, case, range(1, 7))


@pytest.mark.parametrize(
    "name",
    ["sm_90, two blocks", "sm_100", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sm_90", "sm_120"))],
)
@pytest.mark.parametrize("spoiled", [2, 3])
def test_a_groups_nan_stays_in_it(monkeypatch, name, spoiled):
    """A neighbour's columns share stages, and MMAs, with its own."""
    case = WGRAD[name]
    problem = of_columns(case.sizes, case.lines, case.columns, case.tail, spoiled=spoiled)
    found, wanted = run(monkeypatch, case, problem, range(1)), problem.wanted.to(case.out)
    assert wanted[spoiled].isnan().all()
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num(), wanted.nan_to_num())


@pytest.mark.parametrize("make", [of_rows, of_columns])
def test_kernels_of_warps_in_place_of_a_hoppers_own(make):
    torch.manual_seed(0)
    problem = make((40, 0, 9), 96, 64, 15)
    with kernels_of_warps.in_place(), emulate(kernels_of_warps.PLACE) as machine:
        out = getattr(tgl, problem.op)(*problem.operands)
        assert machine.launches[-1].instructions["mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32"]
    assert torch.equal(out, problem.wanted.to(BF16))


@pytest.mark.parametrize("arch", ["sm_90", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_ops_run_one_kernel_each(arch):
    """Scales are multiplied in float32, one rounding each."""
    torch.manual_seed(0)
    for make in (of_rows, of_columns):
        problem = make((40, 0, 9), 96, 64, 15)
        a, a_scale, b, b_scale, offs = problem.operands
        operands = (a, a_scale * 1.1, b, b_scale / 3, offs)
        op = getattr(tgl, problem.op)
        with emulate(ARCHS[arch].target, detect_races=False) as machine:
            out = op(*operands, out_dtype=F32)
            assert len(machine.launches) == 1
        assert same_bytes(out, op(*operands, out_dtype=F32))


@pytest.mark.parametrize("make", [of_rows, of_columns])
def test_unsupported_layouts_are_copied(make):
    """Columns side by side, and rows that begin anywhere."""
    problem = make((40, 0, 9), 90, 64, 7)
    a, a_scale, b, b_scale, offs = problem.operands
    aside = b.transpose(-2, -1).contiguous().transpose(-2, -1)
    with emulate("sm_90a", detect_races=False) as machine:
        explained = tgl.explain(problem.op, a, a_scale, aside, b_scale, offs)
        assert explained.chosen.name == "tgl kernel between copies"
        assert set(dict(explained.copies)) == {"a", "b"}
        out = getattr(tgl, problem.op)(a, a_scale, aside, b_scale, offs)
        assert len(machine.launches) == 1
    assert torch.equal(out, problem.wanted.to(BF16))


@pytest.mark.parametrize("make", [of_rows, of_columns])
def test_warmup_compiles_and_touches_no_argument(make, monkeypatch):
    problem = make((40, 0, 9), 96, 64, 15)
    monkeypatch.setattr(launcher, "compiled_kernels", {})
    monkeypatch.setattr(launcher, "warm_plans", {})
    with emulate("sm_90a", detect_races=False):
        before = [t.clone() for t in problem.operands]
        assert tgl.warmup(problem.op, *problem.operands).chosen.name == "tgl kernel"
        assert all(map(same_bytes, before, problem.operands))
        monkeypatch.setattr(launcher, "compiled", None)
        out = getattr(tgl, problem.op)(*problem.operands)
    assert torch.equal(out, problem.wanted.to(BF16))


# --- machine code -----------------------------------------------------------------------------------------------------

TILINGS = [
    (arch, kind, tiling)
    for arch, sizes in (
        ("sm_90", [(64, 64), (64, 128), (64, 192), (128, 64), (128, 128), (128, 192), (256, 64), (256, 128)]),
        ("sm_100", [(128, 128), (128, 256), (256, 128), (256, 256)]),
    )
    for kind, form in ((VARLEN_M, ROW_SCALED), (VARLEN_K, ROW_SCALED_WGRAD))
    for rows, columns in sizes
    for ctas in (1, 2)
    for tiling in [GemmConfig(rows, columns, 128, two_cta=arch == "sm_100" and rows == 256, cluster_n=ctas)]
    if tilings.reason(arch, kind, tiling, form) is None
]
TILINGS += [
    (arch, kind, tiling)
    for arch in ROW_SCALED.archs
    if not ARCHS[arch].wider_mmas
    for kind in KINDS
    for rows, columns in WARPS
    for tiling in [ARCHS[arch].tilings.deepest(rows, columns, kind, ROW_SCALED)]
    if tilings.reason(arch, kind, tiling, ROW_SCALED) is None
]
USUAL = {
    (arch, kind, tilings.choose_scaled(arch, kind, form, 4096, depth, rows))
    for arch in ROW_SCALED.archs
    for kind, form in ((VARLEN_M, ROW_SCALED), (VARLEN_K, ROW_SCALED_WGRAD))
    for rows in (32, 2048)
    for depth in (512, 4096)
}


MMA = {"sm_90": "QGMMA", "sm_100": "UTCQMMA", "sm_89": "QMMA.16832"}
MMA |= dict.fromkeys(("sm_120", "sm_121"), "QMMA.SF")  # which scales blocks, by one
COMPILED = {made for made in USUAL if ARCHS[made[0]].wider_mmas}
COMPILED |= {made for made in USUAL if made[:2] == ("sm_89", VARLEN_K) and made[2].tile_m == 128}


def test_the_usual_tilings_are_among_those_compiled():
    assert set(TILINGS) >= USUAL
    assert not [t for arch, kind, t in TILINGS if arch == "sm_100" and kind == VARLEN_K and t.two_cta]


@pytest.mark.slices(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "kind", "tiling"),
    [
        pytest.param(
            *made,
            id=f"{made[0]} {made[1]} {made[2].tile_m}x{made[2].tile_n}x{made[2].cluster_n}",
            marks=[] if made in COMPILED else [pytest.mark.slow],
        )
        for made in TILINGS
    ],
)
@pytest.mark.parametrize("out", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_compiles_without_spills(arch, kind, tiling, out):
    spec = EpilogueSpec(out, tail=kind == VARLEN_M, alpha=ROW_SCALED.alpha)
    elements = ("float8_e4m3fn", "float8_e5m2")
    key = gemm_row_scaled.RowScaledKey(kind, arch, True, *elements, spec, tiling)
    forward = kind == VARLEN_M
    served = gemm_row_scaled.GROUPED_GEMM_ROW_SCALED if forward else gemm_row_scaled.GROUPED_GEMM_ROW_SCALED_WGRAD
    with emulate(ARCHS[arch].target), backends.emulated_device(arch):
        report = sass.inspect(served.build(key).artifacts.CUBIN)
    assert report.spills == report.frame == 0
    assert report.count(MMA[arch]) > 0
    if arch == "sm_90":
        # One wait per 64 rows of a warpgroup, in whole stages and in the last: more would be one for every single MMA.
        assert report.count("WARPGROUP.DEPBAR") == max(tiling.tile_m // 128, 1) * (2 if kind == VARLEN_K else 1)
