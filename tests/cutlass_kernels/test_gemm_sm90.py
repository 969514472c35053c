"""sm_90a kernels on the emulator: exact on integers, canaries intact, the same bits under adversarial timing."""

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

from tests.cutlass_kernels.gemm_cases import MANY, Case, run
from tgl.cutlass_kernels.config import VARLEN_K, VARLEN_M, GemmConfig

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
RAGGED = (5, 0, 129, 128, 1, 0, 40)
PAIRS = {shape: GemmConfig(*shape, cluster_n=2) for shape in ((128, 64), (128, 128), (256, 128))}
TURNS = {shape: GemmConfig(*shape, pingpong=True) for shape in ((64, 128), (64, 256), (128, 64), (128, 128))}
TILES = {shape: GemmConfig(*shape) for shape in ((64, 64), (64, 256), (128, 128), (128, 192), (128, 256), (256, 128))}
HIGH_PAIR = GemmConfig(128, 256, cluster_m=2)

GEMM = {
    "plain": Case(TILES[128, 128], RAGGED),
    "float32 out": Case(TILES[128, 128], RAGGED, depth=200, out=F32),
    "b column-major": Case(TILES[128, 256], RAGGED, b_row_major=False, dtype=F16, out=F16, columns=264, tail=0),
    "two blocks, b column-major": Case(TILES[256, 128], RAGGED, b_row_major=False, bias=BF16),
    "bias": Case(TILES[64, 64], RAGGED, bias=F32, zero_tail=False, tail=150),
    "scaled bias, odd number of chunks": Case(TILES[128, 192], (130, 0, 1), bias=BF16, bias_scale=F32, columns=392),
    "bias scaled in 16 bits": Case(TILES[64, 256], (1, 3, 300), bias=F16, bias_scale=F16, dtype=F16, out=F32),
    "two blocks, untouched tail": Case(TILES[256, 128], (257, 0, 255, 1), zero_tail=False, tail=300, b_row_major=False),
    "multicast": Case(PAIRS[128, 64], RAGGED, depth=200),
    "multicast, scaled bias": Case(
        PAIRS[256, 128], (257, 0, 3), columns=264, bias=F32, bias_scale=BF16, zero_tail=False
    ),
    "ping-pong, deeper than the ring": Case(TURNS[128, 128], (257, 0, 3, 130), depth=520, columns=264, bias=BF16),
    "ping-pong, scaled bias, tail": Case(TURNS[64, 128], RAGGED, bias=F32, bias_scale=BF16, tail=150),
    "all empty": Case(TILES[128, 128], (0, 0, 0), tail=140, columns=40),
    "no tail rows": Case(TILES[128, 256], (256, 128), tail=0),
    "one column tile, odd K": Case(TILES[128, 128], (70,), depth=67, columns=13),
}
WGRAD = {
    "plain": Case(TILES[128, 128], RAGGED),
    "float32 out": Case(TILES[128, 256], RAGGED, out=F32, dtype=F16, depth=136, columns=264),
    "accumulate": Case(TILES[64, 64], RAGGED, out=F32, accumulate=True),
    "accumulate in 16 bits": Case(TILES[128, 192], RAGGED, accumulate=True, columns=200),
    "two blocks": Case(TILES[256, 128], (130, 0, 64, 1, 70), depth=264, columns=136),
    "two blocks, accumulate": Case(TILES[256, 128], (64, 0, 63, 65), depth=264, out=F32, accumulate=True),
    "multicast, accumulate": Case(PAIRS[128, 128], (64, 0, 63), columns=392, depth=136, out=F32, accumulate=True),
    "pairs along the rows": Case(HIGH_PAIR, (64, 0, 63, 165), columns=264, depth=264),
    "pairs along the rows, accumulate": Case(HIGH_PAIR, (64, 0, 63), columns=392, depth=392, out=F32, accumulate=True),
    "ping-pong": Case(TURNS[64, 256], (64, 0, 63, 165), columns=264, depth=136),
    "ping-pong, accumulate": Case(TURNS[128, 128], (64, 0, 65), columns=136, depth=264, out=F32, accumulate=True),
    "odd columns, accumulate": Case(TILES[64, 64], (3, 200), columns=37, dtype=F16, out=F16, accumulate=True),
    "all empty": Case(TURNS[128, 128], (0, 0), tail=20, columns=40),
}


KINDS = [(VARLEN_M, case) for case in GEMM.values()] + [(VARLEN_K, case) for case in WGRAD.values()]
NAMES = [f"rows: {name}" for name in GEMM] + [f"contraction: {name}" for name in WGRAD]
LONGER = {f"rows: {name}" for name in ("float32 out", "two blocks, b column-major", "multicast", "no tail rows")}
LONGER |= {f"rows: {name}" for name in ("b column-major", "bias scaled in 16 bits")}
LONGER |= {f"contraction: {name}" for name in ("two blocks", "ping-pong", "pairs along the rows", "float32 out")}
LONGER |= {"contraction: accumulate in 16 bits"}
"""Cases whose paths through the kernels other cases take too."""


@pytest.mark.cover(1)
@pytest.mark.parametrize(
    ("kind", "case"),
    [pytest.param(*case, id=name, marks=[pytest.mark.slow] * (name in LONGER)) for name, case in zip(NAMES, KINDS)],
)
def test_exact(kind, case):
    run("sm_90", kind, case, seeds=(0,))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "case"), KINDS, ids=NAMES)
def test_exact_under_many_schedules(kind, case):
    run("sm_90", kind, case, seeds=range(1, 7))


@pytest.mark.parametrize("config", [TILES[128, 128], TURNS[128, 128]], ids=["together", "ping-pong"])
def test_no_mma_lies_behind_a_group(config):
    """One MMA is 64 rows of a tile by 16 tokens."""
    sizes = (1, 16, 17, 0, 63, 64, 65, 200)
    record = run("sm_90", VARLEN_K, Case(config, sizes), seeds=(0,))
    tiles = 2  # of 72 x 136
    assert record.mma_count == tiles * (config.tile_m // 64) * sum(-(-size // 16) for size in sizes)


@pytest.mark.parametrize("config", [TILES[64, 64], TURNS[64, 128]], ids=["together", "ping-pong"])
def test_more_groups_than_a_warp_holds(config):
    run("sm_90", VARLEN_M, Case(config, MANY, depth=24, columns=16), seeds=(0,))
    run("sm_90", VARLEN_K, Case(config, MANY, depth=24, columns=16), seeds=(0,))


@pytest.mark.slices(2)
@pytest.mark.slow
@pytest.mark.parametrize("kind", [VARLEN_M, VARLEN_K])
@pytest.mark.parametrize("config", [*TILES.values(), *PAIRS.values(), *TURNS.values()], ids=str)
def test_every_tiling(kind, config):
    case = Case(config, RAGGED, out=F32, bias=F32 if kind == VARLEN_M else None, depth=264, columns=264)
    run("sm_90", kind, case, seeds=(0, 1))
