"""Kernels of MMAs by warps on quantised operands on the emulator: exact, canaries intact, whatever the timing."""

import re
from dataclasses import replace
from unittest import mock

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

import cute_emulator
import tgl
from tests.cutlass_kernels.gemm_cases import CLUSTERS, MANY
from tests.cutlass_kernels.scaled_cases import E5M2, ScaledCase, function, run
from tests.kernel_cases import framed
from tgl import backends
from tgl.cutlass_kernels import archs, tilings
from tgl.cutlass_kernels.archs import ARCHS
from tgl.cutlass_kernels.config import KINDS, VARLEN_K, VARLEN_M, GemmConfig
from tgl.cutlass_kernels.gemm.mma_sync.tilings import WARPS, Tilings
from tgl.cutlass_kernels.gemm.operand_formats import OPERANDS
from tgl.testing import emulate

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
RAGGED = (5, 0, 130, 127, 1, 0, 40)
NAMES = [name for name, arch in ARCHS.items() if not arch.wider_mmas and "ScaledGroupedGemm" in arch.kernels]
FORMATS = {name: [arch for arch in form.archs if arch in NAMES] for name, form in OPERANDS.items()}
FP8 = "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32"
SCALED_FP8 = "mma.sync.aligned.kind::mxf8f6f4.block_scale.scale_vec::1X.m16n8k32.row.col.f32.e4m3.e4m3.f32.ue8m0"
SERVED = [(arch, name) for name, here in FORMATS.items() for arch in here]
USUALLY_SERVED = [("sm_89", "fp8_block"), ("sm_120", "mxfp8"), ("sm_121", "fp8_tensor")]

