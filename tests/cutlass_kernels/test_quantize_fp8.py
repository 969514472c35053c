"""FP8 quantisation kernels on the emulator: the bytes of the CPU implementation, and nothing written around them."""

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

import tgl
from tests.cutlass_kernels import sass
from tests.cutlass_kernels.test_quantize import (
    BF16,
    E5M2,
    F16,
    F32,
    MANY,
    RAGGED,
    awkward,
    check,
    cost_without_rows,
    grouped,
)
from tests.kernel_cases import framed_like
from tests.memory import same_bytes
from tgl import backends
from tgl.cutlass_kernels.archs import ARCHS
from tgl.cutlass_kernels.launchers.quantize import QUANTIZERS
from tgl.cutlass_kernels.quantize import l2_chunks, lane_tile
from tgl.cutlass_kernels.quantize.quantize_spec import FP8Spec
from tgl.cutlass_kernels.runtime import launcher
from tgl.meta.components import Components
from tgl.testing import emulate

FORMATS = ("fp8_block", "fp8_tensor")
CASES = {
    "block": dict(format="fp8_block"),
    "block, rowwise, any scale": dict(format="fp8_block", columnwise=False, power_of_two=False),
    "block, columnwise, E5M2": dict(format="fp8_block", rowwise=False, dtype=E5M2),
    "tensor": dict(format="fp8_tensor"),
    "tensor, rowwise, powers of two": dict(format="fp8_tensor", columnwise=False, power_of_two=True),
    "tensor, columnwise, E5M2": dict(format="fp8_tensor", rowwise=False, dtype=E5M2),
}


@pytest.mark.cover(1)
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_groups(options):
    check(*grouped(RAGGED, 9, 272, BF16), **options)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [F32, F16])
def test_sources(format, dtype):
    check(*grouped((3, 60), 140, 80, dtype), arch="sm_90a", format=format, eps=1e-3)


@pytest.mark.parametrize("sizes, tail", [(MANY, 0), ((0, 0, 0), 300), ((256, 128), 0), ((0, 1, 0), 127), ((), 40)])
@pytest.mark.parametrize("format", FORMATS)
def test_routings(sizes, tail, format):
    check(*grouped(sizes, tail, 40, BF16), format=format)


@pytest.mark.parametrize("options", [dict(format=f) for f in FORMATS] + [dict(format="fp8_block", block_2d=True)])
@pytest.mark.parametrize("rows", [208, 16])
def test_matrices(options, rows):
    check(awkward(3, rows, 136, dtype=BF16), None, **options)


@pytest.mark.parametrize("format", FORMATS)
def test_row_scale(format):
    x, offs = grouped((5, 0, 130), 9, 64, BF16)
    factors = torch.rand(x.shape[0])
    factors[offs[-1] :] = float("nan")
    check(x, offs, row_scale=factors, format=format)


def test_given_scales():
    x, offs = grouped((5, 0, 130), 9, 264, BF16)
    check(x, offs, scale=torch.tensor([1.0, 3.0, 1e30]), format="fp8_tensor")


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_many_schedules(format):
    check(*grouped((3, 0, 140), 9, 136, BF16), arch="sm_90a", seeds=range(3), format=format)


def test_noop_writes_nothing():
    x, offs = grouped((3, 40), 9, 64, BF16)
    frame = framed_like(tgl.group_quantize(x, offs, format="fp8_block"))
    out = Components(*frame.inside)
    with emulate("sm_100a") as machine:
        tgl.group_quantize(x, offs, noop=torch.tensor(True), format="fp8_block", out=out)
        assert len(machine.launches) == 1
    assert frame.untouched()


@pytest.mark.usefixtures("overlapping_groups")
@pytest.mark.parametrize("format", FORMATS)
def test_bad_offsets_stay_inside(format):
    x = torch.randn(100, 64).bfloat16()
    offs = torch.tensor([90, -5, 2000, 40], dtype=torch.int32)
    frame = framed_like(tgl.group_quantize(x, torch.tensor([10, 20, 30, 40], dtype=torch.int32), format=format))
    out = Components(*frame.inside)
    with emulate("sm_100a"):
        tgl.group_quantize(x, offs, format=format, out=out)
    assert frame.intact()


