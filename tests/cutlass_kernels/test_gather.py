"""sm_90a kernels that read rows of an operand by an index: exact on integers, the same bits under adversarial timing.

Rows that no index names hold NaN, as does everything behind the last group; rows of no token count as zeros.
"""

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

from tests.cutlass_kernels.gather_cases import Case, run
from tgl.cutlass_kernels.config import VARLEN_K, VARLEN_M, GemmConfig

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
RAGGED = (5, 0, 130, 127, 128, 129, 1, 0, 40)
SHORT = (5, 0, 130, 1)
TURNS = {shape: GemmConfig(*shape, pingpong=True) for shape in ((64, 128), (64, 256), (128, 64), (128, 128))}
TILES = {shape: GemmConfig(*shape) for shape in ((64, 64), (128, 128), (128, 192), (128, 256), (256, 64), (256, 128))}

GEMM = {
    "in turns": Case(TURNS[128, 128], RAGGED, bias=BF16),
    "deeper than the ring": Case(TURNS[128, 128], (257, 0, 3, 130), tokens=300, depth=520, columns=264),
    "float32 out, odd K": Case(TILES[128, 128], SHORT, out=F32, depth=67),
    "b column-major": Case(TILES[128, 256], SHORT, b_row_major=False, dtype=F16, out=F16, columns=264, tail=0),
    "K of one tile": Case(TURNS[64, 128], SHORT, depth=64, bias=F32, bias_scale=BF16, tail=150),
    "K below a piece": Case(TILES[64, 64], SHORT, depth=5, columns=40),
    "two blocks, untouched tail": Case(TILES[256, 128], (257, 0, 255, 1), zero_tail=False, tail=300, tokens=700),
    "at slots": Case(TURNS[128, 64], SHORT, slots=True),
    "one token": Case(TILES[128, 192], (3, 70), tokens=1, absent=False),
    "all empty": Case(TILES[64, 64], (0, 0, 0), tail=140, columns=40),
}
WGRAD = {
    "in turns": Case(TURNS[128, 128], RAGGED, columns=264),
    "accumulate": Case(TURNS[64, 256], (64, 0, 63, 165), columns=264, depth=136, out=F32, accumulate=True),
    "two blocks": Case(TILES[256, 128], (130, 0, 64, 1, 70), depth=264, tokens=200),
    "odd columns": Case(TILES[128, 192], SHORT, depth=37, columns=205, dtype=F16, out=F16),
    "all empty": Case(TILES[64, 64], (0, 0), tail=20, columns=40),
}
KINDS = {f"rows: {name}": (VARLEN_M, "a", case) for name, case in GEMM.items()}
KINDS |= {f"contraction of {x}: {name}": (VARLEN_K, x, case) for x in "ab" for name, case in WGRAD.items()}


@pytest.mark.parametrize(("kind", "gathered", "case"), KINDS.values(), ids=KINDS)
def test_exact(kind, gathered, case):
    run(kind, gathered, case, seeds=(0,))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "gathered", "case"), KINDS.values(), ids=KINDS)
def test_exact_under_many_schedules(kind, gathered, case):
    run(kind, gathered, case, seeds=range(1, 5))
