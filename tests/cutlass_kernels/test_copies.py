"""Operands and outputs that no tensor map describes: one launch between copies, exact, without synchronising."""

import re

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

import tgl
from tests.kernel_cases import CANARY, column_major, ends, exact, gradient, integers, product
from tests.kernel_cases import poisoned as poisoned_behind
from tests.memory import like, raw
from tgl.cutlass_kernels.runtime import launcher
from tgl.testing import emulate

BF16, F32 = torch.bfloat16, torch.float32
SIZES = (3, 0, 130, 1)
ROWS = sum(SIZES) + 9


@pytest.fixture(scope="module", params=["sm_90a", "sm_100a"])
def machine(request):
    with emulate(request.param, detect_races=False) as machine:
        yield machine


def misaligned(t):
    return t.new_empty(t.numel() + 1)[1:].view(t.shape).copy_(t)


def expanded(t):
    return t[:1].expand_as(t)


def poisoned(t):
    return poisoned_behind(t, SIZES)


def offs():
    return ends(SIZES)


def served(machine, op, *args, **kwargs):
    """The call's result, after proof that it runs between copies, in one launch, and that a warmed-up one compiles
    nothing."""
    explanation = tgl.warmup(op, *args, **kwargs)
    assert explanation.chosen.name == "tgl kernel between copies"
    assert not explanation.syncs
    before, known = len(machine.launches), len(launcher.compiled_kernels)
    result = op(*args, **kwargs)
    assert len(machine.launches) == before + 1
    assert len(launcher.compiled_kernels) == known
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
    assert torch.equal(served(machine, tgl.grouped_gemm, a, b, offs()), product(a, b, SIZES).to(BF16))


def test_an_output_of_odd_pitch_keeps_its_tail(machine):
    a, b = poisoned(integers(ROWS, 72, dtype=BF16)), integers(len(SIZES), 72, 39, dtype=BF16)
    buffer = torch.full((ROWS, 45), CANARY, dtype=BF16)
    served(machine, tgl.grouped_gemm, a, b, offs(), out=buffer[:, :39])
    assert torch.equal(buffer[: sum(SIZES), :39], product(a, b, SIZES)[: sum(SIZES)].to(BF16))
    assert buffer[sum(SIZES) :].eq(CANARY).all()
    assert buffer[:, 39:].eq(CANARY).all()


def test_the_log_names_kernels_and_copies(machine, caplog):
    caplog.set_level("DEBUG", "tgl")
    a, b = misaligned(integers(ROWS, 80, dtype=BF16)), integers(len(SIZES), 80, 40, dtype=BF16)
    launcher.compiled_kernels.clear()
    launcher.forget()
    tgl.grouped_gemm(a, b, offs())
    copied, compiled = (record.getMessage() for record in caplog.records)
    assert copied == f"tgl::grouped_gemm copies `a` ({a.nbytes} bytes)"
    assert re.fullmatch(r"compiled Sm\d+\w*Kernel for sm_\d+\w in \d+\.\d s", compiled)


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
    wanted = gradient(a, b, SIZES)
    assert torch.equal(served(machine, tgl.grouped_gemm_wgrad, a, b, offs()), wanted.to(BF16))
    for dtype in (F32, BF16):
        main_grad = integers(*wanted.shape, dtype=dtype)
        total = (main_grad.double() + wanted).to(dtype)
        main_grad[1] = float("nan")  # an empty group's slot keeps its bytes
        served(machine, tgl.grouped_gemm_wgrad_accumulate_, a, b, offs(), main_grad)
        assert main_grad[1].isnan().all()
        assert torch.equal(main_grad[[0, 2, 3]], total[[0, 2, 3]])


def test_calls_that_no_copy_helps_have_reasons(machine):
    a, b = integers(ROWS, 72, dtype=BF16), integers(len(SIZES), 72, 40, dtype=BF16)
    for args, reason in (((a.float(), b.float()), "takes bfloat16"), ((a[:, :0], b[:, :0]), "K = 0")):
        refused = {i.name: why for i, why in tgl.explain("grouped_gemm", *args, offs()).refused}
        assert reason in refused["tgl kernel between copies"]


