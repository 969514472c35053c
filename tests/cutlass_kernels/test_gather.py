"""sm_90a kernels that read rows of an operand by an index: exact on integers, the same bits under adversarial timing.

Rows that no index names hold NaN, as does everything behind the last group; rows of no token count as zeros.
"""

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

from cutlass import Int32, cute

import tgl
from tests.activation_cases import PARAMS
from tests.cutlass_kernels import sass
from tests.cutlass_kernels.gather_cases import ARCH, Case, kernel, random_index, run, scattered
from tests.cutlass_kernels.gemm_cases import CLUSTERS
from tests.kernel_cases import ends, framed, integers, poisoned
from tgl.cutlass_kernels.activation.activation_spec import spec_of
from tgl.cutlass_kernels.autotune import autotune
from tgl.cutlass_kernels.config import VARLEN_K, VARLEN_M, GemmConfig
from tgl.cutlass_kernels.epilogue import EpilogueSpec
from tgl.cutlass_kernels.gemm.sm90 import gather, mma
from tgl.cutlass_kernels.ops import gemm, gemm_activation, gemm_dactivation
from tgl.testing import emulator

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
RAGGED = (5, 0, 130, 127, 128, 129, 1, 0, 40)
SHORT = (5, 0, 130, 1)
TINY = (70, 0, 3)
TURNS = {shape: GemmConfig(*shape, pingpong=True) for shape in ((64, 128), (64, 256), (128, 64), (128, 128))}
TILES = {shape: GemmConfig(*shape) for shape in ((64, 64), (128, 128), (128, 192), (128, 256), (256, 64), (256, 128))}

GEMM = {
    "in turns": Case(TURNS[128, 128], RAGGED, bias=BF16),
    "K of one tile": Case(TURNS[64, 128], SHORT, depth=64, bias=F32, bias_scale=BF16, tail=150),
    "float32 out, odd K": Case(TILES[128, 128], SHORT, out=F32, depth=67),
    "two blocks, untouched tail": Case(TILES[256, 128], (257, 0, 3), zero_tail=False, tail=300, tokens=700),
    "at slots": Case(TURNS[128, 64], SHORT, slots=True, columns=40),
    "all empty": Case(TILES[64, 64], (0, 0, 0), tail=140, columns=40),
}
RARER_GEMM = {
    "deeper than the ring": Case(TURNS[128, 128], (257, 0, 3, 130), tokens=300, depth=520, columns=264),
    "b column-major": Case(TILES[128, 256], SHORT, b_row_major=False, dtype=F16, out=F16, columns=264, tail=0),
    "K below a piece": Case(TILES[64, 64], SHORT, depth=5, columns=40),
    "one token": Case(TILES[128, 192], (3, 70), tokens=1, absent=False),
    "64 columns": Case(TILES[256, 64], (257, 3), depth=200),
}
WGRAD = {
    "in turns": Case(TURNS[128, 128], (64, 0, 63, 65), columns=264),
    "odd columns": Case(TILES[128, 192], SHORT, depth=37, columns=205, dtype=F16, out=F16),
    "all empty": Case(TILES[64, 64], (0, 0), tail=20, columns=40),
}
RARER_WGRAD = {
    "ragged": Case(TURNS[128, 128], RAGGED, columns=264),
    "accumulate": Case(TURNS[64, 256], (64, 0, 63, 165), columns=264, depth=136, out=F32, accumulate=True),
    "two blocks": Case(TILES[256, 128], (130, 0, 64, 1, 70), depth=264, tokens=200),
}


def kinds(rows, contraction):
    every = {f"rows: {name}": (VARLEN_M, "a", case) for name, case in rows.items()}
    return every | {f"contraction of {x}: {n}": (VARLEN_K, x, case) for x in "ab" for n, case in contraction.items()}


USUAL = kinds(GEMM, WGRAD)
EVERY = USUAL | kinds(RARER_GEMM, RARER_WGRAD)


@pytest.mark.parametrize(("kind", "gathered", "case"), USUAL.values(), ids=USUAL)
def test_exact(kind, gathered, case):
    run(kind, gathered, case, seeds=(0,))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "gathered", "case"), EVERY.values(), ids=EVERY)
def test_exact_under_many_schedules(kind, gathered, case):
    run(kind, gathered, case, seeds=range(4))


@cute.jit
def without_fence(gemm, ring, stage: Int32, phase: Int32):
    cute.arch.mbarrier_wait(ring.full + stage, phase)


@pytest.mark.parametrize(("kind", "gathered"), [(VARLEN_M, "a"), (VARLEN_K, "a"), (VARLEN_K, "b")])
def test_the_emulator_misses_the_fence(kind, gathered, monkeypatch):
    monkeypatch.setattr(mma, "wait_full", without_fence)
    case = Case(GemmConfig(64, 64), (70, 3), dtype=F16, columns=40)  # of no other test: kernels are kept
    with pytest.raises(emulator.EmulatorError, match=r"fence\.proxy\.async"):
        run(kind, gathered, case, seeds=(0,))


def activation_call(key, gathered):
    """Outputs of the kernel with an activation, on rows by an index, or on copies of those."""
    torch.manual_seed(0)
    sizes, rows = TINY, sum(TINY) + 9
    index = random_index(50, sizes, 9, True)
    x, copies = scattered(integers(50, 72), index)
    b, probs = integers(len(sizes), 72, 144), poisoned(torch.rand(rows), sizes)
    h, y = (framed(rows, columns, dtype=BF16) for columns in (144, 72))
    call = gemm_activation.GROUPED_GEMM_ACTIVATION.build(key._replace(gathered=gathered))
    operands, last = ((x,), (index,)) if gathered else ((copies,), ())
    call(*operands, b, ends(sizes), h.inside, y.inside, None, probs, *last, CLUSTERS)
    return h.room, y.room