GEMM = {
    "fp8_tensor": ScaledCase("fp8_tensor", 128, 128, RAGGED, depth=336, columns=272, arch="sm_89"),
    "fp8_tensor, columnwise weights, scaled bias": ScaledCase(
        "fp8_tensor", 64, 128, RAGGED, "columnwise", out=F32, bias=F32, bias_scale=BF16, arch="sm_120"
    ),
    "fp8_tensor, deeper than the ring, untouched tail": ScaledCase(
        "fp8_tensor", 64, 64, (70, 0, 1), depth=1040, bias=BF16, zero_tail=False, tail=80, arch="sm_121"
    ),
    "fp8_tensor, few columns": ScaledCase("fp8_tensor", 128, 64, (130, 3), columns=40, out=F16, arch="sm_89"),
    "fp8_tensor, all empty": ScaledCase("fp8_tensor", 64, 64, (0, 0, 0), tail=140, columns=40, arch="sm_120"),
    "fp8_block": ScaledCase("fp8_block", 128, 128, RAGGED, depth=336, columns=272, arch="sm_120"),
    "fp8_block, columnwise weights": ScaledCase(
        "fp8_block", 64, 64, RAGGED, "columnwise", columns=200, out=F32, bias=BF16, arch="sm_89"
    ),
    "fp8_block, deeper than the ring, untouched tail": ScaledCase(
        "fp8_block", 128, 64, (130, 0, 3), depth=1040, zero_tail=False, tail=150, arch="sm_121"
    ),
    "fp8_block, all empty": ScaledCase("fp8_block", 64, 128, (0, 0), tail=70, arch="sm_89"),
    "mxfp8": ScaledCase("mxfp8", 128, 128, RAGGED, depth=352, columns=272, arch="sm_120"),
    "mxfp8, columnwise weights, scaled bias": ScaledCase(
        "mxfp8", 128, 128, RAGGED, "columnwise", columns=144, out=F32, bias=F32, bias_scale=BF16, arch="sm_121"
    ),
    "mxfp8, partial last block, untouched tail": ScaledCase(
        "mxfp8", 128, 128, (130, 0, 3), depth=1040, columns=48, zero_tail=False, tail=150, arch="sm_121"
    ),
    "mxfp8, all empty": ScaledCase("mxfp8", 128, 128, (0, 0, 0), tail=140, columns=48, arch="sm_120"),
    "nvfp4": ScaledCase("nvfp4", 128, 128, RAGGED, depth=352, columns=272, bias=BF16, arch="sm_121"),
    "nvfp4, columnwise weights, deeper than the ring": ScaledCase(
        "nvfp4", 128, 128, (70, 0, 1), "columnwise", depth=1056, columns=160, out=F32, arch="sm_120"
    ),
    "nvfp4, untouched tail": ScaledCase("nvfp4", 128, 128, (130, 3), zero_tail=False, tail=90, out=F16, arch="sm_120"),
}
WGRAD = {
    "fp8_tensor": ScaledCase("fp8_tensor", 128, 128, RAGGED, out=F32, arch="sm_120"),
    "fp8_tensor, mixed, accumulate": ScaledCase(
        "fp8_tensor", 64, 64, RAGGED, columns=72, out=F32, accumulate=True, b_dtype=E5M2, arch="sm_89"
    ),
    "fp8_tensor, accumulate in 16 bits, deeper than the ring": ScaledCase(
        "fp8_tensor", 64, 128, (1, 700, 0, 97), depth=72, columns=136, accumulate=True, arch="sm_121"
    ),
    "fp8_tensor, all empty": ScaledCase("fp8_tensor", 64, 64, (0, 0), tail=20, columns=40, arch="sm_89"),
    "fp8_block": ScaledCase("fp8_block", 128, 128, RAGGED, out=F32, arch="sm_89"),
    "fp8_block, mixed, accumulate": ScaledCase(
        "fp8_block", 64, 128, (33, 0, 300, 31), columns=72, out=F32, accumulate=True, b_dtype=E5M2, arch="sm_120"
    ),
    "fp8_block, deeper than the ring": ScaledCase(
        "fp8_block", 128, 64, (1, 700, 0, 97), depth=144, columns=72, arch="sm_121"
    ),
    "fp8_block, all empty": ScaledCase("fp8_block", 64, 64, (0, 0), tail=20, arch="sm_121"),
    "mxfp8": ScaledCase("mxfp8", 128, 128, RAGGED, depth=144, out=F32, arch="sm_121"),
    "mxfp8, mixed, accumulate": ScaledCase(
        "mxfp8", 128, 128, (33, 0, 130, 31), columns=144, out=F32, accumulate=True, b_dtype=E5M2, arch="sm_120"
    ),
    "mxfp8, accumulate in 16 bits, deeper than the ring": ScaledCase(
        "mxfp8", 128, 128, (1, 700, 0, 97), depth=48, columns=80, accumulate=True, arch="sm_121"
    ),
    "mxfp8, all empty": ScaledCase("mxfp8", 128, 128, (0, 0), tail=20, arch="sm_120"),
    "nvfp4": ScaledCase("nvfp4", 128, 128, RAGGED, out=F32, arch="sm_120"),
    "nvfp4, accumulate, deeper than the ring": ScaledCase(
        "nvfp4", 128, 128, (1, 1400, 0, 97), depth=160, columns=144, out=F32, accumulate=True, arch="sm_121"
    ),
}
CASES = [(VARLEN_M, case) for case in GEMM.values()] + [(VARLEN_K, case) for case in WGRAD.values()]
IDS = [f"rows: {name}" for name in GEMM] + [f"contraction: {name}" for name in WGRAD]


RARER = {
    "rows: fp8_tensor, few columns",
    *(f"rows: {name}, all empty" for name in ("fp8_tensor", "mxfp8")),
    "rows: fp8_block, columnwise weights",
    "rows: fp8_tensor, columnwise weights, scaled bias",
    "rows: fp8_block, deeper than the ring, untouched tail",
    "rows: nvfp4, columnwise weights, deeper than the ring",
    *(f"contraction: {name}, all empty" for name in ("fp8_tensor", "mxfp8")),
    *(f"contraction: {name}" for name in ("fp8_tensor", "fp8_block", "mxfp8", "nvfp4")),
    "contraction: fp8_tensor, mixed, accumulate",
    "contraction: mxfp8, accumulate in 16 bits, deeper than the ring",
    "contraction: fp8_block, deeper than the ring",
}
"""Cases whose paths through the kernels other cases take too."""
USUAL = {name: case for name, case in zip(IDS, CASES) if name not in RARER}


