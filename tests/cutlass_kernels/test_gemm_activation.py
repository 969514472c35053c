"""GEMMs with an activation as second output, on the emulator: exact, and the bytes of the activation kernel."""

import dataclasses

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

import tgl
from tests.cutlass_kernels.activated_cases import Case, run
from tgl import backends
from tgl.cutlass_kernels import tilings
from tgl.cutlass_kernels.config import VARLEN_M, GemmConfig
from tgl.cutlass_kernels.runtime import launcher
from tgl.ops.grouped_activation import Params
from tgl.testing import emulate

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
RAGGED = (5, 0, 129, 128, 1, 0, 40)
TURNS = GemmConfig(128, 128, pingpong=True)
CLAMPED = Params("clamped_qgeglu", limit=2.0, alpha=1.5, offset=0.5)
ALTERNATING = Params(interleaved=True)
SRELU = Params("srelu")


SM90 = {
    "swiglu": Case(TURNS, RAGGED, bias=BF16),
    "swiglu, alternating": Case(TURNS, (5, 0, 130, 1), ALTERNATING, bias=F32, columns=136),
    "clamped, no probabilities": Case(GemmConfig(64, 128), (5, 0, 70, 1), CLAMPED, probs=None, bias=F32, depth=200),
    "clamped, alternating": Case(
        GemmConfig(128, 128), (130, 0, 3), CLAMPED._replace(interleaved=True), dtype=F16, out=F16, probs=F16
    ),
    "halves of no whole lines": Case(GemmConfig(128, 192, pingpong=True), (5, 0, 130, 1), columns=200, bias=BF16),
    "srelu": Case(GemmConfig(128, 192), (5, 0, 130, 1), SRELU, columns=200, bias=BF16, probs=BF16, tail=150),
    "float32": Case(TURNS, (5, 0, 130, 1), out=F32, bias=F32, columns=68),
    "float32, alternating": Case(GemmConfig(64, 64), (5, 0, 70, 1), ALTERNATING, out=F32, columns=68),
    "wide": Case(GemmConfig(64, 256), (65, 0, 3), columns=264, tail=70, probs=BF16),
    "two blocks": Case(GemmConfig(256, 128), (257, 0, 3), columns=136, bias=F32, tail=300),
    "multicast": Case(GemmConfig(128, 128, cluster_n=2), (130, 0, 3), columns=264, depth=264, bias=BF16),
    "b row-major": Case(GemmConfig(128, 256), (130, 0, 3), columns=136, b_row_major=True, dtype=F16, out=F16),
    "all empty": Case(TURNS, (0, 0), tail=140, columns=40, bias=BF16),
    "nothing kept": Case(TURNS, RAGGED, bias=BF16, keeps=False),
    "nothing kept, alternating": Case(GemmConfig(64, 128), (5, 0, 70, 1), ALTERNATING, probs=None, keeps=False),
    "nothing kept, srelu": Case(GemmConfig(128, 192), (5, 0, 130, 1), SRELU, columns=200, tail=150, keeps=False),
    "nothing kept, odd halves": Case(TURNS, (130, 0, 3), columns=40, keeps=False),
}
ONE = {n: GemmConfig(128, n) for n in (128, 256)}
TWO = {n: GemmConfig(256, n, two_cta=True) for n in (128, 256)}
SM100 = {
    "swiglu": Case(ONE[128], RAGGED, bias=BF16),
    "swiglu, pair": Case(TWO[256], (5, 0, 257, 1), columns=264, bias=BF16, tail=300),
    "alternating": Case(ONE[256], (5, 0, 130, 1), ALTERNATING, bias=F32, columns=136),
    "clamped, alternating, pair": Case(
        TWO[128], (130, 0, 3), CLAMPED._replace(interleaved=True), dtype=F16, out=F16, probs=F16
    ),
    "clamped, no probabilities": Case(TWO[128], (5, 0, 300, 1), CLAMPED, probs=None, depth=200, bias=F32),
    "srelu": Case(ONE[256], (5, 0, 130, 1), SRELU, columns=200, bias=BF16, probs=BF16, tail=150),
    "float32": Case(ONE[128], (5, 0, 130, 1), out=F32, bias=F32, columns=68),
    "b row-major": Case(ONE[256], (130, 0, 3), columns=136, b_row_major=True),
    "b row-major, pair": Case(TWO[256], (130, 0, 3), columns=136, b_row_major=True),
    "all empty": Case(ONE[128], (0, 0), tail=140, columns=40, bias=BF16),
    "nothing kept": Case(ONE[128], RAGGED, bias=BF16, keeps=False),
    "nothing kept, pair": Case(TWO[256], (5, 0, 257, 1), ALTERNATING, columns=264, tail=300, keeps=False),
    "nothing kept, srelu": Case(ONE[256], (5, 0, 130, 1), SRELU, columns=200, tail=150, keeps=False),
}
CASES = [("sm_90", case) for case in SM90.values()] + [("sm_100", case) for case in SM100.values()]
NAMES = [f"sm_90: {name}" for name in SM90] + [f"sm_100: {name}" for name in SM100]
RARE_90 = (
    *("wide", "multicast", "float32", "clamped, alternating", "srelu", "nothing kept, srelu"),
    *("swiglu, alternating", "float32, alternating", "nothing kept, alternating"),
)
RARE_100 = (
    *("clamped, no probabilities", "float32", "b row-major", "srelu", "nothing kept, srelu"),
    *("swiglu", "alternating", "nothing kept"),
)
RARER = (*(SM90[name] for name in RARE_90), *(SM100[name] for name in RARE_100))
USUAL = {name: case for name, case in zip(NAMES, CASES) if case[1] not in RARER}