@pytest.mark.parametrize("config", [TILES[128, 256], pytest.param(TURNS[128, 128], marks=pytest.mark.slow)], ids=str)
def test_activation(config):
    spec = EpilogueSpec("bfloat16", tail=True, activation=spec_of(PARAMS["swiglu"]), probs="float32")
    key = gemm.GemmKey(VARLEN_M, ARCH, True, "bfloat16", 2, spec, config)
    with emulator.emulate("sm_90a"):
        for got, wanted in zip(activation_call(key, "a"), activation_call(key, None)):
            assert torch.equal(got, wanted)


def gradient_call(key, gathered):
    """Outputs of the kernel that goes back through the activation, on rows by an index, or on copies of those."""
    torch.manual_seed(0)
    sizes, rows = TINY, sum(TINY) + 9
    index = random_index(50, sizes, 9, True)
    dy, copies = scattered(integers(50, 72), index)
    b, h, probs = integers(len(sizes), 72, 136), torch.randn(rows, 272).bfloat16(), torch.rand(rows)
    dh, sums = framed(rows, 272, dtype=BF16), torch.full((-(-136 // key.config.tile_n), rows), 7.0)
    call = gemm_dactivation.GROUPED_GEMM_DACTIVATION.build(key._replace(gathered=gathered))
    operands, last = ((dy,), (index,)) if gathered else ((copies,), ())
    call(*operands, b, ends(sizes), dh.inside, poisoned(h, sizes), poisoned(probs, sizes), sums, *last, CLUSTERS)
    return dh.room, sums


@pytest.mark.parametrize("config", [TURNS[128, 128], pytest.param(TILES[128, 256], marks=pytest.mark.slow)], ids=str)
def test_gradient_of_an_activation(config):
    activation = spec_of(PARAMS["swiglu"])
    key = gemm_dactivation.DactivationKey(ARCH, True, "bfloat16", 2, activation, "float32", config)
    with emulator.emulate("sm_90a"):
        for got, wanted in zip(gradient_call(key, "a"), gradient_call(key, None)):
            assert torch.equal(got, wanted)


def test_any_index_and_any_offsets_stay_inside():
    """What groups overlap or end outside is wrong, and no reason to read or write elsewhere."""
    low, high = -(1 << 31), (1 << 31) - 1
    case = Case(TILES[64, 64], (0, 0, 0), columns=40)
    index = torch.tensor([low, high, 50, -1, 49] * 28, dtype=torch.int32)
    a, b, dy, frame = integers(50, 72), integers(4, 72, 40), integers(140, 40), framed(140, 40, dtype=BF16)
    grads = framed(4, 72, 40, dtype=BF16)
    with emulator.emulate("sm_90a", detect_races=False):
        for wrong in ((-5, 90, 40, 1 << 30), (high, low, high, 7), (140, 141, high, high)):
            offs = torch.tensor(wrong, dtype=torch.int32)
            kernel(VARLEN_M, "a", case)(a, b, offs, frame.inside, None, None, None, index, CLUSTERS)
            kernel(VARLEN_K, "a", case)(a, dy, offs, grads.inside, None, None, None, index, CLUSTERS)
            assert frame.intact(), wrong
            assert grads.intact(), wrong


@pytest.mark.parametrize(
    ("kind", "config", "gathered", "message"),
    [
        (VARLEN_M, GemmConfig(), "b", r"`gathered` must be None or one of \('a',\) for varlen_m, not 'b'"),
        (VARLEN_K, GemmConfig(), "out", "not 'out'"),
        (VARLEN_K, GemmConfig(cluster_n=2), "a", "there are no clusters"),
    ],
)
def test_what_cannot_be_gathered_is_said(kind, config, gathered, message):
    with pytest.raises(ValueError, match=message):
        gather.check(kind, config, gathered)


@pytest.mark.skipif(sass.nvdisasm() is None, reason="needs the package nvidia-cuda-nvdisasm")
@pytest.mark.parametrize("kind", [VARLEN_M, VARLEN_K])
@pytest.mark.parametrize(
    "config",
    [TURNS[128, 128], *(pytest.param(t, marks=pytest.mark.slow) for t in (TILES[128, 256], TILES[256, 128]))],
    ids=str,
)
def test_machine_code(kind, config):
    """No local memory for a lane's rows, and no MMA that is waited for by itself."""
    with emulator.emulate("sm_90a"):
        for gathered in gather.OPERANDS[kind]:
            report = sass.inspect(kernel(kind, gathered, Case(config, ())).artifacts.CUBIN)
            assert report.spills == report.frame == 0
            assert report.count("WARPGROUP.DEPBAR") == 2
            assert report.count("LDGSTS") == config.tile_m // 16 if gathered == "a" else config.tile_n // 16


def test_clusters_are_not_tried():
    a, b, offs = integers(8, 72), integers(1, 72, 64), ends((4,))
    rows = torch.zeros(4, dtype=torch.int32)
    with emulator.emulate("sm_90a"), pytest.raises(ValueError, match="each CTA gathers rows for itself"):
        autotune(tgl.grouped_gemm, a, b, offs, rows=rows, tilings=[GemmConfig(128, 64, cluster_n=2)])
