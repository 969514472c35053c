"""GEMMs that go back through the activation, on the emulator: the bits of the kernels that do it in two launches."""

import itertools
from dataclasses import dataclass, replace

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")


import tgl
from tests.activation_cases import PARAMS, back_to_hidden
from tests.cutlass_kernels import sass
from tests.cutlass_kernels.gemm_cases import CLUSTERS
from tests.cutlass_kernels.matrix import REGISTER_FILE, pairwise, threads
from tests.kernel_cases import CANARY, ends, framed, stored
from tgl import backends
from tgl.cutlass_kernels import tilings
from tgl.cutlass_kernels.activation.activation_spec import spec_of
from tgl.cutlass_kernels.archs import ARCHS
from tgl.cutlass_kernels.config import GemmConfig
from tgl.cutlass_kernels.launchers import gemm_dactivation
from tgl.cutlass_kernels.runtime import launcher, names
from tgl.meta.specs import TensorSpec
from tgl.testing import emulate

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
RAGGED = (5, 0, 129, 128, 1, 0, 40)
SHORT = (5, 0, 130, 1)
HIGH = (257, 0, 255, 1)
MANY = (0, 3, 1, 9, 0, 70, 2) * 6
_compiled = {}


@dataclass(frozen=True)
class Case:
    """A kernel and the sizes it is run on. ``sizes`` are the groups' rows, then ``tail`` rows that hold NaN."""

    arch: str
    config: GemmConfig
    kind: str = "swiglu"
    sizes: tuple[int, ...] = SHORT
    tail: int = 9
    depth: int = 72
    columns: int = 136
    dtype: torch.dtype = BF16
    probs: torch.dtype | None = F32
    b_row_major: bool = False
    act: bool = False


def kernel(case):
    """The compiled kernel; compiled once per process. Only inside ``emulate``."""
    dtypes = names.name(case.dtype), 2 if case.b_row_major else 1, spec_of(PARAMS[case.kind]), names.name(case.probs)
    key = gemm_dactivation.DactivationKey(case.arch, True, *dtypes, case.config, act=case.act)
    if key not in _compiled:
        _compiled[key] = gemm_dactivation.GROUPED_GEMM_DACTIVATION.build(key)
    return _compiled[key]


def operands(case):
    """dy, b, h, offs and probs; NaN in every tail. Products are exact sums, but not numbers of 16 bits."""
    torch.manual_seed(case.columns)
    params, routed = PARAMS[case.kind], sum(case.sizes)
    rows, groups = routed + case.tail, len(case.sizes)
    dy = torch.randint(-8, 9, (rows, case.depth)) / 64
    b = torch.randint(-40, 41, (groups, case.depth, case.columns)) / 64
    h = torch.randn(rows, case.columns * (2 if params.gated else 1)) * 3
    probs = None if case.probs is None else torch.rand(rows).to(case.probs)
    for t in (dy, h, probs):
        if t is not None:
            t[routed:] = float("nan")
    offs = ends(case.sizes)
    return (
        stored(dy.to(case.dtype), True),
        stored(b.to(case.dtype), case.b_row_major),
        stored(h.to(case.dtype), True),
        offs,
        probs,
    )


def expected(case, dy, b, h, offs, probs):
    """The product on the CPU, rounded, and the activation's backward by its own kernel; its forward by its own too."""
    da = tgl.grouped_gemm(dy, b, offs)
    params = PARAMS[case.kind]._asdict()
    with emulate(ARCHS[case.arch].target):
        backward = torch.ops.tgl.grouped_activation_backward(da, h, offs, probs, **params)
        return *backward, tgl.grouped_activation(h, offs, probs, **params) if case.act else None


def check_bits(found, wanted, what):
    """Equal, of 16-bit numbers, to the bit."""
    where = (found.view(torch.int16) != wanted.view(torch.int16)).nonzero()
    assert not len(where), f"{what}: {len(where)} elements differ, the first at {where[:3].tolist()}"


