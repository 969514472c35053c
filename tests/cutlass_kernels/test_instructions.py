"""Chips before 9.0, which lack instructions: kernels that quantise, decode, sum and route have the bits of the CPU."""

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

import tgl
from tests.cutlass_kernels import sass, test_dequantize
from tests.cutlass_kernels.test_dequantize import KERNELS, operand
from tests.cutlass_kernels.test_quantize import BF16, E5M2, F16, F32, check, grouped
from tests.cutlass_kernels.test_quantize_rows import spec_of
from tests.kernel_cases import ends, integers
from tests.memory import same_bytes
from tgl.cutlass_kernels.archs import ARCHS
from tgl.cutlass_kernels.launchers import reduce, route
from tgl.cutlass_kernels.launchers.dequantize import GROUP_DEQUANTIZE, DequantizeKey
from tgl.cutlass_kernels.launchers.quantize import WRITTEN
from tgl.meta.table import OnePerName
from tgl.testing import emulate

BEFORE = tuple(name for name, arch in ARCHS.items() if not arch.bulk_copies)  # no FP8 on the first two
SHORT = (5, 0, 130)
SOURCES = "bfloat16", "float32"
slow = pytest.mark.slow


@pytest.mark.parametrize("arch", ["sm_80", pytest.param("sm_86", marks=slow), pytest.param("sm_89", marks=slow)])
@pytest.mark.parametrize("element", [torch.float8_e4m3fn, E5M2], ids=str)
def test_every_number_of_16_bits_becomes_the_nearest_of_fp8(arch, element):
    """Every bfloat16, times 1: ties, numbers below the smallest normal one, too large ones, zeros of both signs."""
    x = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(BF16).view(512, 128)
    options = {"format": "fp8_tensor", "dtype": element, "columnwise": False}
    expected = tgl.group_quantize(x, ends((512,)), torch.ones(1), **options)
    with emulate(arch, detect_races=False) as machine:
        found = tgl.group_quantize(x, ends((512,)), torch.ones(1), **options)
        assert machine.launches
    assert same_bytes(found.data, expected.data)


@pytest.mark.parametrize("arch", ["sm_80", pytest.param("sm_86", marks=slow), pytest.param("sm_89", marks=slow)])
@pytest.mark.parametrize("element", [torch.float8_e4m3fn, E5M2], ids=str)
def test_every_code_of_fp8_is_decoded(arch, element):
    x = torch.zeros(8, 64, dtype=BF16)
    q = operand(x, ends((8,)), "mxfp8", dtype=element)
    q.data.view(torch.uint8)[:4] = torch.arange(256).view(4, 64)
    test_dequantize.check(q, F32, arch=arch)


QUANTIZED = OnePerName(
    WRITTEN,
    "QUANTIZED",
    {"mxfp8": {}, "nvfp4": {"rht": True}, "fp8_block": {"dtype": E5M2}, "fp8_tensor": {}},
)


@pytest.mark.parametrize("name", [n if n == "fp8_block" else pytest.param(n, marks=slow) for n in QUANTIZED])
def test_quantised(name):
    check(*grouped(SHORT, 9, 144, BF16), arch="sm_80", format=name, **QUANTIZED[name])


@slow
@pytest.mark.parametrize("arch", BEFORE)
@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_quantised_under_many_schedules(arch, name, dtype):
    options = {"format": name, **QUANTIZED[name]}
    if options.get("rht") and dtype != BF16:
        options["rht"] = False
    check(*grouped(SHORT, 9, 144, dtype), arch=arch, seeds=(0, 1, 2), **options)


@slow
@pytest.mark.parametrize("arch", BEFORE)
@pytest.mark.parametrize("format", WRITTEN)
@pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "columnwise"])
def test_decoded(arch, format, columnwise):
    test_dequantize.check(operand(*grouped(SHORT, 9, 144, BF16), format, columnwise=columnwise), arch=arch)


@pytest.mark.parametrize("arch", ["sm_80", *(pytest.param(name, marks=slow) for name in BEFORE[1:])])
def test_sums_of_rows(arch):
    """Sums of rows stay in registers; groups of several tiles cost one more launch."""
    sizes = (3, 0, 600, 1)
    dy = integers(sum(sizes) + 5, 264, dtype=BF16)
    dy[sum(sizes) :] = float("nan")
    assert not reduce.cut_of(arch, torch.empty(1 << 15, 768, dtype=BF16), None).slots
    with emulate(arch) as machine:
        found = tgl.grouped_dbias(dy, ends(sizes))
        assert machine.launches
    assert torch.equal(found, torch.stack([part.float().sum(0) for part in dy[: sum(sizes)].split(sizes)]))


def test_choices_of_many_tokens_are_routed_by_two_launches():
    chosen = torch.randint(0, 5, (route.TILE + 300, 1))
    expected = tgl.route(chosen, 4)
    with emulate("sm_80") as machine:
        found = tgl.route(chosen, 4)
        assert len(machine.launches) == 2
    for name in ("source", "position", "token", "offs"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


@slow
@pytest.mark.parametrize("arch", BEFORE)
def test_machine_code(arch):
    """Nothing in local memory: quantisers with most to hold, everything that decodes, and sums."""
    made = [lambda f=f, s=s: WRITTEN[f].build(arch, spec_of(f, arch, s)) for f in WRITTEN for s in SOURCES]
    made += [lambda s=s: GROUP_DEQUANTIZE.build(DequantizeKey(arch, True, s)) for s in KERNELS.values()]
    cuts = [reduce.DbiasTiling(vector, across) for vector, across in ((8, 8), (8, 16), (1, 16))]
    made += [lambda cut=cut: reduce.build(reduce.ReduceKey(arch, True, "bfloat16", cut)) for cut in cuts]
    for build in made:
        with emulate(arch):  # keeps what was compiled
            report = sass.inspect(build().artifacts.CUBIN)
        assert (report.spills, report.frame) == (0, 0)