SCALED = {
    "mxfp8, odd depth": ("sm_100", "mxfp8", "rowwise", 40, 48, ()),
    "mxfp8, columnwise weights, odd columns": ("sm_100", "mxfp8", "columnwise", 64, 39, ()),
    "nvfp4, odd depth, misaligned scales": ("sm_100", "nvfp4", "rowwise", 36, 48, (1, 3)),
    "fp8_tensor, odd depth and columns": ("sm_90", "fp8_tensor", "columnwise", 40, 39, ()),
    "fp8_block, misaligned operands and scales": ("sm_90", "fp8_block", "rowwise", 64, 48, (0, 1, 2, 3)),
}


def moved(t):
    """The same bytes, at an address that is no multiple of 16."""
    room = like(torch.empty(t.numel() + 1, dtype=t.dtype)[1:], t)
    raw(room).copy_(raw(t))
    return room


@pytest.mark.parametrize("arch, format, direction, depth, columns, elsewhere", SCALED.values(), ids=SCALED)
def test_grouped_gemm_scaled(arch, format, direction, depth, columns, elsewhere):
    options = {"format": format} | ({"scale_layout": "blocked"} if format in ("mxfp8", "nvfp4") else {})
    x = poisoned(exact(ROWS, depth))
    w = exact(len(SIZES), *((depth, columns) if direction == "columnwise" else (columns, depth)))
    q = tgl.group_quantize(x, offs(), **options)
    p = tgl.group_quantize(w, None, **options, block_2d=format == "fp8_block")
    b, b_scale, b_amax = p[3:6] if direction == "columnwise" else p[:3]
    operands = [q.data, q.scale, b, b_scale]
    for i in elsewhere:
        operands[i] = moved(operands[i])
    operands += [offs(), *((q.amax, b_amax) if format == "nvfp4" else ())]
    options["b_direction"] = direction
    wanted = tgl.grouped_gemm_scaled(*operands, **options)
    with emulate(f"{arch}a", detect_races=False) as machine:
        assert torch.equal(served(machine, tgl.grouped_gemm_scaled, *operands, **options), wanted)
        if columns % 8:
            buffer = torch.full((ROWS, columns + 6), CANARY, dtype=BF16)
            served(machine, tgl.grouped_gemm_scaled, *operands, **options, out=buffer[:, :columns])
            assert torch.equal(buffer[: sum(SIZES), :columns], wanted[: sum(SIZES)])
            assert buffer[sum(SIZES) :].eq(CANARY).all()
            assert buffer[:, columns:].eq(CANARY).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "arch, format",
    [("sm_100", "mxfp8"), ("sm_90", "fp8_tensor"), ("sm_100", "nvfp4")],
)
def test_wgrad_scaled(arch, format):
    options = {"format": format} | ({"scale_layout": "blocked"} if format in ("mxfp8", "nvfp4") else {})
    q = tgl.group_quantize(poisoned(exact(ROWS, 40)), offs(), rowwise=False, **options)
    p = tgl.group_quantize(poisoned(exact(ROWS, 38)), offs(), rowwise=False, **options)
    amax = (q.columnwise_amax, p.columnwise_amax) if format == "nvfp4" else ()
    operands = (moved(q.columnwise_data), q.columnwise_scale, p.columnwise_data, moved(p.columnwise_scale), offs())
    main_grad = integers(len(SIZES), 40, 38, dtype=F32)
    wanted = tgl.grouped_gemm_scaled_wgrad(*operands, *amax, **options, out_dtype=F32)
    total = main_grad + wanted
    with emulate(f"{arch}a", detect_races=False) as machine:
        wgrad, accumulate = tgl.grouped_gemm_scaled_wgrad, tgl.grouped_gemm_scaled_wgrad_accumulate_
        assert torch.equal(served(machine, wgrad, *operands, *amax, **options, out_dtype=F32), wanted)
        main_grad[1] = float("nan")  # an empty group's slot keeps its bytes
        served(machine, accumulate, *operands, main_grad, *amax, **options)
    assert main_grad[1].isnan().all()
    assert torch.equal(main_grad[[0, 2, 3]], total[[0, 2, 3]])
