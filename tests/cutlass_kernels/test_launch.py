"""The path from an op to a launch: when kernels are compiled, which calls they do not take and why."""

import subprocess
import sys

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

import tgl
from tests.cutlass_kernels.gemm_cases import Case, kernel
from tests.kernel_cases import CANARY, ends, framed, integers, poisoned, stored
from tgl import backends
from tgl.cutlass_kernels.config import VARLEN_K, VARLEN_M, GemmConfig
from tgl.cutlass_kernels.launchers import gemm
from tgl.cutlass_kernels.runtime import launcher
from tgl.testing import emulate

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(scope="module")
def machine():
    with emulate("sm_100a", detect_races=False) as machine:
        yield machine


def operands(sizes, tail=9, depth=72, columns=40, dtype=BF16):
    a = poisoned(integers(sum(sizes) + tail, depth, dtype=dtype), sizes)
    return a, integers(len(sizes), depth, columns, dtype=dtype), ends(sizes)


def test_importing_tgl_does_not_import_the_dsl():
    code = "import tgl, sys; sys.exit('cutlass' in sys.modules or 'tvm_ffi' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_forward_and_backward_run_one_kernel_per_op(machine):
    a, b, offs = operands([3, 0, 130, 1])
    dy = integers(a.shape[0], b.shape[2], dtype=BF16)
    dy[offs[-1] :] = float("nan")
    results = []
    for emulated in (True, False):
        x, w = a.clone().requires_grad_(), b.clone().requires_grad_()
        before = len(machine.launches)
        if emulated:
            y = tgl.grouped_gemm(x, w, offs)
            y.backward(dy)
            assert len(machine.launches) == before + 3
        else:
            with backends.emulated_device("no such device"):
                y = tgl.grouped_gemm(x, w, offs)
                y.backward(dy)
            assert len(machine.launches) == before
        results.append((y.detach(), x.grad, w.grad))
    for ours, reference in zip(*results):
        assert torch.equal(ours, reference)


@pytest.mark.parametrize("out", [BF16, F32])
def test_accumulate_leaves_empty_groups_and_the_other_bytes_alone(machine, out):
    a, _, offs = operands([3, 0, 130, 1])
    dy = integers(a.shape[0], 40, dtype=BF16)
    main_grad = tgl.allocate_wgrad(4, (72, 40), out, torch.device("cpu"))
    main_grad.copy_(integers(4, 72, 40, dtype=out))
    expected = main_grad.clone()
    for g, (start, end) in enumerate([(0, 3), (3, 3), (3, 133), (133, 134)]):
        expected[g] += (a[start:end].double().t() @ dy[start:end].double()).to(out)
    before = len(machine.launches)
    tgl.grouped_gemm_wgrad_accumulate_(a, dy, offs, main_grad)
    assert len(machine.launches) == before + 1
    assert torch.equal(main_grad, expected)


def test_routing_and_token_counts_compile_nothing(machine, monkeypatch):
    tgl.grouped_gemm(*operands([3, 4, 5]))
    known = dict(launcher.compiled_kernels)
    monkeypatch.setattr(launcher, "compiled", None)
    for sizes in ([0, 0, 1], [60, 1, 5], [9, 0, 2, 3, 130]):
        a, b, offs = operands(sizes, tail=3)
        assert torch.equal(tgl.grouped_gemm(a, b, offs)[offs[-1] :], torch.zeros(3, 40, dtype=BF16))
    assert launcher.compiled_kernels == known


def test_a_warm_call_is_one_look_up(machine, monkeypatch):
    a, b, offs = operands([3, 4, 5])
    dy = integers(a.shape[0], 40, dtype=BF16)
    expected = [tgl.grouped_gemm(a, b, offs), tgl.grouped_gemm_wgrad(a, dy, offs)]
    for name in ("reason", "plan"):
        monkeypatch.setattr(launcher.Launcher, name, None)
    assert all(map(torch.equal, expected, [tgl.grouped_gemm(a, b, offs), tgl.grouped_gemm_wgrad(a, dy, offs)]))


def test_checks_of_a_warm_call(machine):
    """Addresses and the number of rows, which no plan depends on, may rule the kernel out all the same."""
    a, b, offs = operands([3, 4, 5], tail=0)
    expected = tgl.grouped_gemm(a, b, offs)
    shifted = torch.zeros(a.numel() + 1, dtype=BF16)[1:].view(a.shape).copy_(a)
    assert tgl.explain(tgl.grouped_gemm, shifted, b, offs).chosen.name == "tgl kernel between copies"
    assert torch.equal(tgl.grouped_gemm(shifted, b, offs), expected)
    before = len(machine.launches)
    empty = torch.zeros(0, 72, dtype=BF16)
    assert tgl.grouped_gemm(empty, b, torch.zeros_like(offs)).shape == (0, 40)
    assert tgl.grouped_gemm_wgrad(empty, empty, torch.zeros_like(offs)).eq(0).all()
    assert len(machine.launches) == before
    # One row has any stride, also 0; more rows of that stride are out of the kernel's reach.
    one = torch.tensor([0, 1, 1], dtype=torch.int32)
    for rows, name in ((1, "tgl kernel"), (5, "tgl kernel between copies")):
        x = a[:1].expand(rows, 72)
        assert tgl.explain(tgl.grouped_gemm, x, b, one).chosen.name == name
        y = tgl.grouped_gemm(x, b, one)
        assert torch.equal(y[:1], a[:1] @ b[1])
        assert y[1:].eq(0).all()