def run(case, seeds=(0, 1)):
    """``dh`` and ``act`` bit by bit, and ``dprobs`` within the error of a float32 sum; the same bits for every seed."""
    dy, b, h, offs, probs = given = operands(case)
    wanted, wanted_probs, wanted_act = expected(case, *given)
    frame, act_frame = framed(*h.shape, dtype=case.dtype), framed(len(h), case.columns, dtype=case.dtype)
    dh, act = frame.inside, act_frame.inside if case.act else None
    tiles = -(-case.columns // ARCHS[case.arch].tilings.sum_columns(case.config))
    sum_buffer, sums, dprobs = torch.full((tiles + 2, h.shape[0]), CANARY), None, None
    if probs is not None:
        sums, dprobs = sum_buffer[1:-1], torch.full((h.shape[0] + 2,), CANARY)[1:-1]
    first = None
    with emulate(ARCHS[case.arch].target) as machine, backends.emulated_device(case.arch):
        function = kernel(case)
        for seed in seeds:
            machine.seed = seed
            frame.refill()
            act_frame.refill()
            sum_buffer.fill_(CANARY)
            function(dy, b, offs, dh, h, probs, sums, dprobs, act, CLUSTERS)
            record = machine.launches[-1 if probs is None else -2]
            check_bits(dh, wanted, f"dh, seed {seed}")
            if case.act:
                check_bits(act, wanted_act, f"act, seed {seed}")
            for around in (frame, act_frame):
                assert around.intact(), f"seed {seed}: written around an output"
            assert (sum_buffer[0] == CANARY).all()
            assert (sum_buffer[-1] == CANARY).all()
            first = sum_buffer.clone() if first is None else first
            assert torch.equal(sum_buffer, first)
    if probs is not None:
        in_order = torch.zeros_like(dprobs)
        for part in sums:
            in_order += part
        assert torch.equal(dprobs, in_order)
        assert (dprobs._base[[0, -1]] == CANARY).all()
        size = summands(case, *given).abs().sum(1)
        assert ((dprobs - wanted_probs).abs().double() <= size * 2.0**-24 * (8 + case.columns / 32)).all()
        assert dprobs[sum(case.sizes) :].eq(0).all()
    return record


def summands(case, dy, b, h, offs, probs):
    """Return the summands of ``dprobs``, in float64; zero in the tail."""
    da = tgl.grouped_gemm(dy, b, offs).double()
    a, _, linear, _ = PARAMS[case.kind].factors(*PARAMS[case.kind].halves(h.double()))
    return torch.where((torch.arange(len(h)) < offs[-1])[:, None], da * a * (1 if linear is None else linear), 0)


TILES = {shape: GemmConfig(*shape) for shape in ((64, 64), (64, 256), (128, 192), (256, 64), (256, 128))}
TURNS = GemmConfig(128, 128, pingpong=True)
PAIR = GemmConfig(128, 128, cluster_n=2)
ONE = {n: GemmConfig(128, n) for n in (64, 128, 256)}
TWO = {n: GemmConfig(256, n, two_cta=True) for n in (64, 128, 256)}
CASES = {
    "ping-pong": Case("sm_90", TURNS, sizes=RAGGED, columns=264, depth=200),
    "together": Case("sm_90", TILES[64, 64], "clamped_qgeglu", tail=150, probs=None),
    "together, all empty": Case("sm_90", TILES[64, 64], "clamped_qgeglu", (0, 0, 0), tail=70, columns=40, probs=None),
    "wide": Case("sm_90", TILES[64, 256], "clamped_qgeglu interleaved", (1, 0, 70), columns=40, probs=BF16),
    "high": Case("sm_90", TILES[256, 64], "srelu", HIGH, tail=300, dtype=F16, b_row_major=True),
    "one CTA": Case("sm_100", ONE[128], sizes=RAGGED, columns=264, depth=200),
    "one CTA, all empty": Case("sm_100", ONE[128], sizes=(0, 0, 0), tail=270, columns=40),
    "pair of CTAs": Case("sm_100", TWO[256], "clamped_qgeglu interleaved", (257, 0, 3), tail=140, columns=264),
    "ping-pong, and act": Case("sm_90", TURNS, sizes=(5, 0, 130), columns=136, act=True),
    "one CTA, and act": Case("sm_100", ONE[128], "srelu", (5, 0, 130), columns=136, dtype=F16, act=True),
}
MORE = {
    "ping-pong, interleaved": Case("sm_90", TURNS, "swiglu interleaved", columns=300),
    "together, many groups": Case("sm_90", TILES[64, 64], "clamped_qgeglu", MANY, depth=24, probs=None),
    "one CTA, interleaved": Case("sm_100", ONE[256], "swiglu interleaved", columns=300, probs=BF16),
    "pair of CTAs, srelu": Case("sm_100", TWO[128], "srelu", columns=392),
    "two warpgroups": Case("sm_90", TILES[128, 192], "swiglu", columns=392, b_row_major=True),
    "two blocks": Case("sm_90", TILES[256, 128], "swiglu", sizes=(257, 0, 255, 1), tail=300),
    "multicast": Case("sm_90", PAIR, "swiglu", columns=136),
    "narrow": Case("sm_100", ONE[64], "clamped_qgeglu", tail=150, probs=None, dtype=F16, b_row_major=True),
    "narrow pair": Case("sm_100", TWO[64], "swiglu", RAGGED, tail=300),
    "wide, interleaved, and act": Case("sm_90", TILES[64, 256], "swiglu interleaved", (1, 0, 70), columns=44, act=True),
    "all empty, and act": Case("sm_90", TILES[64, 64], "srelu", (0, 0, 0), tail=150, columns=40, act=True),
    "pair of CTAs, and act": Case("sm_100", TWO[256], "swiglu", HIGH, tail=300, columns=264, act=True),
    "together, and act": Case("sm_90", TILES[64, 64], "clamped_qgeglu", MANY, depth=24, probs=None, act=True),
    "two warpgroups, and act": Case("sm_90", TILES[128, 192], "geglu", columns=392, b_row_major=True, act=True),
    "two blocks, and act": Case("sm_90", TILES[256, 128], "swiglu", (257, 0, 255, 1), tail=300, act=True),
    "multicast, and act": Case("sm_90", PAIR, "swiglu", columns=136, act=True),
    "one CTA, interleaved, and act": Case("sm_100", ONE[256], "swiglu interleaved", columns=300, probs=BF16, act=True),
    "narrow, and act": Case("sm_100", ONE[64], "gelu", tail=150, dtype=F16, b_row_major=True, act=True),
}


def inspected(case):
    """Return the machine code of the kernel, after checks that hold for every kernel."""
    artifacts = kernel(case).artifacts
    report = sass.inspect(artifacts.CUBIN)
    assert report.spills == report.frame == report.loops_over_lanes == 0
    assert report.registers * threads(case.arch, case.config) <= REGISTER_FILE
    assert report.count("UTMALDG") >= 2 + 1
    assert report.count("UTMASTG") > 0
    assert "ld.global.v" not in artifacts.PTX  # offsets and probabilities; the activation's input comes by TMA
    if case.arch == "sm_90":
        assert report.count("WARPGROUP.DEPBAR") == 2  # more would mean that every MMA is waited for
        assert (report.count("LDSM") > 0) == (not PARAMS[case.kind].interleaved)
    return report


RARER = ("together, all empty", "one CTA, all empty", "ping-pong", "one CTA")
"""Cases whose paths through the kernels other cases take too."""
USUAL = [pytest.param(case, id=name, marks=[pytest.mark.slow] * (name in RARER)) for name, case in CASES.items()]


@pytest.mark.parametrize("case", USUAL)
def test_the_bits_of_two_launches(case):
    record = run(case, seeds=(0,))
    assert record.shared_bytes <= ARCHS[case.arch].smem_bytes
    inspected(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES.values(), *MORE.values()], ids=[*CASES, *MORE])
