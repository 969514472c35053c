"""Quantisation kernels on the emulator: the bytes of the CPU implementation, and nothing written around them."""

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

import tgl
from tests.cutlass_kernels import sass
from tests.kernel_cases import ends, framed_like, poisoned
from tests.memory import raw, same_bytes
from tests.quantize import drawn
from tgl import backends
from tgl.cutlass_kernels.archs import ARCHS
from tgl.cutlass_kernels.launchers.quantize import QUANTIZERS
from tgl.cutlass_kernels.quantize import lane_tile
from tgl.cutlass_kernels.quantize.quantize_spec import MXFP8Spec
from tgl.meta.components import Components
from tgl.testing import emulate

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
RAGGED = (5, 0, 129, 128, 1, 0, 40)
MANY = (*([0, 3, 1, 0, 9, 0, 130, 2] * 5), *([0] * 95), 7, 0)  # more than are looked up at a time


def awkward(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Values of every exponent, zeros of both signs, the largest, the smallest, Inf and NaN."""
    x = torch.randn(shape) * torch.exp2(torch.randint(-40, 40, shape).float())
    flat = x.view(-1, shape[-1])
    info = torch.finfo(dtype)
    special = (0.0, -0.0, info.max, info.tiny, info.smallest_normal / 4, 448.0, -448.0, 480.0, float("inf"))
    for i, value in enumerate((*special, float("nan"))):
        if 7 * i + 3 < flat.shape[0]:
            flat[7 * i + 3, : 8 * (i + 1)] = value
    flat[1::11] = 0.0
    return x.to(dtype)


def check(x, offs, arch="sm_100a", seeds=(0,), **options):
    with drawn.as_on(arch.rstrip("af"), x, offs, options):
        expected = tgl.group_quantize(x, offs, **options)
    extra = {k: options.pop(k) for k in ("row_scale", "scale", "rng") if k in options}
    frame = framed_like(expected)
    out = Components(*frame.inside)
    with emulate(arch) as machine:
        for seed in seeds:
            machine.seed = seed
            before = len(machine.launches)
            frame.refill()
            tgl.group_quantize(x, offs, **extra, **options, out=out)
            assert len(machine.launches) > before
            for name, ours, theirs in zip(Components._fields, out, expected):
                differ = (raw(ours) != raw(theirs)).sum()
                assert differ == 0, f"{name}: {differ} bytes differ"
            assert frame.intact()


def grouped(sizes, tail, columns, dtype):
    torch.manual_seed(len(sizes))
    x = awkward(sum(sizes) + tail, columns, dtype=dtype)
    return poisoned(x, sizes), ends(sizes)


CASES = {
    "both, blocked": dict(scale_layout="blocked"),
    "both, compact": dict(),
    "rowwise, floor": dict(columnwise=False, scaling="floor", scale_layout="blocked"),
    "columnwise, even": dict(rowwise=False, scaling="even"),
    "E5M2": dict(dtype=E5M2, scale_layout="blocked"),
}


def cost_without_rows(**options) -> float:
    """Return instructions of a tile without rows as a fraction of those of 128 rows, on Hopper.

    Every group may add such a tile: with 128 groups of 512 rows they are a fifth of all.
    """
    x = torch.randn(256, 128).bfloat16()
    issued = []
    for empty in (0, 16):
        offs = torch.full((1 + empty,), 256, dtype=torch.int32)
        with emulate("sm_90a", detect_races=False) as machine:
            tgl.group_quantize(x, offs, **options)
        issued.append(sum(machine.launches[-1].instructions.values()))
    one = (issued[1] - issued[0]) / 16
    return one / ((issued[0] - one) / 2)  # in the first there are two with rows and one without


@pytest.mark.cover(1)
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_groups(options):
    check(*grouped(RAGGED, 9, 272, BF16), format="mxfp8", **options)


@pytest.mark.parametrize("dtype", [F32, F16])
@pytest.mark.parametrize("scaling", ["rceil", "floor", "even"])
def test_sources_and_scalings(dtype, scaling):
    check(*grouped((3, 60), 140, 80, dtype), format="mxfp8", scaling=scaling, dtype=E5M2, scale_layout="blocked")


@pytest.mark.parametrize("sizes, tail", [(MANY, 0), ((0, 0, 0), 300), ((256, 128), 0), ((0, 1, 0), 127), ((), 40)])
@pytest.mark.parametrize("layout", ["compact", "blocked"])
def test_routings(sizes, tail, layout):
    check(*grouped(sizes, tail, 40, BF16), format="mxfp8", scale_layout=layout)


@pytest.mark.parametrize("layout", ["compact", "blocked"])
@pytest.mark.parametrize("rows", [200, 32, 7])
def test_matrices(layout, rows):
    check(awkward(3, rows, 136, dtype=BF16), None, format="mxfp8", scale_layout=layout)


def test_row_scale():
    x, offs = grouped(RAGGED, 9, 64, BF16)
    factors = torch.rand(x.shape[0])
    factors[offs[-1] :] = float("nan")
    expected = tgl.group_quantize(x, offs, row_scale=factors, format="mxfp8")
    with emulate("sm_100a") as machine:
        ours = tgl.group_quantize(x, offs, row_scale=factors, format="mxfp8")
        assert len(machine.launches) == 1
    for a, b in zip(ours, expected):
        assert same_bytes(a, b)


@pytest.mark.slow
def test_hopper_and_many_schedules():
    check(*grouped((3, 0, 140), 9, 136, BF16), arch="sm_90a", seeds=range(3), format="mxfp8", scale_layout="blocked")


@pytest.mark.parametrize("flag", [torch.tensor([1.0]), torch.tensor(True)])
def test_noop_writes_nothing(flag):
    x, offs = grouped((3, 40), 9, 64, BF16)
    frame = framed_like(tgl.group_quantize(x, offs, format="mxfp8"))
    out = Components(*frame.inside)
    with emulate("sm_100a") as machine:
        tgl.group_quantize(x, offs, noop=flag, format="mxfp8", out=out)
        assert len(machine.launches) == 1
        assert frame.untouched()
        tgl.group_quantize(x, offs, noop=torch.zeros_like(flag), format="mxfp8", out=out)
    assert not frame.untouched()


@pytest.mark.usefixtures("overlapping_groups")
def test_bad_offsets_stay_inside():
    x = torch.randn(100, 64).bfloat16()
    offs = torch.tensor([90, -5, 2000, 40], dtype=torch.int32)
    frame = framed_like(tgl.group_quantize(x, torch.tensor([10, 20, 30, 40], dtype=torch.int32), format="mxfp8"))
    out = Components(*frame.inside)
    with emulate("sm_100a"):
        tgl.group_quantize(x, offs, format="mxfp8", out=out)
    assert frame.intact()


def test_unsupported_calls_have_reasons():
    x, offs = torch.zeros(8, 36, dtype=BF16), torch.tensor([8], dtype=torch.int32)
    with backends.emulated_device("sm_100"):
        assert "multiple of 8" in str(tgl.explain("group_quantize", x, offs, format="mxfp8"))
        columns = torch.zeros(64, 8, dtype=BF16).t()
        assert "row-major" in str(tgl.explain("group_quantize", columns, offs, format="mxfp8"))


def test_dbias_goes_along():
    x, offs = grouped(RAGGED, 9, 64, BF16)
    x = torch.randint(-4, 5, x.shape).to(BF16)
    expected = tgl.group_quantize(x, offs, format="mxfp8", dbias=True)
    with emulate("sm_100a") as machine:
        ours = tgl.group_quantize(x, offs, format="mxfp8", dbias=True)
        assert len(machine.launches) == 3  # two of the sums
    assert torch.equal(ours.dbias, expected.dbias)
    assert same_bytes(ours.data, expected.data)


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize(
    "source, rowwise, columnwise, registers",
    [("bfloat16", True, True, 80), ("bfloat16", True, False, 64), ("float32", True, True, 128)],
)
def test_machine_code(arch, source, rowwise, columnwise, registers):
    """Registers for the blocks to share a multiprocessor, nothing in local memory, one cast for two elements."""
    with emulate(ARCHS[arch].target):  # keeps what was compiled
        kernel = QUANTIZERS["mxfp8"].build(
            arch, MXFP8Spec(source, "float8_e4m3fn", rowwise, columnwise, "rceil", True, True)
        )
    report = sass.inspect(kernel.artifacts.CUBIN)
    assert report.spills == 0
    assert report.frame == 0
    assert report.registers <= registers
    assert report.count("F2FP.SATFINITE") == (rowwise + columnwise) * lane_tile.STEPS * lane_tile.VECTOR // 2
    assert report.count("LDG") >= lane_tile.STEPS


@pytest.mark.parametrize("layout", ["blocked", "compact"])
def test_tiles_without_rows_cost_little(layout):
    assert cost_without_rows(format="mxfp8", scale_layout=layout) < 0.5