def test_empty_problems_launch_nothing(machine):
    before = len(machine.launches)
    for sizes, tail, columns in (([0, 0], 0, 40), ([], 5, 40), ([3], 0, 0)):
        a, b, offs = operands(sizes, tail, columns=columns)
        offs = offs.int().reshape(len(sizes))
        assert "runs tgl kernel" in str(tgl.explain("grouped_gemm", a, b, offs))
        assert tgl.grouped_gemm(a, b, offs).eq(0).all()
        assert tgl.grouped_gemm_wgrad(a, integers(a.shape[0], columns, dtype=BF16), offs).shape[0] == len(sizes)
    wgrads = 2  # those with rows and columns, one of them without groups
    assert len(machine.launches) - before < wgrads
    assert tgl.grouped_gemm_wgrad(torch.zeros(0, 8, dtype=BF16), torch.zeros(0, 8, dtype=BF16), offs).eq(0).all()


def test_warmup_compiles_and_touches_no_argument(machine, monkeypatch):
    a, b, offs = operands([3, 0, 130, 1], columns=24, dtype=F16)
    dy = integers(a.shape[0], 24, dtype=F16)
    main_grad = torch.full((4, 72, 24), CANARY)
    launcher.compiled_kernels.clear()
    launcher.forget()
    assert tgl.warmup(tgl.grouped_gemm, a, b, offs).chosen.name == "tgl kernel"
    tgl.warmup("grouped_gemm_wgrad", a, dy, offs)
    tgl.warmup("grouped_gemm_wgrad_accumulate_", a, dy, offs, main_grad)
    assert main_grad.eq(CANARY).all()
    monkeypatch.setattr(launcher, "compiled", None)
    tgl.grouped_gemm(a, b, offs)
    tgl.grouped_gemm_wgrad(a, dy, offs)
    tgl.grouped_gemm_wgrad_accumulate_(a, dy, offs, main_grad)


def test_a_kernel_missing_during_capture_is_a_named_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    key = gemm.GemmKey(VARLEN_M, "sm_90", False, "bfloat16", 2, None, GemmConfig())
    with pytest.raises(tgl.GraphCaptureError, match=r"call tgl.warmup\('grouped_gemm', ...\)"):
        launcher.compiled("grouped_gemm", key, torch.device("cuda", 0), lambda: gemm.GROUPED_GEMM.build(key))


def refusal(op, *args):
    return dict((i.name, reason) for i, reason in tgl.explain(op, *args).refused).get("tgl kernel", "")


def test_unsupported_samples_have_reasons(machine):
    a, b, offs = operands([3, 4])
    buffer = torch.zeros(a.numel() + 1, dtype=BF16)
    shifted = buffer[1:].view(a.shape)
    assert refusal("grouped_gemm", shifted, b, offs) == "needs `a` aligned to 16 bytes"
    assert "multiples of 16 bytes" in refusal("grouped_gemm", integers(16, 71, dtype=BF16), b[:, :71], offs)
    assert "not 0" in refusal("grouped_gemm", a, b[:1].expand(2, 72, 40), offs)
    assert "takes bfloat16 and float16" in refusal("grouped_gemm", a.float(), b.float(), offs)
    assert "`out`" in refusal("grouped_gemm", a, integers(2, 72, 41, dtype=BF16).mT.contiguous().mT, offs)
    assert "needs `a` row-major" in refusal("grouped_gemm", integers(72, 16, dtype=BF16).t(), b, offs)
    column_major = integers(48, 16, dtype=BF16).t()
    assert "needs `a` row-major" in refusal("grouped_gemm_wgrad", column_major, a[:, :48], offs)
    with backends.emulated_device("sm_90"):
        assert refusal("grouped_gemm", a, b, offs) == ""
    # The op still works, on what else there is.
    assert torch.equal(tgl.grouped_gemm(shifted, b, offs), torch.zeros(16, 40, dtype=BF16))


@pytest.mark.parametrize("offs", [(100, 40, 300), (-5, 9, 20), (4, 4, 2**31 - 1), (-(2**31), 500, 3)], ids=str)
@pytest.mark.parametrize("kind", [VARLEN_M, VARLEN_K])
def test_bad_offsets_write_nothing_outside_the_output(machine, kind, offs):
    case = Case(GemmConfig(128, 64), (50, 60, 70), tail=20, columns=40, depth=24)
    a = stored(integers(case.rows, case.depth, dtype=BF16), True)
    if kind == VARLEN_M:
        b = stored(integers(3, case.depth, case.columns, dtype=BF16), True)
        frame = framed(case.rows, case.columns, dtype=BF16)
    else:
        b = stored(integers(case.rows, case.columns, dtype=BF16), True)
        frame = framed(3, case.depth, case.columns, dtype=BF16)
    kernel("sm_100", kind, case)(a, b, torch.tensor(offs, dtype=torch.int32), frame.inside, None, None, None, None, 3)
    assert frame.inside.isfinite().all()
    assert frame.intact()