def few_of_formats(*usual):
    """Every format of mma.sync kernels, all but these in ``make test-full`` alone."""
    served = [name for name, here in FORMATS.items() if here]
    assert {*usual} < {*served}
    return [pytest.param(name, marks=[pytest.mark.slow] * (name not in usual)) for name in served]


def test_rarer_cases_are_cases():
    assert set(IDS) > RARER


@pytest.mark.parametrize(("kind", "case"), USUAL.values(), ids=USUAL)
def test_exact(kind, case):
    record = run(kind, case)
    # Scales that MMAs take lie as in memory, where those of 16 rows share eight banks.
    assert record.bank_conflicts == 0 or OPERANDS[case.format].vector
    assert not record.warnings


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "case"), CASES, ids=IDS)
def test_exact_under_many_schedules(kind, case):
    run(kind, case, seeds=range(1, 7))


def smallest(name):
    """The tiling with the fewest rows and columns."""
    return next(shape for shape in WARPS if fits(FORMATS[name][0], VARLEN_M, shape, name))


def fits(arch, kind, shape, name):
    """Return whether a kernel of the tiling exists."""
    form = OPERANDS[name]
    return tilings.reason(arch, kind, ARCHS[arch].tilings.deepest(*shape, kind, form), form) is None


@pytest.mark.slices(2)
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", WARPS, ids=str)
@pytest.mark.parametrize(("arch", "name"), SERVED)
def test_every_tiling(arch, name, shape, kind):
    if fits(arch, kind, shape, name):
        run(kind, ScaledCase(name, *shape, RAGGED, out=F32, depth=272, columns=272, arch=arch), seeds=(0, 1))
    else:
        assert OPERANDS[name].vector or shape[0] * shape[1] > 128 * 128


@pytest.mark.parametrize("name", [name for name, here in FORMATS.items() if here])
def test_no_mma_lies_behind_a_group(name):
    """An MMA is 16 x 8 and a step of the depth."""
    sizes, (m, n) = (1, 32, 33, 0, 127, 128, 129, 200), smallest(name)
    step = OPERANDS[name].tile_k // 4
    record = run(VARLEN_K, ScaledCase(name, m, n, sizes, depth=m, columns=n, out=F32, arch=FORMATS[name][0]))
    assert record.mma_count == m * n // 128 * sum(-(-size // step) for size in sizes)


@pytest.mark.slow
@pytest.mark.parametrize("name", few_of_formats("nvfp4"))
@pytest.mark.parametrize("kind", KINDS)
def test_more_groups_than_a_warp_holds(kind, name):
    run(kind, ScaledCase(name, *smallest(name), MANY, depth=32, columns=32, arch=FORMATS[name][-1]))


