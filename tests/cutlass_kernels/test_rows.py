"""Rows by an index: a kernel that gathers them, or an ordered copy on the device and a kernel, as ``explain`` says."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

import tgl
from tests import chips
from tests.kernel_cases import CANARY, column_major, ends, gradient, integers, product
from tgl import backends
from tgl.cutlass_kernels.archs import ARCHS, arch_of, having
from tgl.cutlass_kernels.runtime import launcher
from tgl.testing import emulate

BF16, F32 = torch.bfloat16, torch.float32
SIZES, TAIL, TOKENS = (3, 0, 70, 1), 5, 40
ROUTED = sum(SIZES)
ROWS = ROUTED + TAIL
NEVER = TOKENS - 1  # a token of no row
LOW, HIGH = -(1 << 31), (1 << 31) - 1
WITHOUT = "without kernels that gather"


@pytest.fixture(scope="module", params=[*chips.parameters(sorted(having("GatheredGradientGroupedGemm"))), WITHOUT])
def machine(request):
    """An architecture, or one whose kernels do not gather: every index is followed by a copy."""
    arch = arch_of("sm_90" if request.param == WITHOUT else request.param)
    with pytest.MonkeyPatch.context() as patch, emulate(arch.target) as machine:
        if request.param == WITHOUT:
            patch.setitem(ARCHS, arch.name, replace(arch, kernels=arch.kernels - {"GatheredGroupedGemm"}))
        launcher.forget()
        yield machine
    launcher.forget()


def gathers():
    """Return whether kernels gather rows of one operand."""
    return arch_of(backends.device_arch(torch.device("cpu"))).gathers


def offs():
    return ends(SIZES)


def index(seed=0):
    """Tokens of the rows and, in the tail, numbers that mean nothing."""
    numbers = torch.randint(0, NEVER, (ROUTED,), generator=torch.Generator().manual_seed(seed))
    return torch.cat([numbers, torch.tensor([-1, LOW, HIGH, TOKENS, NEVER])]).int()


def tokens(columns):
    """NaN for the token of no row."""
    made = integers(TOKENS, columns, dtype=BF16)
    made[NEVER] = float("nan")
    return made


def in_order(t, rows):
    return t[rows.clamp(0, NEVER - 1).long()]


def served(machine, copies, gathered, op, *args, **kwargs):
    """The call's result, after proof of what runs it and copies, and that a warmed-up one compiles nothing.

    Args:
        copies: where no kernel gathers.
        gathered: the operand that needs no copy where one does, or None.
    """
    if gathers():
        copies = {name: size for name, size in copies.items() if name != gathered}
    report = tgl.warmup(op, *args, **kwargs)
    assert report.chosen.name == ("tgl kernel between copies" if copies else "tgl kernel")
    assert not report.syncs
    assert dict(report.copies) == copies
    before, known = len(machine.launches), len(launcher.compiled_kernels)
    result = op(*args, **kwargs)
    ran = [launch.kernel for launch in machine.launches[before:] if "PartialSums" not in launch.kernel]  # behind a GEMM
    assert len(ran) == 1 + len(copies)
    assert len(launcher.compiled_kernels) == known
    return result


def test_grouped_gemm(machine):
    a, b, bias, rows = (
        tokens(72),
        integers(len(SIZES), 72, 40, dtype=BF16),
        integers(len(SIZES), 40, dtype=BF16),
        index(),
    )
    size = ROWS * 72 * 2
    wanted = product(in_order(a, rows), b, SIZES).to(BF16)
    assert torch.equal(served(machine, {"a": size}, "a", tgl.grouped_gemm, a, b, offs(), rows=rows), wanted)
    report = str(tgl.explain(tgl.grouped_gemm, a, b, offs(), rows=rows))
    reason = "reads rows of `a` in the order of the groups, not by `rows`"
    assert (reason in report) != gathers()
    # A call in order, of the same shapes as its copy, finds a plan of its own before and behind.
    whole = in_order(a, rows)
    assert torch.equal(tgl.grouped_gemm(whole, b, offs()), wanted)
    assert torch.equal(tgl.grouped_gemm(a, b, offs(), rows=rows), wanted)
    # One copy brings rows in order and within reach.
    far = column_major(tokens(71))
    narrow = b[:, :71].contiguous()
    wanted = product(in_order(far, rows), narrow, SIZES).to(BF16)
    got = served(machine, {"a": ROWS * 71 * 2}, None, tgl.grouped_gemm, far, narrow, offs(), rows=rows)
    assert torch.equal(got, wanted)
    slots = torch.tensor([3, 2, 1, 0], dtype=torch.int32)
    out = torch.full((ROWS, 40), CANARY, dtype=BF16)
    served(machine, {"a": size}, "a", tgl.grouped_gemm, a, b.flip(0), offs(), slots=slots, rows=rows, out=out)
    assert torch.equal(out[:ROUTED], product(in_order(a, rows), b, SIZES)[:ROUTED].to(BF16))
    assert out[ROUTED:].eq(CANARY).all()
    absent = rows.clone()
    absent[5] = -1
    zeros = in_order(a, rows)
    zeros[5] = 0
    assert torch.equal(tgl.grouped_gemm(a, b, offs(), bias, rows=absent), tgl.grouped_gemm(zeros, b, offs(), bias))


def test_the_gradient_of_tokens(machine):
    """The sums of their rows are a launch, and another number of tokens fills no table."""
    b, rows = integers(len(SIZES), 72, 40, dtype=BF16), index()
    dy = integers(ROWS, 40, dtype=BF16)
    by_row = product(dy, b.transpose(1, 2), SIZES)
    for count in (TOKENS, TOKENS + 1, TOKENS + 9):
        a = integers(count, 72, dtype=BF16).requires_grad_()
        y = tgl.grouped_gemm(a, b, offs(), rows=rows)
        before, known = len(machine.launches), len(launcher.warm_plans)
        (da,) = torch.autograd.grad(y, a, dy)
        assert len(machine.launches) == before + 2
        assert count == TOKENS or len(launcher.warm_plans) == known
        wanted = torch.zeros(count, 72, dtype=torch.float64).index_add_(0, rows[:ROUTED], by_row[:ROUTED])
        assert torch.equal(da, wanted.to(BF16))


@pytest.mark.parametrize("which", [("a",), ("b",), ("a", "b")], ids="+".join)
def test_wgrad(machine, which):
    a, b = tokens(72), tokens(40)
    x, y = in_order(a, index(1)), in_order(b, index(2))
    operands = (a if "a" in which else x, b if "b" in which else y, offs())
    indices = {f"{name}_rows": index({"a": 1, "b": 2}[name]) for name in which}
    copies = {name: ROWS * {"a": 72, "b": 40}[name] * 2 for name in which}
    wanted = gradient(x, y, SIZES)
    got = served(machine, copies, which[0], tgl.grouped_gemm_wgrad, *operands, **indices)
    assert torch.equal(got, wanted.to(BF16))
    main_grad = integers(*wanted.shape, dtype=F32)
    total = main_grad + wanted.float()
    main_grad[1] = float("nan")  # an empty group's slot keeps its bytes
    served(machine, copies, which[0], tgl.grouped_gemm_wgrad_accumulate_, *operands, main_grad, **indices)
    assert main_grad[1].isnan().all()
    assert torch.equal(main_grad[[0, 2, 3]], total[[0, 2, 3]])
    slots = torch.tensor([3, 2, 1, 0], dtype=torch.int32)
    served(machine, copies, which[0], tgl.grouped_gemm_wgrad, *operands, slots, **indices, out=main_grad)
    assert torch.equal(main_grad.flip(0), wanted.float())


def test_activation(machine):
    a, b, rows = tokens(72), integers(len(SIZES), 72, 48, dtype=BF16), index()
    probs = torch.rand(ROWS)
    wanted = tgl.grouped_gemm_activation(in_order(a, rows), b, offs(), None, probs)
    copies = {"a": ROWS * 72 * 2}
    got = served(machine, copies, "a", tgl.grouped_gemm_activation, a, b, offs(), None, probs, rows)
    assert all(map(torch.equal, got, wanted))
    # The op that has no kernel is two that have.
    narrow = b[..., :44].contiguous()
    wanted = tgl.grouped_gemm_activation(in_order(a, rows), narrow, offs())
    assert tgl.explain(tgl.grouped_gemm_activation, a, narrow, offs(), rows=rows).chosen.name == "GEMM, then activation"
    assert all(map(torch.equal, tgl.grouped_gemm_activation(a, narrow, offs(), rows=rows), wanted))


def test_dactivation(machine):
    dy, b, rows = tokens(72), integers(len(SIZES), 72, 24, dtype=BF16), index()
    h, probs = integers(ROWS, 48, dtype=BF16), torch.rand(ROWS)
    wanted = tgl.grouped_gemm_dactivation(in_order(dy, rows), b, h, offs(), probs)
    copies = {"dy": ROWS * 72 * 2}
    got = served(machine, copies, "dy", tgl.grouped_gemm_dactivation, dy, b, h, offs(), probs, rows)
    assert all(map(torch.equal, got, wanted))


def test_nothing_to_launch(machine):
    b, rows = integers(len(SIZES), 72, 40, dtype=BF16), index()
    none, bias = tokens(72)[:0], integers(len(SIZES), 40, dtype=BF16)
    wanted = tgl.grouped_gemm(torch.zeros(ROWS, 72, dtype=BF16), b, offs(), bias)
    assert torch.equal(tgl.grouped_gemm(none, b, offs(), bias, rows=rows), wanted)
    assert tgl.grouped_gemm(tokens(72), b, offs() * 0, rows=rows[:0]).shape == (0, 40)
    assert not tgl.grouped_gemm_wgrad(none, integers(ROWS, 40, dtype=BF16), offs(), a_rows=rows).any()
    assert not tgl.grouped_gemm_wgrad(tokens(72), integers(0, 40, dtype=BF16), offs() * 0, a_rows=rows[:0]).any()


def test_no_depth(machine):
    """A product without columns copies nothing."""
    a, b, bias = tokens(72)[:, :0], integers(len(SIZES), 0, 40, dtype=BF16), integers(len(SIZES), 40, dtype=BF16)
    report = tgl.explain(tgl.grouped_gemm, a, b, offs(), bias, rows=index())
    assert report.chosen.name == "bias alone"
    wanted = tgl.grouped_gemm(torch.zeros(ROWS, 0, dtype=BF16), b, offs(), bias)
    assert torch.equal(tgl.grouped_gemm(a, b, offs(), bias, rows=index()), wanted)
