"""sm_100a kernels on the emulator: exact on integers, canaries intact, the same bits under adversarial timing."""

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

from tests.cutlass_kernels.gemm_cases import MANY, Case, run
from tgl.cutlass_kernels.config import VARLEN_K, VARLEN_M, GemmConfig

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
RAGGED = (5, 0, 129, 128, 1, 0, 40)
ONE = {n: GemmConfig(128, n) for n in (64, 128, 256)}
TWO = {n: GemmConfig(256, n, two_cta=True) for n in (64, 128, 256)}

GEMM = {
    "plain": Case(ONE[128], RAGGED),
    "float32 out": Case(ONE[128], RAGGED, depth=200, out=F32),
    "b column-major": Case(ONE[256], RAGGED, b_row_major=False, dtype=F16, out=F16, columns=264, tail=0),
    "pair, b column-major": Case(TWO[128], RAGGED, b_row_major=False, bias=BF16),
    "bias": Case(ONE[64], RAGGED, bias=F32, zero_tail=False, tail=150),
    "scaled bias": Case(TWO[256], RAGGED, bias=BF16, bias_scale=F32, columns=264),
    "bias scaled in 16 bits": Case(ONE[256], (1, 3, 300), bias=F16, bias_scale=F16, dtype=F16, out=F32),
    "pair, untouched tail": Case(TWO[64], (257, 0, 255, 1), zero_tail=False, tail=300, b_row_major=False),
    "all empty": Case(ONE[64], (0, 0, 0), tail=140, columns=40),
    "no tail rows": Case(TWO[128], (256, 128), tail=0),
    "one column tile, odd K": Case(ONE[64], (70,), depth=67, columns=13),
}
WGRAD = {
    "plain": Case(ONE[128], RAGGED),
    "float32 out": Case(ONE[256], RAGGED, out=F32, dtype=F16, depth=136, columns=264),
    "accumulate": Case(ONE[64], RAGGED, out=F32, accumulate=True),
    "accumulate in 16 bits": Case(ONE[128], RAGGED, accumulate=True),
    "pair": Case(TWO[256], (5, 0, 130, 64, 1), depth=264, columns=264),
    "pair, accumulate": Case(TWO[128], (64, 0, 63, 65), depth=264, out=F32, accumulate=True),
    "pair, accumulate in 16 bits": Case(TWO[64], (3, 200), depth=72, columns=40, dtype=F16, out=F16, accumulate=True),
    "all empty": Case(ONE[256], (0, 0), tail=20, columns=40, out=F32, dtype=F16),
}


KINDS = [(VARLEN_M, case) for case in GEMM.values()] + [(VARLEN_K, case) for case in WGRAD.values()]
NAMES = [f"rows: {name}" for name in GEMM] + [f"contraction: {name}" for name in WGRAD]
LONGER = {
    f"rows: {name}"
    for name in ("float32 out", "pair, b column-major", "b column-major", "no tail rows", "bias scaled in 16 bits")
}
LONGER |= {"contraction: pair, accumulate in 16 bits"}
"""Cases whose paths through the kernels other cases take too."""


@pytest.mark.cover(1)
@pytest.mark.parametrize(
    ("kind", "case"),
    [pytest.param(*case, id=name, marks=[pytest.mark.slow] * (name in LONGER)) for name, case in zip(NAMES, KINDS)],
)
def test_exact(kind, case):
    run("sm_100", kind, case, seeds=(0,))


@pytest.mark.slow
@pytest.mark.parametrize("kind, case", KINDS, ids=NAMES)
def test_exact_under_many_schedules(kind, case):
    run("sm_100", kind, case, seeds=range(1, 7))


@pytest.mark.parametrize("config", [ONE[128], TWO[128]], ids=["one", "pair"])
def test_no_mma_lies_behind_a_group(config):
    """One MMA is a tile by 16 tokens."""
    sizes = (1, 16, 17, 0, 63, 64, 65, 200)
    record = run("sm_100", VARLEN_K, Case(config, sizes), seeds=(0,))
    tiles = 2  # of 72 x 136
    assert record.mma_count == tiles * sum(-(-size // 16) for size in sizes)


@pytest.mark.slow
@pytest.mark.parametrize("config", [ONE[64], TWO[64]], ids=["one", "pair"])
def test_more_groups_than_a_warp_holds(config):
    run("sm_100", VARLEN_M, Case(config, MANY, depth=24, columns=16), seeds=(0,))
    run("sm_100", VARLEN_K, Case(config, MANY, depth=24, columns=16), seeds=(0,))


@pytest.mark.slices(2)
@pytest.mark.slow
@pytest.mark.parametrize("kind", [VARLEN_M, VARLEN_K])
@pytest.mark.parametrize("config", [*ONE.values(), *TWO.values()], ids=str)
def test_every_tiling(kind, config):
    case = Case(config, RAGGED, out=F32, bias=F32 if kind == VARLEN_M else None, depth=264, columns=264)
    run("sm_100", kind, case, seeds=(0, 1))
