"""GEMMs with an activation as second output, on the emulator: exact, and the bytes of the activation kernel."""

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

import tgl
from tests.cutlass_kernels.activated_cases import Case, run
from tgl import backends
from tgl.cutlass_kernels.config import GemmConfig
from tgl.ops.grouped_activation import Params
from tgl.testing import emulator

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
RAGGED = (5, 0, 130, 127, 128, 129, 1, 0, 40)
TURNS = GemmConfig(128, 128, pingpong=True)
CLAMPED = Params("clamped_qgeglu", limit=2.0, alpha=1.5, offset=0.5)
ALTERNATING = Params(interleaved=True)
SRELU = Params("srelu")

SM90 = {
    "swiglu": Case(TURNS, RAGGED, bias=BF16),
    "swiglu, alternating": Case(TURNS, (5, 0, 130, 1), ALTERNATING, bias=F32, columns=136),
    "clamped, no probabilities": Case(GemmConfig(64, 128), (5, 0, 70, 1), CLAMPED, probs=None, bias=F32, depth=200),
    "clamped, alternating": Case(
        GemmConfig(128, 128), (130, 0, 3), Params(*CLAMPED[:1], True, *CLAMPED[2:]), dtype=F16, out=F16, probs=F16
    ),
    "srelu": Case(GemmConfig(128, 192), (5, 0, 130, 1), SRELU, columns=200, bias=BF16, probs=BF16, tail=150),
    "float32": Case(TURNS, (5, 0, 130, 1), out=F32, bias=F32, columns=68),
    "float32, alternating": Case(GemmConfig(64, 64), (5, 0, 70, 1), ALTERNATING, out=F32, columns=68),
    "wide": Case(GemmConfig(64, 256), (65, 0, 3), columns=264, tail=70, probs=BF16),
    "two blocks": Case(GemmConfig(256, 128), (257, 0, 3), columns=136, bias=F32, tail=300),
    "multicast": Case(GemmConfig(128, 128, cluster_n=2), (130, 0, 3), columns=264, depth=264, bias=BF16),
    "b row-major": Case(GemmConfig(128, 256), (130, 0, 3), columns=136, b_row_major=True, dtype=F16, out=F16),
    "all empty": Case(TURNS, (0, 0), tail=140, columns=40, bias=BF16),
}
CASES = [("sm_90", case) for case in SM90.values()]
NAMES = [f"sm_90: {name}" for name in SM90]


@pytest.mark.parametrize(("arch", "case"), CASES, ids=NAMES)
def test_exact(arch, case):
    run(arch, case, seeds=(0,))


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "case"), CASES, ids=NAMES)
def test_exact_under_many_schedules(arch, case):
    run(arch, case, seeds=range(1, 7))
