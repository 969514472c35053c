"""Quantising kernels on matrices at slots of a packed tensor: the CPU's bytes, for any numbers, and no copy of x."""

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

import tgl
from tests import chips
from tests.cutlass_kernels import sass
from tests.cutlass_kernels.test_quantize import BF16, F32, awkward, check
from tgl.cutlass_kernels.archs import ARCHS
from tgl.cutlass_kernels.launchers.quantize import WRITTEN
from tgl.cutlass_kernels.quantize.quantize_spec import FP8Spec, MXFP8Spec, NVFP4Spec
from tgl.cutlass_kernels.runtime import launcher
from tgl.meta.table import OnePerName
from tgl.testing import emulate

BY_VECTORS, BY_ELEMENTS = "tgl kernel", "tgl kernel, element by element"
LOW, HIGH = -(1 << 31), (1 << 31) - 1
BEYOND = None  # the first number outside the packed tensor
G, K = 3, 136
DELAYED = torch.tensor([1.0, 0.5, 4.0])
CASES = OnePerName(
    WRITTEN,
    "CASES",
    {
        "mxfp8": [{"scale_layout": "blocked"}, {}],
        "nvfp4": [{"scale_layout": "blocked"}, {"block_2d": True}, {"rng": torch.tensor([3, 5])}],
        "fp8_tensor": [{}, {"scale": DELAYED}],
        "fp8_block": [{}, {"block_2d": True}],
    },
)
slow = pytest.mark.slow
ALL = [{"format": name, **options} for name in WRITTEN for options in CASES[name]]


def cases(*quick):
    """Every case; those of other formats than ``quick``, and all but the first of each, are slow."""
    marked, met = [], set()
    for options in ALL:
        name = options["format"]
        marks = () if name in quick and name not in met else slow
        met.add(name)
        marked.append(pytest.param(options, marks=marks, id=", ".join([name, *(set(options) - {"format"})])))
    return pytest.mark.parametrize("options", marked)


def packed(matrices, unit=8, transposed=False):
    """Place matrices from last to first, at uneven distances in a buffer of NaN, as slots of ``unit`` values."""
    groups, rows, columns = matrices.shape
    size = -(-rows * columns // unit)
    starts = [1 + i * size + i * i for i in range(groups)][::-1]
    buffer = matrices.new_full(((starts[0] + size) * unit,), float("nan"))
    strides = (unit, 1, rows) if transposed else (unit, columns, 1)
    view = buffer.as_strided((starts[0] + 1, rows, columns), strides)
    for start, matrix in zip(starts, matrices):
        view[start] = matrix
    return view, torch.tensor(starts, dtype=torch.int32)


def served_by(arch, x, slots, **options):
    with emulate(arch):
        explained = tgl.explain("group_quantize", x, None, slots=slots, **options)
    return explained.chosen.name


@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=slow)])
@cases(*WRITTEN)
def test_bytes(arch, options):
    view, slots = packed(awkward(G, 160, K, dtype=BF16))
    slots[1] = HIGH
    assert served_by(arch, view, slots, **options) == BY_VECTORS
    check(view, None, arch, slots=slots, **options)


@cases()
@pytest.mark.parametrize("absent", [{0: LOW, 2: BEYOND}, {1: -1, 2: HIGH}, {0: HIGH, 1: LOW, 2: -1}], ids=str)
def test_a_number_of_no_slot_is_a_matrix_of_zeros(options, absent):
    view, slots = packed(torch.full((G, 32, 40), float("inf"), dtype=BF16))
    for g, number in absent.items():
        slots[g] = view.shape[0] if number is BEYOND else number
    check(view, None, slots=slots, **options)


@cases()
@pytest.mark.parametrize("directions", [(True, False), (False, True)], ids=["rows", "columns"])
def test_one_direction(options, directions):
    view, slots = packed(awkward(G, 32, 40, dtype=F32), unit=4)
    check(view, None, slots=slots, rowwise=directions[0], columnwise=directions[1], **options)


LAYOUTS = {
    "odd sizes": lambda w: packed(w, unit=4),
    "odd distances": lambda w: packed(w[:, :32, :40].contiguous(), unit=1),
    "transposed": lambda w: packed(w, unit=4, transposed=True),
}


@cases("mxfp8")
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(options, layout):
    """Operands that are read by single elements are not copied."""
    view, slots = layout(awkward(G, 38, 60, dtype=BF16))
    slots[1] = -1
    assert served_by("sm_90a", view, slots, **options) == BY_ELEMENTS
    check(view, None, "sm_90a", slots=slots, **options)


def test_another_order_of_the_same_slots_is_the_same_kernel():
    w, options = awkward(G, 32, 40, dtype=BF16), {"format": "mxfp8"}
    with emulate("sm_90a") as machine:
        tgl.group_quantize(w, None, slots=torch.tensor([2, 1, 0], dtype=torch.int32), **options)
        known, before = len(launcher.compiled_kernels), len(machine.launches)
        for order in ([0, 1, 2], [1, 1, -1], [2, 0]):
            tgl.group_quantize(w, None, slots=torch.tensor(order, dtype=torch.int32), **options)
        assert (len(launcher.compiled_kernels), len(machine.launches)) == (known, before + 3)
        tgl.group_quantize(w, None, slots=torch.tensor([], dtype=torch.int32), **options)
        assert len(machine.launches) == before + 3
        tgl.group_quantize(w, None, **options)
        assert len(launcher.compiled_kernels) == known + 1


SPECS = OnePerName(
    WRITTEN,
    "SPECS",
    {
        "mxfp8": MXFP8Spec("bfloat16", "float8_e4m3fn", True, True, "rceil", True, False, slots=True),
        "nvfp4": NVFP4Spec("bfloat16", True, True, False, True, False, False, False, True, slots=True),
        "fp8_tensor": FP8Spec("bfloat16", "float8_e4m3fn", True, True, None, False, 0, False, slots=True),
        "fp8_block": FP8Spec("bfloat16", "float8_e4m3fn", True, True, "2d", True, 0, False, slots=True),
    },
)


@pytest.mark.slices(2)
@pytest.mark.parametrize("arch", chips.parameters())
@pytest.mark.parametrize("format", ["mxfp8", *(pytest.param(f, marks=slow) for f in WRITTEN if f != "mxfp8")])
def test_machine_code(arch, format):
    """A table costs no registers, and nothing is in local memory."""
    spec = SPECS[format]
    if format == "nvfp4":
        spec = NVFP4Spec(**{**spec.__dict__, "converts": ARCHS[arch].rounds_to_fp4})
    with emulate(ARCHS[arch].target):  # keeps what was compiled
        kernel = WRITTEN[format].build(arch, spec)
    report = sass.inspect(kernel.artifacts.CUBIN)
    assert (report.spills, report.frame) == (0, 0)