@pytest.mark.parametrize("groups", [0, 3])
@pytest.mark.parametrize("format", [*FORMATS, "mxfp8"])
def test_no_rows(format, groups):
    x, offs = torch.zeros(0, 40, dtype=BF16), torch.zeros(groups, dtype=torch.int32)
    expected = tgl.group_quantize(x, offs, format=format)
    frame = framed_like(expected)
    out = Components(*frame.inside)
    with emulate("sm_90a"):
        tgl.group_quantize(x, offs, format=format, out=out)
    for ours, theirs in zip(out, expected):
        assert same_bytes(ours, theirs)


def test_unsupported_calls_have_reasons():
    w = torch.zeros(1, 8, 64, dtype=BF16)
    with backends.emulated_device("sm_90"):
        assert "multiple of 16" in str(tgl.explain("group_quantize", w, None, format="fp8_block"))


@pytest.fixture(params=[(2, 1), (3, 2)], ids=["windows of 2, 1 behind", "windows of 3, 2 behind"])
def small_windows(request, monkeypatch):
    """Shrink the windows, so that few tiles take many stages."""
    tiles, lag = request.param
    monkeypatch.setattr(l2_chunks, "TILES", tiles)
    monkeypatch.setattr(l2_chunks, "LAG", lag)
    monkeypatch.setattr(launcher, "compiled_kernels", {})
    monkeypatch.setattr(launcher, "warm_plans", {})


STAGED = {
    "one long, many short": ((5, 700, 1, 0, 130, 9, 0, 60), 140),
    "ends on windows": ((256, 256, 128, 384), 0),
    "only a tail": ((), 400),
    "no tail, an empty end": ((300, 0, 200, 0), 0),
}


@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize("sizes, tail", STAGED.values(), ids=STAGED)
def test_stages(sizes, tail):
    check(*grouped(sizes, tail, 136, BF16), arch="sm_90a", seeds=range(2), format="fp8_tensor", columnwise=False)


@pytest.mark.slow
@pytest.mark.usefixtures("small_windows")
def test_stages_of_matrices():
    check(awkward(5, 208, 136, dtype=BF16), None, format="fp8_tensor")


@pytest.mark.slow
@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize("resident", [1, 6])
def test_blocks_that_run_one_after_another(resident):
    """Blocks wait only for blocks that have begun: one block at a time finishes, and six at once."""
    x, offs = grouped((300, 0, 400), 9, 136, BF16)
    expected = tgl.group_quantize(x, offs, format="fp8_tensor")
    with emulate("sm_90a") as machine:
        machine.resident_clusters = resident
        ours = tgl.group_quantize(x, offs, format="fp8_tensor")
    for a, b in zip(ours, expected):
        assert same_bytes(a, b)


@pytest.mark.usefixtures("small_windows", "overlapping_groups")
def test_bad_offsets_do_not_hang():
    x = torch.randn(700, 136).bfloat16()
    for seed in range(2):
        torch.manual_seed(seed)
        offs = torch.randint(-300, 1200, (7,), dtype=torch.int32)
        frame = framed_like(tgl.group_quantize(x, torch.arange(100, 800, 100, dtype=torch.int32), format="fp8_tensor"))
        out = Components(*frame.inside)
        with emulate("sm_90a"):
            tgl.group_quantize(x, offs, format="fp8_tensor", out=out)
        assert frame.intact()


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize("directions", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("blocks", ["1d", "2d", None])
def test_machine_code(arch, blocks, directions):
    """Registers for four or three blocks, nothing divides but by a group's maximum, nothing is in local memory."""
    spec = FP8Spec("bfloat16", "float8_e4m3fn", *directions, blocks, blocks is not None, 0, blocks != "2d")
    with emulate(ARCHS[arch].target):  # keeps what was compiled
        kernel = QUANTIZERS["fp8_block"].build(arch, spec)
    report = sass.inspect(kernel.artifacts.CUBIN, "QuantizeFP8")
    assert report.registers <= (80 if all(directions) or blocks is None else 64)
    assert report.spills == 0
    assert report.count("F2FP.SATFINITE") == sum(directions) * lane_tile.STEPS * lane_tile.VECTOR // 2
    assert report.count("CALL") == (0 if blocks else 2)  # quotient and inverse


def test_tiles_without_rows_cost_little():
    assert cost_without_rows(format="fp8_block") < 0.5
