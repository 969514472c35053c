"""Kernels that read rows of an operand by an index: exact on integers, the same bits under adversarial timing.

Rows that no index names hold NaN, as does everything behind the last group; rows of no token count as zeros.
"""

from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

from cutlass import Boolean, Int32, cute, pipeline

import cute_emulator
import tgl
from tests.activation_cases import PARAMS
from tests.cutlass_kernels import sass
from tests.cutlass_kernels.gather_cases import Case, kernel, random_index, run, scattered
from tests.cutlass_kernels.gemm_cases import CLUSTERS
from tests.kernel_cases import ends, framed, integers, poisoned, stored
from tgl import backends
from tgl.cutlass_kernels import tilings
from tgl.cutlass_kernels.activation.activation_spec import spec_of
from tgl.cutlass_kernels.archs import ARCHS
from tgl.cutlass_kernels.autotune import autotune
from tgl.cutlass_kernels.config import VARLEN_K, VARLEN_M, WIDTHS, GemmConfig
from tgl.cutlass_kernels.epilogue import EpilogueSpec
from tgl.cutlass_kernels.gemm import gather_call as shared
from tgl.cutlass_kernels.gemm.sm90 import mma
from tgl.cutlass_kernels.gemm.sm100 import gather_load
from tgl.cutlass_kernels.launchers import gemm, gemm_activation, gemm_dactivation
from tgl.testing import emulate

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
RAGGED = (5, 0, 129, 128, 1, 0, 40)
SHORT = (5, 0, 130, 1)
TINY = (70, 0, 3)
SHAPES = ((64, 128), (64, 256), (128, 64), (128, 128), (128, 192), (192, 128))
TURNS = {shape: GemmConfig(*shape, pingpong=True) for shape in SHAPES}
TILES = {shape: GemmConfig(*shape) for shape in ((64, 64), (128, 64), (128, 128), (128, 256), (256, 64))}
PAIRS = {columns: GemmConfig(256, columns, two_cta=True) for columns in (64, 128, 256)}


@dataclass(frozen=True)
class Tilings:
    """The tilings of an architecture that the cases use."""

    usual: GemmConfig
    short: GemmConfig
    square: GemmConfig
    odd: GemmConfig
    wide: GemmConfig
    wider: GemmConfig
    high: GemmConfig
    tall: GemmConfig
    narrow: GemmConfig
    least: GemmConfig


HIGH = GemmConfig(256, 128)
SM_90 = Tilings(
    usual=TURNS[128, 128],
    short=TURNS[64, 128],
    square=TILES[128, 128],
    odd=TURNS[128, 192],
    wide=TILES[128, 256],
    wider=TURNS[64, 256],
    high=HIGH,
    tall=TILES[256, 64],
    narrow=TURNS[128, 64],
    least=TILES[64, 64],
)
SM_100 = Tilings(
    usual=PAIRS[128],
    short=TILES[128, 128],
    square=TILES[128, 128],
    odd=PAIRS[64],
    wide=TILES[128, 256],
    wider=TILES[128, 256],
    high=PAIRS[256],
    tall=PAIRS[64],
    narrow=TILES[128, 64],
    least=TILES[128, 64],
)
BY_ARCH = {"sm_90": SM_90, "sm_100": SM_100}


def gemms(t):
    return {
        "usual": Case(t.usual, RAGGED, bias=BF16),
        "two blocks, untouched tail": Case(t.high, (257, 0, 3), zero_tail=False, tail=300, tokens=700),
        "float32 out, odd K": Case(t.square, SHORT, out=F32, depth=67),
        "K of one tile": Case(t.short, SHORT, depth=64, bias=F32, bias_scale=BF16, tail=150),
        "at slots": Case(t.narrow, SHORT, slots=True, columns=40),
        "all empty": Case(t.usual, (0, 0, 0), tail=140, columns=40, bias=BF16),
    }