@pytest.mark.parametrize(("arch", "case"), USUAL.values(), ids=USUAL)
def test_exact(arch, case):
    run(arch, case, seeds=(0,))


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "case"), CASES, ids=NAMES)
def test_exact_under_many_schedules(arch, case):
    run(arch, case, seeds=range(6))


@pytest.mark.usefixtures("overlapping_groups")
@pytest.mark.parametrize(("arch", "case"), [("sm_90", SM90["swiglu"]), ("sm_100", SM100["swiglu"])], ids=str)
def test_bad_offsets_stay_inside(arch, case):
    sizes = (130, 20)
    for ends in ((5, 1 << 30), (70, -3), (-(1 << 31), 3), (1 << 30, 90)):
        run(arch, dataclasses.replace(case, sizes=sizes, offs=ends), seeds=(0,))


def operands(rows=40, depth=64, half=72, dtype=BF16, gated=True):
    width = half * (2 if gated else 1)
    weight = torch.randn(3, width, depth).to(dtype)
    bias, probs = torch.randn(3, width).to(dtype), torch.rand(rows)
    return torch.randn(rows, depth).to(dtype), weight.transpose(1, 2), torch.tensor([7, 7, 30]).int(), bias, probs


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("params", [Params(), ALTERNATING, SRELU], ids=["halves", "alternating", "srelu"])
def test_one_launch_with_the_bits_of_two(arch, params):
    a, b, offs, bias, probs = operands(gated=params.gated)
    options = params._asdict()
    with emulate(arch) as machine:
        y, h = tgl.grouped_gemm_activation(a, b, offs, bias, probs, **options)
        assert len(machine.launches) == 1
        assert torch.equal(h, tgl.grouped_gemm(a, b, offs, bias))
        assert torch.equal(y, tgl.grouped_activation(h, offs, probs, **options))
        again = tgl.grouped_gemm_activation(a, b, offs, bias, probs, **options)
        assert torch.equal(again[0], y)
        assert not y[30:].any()


@pytest.mark.slow
def test_a_warmed_up_call_compiles_nothing(monkeypatch):
    a, b, offs, bias, probs = operands(dtype=F16)
    with emulate("sm_90a") as machine:
        tgl.warmup("grouped_gemm_activation", a, b, offs, bias, probs)
        assert len(machine.launches) == 1
        monkeypatch.setattr(launcher, "compiled", None)
        for rows in (40, 33):  # as many per group, to a power of two
            tgl.grouped_gemm_activation(a[:rows], b, offs, bias, probs[:rows])
        assert len(machine.launches) == 3


def test_unsupported_calls_have_reasons():
    with backends.compile_only("sm_90"):

        def reason(a, b, offs, *_, runs="GEMM, then activation", **options):
            explanation = tgl.explain("grouped_gemm_activation", a, b, offs, **options)
            assert explanation.chosen.name == runs
            return str(explanation)

        assert "multiple of 8 columns of the result, got 36" in reason(*operands(half=36))
        assert "float64" in reason(*operands(dtype=torch.float64))
        a, b, offs, *_ = operands()
        assert "`b` contiguous along K when gate" in reason(a, b.contiguous(), offs, interleaved=True)
        assert "`a` row-major" in reason(a.t().contiguous().t(), b, offs, runs="tgl kernel between copies")
        assert "writes torch.bfloat16 or torch.float32" in reason(a, b, offs, out_dtype=F16)


def test_tilings_with_room_for_halves_are_chosen():
    """Tilings fit the halves even if autotuning has found another for the problem without halves."""
    key = ("sm_90", VARLEN_M, 144, 64, 8)
    tilings.tuned[key] = GemmConfig(64, 192)
    try:
        assert tilings.choose(*key).tile_n == 192
        assert tilings.choose(*key, (128, 256)).tile_n == 256
    finally:
        del tilings.tuned[key]
    for arch in ("sm_90", "sm_100"):
        for columns in (8, 64, 72, 4096):
            for rows in (1, 64, 128, 1024):
                for widths in ((128, 256), (128, 192, 256)):
                    assert tilings.choose(arch, VARLEN_M, columns, 64, rows, widths).tile_n in widths
