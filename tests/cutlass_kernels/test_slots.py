"""Kernels on matrices at slots of a packed tensor: exact, every byte around them kept, no race, for any numbers."""

import dataclasses

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

import tgl
from tests.cutlass_kernels import gemm_cases
from tests.cutlass_kernels.gemm_cases import CLUSTERS
from tests.kernel_cases import CANARY, ends, gradient, integers, spans
from tgl.cutlass_kernels.archs import ARCHS
from tgl.cutlass_kernels.config import VARLEN_K, VARLEN_M, GemmConfig
from tgl.cutlass_kernels.epilogue import EpilogueSpec
from tgl.cutlass_kernels.launchers import gemm
from tgl.cutlass_kernels.runtime import launcher, names
from tgl.testing import emulate

BF16, F32 = torch.bfloat16, torch.float32
SIZES, TAIL = (3, 0, 70, 65, 1), 5
ROWS = sum(SIZES) + TAIL
LOW, HIGH = -(1 << 31), (1 << 31) - 1
BEYOND = None  # the first number outside the packed tensor
TILINGS = [
    ("sm_90", GemmConfig(64, 64)),
    ("sm_90", GemmConfig(128, 64, pingpong=True)),
    ("sm_90", GemmConfig(128, 128, cluster_n=2)),
    ("sm_100", GemmConfig(128, 64)),
    ("sm_89", GemmConfig(64, 64, stages=5)),
    ("sm_120", GemmConfig(64, 64, stages=5, tma=True)),
    ("sm_100", GemmConfig(256, 64, two_cta=True)),
]
tilings = pytest.mark.parametrize("arch, config", TILINGS, ids=str)
slow = pytest.mark.slow


def offs():
    return ends(SIZES)