@pytest.mark.cover(1)
@pytest.mark.parametrize(
    ("arch", "name"), [pytest.param(*both, marks=[pytest.mark.slow] * (both not in USUALLY_SERVED)) for both in SERVED]
)
def test_the_ops_are_served(arch, name):
    """Through the ops, in the tiling that is chosen, on the chip of its name."""
    form = OPERANDS[name]
    layout = {"scale_layout": "blocked"} if form.vector else {}
    offs, total = torch.tensor([30, 66], dtype=torch.int32), torch.ones(2, 64, 64)
    q = tgl.group_quantize(torch.randn(70, 64).bfloat16(), offs, format=name, **layout)
    p = tgl.group_quantize(torch.randn(2, 64, 64).bfloat16(), None, format=name, **layout, block_2d=form.block > 0)
    amax, columnwise_amax = ((q.amax, p.amax), (q.columnwise_amax,) * 2) if form.alpha == "amax" else ((), ())
    options = {"format": name, **layout}
    rows = (q.data, q.scale, p.data, p.scale, offs, *amax)
    columns = (q.columnwise_data, q.columnwise_scale) * 2
    calls = {
        tgl.grouped_gemm_scaled: rows,
        tgl.grouped_gemm_scaled_wgrad: (*columns, offs, *columnwise_amax),
        tgl.grouped_gemm_scaled_wgrad_accumulate_: (*columns, offs, total, *columnwise_amax),
    }
    with emulate(arch, detect_races=False) as machine:
        for number, (op, args) in enumerate(calls.items(), 1):
            assert tgl.explain(op, *args, **options).chosen.name == "tgl kernel"
            op(*args, **options)
            assert [launch.arch for launch in machine.launches] == [ARCHS[arch].target] * number


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("deleted", [r"cp\.async\.wait_group", r"bar\.sync"])
@pytest.mark.parametrize("name", few_of_formats("fp8_block", "nvfp4"))
def test_a_wait_or_a_barrier_less_is_reported(name, deleted, kind):
    """The checker reports a missing wait or barrier of the mainloop, except the last one, which nothing follows."""

    def edit(ptx):
        found = list(re.finditer(rf"\n\s*{deleted}[^\n]*", ptx))
        match = found[-2 if "wait" in deleted else -1]
        return ptx[: match.start()] + ptx[match.end() :]

    deep = {"depth": 4 * 5 * OPERANDS[name].tile_k} if kind == VARLEN_M else {}
    sizes = (130, 70) if kind == VARLEN_M else (5 * OPERANDS[name].tile_k, 70)
    case = ScaledCase(name, *smallest(name), sizes, columns=80, out=F32, arch=FORMATS[name][0], **deep)
    with pytest.raises(cute_emulator.RaceError):
        run(kind, case, edit_ptx=edit)


@pytest.mark.usefixtures("overlapping_groups")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [name for name, here in FORMATS.items() if here])
def test_bad_offsets_touch_nothing_outside(name, kind):
    case = ScaledCase(
        name, *smallest(name), (20, 30, 40, 50), tail=0, depth=64, columns=64, out=F32, arch=FORMATS[name][0]
    )
    form, rows, groups = OPERANDS[name], sum(case.sizes), len(case.sizes)
    offs = torch.tensor(case.sizes).cumsum(0).int()
    q = tgl.group_quantize(torch.randn(rows, 64).bfloat16(), offs, **case.options)
    p = tgl.group_quantize(torch.randn(groups, 64, 64).bfloat16(), None, **case.options, block_2d=form.block > 0)
    a, b = (q[:3], p[:3]) if kind == VARLEN_M else (q[3:6], q[3:6])
    factors = (a[2], b[2]) if form.alpha == "amax" else (None, None)
    frame = framed(*((rows, 64) if kind == VARLEN_M else (groups, 64, 64)), dtype=F32)
    low, high = -(1 << 31), (1 << 31) - 1
    with emulate(ARCHS[case.arch].target), backends.emulated_device(case.arch):
        call = function(kind, case, a[0], b[0])
        for bad in ((-5, 90, 40, 1 << 30), (high, low, high, 7), (-1, -2, -3, -4), (140, 141, high, high)):
            frame.refill()
            ends = torch.tensor(bad, dtype=torch.int32)
            call(a[0], a[1], b[0], b[1], ends, *factors, frame.inside, None, None, None, CLUSTERS)
            assert frame.intact(), bad


