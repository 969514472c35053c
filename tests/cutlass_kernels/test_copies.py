"""Operands and outputs that no tensor map describes: one launch between copies, exact, without synchronising."""

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

import tgl
from tests.cutlass_kernels.gemm_cases import CANARY, integers
from tgl.cutlass_kernels import launch
from tgl.testing.emulator import emulate

BF16, F32 = torch.bfloat16, torch.float32
SIZES = (3, 0, 130, 1)
ROWS = sum(SIZES) + 9


@pytest.fixture(scope="module", params=["sm_90a", "sm_100a"])
def machine(request):
    with emulate(request.param, detect_races=False) as machine:
        yield machine


def column_major(t):
    return t.transpose(-1, -2).contiguous().transpose(-1, -2)


def misaligned(t):
    return t.new_empty(t.numel() + 1)[1:].view(t.shape).copy_(t)


def expanded(t):
    return t[:1].expand_as(t)


def poisoned(t):
    t[sum(SIZES) :] = float("nan")
    return t


def offs():
    return torch.tensor(SIZES).cumsum(0).int()


def spans():
    ends = offs().tolist()
    return list(zip([0, *ends], ends))


def served(machine, op, *args, **kwargs):
    """The call's result, after proof that it runs between copies, in one launch, and that a warmed-up one compiles
    nothing."""
    explanation = tgl.warmup(op, *args, **kwargs)
    assert explanation.chosen.name == "tgl kernel between copies"
    assert not explanation.syncs
    before, plans = len(machine.launches), len(launch._plans)
    result = op(*args, **kwargs)
    assert len(machine.launches) == before + 1
    assert len(launch._plans) == plans
    return result


GEMM = {
    "column-major a": (lambda a, b: (column_major(a), b)),
    "misaligned a": (lambda a, b: (misaligned(a), b)),
    "expanded a": (lambda a, b: (expanded(a), b)),
    "odd depth": (lambda a, b: (a[:, :71].contiguous(), b[:, :71])),
    "misaligned b": (lambda a, b: (a, misaligned(b))),
    "expanded b": (lambda a, b: (a, expanded(b))),
    "odd columns": (lambda a, b: (a, b[..., :39].contiguous())),
}


@pytest.mark.parametrize("layout", GEMM.values(), ids=GEMM)
def test_grouped_gemm(machine, layout):
    a, b = layout(integers(ROWS, 72, dtype=BF16), integers(len(SIZES), 72, 40, dtype=BF16))
    if a.stride(0):
        poisoned(a)
    wanted = torch.zeros(ROWS, b.shape[2], dtype=torch.float64)
    for g, (start, end) in enumerate(spans()):
        wanted[start:end] = a[start:end].double() @ b[g].double()
    assert torch.equal(served(machine, tgl.grouped_gemm, a, b, offs()), wanted.to(BF16))


def test_an_output_of_odd_pitch_keeps_its_tail(machine):
    a, b = poisoned(integers(ROWS, 72, dtype=BF16)), integers(len(SIZES), 72, 39, dtype=BF16)
    buffer = torch.full((ROWS, 45), CANARY, dtype=BF16)
    served(machine, tgl.grouped_gemm, a, b, offs(), out=buffer[:, :39])
    for g, (start, end) in enumerate(spans()):
        assert torch.equal(buffer[start:end, :39], (a[start:end].double() @ b[g].double()).to(BF16))
    assert buffer[sum(SIZES) :].eq(CANARY).all()
    assert buffer[:, 39:].eq(CANARY).all()


WGRAD = {
    "column-major a": (lambda a, b: (column_major(a), b)),
    "column-major b": (lambda a, b: (a, column_major(b))),
    "both": (lambda a, b: (column_major(a), column_major(b))),
    "expanded b": (lambda a, b: (a, expanded(b))),
    "odd rows and columns": (lambda a, b: (a[:, :71].contiguous(), b[:, :39].contiguous())),
}


@pytest.mark.parametrize("layout", WGRAD.values(), ids=WGRAD)
def test_wgrad(machine, layout):
    a, b = layout(integers(ROWS, 72, dtype=BF16), integers(ROWS, 40, dtype=BF16))
    for t in (a, b):
        if t.stride(0):
            poisoned(t)
    wanted = torch.stack([a[start:end].double().t() @ b[start:end].double() for start, end in spans()])
    assert torch.equal(served(machine, tgl.grouped_gemm_wgrad, a, b, offs()), wanted.to(BF16))
    for dtype in (F32, BF16):
        main_grad = integers(*wanted.shape, dtype=dtype)
        total = (main_grad.double() + wanted).to(dtype)
        main_grad[1] = float("nan")  # an empty group's slot keeps its bytes
        served(machine, tgl.grouped_gemm_wgrad_accumulate_, a, b, offs(), main_grad)
        assert main_grad[1].isnan().all()
        assert torch.equal(main_grad[[0, 2, 3]], total[[0, 2, 3]])


def test_what_no_copy_helps_has_a_reason(machine):
    a, b = integers(ROWS, 72, dtype=BF16), integers(len(SIZES), 72, 40, dtype=BF16)
    for args, reason in (((a.float(), b.float()), "takes bfloat16"), ((a[:, :0], b[:, :0]), "K = 0")):
        refused = {i.name: why for i, why in tgl.explain("grouped_gemm", *args, offs()).refused}
        assert reason in refused["tgl kernel between copies"]