def test_the_bits_under_many_schedules(case):
    run(case, seeds=range(1, 8))


SIZES = itertools.product((64, 128, 512, 4096), (2048, 4096), (32, 128, 1024))
USUAL = dict.fromkeys((arch, tilings.choose_gradient(arch, *size)) for size in SIZES for arch in ("sm_90", "sm_100"))
CHOICES = {
    "tiling": tuple(USUAL),
    "kind": tuple(PARAMS),
    "dtype": (BF16, F16),
    "probs": (None, "same", F32),
    "b_row_major": (True, False),
    "act": (True, False),
}


def chosen(tiling, dtype, probs, **rest):
    return Case(*tiling, dtype=dtype, probs=dtype if probs == "same" else probs, **rest)


COVER = [chosen(**choice) for choice in pairwise(CHOICES)]


@pytest.mark.slices(2)
@pytest.mark.slow
@pytest.mark.parametrize("case", COVER, ids=str)
def test_compiles(case):
    """Any two choices occur together in some kernel of the usual tilings."""
    with emulate(ARCHS[case.arch].target), backends.emulated_device(case.arch):
        inspected(case)


@pytest.mark.parametrize("name", ["together", "one CTA"])
def test_bad_offsets_stay_inside(name):
    check_bad_offsets(replace(CASES[name], act=True))