def rarer_gemms(t):
    return {
        "deeper than the ring": Case(t.usual, (257, 0, 3, 130), tokens=300, depth=520, columns=264),
        "b column-major": Case(t.wide, SHORT, b_row_major=False, dtype=F16, out=F16, columns=264, tail=0),
        "K below a piece": Case(t.least, SHORT, depth=5, columns=40),
        "one token": Case(t.odd, (3, 70), tokens=1, absent=False),
        "64 columns": Case(t.tall, (257, 3), depth=200),
    }


def wgrads(t):
    return {
        "usual": Case(t.usual, (64, 0, 63, 65), columns=264),
        "odd columns": Case(t.odd, SHORT, depth=37, columns=205, dtype=F16, out=F16),
        "all empty": Case(t.least, (0, 0), tail=20, columns=40),
    }


def rarer_wgrads(t):
    return {
        "ragged": Case(t.usual, RAGGED, columns=264),
        "accumulate": Case(t.wider, (64, 0, 63, 165), columns=264, depth=136, out=F32, accumulate=True),
        "two blocks": Case(t.high, (130, 0, 64, 1, 70), depth=264, tokens=200),
    }


def kinds(rows, contraction):
    """Cases of every operand that may be gathered, by architecture."""
    found = {}
    for arch, t in BY_ARCH.items():
        found |= {f"{arch} rows: {name}": (arch, VARLEN_M, "a", case) for name, case in rows(t).items()}
        for x in "ab":
            every = contraction(t).items()
            found |= {f"{arch} contraction of {x}: {name}": (arch, VARLEN_K, x, case) for name, case in every}
    return found


USUAL = kinds(gemms, wgrads)
USUAL["192 rows"] = ("sm_90", VARLEN_K, "b", Case(TURNS[192, 128], (5, 0, 330, 1), depth=200, columns=136))
EVERY = USUAL | kinds(rarer_gemms, rarer_wgrads)
LONGER = {f"sm_100 {name}" for name in ("rows: K of one tile", "rows: at slots", "rows: all empty")}
LONGER |= {f"sm_100 contraction of {name}" for name in ("a: odd columns", "a: all empty", "b: all empty")}


def test_every_architecture_has_cases():
    assert {name for name, arch in ARCHS.items() if arch.gathers and arch.folder != "mma_sync"} == set(BY_ARCH)


@pytest.mark.cover(1)
@pytest.mark.parametrize(
    ("arch", "kind", "gathered", "case"),
    [pytest.param(*case, id=name, marks=[pytest.mark.slow] * (name in LONGER)) for name, case in USUAL.items()],
)
def test_exact(arch, kind, gathered, case):
    run(arch, kind, gathered, case, seeds=(0,))


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "kind", "gathered", "case"), EVERY.values(), ids=EVERY)
def test_exact_under_many_schedules(arch, kind, gathered, case):
    run(arch, kind, gathered, case, seeds=range(4))


@cute.jit
def without_fence(gemm, ring, stage: Int32, phase: Int32):
    cute.arch.mbarrier_wait(ring.full + stage, phase)


@pytest.mark.parametrize(("kind", "gathered"), [(VARLEN_M, "a"), (VARLEN_K, "a"), (VARLEN_K, "b")])
def test_the_emulator_misses_the_fence(kind, gathered, monkeypatch):
    monkeypatch.setattr(mma, "wait_full", without_fence)
    case = Case(GemmConfig(64, 64), (70, 3), dtype=F16, columns=40)  # of no other test: kernels are kept
    with pytest.raises(cute_emulator.EmulatorError, match=r"fence\.proxy\.async"):
        run("sm_90", kind, gathered, case, seeds=(0,))