def test_a_tiling_that_does_not_fit_is_refused():
    form, entry = OPERANDS["fp8_block"], ARCHS["sm_89"].tilings
    small = entry.deepest(128, 128, VARLEN_M, form)
    assert tilings.reason("sm_89", VARLEN_M, small, form) is None
    more = tilings.reason("sm_89", VARLEN_K, small, form)
    assert more == "stages must be 2 to 2, as many as fit in shared memory, not 3"
    wide = tilings.reason("sm_89", VARLEN_M, entry.deepest(128, 256, VARLEN_M, form), form)
    assert "do not fit in registers beside the 64 x 64 accumulators" in wide
    blocks = tilings.reason("sm_89", VARLEN_M, entry.deepest(128, 128, VARLEN_M, OPERANDS["mxfp8"]), OPERANDS["mxfp8"])
    assert blocks == "there is no block-scaled mma.sync here"
    few = ARCHS["sm_120"].tilings.deepest(64, 128, VARLEN_M, OPERANDS["nvfp4"])
    assert "tile_m and tile_n must be multiples of 128" in tilings.reason("sm_120", VARLEN_M, few, OPERANDS["nvfp4"])
    ones = tilings.reason("sm_89", VARLEN_M, replace(small, unit_scales=True), form)
    assert ones == "there is no block-scaled mma.sync here"
    chosen = ARCHS["sm_120"].tilings.deepest(128, 128, VARLEN_M, OPERANDS["mxfp8"])
    own = tilings.reason("sm_120", VARLEN_M, replace(chosen, unit_scales=True), OPERANDS["mxfp8"])
    assert own == "these operands have block scales instead of unit scales"
    dense = ARCHS["sm_120"].tilings.deepest(128, 128)
    assert "for FP8" in tilings.reason("sm_120", VARLEN_M, replace(dense, unit_scales=True))
    wider = replace(GemmConfig(128, 128, form.tile_k), unit_scales=True)
    for arch in ("sm_90", "sm_100"):
        assert tilings.reason(arch, VARLEN_M, wider, form) == "unit scales exist for mma.sync kernels only"
    narrow = tilings.reason("sm_86", VARLEN_M, small, form)
    assert narrow == "mma.sync kernels take 16-bit elements here, not 8-bit ones"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp8_tensor", pytest.param("fp8_block", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_mmas_with_scales_of_one_have_the_results_of_those_without(kind, name):
    """Each is run against exact products; sm_120 has both, and is given those with scales."""
    tiling = ARCHS["sm_120"].tilings.deepest(64, 64, kind, OPERANDS[name])
    assert tiling.unit_scales
    case = ScaledCase(name, 64, 64, (5, 0, 70), arch="sm_120")
    scaled = run(kind, case).instructions
    with mock.patch.object(ARCHS["sm_120"].tilings, "scales_blocks", False):
        plain = run(kind, case).instructions
    mmas = [{op: n for op, n in found.items() if op.startswith("mma.sync")} for found in (scaled, plain)]
    assert [list(found) for found in mmas] == [[SCALED_FP8], [FP8]]
    assert list(mmas[0].values()) == list(mmas[1].values())


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["fp8_tensor", "fp8_block"])
def test_kernels_take_the_place_of_others(name, kind, monkeypatch):
    """Nothing in them depends on the architecture: an entry of the table puts them on a chip that has wider MMAs."""
    here = Tilings(227 * 1024, (16, 8))
    forced = replace(ARCHS["sm_90"], folder="mma_sync", target="sm_90", kernels=archs.ALL, tilings=here)
    monkeypatch.setitem(ARCHS, "sm_90", forced)
    assert run(kind, ScaledCase(name, 64, 64, (5, 0, 70), arch="sm_90")).instructions[FP8]


def test_a_transform_fills_the_last_block_of_a_group():
    """All its places are multiplied, those behind the group's last token included."""
    torch.manual_seed(0)
    sizes = (5, 0, 33, 16)
    offs, options = torch.tensor(sizes).cumsum(0).int(), {"format": "nvfp4", "scale_layout": "blocked"}
    q = tgl.group_quantize(torch.randn(sum(sizes), 64).bfloat16(), offs, **options, rht=True)
    args = (*(q.columnwise_data, q.columnwise_scale) * 2, offs, *(q.columnwise_amax,) * 2)
    wanted = tgl.grouped_gemm_scaled_wgrad(*args, **options, out_dtype=F32)
    with emulate("sm_120") as machine:
        got = tgl.grouped_gemm_scaled_wgrad(*args, **options, out_dtype=F32)
        assert len(machine.launches) == 1
    assert (got - wanted).abs().max() <= wanted.abs().max() * 2.0**-20
    assert not got[1].any()