def check_bad_offsets(case):
    """Check that bad offsets lead to no write outside of the outputs of the kernel of ``case``."""
    low, high = -(1 << 31), (1 << 31) - 1
    dy, b, h, _, probs = operands(replace(case, sizes=(20, 30, 40, 50), tail=0))
    frame, act_frame = framed(*h.shape, dtype=case.dtype), framed(len(h), case.columns, dtype=case.dtype)
    sums = torch.full((5, h.shape[0]), CANARY)
    inner = None if probs is None else sums[1:-1]
    target = ARCHS[case.arch].target
    with emulate(target, detect_races=False), backends.emulated_device(case.arch):
        for wrong in ((-5, 90, 40, 1 << 30), (high, low, high, 7), (-1, -2, -3, -4), (140, 141, high, high)):
            frame.refill()
            act_frame.refill()
            offs = torch.tensor(wrong, dtype=torch.int32)
            dprobs = None if probs is None else torch.empty(h.shape[0])
            kernel(case)(dy, b, offs, frame.inside, h, probs, inner, dprobs, act_frame.inside, CLUSTERS)
            assert frame.intact(), wrong
            assert act_frame.intact(), wrong
            assert sums[0].eq(CANARY).all()
            assert sums[-1].eq(CANARY).all()


# --- the op -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def machine():
    with emulate("sm_90a", detect_races=False) as machine:
        yield machine
    launcher.compiled_kernels.clear()
    launcher.forget()


@pytest.mark.parametrize("columns", [40, 136], ids=["one tile", "two tiles"])
def test_launches_of_a_call(machine, columns):
    """The GEMM, and what adds up the sums of rows; what was warmed up compiles nothing."""
    case = Case("sm_90", TILES[64, 64], columns=columns)
    dy, b, h, offs, probs = operands(case)
    assert "runs tgl kernel" in str(tgl.warmup("grouped_gemm_dactivation", dy, b, h, offs, probs))
    plans, before = dict(launcher.compiled_kernels), len(machine.launches)
    dh, dprobs = tgl.grouped_gemm_dactivation(dy, b, h, offs, probs)
    assert ["PartialSums" in launch.kernel for launch in machine.launches[before:]] == [False, True]
    with backends.emulated_device("no such device"):
        wanted, wanted_probs = tgl.grouped_gemm_dactivation(dy, b, h, offs, probs)
    torch.testing.assert_close(dh.float(), wanted.float(), rtol=2**-7, atol=2**-12)
    torch.testing.assert_close(dprobs, wanted_probs, rtol=1e-5, atol=1e-3)
    routed = sum(case.sizes)
    for result in (dh, dprobs):
        assert result[routed:].eq(0).all()
    for sizes in ((0, 0, 0, 0), (1, 60, 2, 3)):
        offs = torch.tensor(sizes).cumsum(0).int()
        dh, dprobs = tgl.grouped_gemm_dactivation(dy, b, h, offs, probs)
        assert dh[offs[-1] :].eq(0).all()
        assert dprobs[offs[-1] :].eq(0).all()
    assert launcher.compiled_kernels == plans


