"""Columnwise codes from rowwise ones in one launch, on the emulator: the bytes of the CPU, and nothing around them."""

import importlib
import itertools

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

import tgl
from tests.cutlass_kernels import sass
from tests.cutlass_kernels.test_dequantize import misaligned, spoil_tail
from tests.cutlass_kernels.test_quantize import BF16, E5M2, F32, MANY, RAGGED, awkward, grouped
from tests.kernel_cases import framed_like
from tests.memory import raw, same_bytes
from tgl import backends
from tgl.cutlass_kernels.archs import ARCHS
from tgl.cutlass_kernels.launchers.quantize import WRITTEN
from tgl.cutlass_kernels.quantize.quantize_spec import DequantizeSpec, FP8Spec, MXFP8Spec
from tgl.cutlass_kernels.runtime import launcher
from tgl.meta.components import Components
from tgl.testing import emulate

requantize = importlib.import_module("tgl.ops.group_requantize")

NAMES = "columnwise_data", "columnwise_scale", "columnwise_amax"
BLOCKED = dict(scale_layout="blocked")
NANS = {torch.float8_e4m3fn: 0xFF, E5M2: 0x7D}


def rowwise(x, offs, dtype=None, **options):
    """Codes and scales of ``x``, of which some are NaN; those in the tail are bad."""
    q = tgl.group_quantize(x, offs, columnwise=False, dtype=dtype, **options)
    codes = q.data.view(-1, q.data.shape[-1]).view(torch.uint8)
    codes[3 : sum(x.shape[:-1]) // 2 : 61, ::37] = NANS[q.data.dtype]
    if offs is not None:
        spoil_tail(q.data, q.scale, offs, x.shape[0])
    return q.data, q.scale, offs


def check(q, arch="sm_90a", seeds=(0,), **options):
    expected = tgl.group_requantize(*q, **options)
    resolved, specs = requantize._specs(*q, **options)
    frame = framed_like(specs.empty())
    out = Components(*frame.inside)
    with emulate(arch) as machine:
        for seed in seeds:
            machine.seed = seed
            frame.refill()
            backends.run("group_requantize", q[0].device, *q, None, options=resolved, out=out)
            for name, ours, theirs in zip(NAMES, out[3:6], expected, strict=True):
                differ = (raw(ours) != raw(theirs)).sum()
                assert differ == 0, f"{name}: {differ} bytes differ"
            assert frame.intact()
        assert len(machine.launches) == len(seeds)


CASES = {
    "blocks": dict(format="fp8_block"),
    "blocks, any scale": dict(format="fp8_block", power_of_two=False),
    "mxfp8": dict(format="mxfp8"),
    "mxfp8, blocked": dict(format="mxfp8", **BLOCKED),
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_groups(options):
    check(rowwise(*grouped(RAGGED, 9, 272, BF16), **options), **options)


@pytest.mark.parametrize(
    "arch, dtype, wanted", [("sm_80", E5M2, None), ("sm_120a", None, E5M2), ("sm_100a", E5M2, None)]
)
@pytest.mark.parametrize("format", ["fp8_block", "mxfp8"])
def test_elements(format, arch, dtype, wanted):
    """Elements of both kinds, read and written, on chips with and without instructions for them."""
    options = {"format": format, "eps": 1e-3} if format == "fp8_block" else {"format": format, "scaling": "floor"}
    made_with = {name: value for name, value in options.items() if name == "format"}
    check(rowwise(*grouped((3, 60), 70, 80, BF16), dtype=dtype, **made_with), arch, dtype=wanted, **options)


@pytest.mark.parametrize("sizes, tail", [(MANY, 0), ((0, 0, 0), 300), ((256, 128), 0), ((0, 1, 0), 127), ((), 40)])
@pytest.mark.parametrize("options", [CASES["blocks"], CASES["mxfp8, blocked"]], ids=["blocks", "mxfp8"])
def test_routings(sizes, tail, options):
    check(rowwise(*grouped(sizes, tail, 48, BF16), **options), **options)


@pytest.mark.parametrize("columns", [40, 37, 130])
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_widths(options, columns):
    """Rows that begin anywhere."""
    check(rowwise(*grouped((3, 0, 140), 9, columns, BF16), **options), **options)


@pytest.mark.parametrize("options", [CASES["blocks"], CASES["mxfp8, blocked"]], ids=["blocks", "mxfp8"])
def test_groups_without_rows_of_any_width(options):
    """Arguments of kernels are looked at before they run: strides of no rows too."""
    check(rowwise(*grouped((0, 0, 0), 0, 40, BF16), **options), **options)


@pytest.mark.cover(1)
@pytest.mark.parametrize("options", [*CASES.values(), dict(format="fp8_block", block_2d=True)], ids=[*CASES, "squares"])
@pytest.mark.parametrize("rows, columns", [(208, 144), (16, 48), (35, 36)])
def test_matrices(options, rows, columns):
    check(rowwise(awkward(3, rows, columns, dtype=F32), None, **options), **options)


@pytest.mark.slow
@pytest.mark.parametrize("options", [CASES["blocks"], CASES["mxfp8, blocked"]], ids=["blocks", "mxfp8"])
def test_many_schedules(options):
    check(rowwise(*grouped((3, 0, 140), 9, 144, BF16), **options), seeds=range(3), **options)


@pytest.mark.usefixtures("overlapping_groups")
@pytest.mark.parametrize("options", [CASES["blocks"], CASES["mxfp8"], CASES["mxfp8, blocked"]], ids=str)
def test_bad_offsets_stay_inside(options):
    x, offs = torch.randn(100, 64).bfloat16(), torch.tensor([10, 20, 30, 40], dtype=torch.int32)
    data, scale, _ = rowwise(x, offs, **options)
    resolved, specs = requantize._specs(data, scale, offs, **options)
    frame = framed_like(specs.empty())
    bad = torch.tensor([90, -5, 2000, 40], dtype=torch.int32)
    with emulate("sm_100a"):
        out = Components(*frame.inside)
        backends.run("group_requantize", data.device, data, scale, bad, None, options=resolved, out=out)
    assert frame.intact()


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_codes_and_scales_that_begin_anywhere(options):
    x, offs = grouped((3, 0, 140), 9, 48, BF16)
    data, scale, _ = rowwise(x, offs, **options)
    expected = tgl.group_requantize(data, scale, offs, **options)
    with emulate("sm_90a") as machine:
        for codes, factors in ((misaligned(data), scale), (data, misaligned(scale)), (data, scale), (data, scale)):
            made = tgl.group_requantize(codes, factors, offs, **options)
            assert all(map(same_bytes, made, expected))
        assert len(machine.launches) == 4


def test_unsupported_calls_have_reasons():
    x, offs = torch.randn(8, 32).bfloat16(), torch.tensor([8], dtype=torch.int32)
    for format in ("fp8_tensor", "nvfp4", "mxfp4"):
        q = tgl.group_quantize(x, offs, columnwise=False, format=format)
        args = q.data, q.scale, offs, q.amax if format == "nvfp4" else None
        with backends.emulated_device("sm_90"):
            assert f"decodes mxfp8 and fp8_block, got {format}" in str(
                tgl.explain("group_requantize", *args, format=format)
            )


def test_warmup_compiles_what_the_call_needs(monkeypatch):
    data, scale, offs = rowwise(*grouped((3, 0, 140), 9, 48, BF16), format="fp8_block")
    with emulate("sm_90a") as machine:
        tgl.warmup("group_requantize", data, scale, offs, format="fp8_block")
        assert not machine.launches
        monkeypatch.setattr(launcher, "compiled", None)
        tgl.group_requantize(data, scale, offs, format="fp8_block")
        assert len(machine.launches) == 1


def specs():
    """Kernels in which every two properties of a format meet."""

    def codes(format, element, blocked, square, grouped):
        return DequantizeSpec(format, element, "float32", False, blocked, square, False, grouped, 8, 0)

    e4m3, e5m2 = "float8_e4m3fn", "float8_e5m2"
    for i, (blocks, elementwise, in_groups) in enumerate(itertools.product(("1d", "2d"), *2 * [(False, True)])):
        if blocks == "1d" or not in_groups:
            read = codes("fp8_block", (e4m3, e5m2)[i % 2], False, blocks == "2d", in_groups)
            made = "float32", (e4m3, e5m2)[i // 2 % 2], False, True, blocks, bool(i % 2), 0, in_groups
            yield "fp8_block", FP8Spec(*made, elementwise=elementwise, codes=read)
    for i, (blocked, elementwise, in_groups) in enumerate(itertools.product(*3 * [(False, True)])):
        read = codes("mxfp8", (e5m2, e4m3)[i % 2], blocked, False, in_groups)
        scaling = ("rceil", "floor", "even")[i % 3]
        made = "float32", (e4m3, e5m2)[i // 2 % 2], False, True, scaling, blocked, in_groups
        yield "mxfp8", MXFP8Spec(*made, elementwise=elementwise, codes=read)


MACHINE_CODE = [
    pytest.param(arch, format, spec, marks=() if arch == "sm_90" else pytest.mark.slow, id=f"{arch}-{format}-{i}")
    for arch in ARCHS
    for i, (format, spec) in enumerate(specs())
]


@pytest.mark.slices(2)
@pytest.mark.parametrize("arch, format, spec", MACHINE_CODE)
def test_machine_code(arch, format, spec):
    """Nothing in local memory; registers for two blocks where codes are loaded eight at a time."""
    with emulate(ARCHS[arch].target):  # keeps what was compiled
        report = sass.inspect(WRITTEN[format].build(arch, spec).artifacts.CUBIN)
    assert report.spills == report.frame == 0
    usual = format == "fp8_block" or spec.blocked
    if arch == "sm_90" and usual and not spec.elementwise:
        assert report.registers <= 128
