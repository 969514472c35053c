"""Sums of two products with an activation as second output: exact, one launch with the bits of two, errors."""

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

import tgl
from tests.activation_cases import width
from tests.cutlass_kernels import sass
from tests.cutlass_kernels.activated_cases import Case, kernel, run
from tests.kernel_cases import column_major, ends, integers, poisoned
from tests.memory import same_bytes
from tgl import backends
from tgl.cutlass_kernels import tilings
from tgl.cutlass_kernels.archs import ARCHS, PAIRED_ACTIVATED, having
from tgl.cutlass_kernels.config import LINE, VARLEN_M, GemmConfig
from tgl.ops.grouped_activation import Params
from tgl.testing import emulate

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
RAGGED = (5, 0, 129, 128, 1, 0, 40)
TURNS, TWO = GemmConfig(128, 128, pingpong=True), GemmConfig(256, 128, two_cta=True)
ALTERNATING, SRELU = Params(interleaved=True), Params("srelu")
CLAMPED = Params("clamped_qgeglu", limit=2.0, alpha=1.5, offset=0.5)

CASES = {
    "halves": ("sm_90", Case(TURNS, (5, 0, 130, 1), bias=BF16, rank=16)),
    "alternating": ("sm_90", Case(TURNS, RAGGED, ALTERNATING, bias=F32, columns=136, rank=100)),
    "b along its columns": (
        "sm_90",
        Case(GemmConfig(128, 256), (130, 0, 3), columns=136, b_row_major=True, dtype=F16, out=F16, rank=24),
    ),
    "not gated, multicast": (
        "sm_90",
        Case(GemmConfig(128, 128, cluster_n=2), (130, 0, 3), SRELU, columns=264, depth=264, probs=BF16, rank=72),
    ),
    "float32": ("sm_90", Case(GemmConfig(64, 128), (5, 0, 70), CLAMPED, out=F32, columns=68, probs=None, rank=8)),
    "tensor memory": ("sm_100", Case(GemmConfig(128, 128), (5, 0, 130, 1), bias=BF16, rank=16)),
    "tensor memory of two, alternating": (
        "sm_100",
        Case(TWO, RAGGED, CLAMPED._replace(interleaved=True), dtype=F16, out=F16, probs=F16, rank=100),
    ),
    "tensor memory, b along its columns": (
        "sm_100",
        Case(GemmConfig(128, 256), (130, 0, 3), SRELU, columns=136, b_row_major=True, rank=24),
    ),
}
USUAL = {"halves", "tensor memory"}
NAMED = [pytest.param(*case, id=name, marks=[pytest.mark.slow] * (name not in USUAL)) for name, case in CASES.items()]


@pytest.mark.cover(1)
@pytest.mark.parametrize(("arch", "case"), NAMED)
def test_exact(arch, case):
    run(arch, case, seeds=(0,))


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "case"), CASES.values(), ids=CASES)
def test_exact_under_many_schedules(arch, case):
    run(arch, case, seeds=range(1, 5))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [8, 16, 24, 64, 100])
@pytest.mark.parametrize("arch", sorted(having(PAIRED_ACTIVATED)))
def test_every_rank(arch, rank):
    run(arch, Case(GemmConfig(128, 128), (5, 0, 130, 1), rank=rank), seeds=(0, 1))


@pytest.mark.parametrize("rank", [8, 72])
def test_no_mma_lies_behind_the_second_pair(rank):
    """One MMA is 64 rows by 16 of the contraction, of which the first pair takes two stages of 64."""
    case = Case(GemmConfig(64, 128), (64,), tail=0, depth=72, columns=64, rank=rank)
    assert run("sm_90", case, seeds=(0,)).mma_count == 2 * 4 + -(-rank // 16)


@pytest.mark.slices(2)
@pytest.mark.parametrize("params", [Params(), ALTERNATING, SRELU], ids=["halves", "alternating", "not gated"])
@pytest.mark.parametrize(
    ("arch", "config"),
    [
        (arch, tiling)
        for arch in sorted(having(PAIRED_ACTIVATED))
        for tiling in tilings.candidates(arch, VARLEN_M)
        if not tiling.stages and tiling.tile_n % (2 * LINE) == 0
    ],
    ids=str,
)
@pytest.mark.slow
def test_nothing_is_spilled(arch, config, params):
    with emulate(ARCHS[arch].target), backends.emulated_device(arch):
        case = Case(config, RAGGED, params, bias=BF16, b_row_major=params.gated and not params.interleaved, rank=16)
        report = sass.inspect(kernel(arch, case).artifacts.CUBIN)
    assert (report.spills, report.frame) == (0, 0)


def operands(params, rank=16, half=72, sizes=(7, 0, 23), tail=10):
    rows, across = sum(sizes) + tail, width(params.kind, half)
    a, low = (poisoned(integers(rows, k), sizes) for k in (64, rank))
    b, up = (column_major(integers(len(sizes), k, across)) for k in (64, rank))
    return a, b, low, up, ends(sizes), integers(len(sizes), across), torch.rand(rows)


@pytest.mark.parametrize(
    ("arch", "params"),
    [
        pytest.param("sm_90", Params(), id="sm_90, halves", marks=pytest.mark.slow),
        pytest.param("sm_90", ALTERNATING, id="sm_90, alternating", marks=pytest.mark.slow),
        pytest.param("sm_90", SRELU, id="sm_90, not gated", marks=pytest.mark.slow),
        pytest.param("sm_100", ALTERNATING, id="sm_100, alternating"),
    ],
)
def test_one_launch_with_the_bits_of_two(arch, params):
    a, b, low, up, offs, bias, probs = operands(params)
    options = params._asdict()
    with emulate(ARCHS[arch].target) as machine, backends.emulated_device(arch):
        y, h = tgl.grouped_gemm_low_rank_activation(a, b, low, up, offs, bias, probs, **options)
        assert len(machine.launches) == 1
        assert same_bytes(h, tgl.grouped_gemm_low_rank(a, b, low, up, offs, bias))
        assert same_bytes(y, tgl.grouped_activation(h, offs, probs, **options))
    assert not y[30:].any()


def test_what_it_leaves_to_two_ops():
    def explained(arch, *args, **options):
        with backends.compile_only(arch):
            found = tgl.explain(tgl.grouped_gemm_low_rank_activation, *args, **options)
        return found

    a, b, low, up, offs, bias, _ = operands(Params())
    for args, options, why in (
        ((a.float(), b.float(), low.float(), up.float(), offs), {}, "takes bfloat16 and float16"),
        ((a, b, low[:, :0], up[:, :0], offs), {}, "does not take R = 0"),
        ((a, b[:, :, :72], low, up[:, :, :72], offs), {}, "multiple of 8 columns of the result, got 36"),
        ((a, b.contiguous(), low, up, offs), {"interleaved": True}, "`b` contiguous along K when gate"),
    ):
        found = explained("sm_90", *args, **options)
        assert found.chosen.name == "sum of two GEMMs, then activation"
        assert why in str(found)
    found = explained("sm_80", a, b, low, up, offs, bias)
    assert [part.op for part in found.parts] == ["grouped_gemm_low_rank", "grouped_activation"]
    found = explained("sm_90", a, b, low, up.contiguous(), offs)
    assert dict(found.copies).keys() == {"up"}