def test_the_activation_of_the_forward_comes_along(machine):
    """The launch also returns the activation, with the bits of its own op; here through a copy of unaligned rows."""
    params, case = PARAMS["swiglu interleaved"], Case("sm_90", TILES[64, 64], "swiglu interleaved", columns=44)
    _, _, h, offs, probs = given = operands(case)
    before = len(machine.launches)
    inner = TensorSpec((len(h), case.columns), BF16, h.device)
    dh, dprobs, act = back_to_hidden(list(given), inner, params=params)
    assert len(machine.launches) == before + 2
    assert torch.equal(act, tgl.grouped_activation(h, offs, probs, **params._asdict()))
    destinations = {"dh": dh, "dprobs": dprobs, "act": act}
    copied = gemm_dactivation.GROUPED_GEMM_DACTIVATION.copying().copies(*given, params=params, **destinations)
    assert list(copied) == ["act"]
    assert not tgl.explain("grouped_gemm_dactivation", *given, **params._asdict()).copies


def test_empty_problems_launch_nothing(machine):
    offs = torch.zeros(2, dtype=torch.int32)
    before = len(machine.launches)
    for rows, groups in ((0, 2), (5, 0)):
        dy, b, h = torch.ones(rows, 16), torch.ones(groups, 16, 8), torch.ones(rows, 16)
        operands = (t.to(BF16) for t in (dy, b, h))
        operands = [*operands, offs[:groups], torch.ones(rows)]
        inner = TensorSpec((rows, 8), BF16, operands[0].device)
        for result in back_to_hidden(operands, inner, params=PARAMS["swiglu"]):
            assert result.shape[0] == rows
            assert result.eq(0).all()
    assert len(machine.launches) == before


def test_unsupported_calls_have_reasons():
    offs = torch.tensor([8], dtype=torch.int32)
    dy, b, h = (torch.zeros(shape, dtype=BF16) for shape in ((8, 16), (1, 16, 16), (8, 32)))

    def reason(dy=dy, b=b, h=h, **options):
        return str(tgl.explain("grouped_gemm_dactivation", dy, b, h, offs, **options))

    with backends.compile_only("sm_90"):
        assert "runs tgl kernel" in reason()
        assert "takes bfloat16 and float16, got torch.float32" in reason(dy.float(), b.float(), h.float())
        assert "needs `h` row-major" in reason(h=h.t().contiguous().t())
        assert "needs `dy` row-major" in reason(dy=dy.t().contiguous().t())
        assert "needs strides of `h`" in reason(h=torch.zeros(8, 33, dtype=BF16)[:, :32])
        assert "needs `h` aligned to 16 bytes" in reason(h=torch.zeros(8, 40, dtype=BF16)[:, 4:36])
        assert "does not take K = 0" in reason(dy[:, :0], b[:, :0])
        narrow = b[:, :, :12].contiguous()
        assert "needs halves of `h` of a multiple of 8 columns, got 12" in reason(b=narrow, h=h[:, :24])
        assert "runs grouped GEMM, then the activation's backward" in reason(b=narrow, h=h[:, :24])
