"""Kernels of MMAs by warps on the emulator: exact on integers, canaries intact, whatever the timing."""

import re
from dataclasses import replace

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

import cute_emulator
import tgl
from tests import chips
from tests.cutlass_kernels import gemm_cases, sass
from tests.cutlass_kernels.gemm_cases import MANY, Case, run
from tests.kernel_cases import integers
from tgl.cutlass_kernels import archs
from tgl.cutlass_kernels.archs import ARCHS
from tgl.cutlass_kernels.config import KINDS, VARLEN_K, VARLEN_M, GemmConfig
from tgl.cutlass_kernels.gemm.mma_sync.tilings import WARPS, Tilings
from tgl.cutlass_kernels.gemm.operand_formats import OPERANDS
from tgl.testing import emulate

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
RAGGED = (5, 0, 130, 128, 1, 0, 40)
NAMES = [name for name, arch in ARCHS.items() if arch.folder == "mma_sync"]
LARGE, SMALL = 163 * 1024, 99 * 1024  # shared memory


def tiling(tile_m, tile_n, shared=SMALL, tma=False):
    return Tilings(shared, tma=tma).deepest(tile_m, tile_n)


GEMM = {
    "plain": ("sm_80", Case(tiling(128, 128, LARGE), RAGGED)),
    "float32 out": ("sm_86", Case(tiling(128, 128), RAGGED, depth=200, out=F32)),
    "b column-major": (
        "sm_80",
        Case(tiling(128, 256, LARGE), (5, 0, 130), b_row_major=False, dtype=F16, out=F16, columns=200, tail=0),
    ),
    "bias": ("sm_89", Case(tiling(64, 64), RAGGED, bias=F32, zero_tail=False, tail=150)),
    "scaled bias": ("sm_120", Case(tiling(64, 128, tma=True), (130, 0, 1), bias=BF16, bias_scale=F32, columns=392)),
    "bias scaled in 16 bits": (
        "sm_121",
        Case(tiling(128, 64, tma=True), (1, 3, 300), bias=F16, bias_scale=F16, dtype=F16, out=F32),
    ),
    "two stages, untouched tail": (
        "sm_120",
        Case(tiling(256, 128, tma=True), (257, 0, 1), zero_tail=False, tail=300, b_row_major=False),
    ),
    "deeper than the ring": ("sm_86", Case(tiling(128, 128), (70, 0, 3), depth=328, columns=72, bias=BF16)),
    "all empty": ("sm_80", Case(tiling(64, 64), (0, 0, 0), tail=140, columns=40)),
    "no tail rows": ("sm_89", Case(tiling(128, 128), (128,), tail=0)),
    "one column tile, odd K": ("sm_121", Case(tiling(128, 128, tma=True), (70,), depth=67, columns=13)),
    "by TMA, deeper than the ring": (
        "sm_120",
        Case(tiling(128, 128, tma=True), (5, 0, 130), depth=328, dtype=F16, out=F16, b_row_major=False, tail=150),
    ),
    "by lanes where there is TMA": ("sm_120", Case(tiling(64, 64), (70, 0, 3), depth=200)),
    "by TMA, all empty": ("sm_121", Case(tiling(64, 64, tma=True), (0, 0, 0), tail=140, columns=40)),
}
WGRAD = {
    "plain": ("sm_80", Case(tiling(128, 128, LARGE), RAGGED)),
    "float32 out": ("sm_80", Case(tiling(128, 256, LARGE), (5, 0, 130), out=F32, dtype=F16, depth=136, columns=264)),
    "accumulate": ("sm_86", Case(tiling(64, 64), RAGGED, out=F32, accumulate=True)),
    "accumulate in 16 bits": ("sm_120", Case(tiling(64, 128, tma=True), (5, 0, 130, 40), accumulate=True, columns=200)),
    "two stages": ("sm_89", Case(tiling(256, 128), (70, 0, 64, 1), depth=264, columns=136)),
    "odd columns, accumulate": (
        "sm_121",
        Case(tiling(128, 64, tma=True), (3, 200), columns=37, dtype=F16, out=F16, accumulate=True),
    ),
    "all empty": ("sm_80", Case(tiling(64, 64), (0, 0), tail=20, columns=40)),
    "by TMA, deeper than the ring": ("sm_121", Case(tiling(128, 128, tma=True), (1, 0, 397, 64), depth=136, dtype=F16)),
    "by TMA, all empty": ("sm_120", Case(tiling(64, 64, tma=True), (0, 0), tail=20, columns=40)),
}
RARER = {
    *(f"rows: {name}" for name in ("float32 out", "bias", "bias scaled in 16 bits", "all empty", "no tail rows")),
    *(f"rows: {name}" for name in ("by TMA, all empty", "by lanes where there is TMA", "two stages, untouched tail")),
    *(f"contraction: {name}" for name in ("float32 out", "accumulate", "two stages", "all empty")),
    *(f"contraction: {name}" for name in ("by TMA, all empty", "plain", "accumulate in 16 bits")),
    "rows: plain",
}
CASES = [(VARLEN_M, *case) for case in GEMM.values()] + [(VARLEN_K, *case) for case in WGRAD.values()]
IDS = [f"rows: {name}" for name in GEMM] + [f"contraction: {name}" for name in WGRAD]
USUAL = {name: case for name, case in zip(IDS, CASES) if name not in RARER}