@pytest.mark.parametrize(("kind", "gathered"), [(VARLEN_M, "a"), (VARLEN_K, "b")])
def test_the_emulator_sees_copies_into_a_stage_that_is_read(kind, gathered, monkeypatch):
    """Only warps that gather say how many bytes they expect."""
    acquire = pipeline.PipelineTmaUmma.producer_acquire

    def without_waiting(self, state, *, expected_tx=None):
        acquire(self, state, None if expected_tx is None else Boolean(True), expected_tx=expected_tx)

    monkeypatch.setattr(pipeline.PipelineTmaUmma, "producer_acquire", without_waiting)
    deep = Case(
        TILES[128, 64], (600, 3), depth=600, columns=48, dtype=F16, out=F32
    )  # of no other test: kernels are kept
    with pytest.raises(cute_emulator.EmulatorError):
        run("sm_100", kind, gathered, deep, seeds=(0,))


def activation_call(key, gathered):
    """Outputs of the kernel with an activation, on rows by an index, or on copies of those."""
    torch.manual_seed(0)
    sizes, rows = TINY, sum(TINY) + 9
    index = random_index(50, sizes, 9, True)
    x, copies = scattered(integers(50, 72), index)
    b, probs = stored(integers(len(sizes), 72, 144), key.b_unit == 2), poisoned(torch.rand(rows), sizes)
    h, y = (framed(rows, columns, dtype=BF16) for columns in (144, 72))
    call = gemm_activation.GROUPED_GEMM_ACTIVATION.build(key._replace(gathered=gathered))
    operands, last = ((x,), (index,)) if gathered else ((copies,), ())
    call(*operands, b, ends(sizes), h.inside, y.inside, None, probs, *last, CLUSTERS)
    return h.room, y.room


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


FORWARD = [("sm_90", TURNS[128, 192], 1), slow("sm_90", TURNS[128, 128], 2), ("sm_100", PAIRS[128], 2)]
FORWARD += [slow("sm_90", TILES[128, 256], 2)]
BACK = [("sm_90", TURNS[128, 128]), slow("sm_90", TILES[128, 256]), ("sm_100", PAIRS[128])]
BOTH = TILES[128, 128], TILES[128, 256], PAIRS[256]
FORWARD += [slow("sm_100", tiling, 2) for tiling in BOTH]
BACK += [slow("sm_100", tiling) for tiling in BOTH]


@pytest.mark.parametrize(("arch", "config", "unit"), FORWARD)
def test_activation(arch, config, unit):
    spec = EpilogueSpec("bfloat16", tail=True, activation=spec_of(PARAMS["swiglu"]), probs="float32")
    key = gemm.GemmKey(VARLEN_M, arch, True, "bfloat16", unit, spec, config)
    with emulate(ARCHS[arch].target):
        for got, wanted in zip(activation_call(key, "a"), activation_call(key, None)):
            assert torch.equal(got, wanted)


