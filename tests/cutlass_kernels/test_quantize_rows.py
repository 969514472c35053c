"""Quantising kernels that read rows by an index: the CPU's bytes of rows in any order, and no copy of x."""

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

import tgl
from tests import chips
from tests.cutlass_kernels import sass
from tests.cutlass_kernels.test_quantize import BF16, F16, F32, awkward, check
from tests.kernel_cases import ends
from tests.memory import same_bytes
from tgl.cutlass_kernels.archs import ARCHS
from tgl.cutlass_kernels.launchers.quantize import WRITTEN
from tgl.cutlass_kernels.quantize.quantize_spec import FP8Spec, MXFP8Spec, NVFP4Spec
from tgl.cutlass_kernels.runtime import launcher
from tgl.meta.table import OnePerName
from tgl.testing import emulate

BY_VECTORS, BY_ELEMENTS, BY_COPIES = "tgl kernel", "tgl kernel, element by element", "tgl kernel between copies"
SIZES, TOKENS = (5, 0, 130, 1, 40), 30
NEVER = TOKENS - 1  # a token of no row
LOW, HIGH = -(1 << 31), (1 << 31) - 1
TAIL = (-1, LOW, HIGH, TOKENS, NEVER)
ROUTED = sum(SIZES)
ROWS = ROUTED + len(TAIL)
DELAYED = torch.tensor([1.0, 0.5, 4.0, 2.0, 1.0])
CASES = OnePerName(
    WRITTEN,
    "CASES",
    {
        "mxfp8": [{"scale_layout": "blocked"}, {}],
        "nvfp4": [{"scale_layout": "blocked"}, {"rht": True}, {"rng": torch.tensor([3, 5])}],
        "fp8_tensor": [{}, {"scale": DELAYED}],
        "fp8_block": [{}, {"power_of_two": False}],
    },
)
slow = pytest.mark.slow
ALL = [{"format": name, **options} for name in WRITTEN for options in CASES[name]]
every_case = pytest.mark.parametrize(
    "options", ALL, ids=lambda o: ", ".join([o["format"], *sorted(set(o) - {"format"})])
)
formats = pytest.mark.parametrize("format", WRITTEN)


def index(seed=0):
    """Tokens of the rows, some of them often, and numbers that mean nothing for the tail."""
    numbers = torch.randint(0, NEVER, (ROUTED,), generator=torch.Generator().manual_seed(seed))
    return torch.cat([numbers, torch.tensor(TAIL)]).int()


def tokens(columns, dtype=BF16):
    """NaN for the token of no row, none beside it."""
    torch.manual_seed(columns)
    made = awkward(TOKENS, columns, dtype=dtype)
    made[NEVER] = float("nan")
    return made


def served(x, rows, arch="sm_90a", **options):
    with emulate(arch):
        return tgl.explain("group_quantize", x, ends(SIZES), rows=rows, **options)


@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=slow)])
@formats
def test_bytes(arch, format):
    """Numbers of no row are rows of zeros."""
    options = {"format": format, **CASES[format][0]}
    rows = index()
    rows[[2, 60, 170]] = torch.tensor([-1, HIGH, TOKENS], dtype=torch.int32)
    report = served(tokens(136), rows, arch, **options)
    assert report.chosen.name == BY_VECTORS
    assert not report.copies
    check(tokens(136), ends(SIZES), arch, rows=rows, **options)


@pytest.mark.slices(2)
@slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@every_case
@pytest.mark.parametrize("directions", [(True, False), (False, True), (True, True)], ids=["rows", "columns", "both"])
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_every_way(arch, options, directions, dtype):
    rowwise, columnwise = directions
    options = {**options, "rowwise": rowwise, "columnwise": columnwise}
    if not columnwise:
        options.pop("rht", None)
    check(tokens(272, dtype), ends(SIZES), arch, seeds=range(2), rows=index(), **options)


@pytest.mark.parametrize("options", [ALL[0], *(pytest.param(o, marks=slow) for o in ALL[1:])], ids=str)
def test_row_scale(options):
    factors = torch.rand(ROWS)
    factors[[3, 50]] = torch.tensor([float("inf"), -1.0])
    factors[ROUTED:] = float("nan")
    rows = index()
    rows[[3, 50]] = -1  # zeros times infinity are NaN, times a negative number zeros with a sign
    check(tokens(72), ends(SIZES), rows=rows, row_scale=factors, **options)


