"""GEMMs with a second pair of operands: exact on integers under any timing, no MMA for nothing, no spills, copies."""

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

import tgl
from tests.cutlass_kernels import sass
from tests.cutlass_kernels.paired_cases import PairedCase, kernel, run
from tests.kernel_cases import ends, integers, poisoned, product
from tgl import backends
from tgl.cutlass_kernels import tilings
from tgl.cutlass_kernels.archs import ARCHS, PAIRED, having
from tgl.cutlass_kernels.config import VARLEN_M, GemmConfig
from tgl.testing import emulate

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
RAGGED = (5, 0, 129, 128, 1, 0, 40)
PAIR, TURNS = GemmConfig(128, 64, cluster_n=2), GemmConfig(128, 128, pingpong=True)
TWO = GemmConfig(256, 128, two_cta=True)

CASES = {
    "plain": ("sm_90", PairedCase(GemmConfig(128, 128), RAGGED)),
    "up along its rows, bias": (
        "sm_90",
        PairedCase(GemmConfig(128, 128), RAGGED, rank=100, b_row_major=False, dtype=F16, out=F32, bias=F32),
    ),
    "ping-pong, deeper than the ring": (
        "sm_90",
        PairedCase(TURNS, (257, 0, 3, 130), depth=520, columns=264, rank=8, bias=BF16, bias_scale=F32),
    ),
    "multicast, untouched tail": ("sm_90", PairedCase(PAIR, RAGGED, depth=200, rank=24, zero_tail=False, tail=150)),
    "whole stages": ("sm_90", PairedCase(GemmConfig(64, 64), (70, 3), depth=128, rank=64, columns=40)),
    "all empty": ("sm_90", PairedCase(GemmConfig(64, 64), (0, 0), tail=80, columns=40)),
    "tensor memory": (
        "sm_100",
        PairedCase(GemmConfig(128, 128), RAGGED, rank=100, b_row_major=False, dtype=F16, out=F16),
    ),
    "tensor memory of two": ("sm_100", PairedCase(TWO, RAGGED, depth=200, rank=24, bias=F32, zero_tail=False)),
}
LONGER = {
    "whole stages",
    "ping-pong, deeper than the ring",
    "up along its rows, bias",
    "multicast, untouched tail",
    "tensor memory",
}
NAMED = [pytest.param(*case, id=name, marks=[pytest.mark.slow] * (name in LONGER)) for name, case in CASES.items()]


@pytest.mark.cover(1)
@pytest.mark.parametrize(("arch", "case"), NAMED)
def test_exact(arch, case):
    run(arch, case, seeds=(0,))


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "case"), CASES.values(), ids=CASES)
def test_exact_under_many_schedules(arch, case):
    run(arch, case, seeds=range(1, 5))


@pytest.mark.slices(2)
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("row_major", [False, True])
@pytest.mark.parametrize("rank", [8, 16, 24, 64, 100])
@pytest.mark.parametrize("arch", sorted(having(PAIRED)))
def test_every_rank(arch, rank, row_major, dtype):
    case = PairedCase(GemmConfig(128, 128), RAGGED, dtype=dtype, out=dtype, b_row_major=row_major, rank=rank)
    run(arch, case, seeds=(0, 1))


