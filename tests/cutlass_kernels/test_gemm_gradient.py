"""GEMMs that go back through the activation, on the emulator: the bits of the kernels that do it in two launches."""

from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

import tgl
from tests.cutlass_kernels.gemm_cases import CANARY, CLUSTERS, framed, stored
from tgl import backends
from tgl.cutlass_kernels import host, launch_gradient
from tgl.cutlass_kernels.activation import calls
from tgl.cutlass_kernels.activation.spec import spec_of
from tgl.cutlass_kernels.config import GemmConfig
from tgl.ops.grouped_activation import Params
from tgl.testing import emulator

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
RAGGED = (5, 0, 130, 127, 128, 129, 1, 0, 40)
SHORT = (5, 0, 130, 1)
KINDS = {
    "swiglu": Params(),
    "swiglu interleaved": Params(interleaved=True),
    "clamped": Params("clamped_qgeglu", limit=2.0, alpha=1.5, offset=0.5),
    "clamped interleaved": Params("clamped_qgeglu", interleaved=True),
    "srelu": Params("srelu"),
}
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
    offs: tuple[int, ...] | None = None  # other than the sizes say


def kernel(case):
    """The compiled kernel; compiled once per process. Only inside ``emulate``."""
    dtypes = host.name(case.dtype), 2 if case.b_row_major else 1, spec_of(KINDS[case.kind]), host.name(case.probs)
    key = launch_gradient.GradientPlanKey(case.arch, True, *dtypes, case.config)
    if key not in _compiled:
        _compiled[key] = launch_gradient.build(key)
    return _compiled[key]


def operands(case):
    """dy, b, h, offs and probs; NaN in every tail. Products are exact sums, but not numbers of 16 bits."""
    torch.manual_seed(case.columns)
    params, routed = KINDS[case.kind], sum(case.sizes)
    rows, groups = routed + case.tail, len(case.sizes)
    dy = torch.randint(-8, 9, (rows, case.depth)) / 64
    b = torch.randint(-40, 41, (groups, case.depth, case.columns)) / 64
    h = torch.randn(rows, case.columns * (2 if params.gated else 1)) * 3
    probs = None if case.probs is None else torch.rand(rows).to(case.probs)
    for t in (dy, h, probs):
        if t is not None:
            t[routed:] = float("nan")
    offs = torch.tensor(case.offs or case.sizes if case.offs else torch.tensor(case.sizes).cumsum(0).tolist()).int()
    return (
        stored(dy.to(case.dtype), True),
        stored(b.to(case.dtype), case.b_row_major),
        stored(h.to(case.dtype), True),
        offs,
        probs,
    )


def expected(case, dy, b, h, offs, probs):
    """The product on the CPU, rounded, and the activation's backward by its own kernel."""
    da = tgl.grouped_gemm(dy, b, offs)
    params = KINDS[case.kind]
    with emulator.emulate(host.GPU_ARCH[case.arch]):
        return torch.ops.tgl.grouped_activation_backward(da, h, offs, probs, **params._asdict())


def run(case, seeds=(0, 1)):
    """``dh`` bit by bit, and ``dprobs`` within the error of a float32 sum; the same bits for every seed."""
    dy, b, h, offs, probs = given = operands(case)
    wanted, wanted_probs = expected(case, *given)
    calls._plans.clear()
    buffer, dh = framed(*h.shape, dtype=case.dtype)
    tiles = -(-case.columns // case.config.tile_n)
    sum_buffer, sums = torch.full((tiles + 2, h.shape[0]), CANARY), None
    if probs is not None:
        sums = sum_buffer[1:-1]
    first = None
    with emulator.emulate(host.GPU_ARCH[case.arch]) as machine, backends.emulated_device(case.arch):
        function = kernel(case)
        for seed in seeds:
            machine.seed = seed
            buffer.fill_(CANARY)
            sum_buffer.fill_(CANARY)
            function(dy, b, offs, dh, h, probs, sums, CLUSTERS)
            record = machine.launches[-1]
            where = (dh.view(torch.int16) != wanted.view(torch.int16)).nonzero()
            assert not len(where), f"seed {seed}: {len(where)} elements differ, the first at {where[:3].tolist()}"
            frame = buffer.clone()
            frame[2:-2, : h.shape[1]] = CANARY
            assert (frame == CANARY).all(), f"seed {seed}: written around the output"
            assert (sum_buffer[0] == CANARY).all()
            assert (sum_buffer[-1] == CANARY).all()
            first = sum_buffer.clone() if first is None else first
            assert torch.equal(sum_buffer, first)
    if probs is not None:
        dprobs = sums.sum(0)
        size = summands(case, *given).abs().sum(1)
        assert ((dprobs - wanted_probs).abs().double() <= size * 2.0**-24 * (8 + case.columns / 32)).all()
        assert dprobs[sum(case.sizes) :].eq(0).all()
    return record


def summands(case, dy, b, h, offs, probs):
    """Of ``dprobs``, in float64; zero in the tail."""
    da = tgl.grouped_gemm(dy, b, offs).double()
    a, _, linear, _ = KINDS[case.kind].factors(*KINDS[case.kind].halves(h.double()))
    return torch.where((torch.arange(len(h)) < offs[-1])[:, None], da * a * (1 if linear is None else linear), 0)


TILES = {shape: GemmConfig(*shape) for shape in ((64, 64), (64, 256), (128, 192), (128, 256), (256, 128))}
TURNS = {shape: GemmConfig(*shape, pingpong=True) for shape in ((64, 128), (128, 128))}
ONE = {n: GemmConfig(128, n) for n in (64, 128, 256)}
TWO = {n: GemmConfig(256, n, two_cta=True) for n in (64, 128, 256)}
PAIR = GemmConfig(128, 128, cluster_n=2)
CASES = {
    "in turns": Case("sm_90", TURNS[128, 128], sizes=RAGGED, columns=264, depth=200),
    "in turns, interleaved": Case("sm_90", TURNS[128, 128], "swiglu interleaved", columns=300),
    "together": Case("sm_90", TILES[64, 64], "clamped", tail=150, probs=None),
    "wide": Case("sm_90", TILES[64, 256], "clamped interleaved", sizes=(1, 0, 70), columns=40, probs=BF16),
    "two warpgroups": Case("sm_90", TILES[128, 192], "srelu", dtype=F16, columns=392, b_row_major=True),
    "two blocks": Case("sm_90", TILES[256, 128], "swiglu", sizes=(257, 0, 255, 1), tail=300, probs=F32),
    "multicast": Case("sm_90", PAIR, "swiglu", columns=136),
    "one CTA": Case("sm_100", ONE[128], sizes=RAGGED, columns=264, depth=200),
    "one CTA, interleaved": Case("sm_100", ONE[256], "swiglu interleaved", columns=300, probs=BF16),
    "narrow": Case("sm_100", ONE[64], "clamped", tail=150, probs=None, dtype=F16, b_row_major=True),
    "pair of CTAs": Case("sm_100", TWO[256], "clamped interleaved", sizes=(257, 0, 255, 1), tail=300, columns=264),
    "pair of CTAs, srelu": Case("sm_100", TWO[128], "srelu", columns=392),
    "pair of CTAs, all empty": Case("sm_100", TWO[64], sizes=(0, 0, 0), tail=270, columns=40),
    "all empty": Case("sm_90", TILES[64, 64], "clamped", sizes=(0, 0, 0), tail=70, columns=40, probs=None),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_bits_of_two_launches(case):
    run(case)