def table(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


@dataclasses.dataclass
class Packed:
    """Matrices from the last to the first, at uneven distances in one buffer, as slots that begin every 16 bytes."""

    matrices: torch.Tensor
    fill: float = CANARY
    gaps: tuple[int, ...] = (2, 0, 5, 1, 3)  # units behind each matrix

    def __post_init__(self):
        _, rows, columns = self.matrices.shape
        self.unit = 16 // self.matrices.element_size()
        assert columns % self.unit == 0
        starts, at = [], 1
        for gap in self.gaps:
            starts.insert(0, at)
            at += rows * columns // self.unit + gap
        self.slots = table(*starts)
        self.buffer = torch.full((at * self.unit,), self.fill, dtype=self.matrices.dtype)
        count = at - rows * columns // self.unit + 1
        self.view = self.buffer.as_strided((count, rows, columns), (self.unit, columns, 1))
        for g, slot in enumerate(starts):
            self.view[slot] = self.matrices[g]


def kernel(arch, config, kind, b_unit, spec):
    with emulate(ARCHS[arch].target):
        return gemm_cases.build(gemm.GemmKey(kind, arch, True, "bfloat16", b_unit, spec, config, True))


@tilings
@pytest.mark.parametrize("b_row_major", [True, pytest.param(False, marks=slow)])
def test_rows(arch, config, b_row_major):
    a, b = integers(ROWS, 72, dtype=BF16), integers(5, 72, 104, dtype=BF16)
    a[sum(SIZES) :] = float("nan")
    bias = integers(5, 104, dtype=BF16)
    packed = Packed(b if b_row_major else b.transpose(1, 2).contiguous(), float("nan"))
    view = packed.view if b_row_major else packed.view.transpose(1, 2)
    spec = EpilogueSpec("bfloat16", "bfloat16", tail=True)
    call = kernel(arch, config, VARLEN_M, 2 if b_row_major else 1, spec)
    for absent in ({}, {0: LOW, 2: -1, 3: HIGH}):
        slots = packed.slots.clone()
        for g, number in absent.items():
            slots[g] = number
        expected = torch.zeros(ROWS, 104, dtype=torch.float64)
        for g, rows in spans(SIZES):
            product = a[rows].double() @ b[g].double() if slots[g] == packed.slots[g] else 0
            expected[rows] = product + bias[g].double()
        out = torch.full((ROWS, 104), CANARY, dtype=BF16)
        with emulate(ARCHS[arch].target):
            call(a, view, offs(), out, bias, None, slots, None, CLUSTERS)
        assert torch.equal(out, expected.to(BF16)), absent


@tilings
@pytest.mark.parametrize("dtype", [pytest.param(BF16, marks=slow), F32], ids=str)
@pytest.mark.parametrize("accumulate", [pytest.param(False, marks=slow), True])
def test_depth(arch, config, dtype, accumulate):
    a, b = integers(ROWS, 72, dtype=BF16), integers(ROWS, 104, dtype=BF16)
    a[sum(SIZES) :] = b[sum(SIZES) :] = float("nan")
    call = kernel(arch, config, VARLEN_K, 1, EpilogueSpec(names.name(dtype), accumulate=accumulate))
    for absent in ({}, {0: LOW, 2: -1, 3: HIGH}, {2: BEYOND}):
        packed = Packed(integers(5, 72, 104, dtype=dtype))
        expected = Packed(packed.matrices)
        slots = packed.slots.clone()
        for g, number in absent.items():
            slots[g] = packed.view.shape[0] if number is BEYOND else number
        for g, rows in spans(SIZES):
            if slots[g] == packed.slots[g]:
                product = a[rows].double().t() @ b[rows].double()
                old = packed.matrices[g].double() if accumulate else 0
                expected.view[slots[g]] = (old + product).to(dtype)
        # A group without a slot reads old sums of another group's, and discards them: in any order, so no races here.
        with emulate(ARCHS[arch].target, detect_races=not absent):
            call(a, b, offs(), packed.view, None, None, slots, None, CLUSTERS)
        assert torch.equal(packed.buffer, expected.buffer), absent


# --- ops --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["sm_90a", "sm_100a"])
def machine(request):
    with emulate(request.param) as machine:
        yield machine


def served(machine, name, op, *args, **kwargs):
    """The call's result, after proof of what runs it, in one launch, and that a warmed-up one compiles nothing."""
    explanation = tgl.warmup(op, *args, **kwargs)
    assert explanation.chosen.name == name
    before, known = len(machine.launches), len(launcher.compiled_kernels)
    op(*args, **kwargs)
    result = op(*args, **kwargs)  # the second call finds its plan by its shapes
    assert len(machine.launches) == before + 2
    assert len(launcher.compiled_kernels) == known
    return result


def odd(packed):
    """A packed tensor that no tensor map describes, with what the kernel reads of it."""
    shifted = packed.buffer.new_full((packed.buffer.numel() + 1,), CANARY)[1:]
    shifted.copy_(packed.buffer)
    return shifted, shifted.as_strided(packed.view.shape, packed.view.stride(), 1)


def test_ops(machine):
    kernel = "tgl kernel"
    a, b, dy = integers(ROWS, 72, dtype=BF16), integers(5, 72, 104, dtype=BF16), integers(ROWS, 104, dtype=BF16)
    packed = Packed(b, float("nan"))
    y = torch.cat([*(a[rows] @ b[g] for g, rows in spans(SIZES)), a.new_zeros(TAIL, 104)])
    assert torch.equal(served(machine, kernel, tgl.grouped_gemm, a, packed.view, offs(), slots=packed.slots), y)
    dx = torch.cat([*(dy[rows] @ b[g].t() for g, rows in spans(SIZES)), a.new_zeros(TAIL, 72)])
    turned = packed.view.transpose(1, 2)
    assert torch.equal(served(machine, kernel, tgl.grouped_gemm, dy, turned, offs(), slots=packed.slots), dx)
    # In order without a table, at the same shapes: another kernel.
    assert torch.equal(served(machine, kernel, tgl.grouped_gemm, a, b, offs()), y)
    assert torch.equal(served(machine, kernel, tgl.grouped_gemm, a, b.flip(0), offs(), slots=table(4, 3, 2, 1, 0)), y)

    dw = gradient(a, dy, SIZES)
    grad = Packed(integers(5, 72, 104, dtype=F32))
    expected = Packed((grad.matrices + 2 * dw).float())
    served(machine, kernel, tgl.grouped_gemm_wgrad_accumulate_, a, dy, offs(), grad.view, grad.slots)
    assert torch.equal(grad.buffer, expected.buffer)
    served(machine, kernel, tgl.grouped_gemm_wgrad, a, dy, offs(), grad.slots, out=grad.view)
    assert torch.equal(grad.buffer, Packed(dw.float()).buffer)
    grad.buffer.fill_(CANARY)
    tgl.grouped_gemm_wgrad_accumulate_(a, dy, offs(), grad.view, grad.slots, overwrite=True)
    assert torch.equal(grad.buffer, Packed(dw.float()).buffer)
    # Without rows there is no launch.
    tgl.grouped_gemm_wgrad_accumulate_(a[:0], dy[:0], offs() * 0, grad.view, grad.slots)
    assert torch.equal(grad.buffer, Packed(dw.float()).buffer)
    tgl.grouped_gemm_wgrad(a[:0], dy[:0], offs() * 0, grad.slots, out=grad.view)
    assert torch.equal(grad.buffer, Packed(dw.float() * 0).buffer)


def test_one_slot(machine):
    kernel, slots = "tgl kernel", table(-1, HIGH, 0, LOW, 1)
    a, b, dy = integers(ROWS, 72, dtype=BF16), integers(1, 72, 104, dtype=BF16), integers(ROWS, 104, dtype=BF16)
    rows, y = dict(spans(SIZES))[2], torch.zeros(ROWS, 104, dtype=BF16)
    y[rows] = a[rows] @ b[0]
    assert torch.equal(served(machine, kernel, tgl.grouped_gemm, a, b, offs(), slots=slots), y)
    dw = (a[rows].double().t() @ dy[rows].double())[None].float()
    buffer = torch.zeros(3, 72, 104)
    served(machine, kernel, tgl.grouped_gemm_wgrad_accumulate_, a, dy, offs(), buffer[1:2], slots)
    assert torch.equal(buffer[1:2], 2 * dw)
    served(machine, kernel, tgl.grouped_gemm_wgrad, a, dy, offs(), slots, out=buffer[1:2])
    assert torch.equal(buffer[1:2], dw)
    assert not buffer[::2].any()


def test_between_copies(machine):
    kernel = "tgl kernel between copies"
    a, b, dy = integers(ROWS, 72, dtype=BF16), integers(5, 72, 104, dtype=BF16), integers(ROWS, 104, dtype=BF16)
    packed = Packed(b, float("nan"))
    _, view = odd(packed)
    slots = packed.slots.clone()
    slots[3] = HIGH
    y = torch.cat([*(a[rows] @ b[g] * (g != 3) for g, rows in spans(SIZES)), a.new_zeros(TAIL, 104)])
    assert torch.equal(served(machine, kernel, tgl.grouped_gemm, a, view, offs(), slots=slots), y)
    dx = torch.cat([*(dy[rows] @ b[g].t() * (g != 3) for g, rows in spans(SIZES)), a.new_zeros(TAIL, 72)])
    turned = view.transpose(1, 2)
    assert torch.equal(served(machine, kernel, tgl.grouped_gemm, dy, turned, offs(), slots=slots), dx)
    # A packed tensor within reach of a call whose rows are not is read and written where it is.
    far = a.t().contiguous().t()
    assert torch.equal(served(machine, kernel, tgl.grouped_gemm, far, packed.view, offs(), slots=slots), y)
    dw = gradient(a, dy, SIZES).float()
    grad = Packed(torch.zeros(5, 72, 104))
    served(machine, kernel, tgl.grouped_gemm_wgrad_accumulate_, far, dy, offs(), grad.view, grad.slots)
    assert torch.equal(grad.buffer, Packed(2 * dw).buffer)


def test_an_output_out_of_reach(machine):
    kernel = "tgl kernel between copies"
    a, dy = integers(ROWS, 72, dtype=BF16), integers(ROWS, 135, dtype=BF16)
    dw = gradient(a, dy, SIZES).float()
    start, size = table(4, 3, 2, 1, 0), 72 * 135
    for absent in ((), (1,), (0, 1, 2, 3, 4)):
        slots = start.clone()
        slots[list(absent)] = -1
        buffer = torch.full((5 * (size + 1),), CANARY)
        expected = buffer.clone()
        grad = buffer.as_strided((5, 72, 135), (size + 1, 135, 1))
        for g in set(range(5)) - set(absent):
            expected.as_strided(grad.shape, grad.stride())[slots[g]] = CANARY + 2 * dw[g]
        served(machine, kernel, tgl.grouped_gemm_wgrad_accumulate_, a, dy, offs(), grad, slots)
        assert torch.equal(buffer, expected)
        for g in set(range(5)) - set(absent):
            expected.as_strided(grad.shape, grad.stride())[slots[g]] = dw[g]
        served(machine, kernel, tgl.grouped_gemm_wgrad, a, dy, offs(), slots, out=grad)
        assert torch.equal(buffer, expected)


def scaled_operands(format, x, dy):
    layout = "blocked" if format == "mxfp8" else "compact"
    how = {"format": format, "scale_layout": layout}
    exact = {"rowwise": False, "power_of_two": None if format == "mxfp8" else True}
    a, b = (tgl.group_quantize(t, offs(), **how, **exact) for t in (x, dy))
    return (*a[3:5], *b[3:5], offs()), how


@pytest.mark.parametrize(
    "arch, format",
    [
        ("sm_90", "fp8_tensor"),
        ("sm_90", "fp8_block"),
        ("sm_100", "mxfp8"),
        pytest.param("sm_100", "fp8_block", marks=slow),
    ],
)
@pytest.mark.parametrize("overwrite", [False, True])
def test_scaled_wgrad(arch, format, overwrite):
    x, dy = integers(ROWS, 64, dtype=BF16), integers(ROWS, 96, dtype=BF16)
    operands, how = scaled_operands(format, x, dy)
    dw = gradient(x, dy, SIZES).float()
    grad, wanted = Packed(torch.zeros(5, 64, 96)), Packed(dw * (1 if overwrite else 2))
    slots = grad.slots.clone()
    for g, number in enumerate((HIGH, LOW, -1)):
        slots[g], wanted.view[grad.slots[g]] = number, 0.0
    with emulate(ARCHS[arch].target) as machine:
        op, arguments = tgl.grouped_gemm_scaled_wgrad_accumulate_, (*operands, grad.view, None, None, slots)
        served(machine, "tgl kernel", op, *arguments, **how, overwrite=overwrite)
    assert torch.equal(grad.buffer, wanted.buffer)


@pytest.mark.slow
def test_a_scaled_output_out_of_reach():
    x, dy = integers(ROWS, 64, dtype=BF16), integers(ROWS, 90, dtype=BF16)
    operands, how = scaled_operands("fp8_tensor", x, dy)
    dw = gradient(x, dy, SIZES).float()
    grad, slots = torch.full((7, 64, 90), CANARY), table(6, 5, 3, -1, 0)
    expected = grad.clone()
    expected[[6, 5, 3, 0]] += 2 * dw[[0, 1, 2, 4]]
    with emulate("sm_90a") as machine:
        op, arguments = tgl.grouped_gemm_scaled_wgrad_accumulate_, (*operands, grad, None, None, slots)
        served(machine, "tgl kernel between copies", op, *arguments, **how)
    assert torch.equal(grad, expected)