LAYOUTS = {
    "odd width": lambda x: x[:, :60].contiguous(),
    "odd pitch": lambda x: x[:, :72],
    "column-major": lambda x: x.t().contiguous().t(),
    "misaligned": lambda x: torch.cat([x.new_zeros(3), x.flatten()])[3:].view(x.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("format", ["mxfp8", *(pytest.param(f, marks=slow) for f in WRITTEN if f != "mxfp8")])
def test_layouts(format, layout):
    """Operands that are read by single elements are not copied."""
    x, options = layout(tokens(75 if layout is LAYOUTS["odd pitch"] else 72)), {"format": format}
    assert served(x, index(), **options).chosen.name == BY_ELEMENTS
    check(x, ends(SIZES), "sm_90a", rows=index(), **options)


@pytest.mark.parametrize("format", ["fp8_block", *(pytest.param(f, marks=slow) for f in WRITTEN if f != "fp8_block")])
def test_nothing_to_read(format):
    x, rows = tokens(72), index()
    check(x[:0], ends(SIZES), rows=rows, format=format)
    check(x[:0, :60], ends(SIZES), rows=rows, format=format)
    check(x, torch.zeros(3, dtype=torch.int32), rows=torch.tensor(TAIL, dtype=torch.int32), format=format)
    with emulate("sm_90a"):
        made = tgl.group_quantize(x, torch.zeros(3, dtype=torch.int32), rows=rows[:0], format=format)
    wanted = tgl.group_quantize(x[:0], torch.zeros(3, dtype=torch.int32), format=format)
    assert all(map(same_bytes, made, wanted))


@pytest.mark.usefixtures("overlapping_groups")
@pytest.mark.parametrize("format", ["fp8_tensor", *(pytest.param(f, marks=slow) for f in WRITTEN if f != "fp8_tensor")])
def test_bad_offsets_stay_inside(format):
    """Then too, no number past the last end is looked at."""
    x, rows, options = tokens(72), index(), {"format": format}
    with emulate("sm_90a"):
        for bad in ([90, -5, 2000, 40], [-9, 300, 20, -1]):
            tgl.group_quantize(x, torch.tensor(bad, dtype=torch.int32), rows=rows, **options)


def test_other_numbers_of_rows_and_tokens_are_the_same_kernel(monkeypatch):
    for table in ("compiled_kernels", "warm_plans"):  # whatever other tests of the process have called
        monkeypatch.setattr(launcher, table, {})
    x, rows, options = tokens(72), index(), {"format": "mxfp8"}
    with emulate("sm_90a") as machine:
        tgl.warmup(tgl.group_quantize, x, ends(SIZES), rows=rows, **options)
        known, before = len(launcher.compiled_kernels), len(machine.launches)
        for count, some in ((TOKENS, 176), (NEVER, 100), (TOKENS, 181)):
            tgl.group_quantize(x[:count], ends((some, 0, 0, 0, 0)), rows=rows[:some], **options)
        assert (len(launcher.compiled_kernels), len(machine.launches)) == (known, before + 3)
        found = len(launcher.warm_plans)
        tgl.group_quantize(x, ends(SIZES), rows=index(1), **options)
        assert len(launcher.warm_plans) == found
        tgl.group_quantize(x, ends((20, 0, 0, 0, 10)), **options)  # in order
        assert len(launcher.compiled_kernels) == known + 1


@pytest.mark.parametrize("weighted", [False, True])
def test_sums_are_those_of_a_copy_in_order(weighted):
    x, rows = torch.randint(-4, 5, (TOKENS, 72)).to(BF16), index()
    extra = {"row_scale": torch.ones(ROWS, dtype=BF16) / 2} if weighted else {}
    wanted = tgl.group_quantize(x, ends(SIZES), rows=rows, format="mxfp8", dbias=True, **extra)
    with emulate("sm_90a") as machine:
        report = tgl.warmup(tgl.group_quantize, x, ends(SIZES), rows=rows, format="mxfp8", dbias=True, **extra)
        assert report.chosen.name == BY_COPIES
        assert dict(report.copies) == {"x": ROWS * 72 * 2}
        known, launched = len(launcher.compiled_kernels), [len(machine.launches)]
        made = tgl.group_quantize(x, ends(SIZES), rows=rows, format="mxfp8", dbias=True, **extra)
        launched.append(len(machine.launches))
        tgl.group_quantize(x[rows.clamp(0, NEVER).long()], ends(SIZES), format="mxfp8", dbias=True, **extra)
        launched.append(len(machine.launches))
        assert launched[1] - launched[0] == launched[2] - launched[1] + 1  # the copy
        assert len(launcher.compiled_kernels) == known
    assert all(map(same_bytes, made, wanted))


def spec_of(format, arch, source):
    """The one with most to hold that blocks share a multiprocessor with."""
    converts = ARCHS[arch].rounds_to_fp4
    return OnePerName(
        WRITTEN,
        "SPECS",
        {
            "mxfp8": MXFP8Spec(source, "float8_e4m3fn", True, True, "rceil", True, True, rows=True),
            "nvfp4": NVFP4Spec(source, True, True, False, True, True, False, False, converts, rows=True),
            "fp8_tensor": FP8Spec(source, "float8_e4m3fn", True, True, None, False, 0, True, rows=True),
            "fp8_block": FP8Spec(source, "float8_e4m3fn", True, True, "1d", True, 0, True, rows=True),
        },
    )[format]


@pytest.mark.slices(2)
@pytest.mark.parametrize("arch", chips.parameters())
@pytest.mark.parametrize("format", ["mxfp8", *(pytest.param(f, marks=slow) for f in WRITTEN if f != "mxfp8")])
@pytest.mark.parametrize("source", ["bfloat16", pytest.param("float32", marks=slow)])
def test_machine_code(arch, format, source):
    """An index costs no registers, and nothing is in local memory. Before 9.0 one block may have all registers."""
    with emulate(ARCHS[arch].target):  # keeps what was compiled
        kernel = WRITTEN[format].build(arch, spec_of(format, arch, source))
    report = sass.inspect(kernel.artifacts.CUBIN)
    assert (report.spills, report.frame) == (0, 0)
    if int(arch.removeprefix("sm_")) >= 90:
        assert report.registers <= (80 if source == "bfloat16" else 128)