def gradient_call(key, gathered):
    """Outputs of the kernel that goes back through the activation, on rows by an index, or on copies of those."""
    torch.manual_seed(0)
    sizes, rows = TINY, sum(TINY) + 9
    index = random_index(50, sizes, 9, True)
    dy, copies = scattered(integers(50, 72), index)
    b, h, probs = integers(len(sizes), 72, 136), torch.randn(rows, 272).bfloat16(), torch.rand(rows)
    dh, act = (framed(rows, columns, dtype=BF16) for columns in (272, 136))
    sums = torch.full((-(-136 // key.config.tile_n), rows), 7.0)
    call = gemm_dactivation.GROUPED_GEMM_DACTIVATION.build(key._replace(gathered=gathered))
    operands, last = ((dy,), (index,)) if gathered else ((copies,), ())
    outputs = sums, (dprobs := torch.empty(rows)), act.inside
    call(*operands, b, ends(sizes), dh.inside, poisoned(h, sizes), poisoned(probs, sizes), *outputs, *last, CLUSTERS)
    return dh.room, sums, dprobs, act.room


@pytest.mark.parametrize(("arch", "config"), BACK)
def test_gradient_of_an_activation(arch, config):
    activation = spec_of(PARAMS["swiglu"])
    key = gemm_dactivation.DactivationKey(arch, True, "bfloat16", 2, activation, "float32", config, act=True)
    with emulate(ARCHS[arch].target):
        for got, wanted in zip(gradient_call(key, "a"), gradient_call(key, None)):
            assert torch.equal(got, wanted)


@pytest.mark.parametrize("arch", BY_ARCH)
def test_any_index_and_any_offsets_stay_inside(arch):
    """Groups that overlap or end outside give wrong results, but no access out of bounds."""
    low, high = -(1 << 31), (1 << 31) - 1
    case = Case(BY_ARCH[arch].least, (0, 0, 0), columns=40)
    index = torch.tensor([low, high, 50, -1, 49] * 28, dtype=torch.int32)
    a, b, dy, frame = integers(50, 72), integers(4, 72, 40), integers(140, 40), framed(140, 40, dtype=BF16)
    grads = framed(4, 72, 40, dtype=BF16)
    with emulate(ARCHS[arch].target, detect_races=False):
        for wrong in ((-5, 90, 40, 1 << 30), (high, low, high, 7), (140, 141, high, high)):
            offs = torch.tensor(wrong, dtype=torch.int32)
            kernel(arch, VARLEN_M, "a", case)(a, b, offs, frame.inside, None, None, None, None, index, CLUSTERS)
            kernel(arch, VARLEN_K, "a", case)(a, dy, offs, grads.inside, None, None, None, None, index, CLUSTERS)
            assert frame.intact(), wrong
            assert grads.intact(), wrong


@pytest.mark.parametrize(
    ("kind", "gathered", "reason", "message"),
    [
        (VARLEN_M, "b", None, r"`gathered` must be None or one of \('a',\) for varlen_m, not 'b'"),
        (VARLEN_K, "out", None, "not 'out'"),
        (VARLEN_K, "a", "there are no clusters", "there are no clusters"),
    ],
)
def test_unsupported_gathers_have_reasons(kind, gathered, reason, message):
    with pytest.raises(ValueError, match=message):
        shared.check(kind, gathered, reason)


def machine_code(arch, kind, config):
    """Return the machine code by gathered operand; the rows that a warp holds take no local memory."""
    with emulate(ARCHS[arch].target):
        found = {
            gathered: sass.inspect(kernel(arch, kind, gathered, Case(config, ())).artifacts.CUBIN)
            for gathered in shared.OPERANDS[kind]
        }
    assert all(report.spills == report.frame == 0 for report in found.values())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", [VARLEN_M, VARLEN_K])
@pytest.mark.parametrize(
    "config",
    [TURNS[128, 192], TURNS[128, 128], TURNS[192, 128], TILES[128, 256], HIGH],
    ids=str,
)
def test_machine_code_of_sm_90(kind, config):
    """MMAs are waited for in batches."""
    for gathered, report in machine_code("sm_90", kind, config).items():
        assert report.count("WARPGROUP.DEPBAR") == 2
        assert report.count("LDGSTS") == config.tile_m // 16 if gathered == "a" else config.tile_n // 16


@pytest.mark.slow
@pytest.mark.parametrize("kind", [VARLEN_M, VARLEN_K])
@pytest.mark.parametrize(
    "config",
    [TILES[128, 64], TILES[128, 128], TILES[128, 256], *PAIRS.values()],
    ids=str,
)
def test_machine_code_of_sm_100(kind, config):
    """Copies of four lines each, by two warps."""
    for gathered, report in machine_code("sm_100", kind, config).items():
        lines = config.cta_m if gathered == "a" else max(config.tile_n // config.ctas, 64)
        assert report.count("UTMALDG.2D") == lines // 4 // gather_load.WARPS


def test_clusters_are_not_tried():
    a, b, offs = integers(8, 72), integers(1, 72, 64), ends((4,))
    rows = torch.zeros(4, dtype=torch.int32)
    with emulate("sm_90a"), pytest.raises(ValueError, match="each CTA gathers rows for itself"):
        autotune(tgl.grouped_gemm, a, b, offs, rows=rows, tilings=[GemmConfig(128, 64, cluster_n=2)])


def chosen(kind, operand, columns, rows, halves=None, depth=2048):
    config = tilings.choose_gathering("sm_90", kind, columns, depth, rows, operand, halves)
    return config.tile_m, config.tile_n, config.pingpong


def test_tilings_of_sm_90_that_gather():
    """Short in what is gathered; no halves in them that the kernel could not load or hold."""
    assert chosen(VARLEN_M, "a", 1536, 1024) == (128, 256, False)
    assert chosen(VARLEN_M, "a", 1536, 1024, (128, 192, 256)) == (128, 192, True)
    assert chosen(VARLEN_M, "a", 1536, 1024, (128, 192, 256), depth=4096) == (128, 256, False)
    assert chosen(VARLEN_M, "a", 1536, 128, (128, 192, 256), depth=4096) == (128, 128, True)
    assert chosen(VARLEN_M, "a", 1536, 1024, (128, 256)) == (128, 128, True)
    assert chosen(VARLEN_M, "a", 1408, 1024, WIDTHS) == (128, 192, True)
    assert chosen(VARLEN_M, "a", 256, 1024, (128, 192, 256)) == (128, 128, True)
    assert chosen(VARLEN_M, "a", 64, 1024, (128, 192, 256))[1] == 128
    assert chosen(VARLEN_K, "a", 768, 2048) == (128, 256, False)
    assert chosen(VARLEN_K, "b", 2048, 1536) == (256, 128, False)
    assert chosen(VARLEN_K, "b", 64, 1536)[1] == 64


def test_gradients_over_fewer_rows_gather_in_turns():
    """Ping-pong if tiles of 192 leave no more empty; not if 16-bit sums are read beside 192 accumulators."""
    assert chosen(VARLEN_K, "a", 768, 2048, depth=1024) == (128, 192, True)
    assert chosen(VARLEN_K, "b", 2048, 1536, depth=1024) == (192, 128, True)
    assert chosen(VARLEN_K, "a", 256, 1536, depth=1024) == (128, 256, False)
    assert chosen(VARLEN_K, "b", 1536, 512, depth=1024) == (256, 128, False)
    assert chosen(VARLEN_K, "a", 768, 2048, (64, 128, 256), depth=1024) == (128, 256, False)
    assert chosen(VARLEN_K, "b", 2048, 1536, (64, 128, 256), depth=1024) == (256, 128, False)


@pytest.mark.parametrize(
    ("across", "interleaved", "columns"), [(False, False, 192), (True, False, 128), (False, True, 128)]
)
def test_halves_that_no_tile_of_192_columns_takes(across, interleaved, columns):
    a, b, index = integers(600, 72), integers(2, 72, 384), torch.zeros(600, dtype=torch.int32)
    h, y = torch.empty(600, 384, dtype=BF16), torch.empty(600, 192, dtype=BF16)
    params, b = PARAMS["swiglu"]._replace(interleaved=interleaved), stored(b, across)
    call = gemm_activation.GemmActivationCall(a, b, ends((300, 300)), None, None, params, y, h, index)
    with backends.emulated_device("sm_90"):
        assert gemm_activation.GROUPED_GEMM_ACTIVATION.key(call, "sm_90").config.tile_n == columns


def test_halves_of_no_whole_lines_along_the_columns_of_b():
    spec = EpilogueSpec("bfloat16", tail=True, activation=spec_of(PARAMS["swiglu"]))
    key = gemm.GemmKey(VARLEN_M, "sm_90", True, "bfloat16", 2, spec, TURNS[128, 192])
    with emulate("sm_90a"), pytest.raises(ValueError, match="tile_n must be a multiple of 128 for a gated B"):
        gemm_activation.GROUPED_GEMM_ACTIVATION.build(key)