@pytest.mark.parametrize("rank", [8, 24, 64, 72])
def test_no_mma_lies_behind_the_second_pair(rank):
    """One MMA is 64 rows by 16 of the contraction, of which the first pair takes two stages of 64."""
    record = run("sm_90", PairedCase(GemmConfig(64, 64), (64,), tail=0, depth=72, columns=64, rank=rank), seeds=(0,))
    assert record.mma_count == 2 * 4 + -(-rank // 16)


@pytest.mark.slices(2)
@pytest.mark.parametrize(
    ("arch", "config"),
    [
        pytest.param(arch, tiling, id=f"{arch} {tiling}", marks=[pytest.mark.slow] * (tiling != widest))
        for arch, widest in (("sm_90", GemmConfig(128, 256)), ("sm_100", GemmConfig(256, 256, two_cta=True)))
        for tiling in tilings.candidates(arch, VARLEN_M)
        if not tiling.stages
    ],
)
def test_nothing_is_spilled(arch, config):
    case = PairedCase(config, RAGGED, b_row_major=False, bias=BF16, bias_scale=F32)
    with emulate(ARCHS[arch].target), backends.emulated_device(arch):
        report = sass.inspect(kernel(arch, case).artifacts.CUBIN)
    assert (report.spills, report.frame) == (0, 0)


def operands(depth=48, rank=16, columns=40, sizes=(9, 0, 12), tail=3):
    rows = sum(sizes) + tail
    a, low = (poisoned(integers(rows, k), sizes) for k in (depth, rank))
    b, up = (integers(len(sizes), k, columns) for k in (depth, rank))
    return a, b, low, up, ends(sizes)


TURNED = {
    "as made": (lambda t: t, lambda t: t, set()),
    "both along their rows": (*[lambda t: t.mT.contiguous().mT] * 2, set()),
    "up alone": (lambda t: t, lambda t: t.mT.contiguous().mT, {"up"}),
    "b alone": (lambda t: t.mT.contiguous().mT, lambda t: t, {"up"}),
    "a b that is copied": (lambda t: t[:, :, 1:], lambda t: t.mT.contiguous().mT[:, :, 1:], {"b", "up"}),
}


@pytest.mark.parametrize("name", TURNED)
def test_a_matrix_of_another_memory_order_is_copied(name):
    turn_b, turn_up, copied = TURNED[name]
    a, b, low, up, offs = operands(columns=41 if "b" in copied else 40)
    b, up = turn_b(b), turn_up(up)
    sizes = (9, 0, 12)
    expected = product(a, b, sizes) + product(low, up, sizes)
    with emulate("sm_90a", detect_races=False) as machine, backends.emulated_device("sm_90"):
        explanation = tgl.explain(tgl.grouped_gemm_low_rank, a, b, low, up, offs)
        assert dict(explanation.copies).keys() == copied
        if copied == {"up"}:
            assert "in the memory order of `b`" in str(explanation)
        found = tgl.grouped_gemm_low_rank(a, b, low, up, offs)
        assert len(machine.launches) == 1
    assert torch.equal(found, expected.bfloat16())


def test_what_the_kernel_leaves_to_two_gemms():
    a, b, low, up, offs = operands()
    with backends.compile_only("sm_90"):
        for args, why in (
            ((a.float(), b.float(), low.float(), up.float(), offs), "takes bfloat16 and float16"),
            ((a, b, low[:, :0], up[:, :0], offs), "does not take R = 0"),
            ((a[:, :0], b[:, :0], low, up, offs), "does not take K = 0"),
        ):
            explanation = tgl.explain(tgl.grouped_gemm_low_rank, *args)
            assert explanation.chosen.name == "two GEMMs and an addition"
            assert why in str(explanation)
    with backends.compile_only("sm_80"):
        explanation = tgl.explain(tgl.grouped_gemm_low_rank, a, b, low, up, offs)
    assert "each product and the sum is rounded" in str(explanation)
    assert [part.chosen.name for part in explanation.parts] == ["tgl kernel"] * 2


@pytest.mark.parametrize("keeps", [pytest.param(False, marks=pytest.mark.slow), True])
def test_two_gemms(keeps):
    """The composition's values, and its tail."""
    a, b, low, up, offs = operands()
    out, sizes = torch.full((a.shape[0], b.shape[2]), -0.0, dtype=BF16), (9, 0, 12)
    expected = (product(a, b, sizes) + product(low, up, sizes)).bfloat16()
    with emulate("sm_80", detect_races=False) as machine, backends.emulated_device("sm_80"):
        found = tgl.grouped_gemm_low_rank(a, b, low, up, offs, out=out if keeps else None)
        assert len(machine.launches) == 2
    assert torch.equal(found, expected)
    assert bool(found[21:].signbit().all()) == keeps