@pytest.mark.cover(1)
@pytest.mark.parametrize(("kind", "arch", "case"), USUAL.values(), ids=USUAL)
def test_exact(kind, arch, case):
    record = run(arch, kind, case, seeds=(0,))
    assert record.bank_conflicts == 0
    assert not record.warnings
    assert (record.tma_bytes["load"] > 0, record.copied_bytes > 0) == (case.config.tma, not case.config.tma)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "arch", "case"), CASES, ids=IDS)
def test_exact_under_many_schedules(kind, arch, case):
    record = run(arch, kind, case, seeds=range(7))
    assert record.bank_conflicts == 0
    assert not record.warnings


@pytest.mark.slices(2)
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", WARPS, ids=str)
@pytest.mark.parametrize("arch", NAMES)
def test_every_tiling(arch, shape, kind):
    config = ARCHS[arch].tilings.deepest(*shape)
    case = Case(config, RAGGED, out=F32, bias=F32 if kind == VARLEN_M else None, depth=264, columns=264)
    run(arch, kind, case, seeds=(0, 1))


@pytest.mark.parametrize("arch", ["sm_80", "sm_120"])
def test_no_mma_lies_behind_a_group(arch):
    """The MMAs of 64 x 64 are 32 per 16 tokens."""
    sizes, config = (1, 16, 17, 0, 63, 64, 65, 200), ARCHS[arch].tilings.deepest(64, 64)
    record = run(arch, VARLEN_K, Case(config, sizes, depth=64, columns=64), seeds=(0,))
    assert record.mma_count == 32 * sum(-(-size // 16) for size in sizes)


@pytest.mark.parametrize("along", [True, False])
def test_copies_stand_between_the_mmas_of_a_k_tile(along):
    """Copies stand between MMAs: in one place, they would be a long row of instructions without an MMA."""
    config = ARCHS["sm_80"].tilings.deepest(128, 256)
    with emulate("sm_80"):
        cubin = gemm_cases.kernel("sm_80", VARLEN_M, Case(config, RAGGED, b_row_major=not along)).artifacts.CUBIN
    beside, mmas = sass.between(cubin, "HMMA", "LDGSTS")
    assert 2 * beside > mmas > 100


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arch", ["sm_80", "sm_120"])
def test_more_groups_than_a_warp_holds(arch, kind):
    run(arch, kind, Case(ARCHS[arch].tilings.deepest(64, 64), MANY, depth=24, columns=16), seeds=(0,))


@pytest.mark.parametrize("arch", chips.parameters(NAMES))
def test_the_ops_are_served(arch):
    """Through the ops, in the tiling that is chosen, on the chip of its name."""
    a, b, offs = integers(70, 48), integers(2, 48, 64), torch.tensor([30, 66], dtype=torch.int32)
    dy, total = integers(70, 64), torch.ones(2, 48, 64)
    dense = a[:30] @ b[0], a[30:66] @ b[1]
    with emulate(arch, detect_races=False) as machine:
        assert tgl.explain(tgl.grouped_gemm, a, b, offs).chosen.name == "tgl kernel"
        assert torch.equal(tgl.grouped_gemm(a, b, offs), torch.cat([*dense, torch.zeros(4, 64, dtype=BF16)]))
        back = tgl.grouped_gemm(dy, b.transpose(1, 2), offs)
        assert torch.equal(back[30:66], dy[30:66] @ b[1].T)
        grad = tgl.grouped_gemm_wgrad(a, dy, offs)
        assert torch.equal(grad[0], a[:30].T @ dy[:30])
        tgl.grouped_gemm_wgrad_accumulate_(a, dy, offs, total)
        assert torch.equal(total[1], 1 + (a[30:66].T @ dy[30:66]).float())
        assert [launch.arch for launch in machine.launches] == [ARCHS[arch].target] * 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("deleted", [r"cp\.async\.wait_group", r"bar\.sync"])
def test_a_wait_or_a_barrier_less_is_reported(deleted, kind):
    """The checker reports a missing wait or barrier of the mainloop, except the last one, which nothing follows."""
    found = []

    def edit(ptx):
        found.extend(re.finditer(rf"\n\s*{deleted}[^\n]*", ptx))
        match = found[-2 if "wait" in deleted else -1]
        return ptx[: match.start()] + ptx[match.end() :]

    case = Case(tiling(64, 64), (130, 70), depth=520, columns=72)
    with pytest.raises(cute_emulator.RaceError):
        run("sm_80", kind, case, seeds=(0,), edit_ptx=edit)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("pattern", "instead"),
    [
        (r"\n\s*bar\.sync[^\n]*", ""),
        (r"mbarrier\.try_wait\.parity\.shared\.b64\s+(\w+), \[%r\d+\], (%r\d+)[^\n]*", r"setp.eq.s32 \1, \2, \2;"),
    ],
    ids=["barrier", "wait"],
)
def test_a_wait_or_a_barrier_less_by_tma_is_reported(pattern, instead, kind):
    """The last of its kind, which is in the mainloop."""

    def edit(ptx):
        match = list(re.finditer(pattern, ptx))[-1]
        return ptx[: match.start()] + match.expand(instead) + ptx[match.end() :]

    case = Case(tiling(64, 64, tma=True), (130, 70), depth=520, columns=72)
    with pytest.raises(cute_emulator.RaceError):
        run("sm_120", kind, case, seeds=(0,), edit_ptx=edit)


def test_a_tiling_that_does_not_fit_is_refused():
    reason = ARCHS["sm_86"].tilings.reason(VARLEN_M, tiling(128, 256, LARGE), 16)
    assert reason == "stages must be 2 to 2, as many as fit in shared memory, not 3"
    for config, why in (
        (GemmConfig(128, 192, stages=2), "tiles are 64 x 64"),
        (GemmConfig(128, 128, pingpong=True, stages=2), "neither CTA pairs, ping-pong consumers nor clusters"),
        (replace(tiling(64, 64), stages=0), "stages must be 2 to 5"),
        (tiling(64, 64, tma=True), "there is no TMA here"),
    ):
        assert why in ARCHS["sm_80"].tilings.reason(VARLEN_M, config, 16)
    for arch in ("sm_90", "sm_100"):
        assert "always loaded by TMA here" in ARCHS[arch].tilings.reason(VARLEN_M, GemmConfig(tma=True), 16)
    form = OPERANDS["fp8_tensor"]
    config = replace(ARCHS["sm_120"].tilings.deepest(64, 64, VARLEN_M, form), tma=True)
    assert (
        ARCHS["sm_120"].tilings.scaled_reason(VARLEN_M, form, config)
        == "quantised operands are loaded by cp.async, not by TMA"
    )


@pytest.mark.slow
@pytest.mark.parametrize("tma", [False, True])
def test_kernels_take_the_place_of_others(tma, monkeypatch):
    """Nothing in them depends on the architecture: an entry of the table puts them on a chip that has wider MMAs."""
    here = Tilings(227 * 1024, tma=tma)
    forced = replace(ARCHS["sm_90"], folder="mma_sync", target="sm_90", kernels=archs.DENSE, tilings=here)
    monkeypatch.setitem(ARCHS, "sm_90", forced)
    for kind in KINDS:
        case = Case(here.deepest(64, 64), (5, 0, 70))
        assert run("sm_90", kind, case, seeds=(0,)).instructions["mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"]
