"""ATen's grouped products served by the ops of this package: every form, its derivatives, and who is served when."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import grouped_mm

import tgl
from tests.kernel_cases import ends, integers
from tgl import backends
from tgl.cutlass_kernels.runtime import device
from tgl.integrations import torch as integration

SIZES, TAIL = (3, 0, 5, 2), 6
GROUPS, ROWS = len(SIZES), sum(SIZES)
M, K, N = 8, 8, 16
OP = torch.ops.aten._grouped_mm


class Problem(NamedTuple):
    """Operands of a form whose dimension T has a tail, and the slices of their groups.

    Attributes:
        shapes: of both operands.
        groups: for a group's number and span, what it takes of both operands.
        place: for a group's number and span, where its product stands in the result.
        spans: the groups' spans.
        tails: what lies past ``offs[-1]`` in both operands.
    """

    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    groups: Callable[[int, slice], tuple[Any, Any]]
    place: Callable[[int, slice], Any]
    result: tuple[int, ...]
    tails: tuple[Any, Any]

    @property
    def offs(self) -> Tensor | None:
        return None if self is PROBLEMS["3D x 3D"] else ends(SIZES)


ALL = slice(None)
PAST = slice(ROWS, None)
PROBLEMS = {
    "2D x 3D": Problem(
        ((ROWS + TAIL, K), (GROUPS, K, N)),
        lambda g, span: (span, g),
        lambda g, span: span,
        (ROWS + TAIL, N),
        (PAST, None),
    ),
    "3D x 2D": Problem(
        ((GROUPS, M, K), (K, ROWS + TAIL)),
        lambda g, span: (g, (ALL, span)),
        lambda g, span: (ALL, span),
        (M, ROWS + TAIL),
        (None, (ALL, PAST)),
    ),
    "2D x 2D": Problem(
        ((M, ROWS + TAIL), (ROWS + TAIL, N)),
        lambda g, span: ((ALL, span), span),
        lambda g, span: g,
        (GROUPS, M, N),
        ((ALL, PAST), PAST),
    ),
    "3D x 3D": Problem(
        ((GROUPS, M, K), (GROUPS, K, N)), lambda g, span: (g, g), lambda g, span: g, (GROUPS, M, N), (None, None)
    ),
}
BY_FORM = pytest.mark.parametrize("form", PROBLEMS)


def operands(problem: Problem, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """Integers, whose products are exact, and NaN past ``offs[-1]``."""
    made = []
    for shape, tail in zip(problem.shapes, problem.tails):
        t = integers(*shape, dtype=dtype)
        if tail is not None:
            t[tail] = torch.nan
        made.append(t)
    return made[0], made[1]


def expected(problem: Problem, mat_a: Tensor, mat_b: Tensor) -> Tensor:
    """The product group by group in float64; zero past ``offs[-1]``."""
    out, start = torch.zeros(problem.result, dtype=torch.float64), 0
    for g, size in enumerate(SIZES):
        span = slice(start, start + size)
        of_a, of_b = problem.groups(g, span)
        out[problem.place(g, span)] = mat_a[of_a].double() @ mat_b[of_b].double()
        start += size
    return out


class Refusing:
    """A stand-in for ATen's own kernel that refuses."""

    def call_boxed(self, *args: Any) -> Tensor:
        raise AssertionError("ATen's own kernel was called")


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Enabled for the CPU, and ATen's own kernel refuses."""
    with monkeypatch.context() as patched:
        patched.setattr(torch.library, "get_kernel", lambda *_: Refusing())
        integration.enable(["cpu"])
    yield
    integration.disable()


@pytest.fixture
def enabled() -> Iterator[None]:
    integration.enable(["cpu"])
    yield
    integration.disable()


def registered() -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(integration.products.OP, "CPU")


def is_ours() -> bool:
    """Return whether a product is ours: ATen's leaves the rows past the last group as they were, or reads them."""
    return "runs tgl::" in str(tgl.explain(OP, *operands(PROBLEMS["2D x 3D"]), ends(SIZES)))


# --- forms ------------------------------------------------------------------------------------------------------------


@BY_FORM
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_forms(ours, form, dtype):
    problem = PROBLEMS[form]
    mat_a, mat_b = operands(problem, dtype)
    out = grouped_mm(mat_a, mat_b, offs=problem.offs)
    assert out.dtype == dtype
    assert torch.equal(out.double(), expected(problem, mat_a, mat_b))
    assert torch.equal(torch._grouped_mm(mat_a, mat_b, problem.offs), out)


def column_major(t: Tensor) -> Tensor:
    return t.transpose(-2, -1).contiguous().transpose(-2, -1)


def padded(t: Tensor) -> Tensor:
    """Rows at a distance that is no multiple of 16 bytes, and apart from one another."""
    wide = torch.full((*t.shape[:-1], t.shape[-1] + 3), torch.nan, dtype=t.dtype)
    wide[..., : t.shape[-1]] = t
    return wide[..., : t.shape[-1]]


ORDERS = {(form, a, b) for form in PROBLEMS for a in (column_major, padded) for b in (column_major, padded)}
NEITHER = ("3D x 3D", column_major, column_major)


@pytest.mark.parametrize("form, of_a, of_b", sorted(ORDERS - {NEITHER}, key=str))
def test_memory_orders(ours, form, of_a, of_b):
    problem = PROBLEMS[form]
    mat_a, mat_b = operands(problem)
    out = grouped_mm(of_a(mat_a), of_b(mat_b), offs=problem.offs)
    assert torch.equal(out.double(), expected(problem, mat_a, mat_b))


def stored(t: Tensor, row_major: bool, strided: bool) -> Tensor:
    """Return operands as torch's own tests of the product store them: with gaps in every dimension if ``strided``."""
    if not row_major:
        return stored(t.transpose(-2, -1), True, strided).transpose(-2, -1)
    if not strided:
        return t.contiguous()
    *outer, rows, columns = t.shape
    room = t.new_full((*(2 * size for size in outer), rows, 2 * columns), torch.nan)
    room = room[::2] if outer else room
    room[..., :columns] = t
    return room[..., :columns]


def layouts(test: Callable[..., None]) -> Callable[..., None]:
    """``test`` for every form and layout of torch's own tests."""
    for name in ("strided", "b_row_major", "a_row_major"):
        test = pytest.mark.parametrize(name, [False, True])(test)
    return BY_FORM(test)


def check_layouts(form: str, majors: tuple[bool, bool], strided: bool, device: str | torch.device) -> None:
    """Check the product and its derivatives with any implementation."""
    problem = PROBLEMS[form]
    offs = None if problem.offs is None else problem.offs.to(device)
    plain = [t.to(device).nan_to_num(0).requires_grad_() for t in operands(problem)]
    laid = [stored(t.detach(), major, strided).requires_grad_() for t, major in zip(plain, majors)]
    found, wanted = (grouped_mm(*pair, offs=offs) for pair in (laid, plain))
    assert torch.equal(found.double().cpu(), expected(problem, *(t.detach().cpu() for t in plain)))
    gradient = integers(*problem.result, device=device)
    for ours, theirs in zip(torch.autograd.grad(found, laid, gradient), torch.autograd.grad(wanted, plain, gradient)):
        assert torch.equal(ours, theirs)


@layouts
def test_layouts_of_torchs_tests(enabled, form, a_row_major, b_row_major, strided):
    check_layouts(form, (a_row_major, b_row_major), strided, "cpu")


@pytest.mark.parametrize("columns", [16, 13])
@BY_FORM
def test_results_have_atens_strides(enabled, form, columns):
    problem = PROBLEMS[form]
    mat_a, mat_b = (torch.ones(shape, dtype=torch.bfloat16) for shape in problem.shapes)
    offs = problem.offs
    if columns == 13:  # rows of 26 bytes; operands with rows of 16, as ATen wants them
        wide = torch.ones(*mat_b.shape[:-1], 16, dtype=torch.bfloat16)
        mat_b, offs = wide[..., :13], None if offs is None else offs.clamp(max=13)
    ours = grouped_mm(mat_a, mat_b, offs=offs)
    integration.disable()
    theirs = grouped_mm(mat_a, mat_b, offs=offs)
    assert (ours.shape, ours.stride(), ours.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)


@pytest.mark.parametrize("form", ["2D x 3D", "3D x 3D"])
@pytest.mark.parametrize("shape", [(N,), (GROUPS, N)])
def test_bias(ours, form, shape):
    problem = PROBLEMS[form]
    mat_a, mat_b = operands(problem)
    bias = integers(*shape)
    out = grouped_mm(mat_a, mat_b, offs=problem.offs, bias=bias)
    plain, start = expected(problem, mat_a, mat_b), 0
    for g, size in enumerate(SIZES):
        plain[problem.place(g, slice(start, start + size))] += bias.expand(GROUPS, N)[g].double()
        start += size
    assert torch.equal(out.double(), plain)


def test_out_dtype(ours):
    problem = PROBLEMS["2D x 3D"]
    mat_a, mat_b = operands(problem)
    out = grouped_mm(mat_a, mat_b, offs=problem.offs, out_dtype=torch.float32)
    assert out.dtype == torch.float32
    assert torch.equal(out.double(), expected(problem, mat_a, mat_b))


@BY_FORM
def test_no_groups_and_no_rows(ours, form):
    problem = PROBLEMS[form]
    mat_a, mat_b = operands(problem)
    nothing = torch.zeros_like(problem.offs) if problem.offs is not None else None
    if nothing is None:
        out = grouped_mm(mat_a[:0], mat_b[:0])
        assert out.shape == (0, M, N)
    else:
        assert not grouped_mm(mat_a, mat_b, offs=nothing).any()


def test_autocast_does_not_cast(ours):
    problem = PROBLEMS["2D x 3D"]
    mat_a, mat_b = operands(problem, torch.float32)
    mat_a[:ROWS] += 2**-12  # what bfloat16 would round away
    with torch.autocast("cpu", torch.bfloat16):
        out = grouped_mm(mat_a, mat_b, offs=problem.offs)
    assert out.dtype == torch.float32
    assert torch.equal(out.double(), expected(problem, mat_a, mat_b))


def test_an_op_of_tgl_does_not_call_itself(enabled):
    """On a CPU tgl's ops call ATen's product, which the integration has replaced by tgl's."""
    problem = PROBLEMS["2D x 3D"]
    mat_a, mat_b = operands(problem)
    assert torch.equal(tgl.grouped_gemm(mat_a, mat_b, problem.offs).double(), expected(problem, mat_a, mat_b))


# --- derivatives ------------------------------------------------------------------------------------------------------


@BY_FORM
@pytest.mark.parametrize("transposed", [False, True])
def test_derivatives(ours, form, transposed):
    """Derivatives of first and second order, every product of which is ours."""
    problem = PROBLEMS[form]
    mat_a, mat_b = (torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in problem.shapes)
    offs = problem.offs
    if transposed:
        mat_b = mat_b.detach().transpose(-2, -1).contiguous().requires_grad_()

    def product(a: Tensor, b: Tensor) -> Tensor:
        return grouped_mm(a, b.transpose(-2, -1) if transposed else b, offs=offs)

    assert torch.autograd.gradcheck(product, (mat_a, mat_b), fast_mode=True)
    assert torch.autograd.gradgradcheck(product, (mat_a, mat_b), fast_mode=True)


@BY_FORM
def test_expanded_gradients(ours, form):
    """A sum's gradient has strides of 0, which ATen's kernel refuses."""
    problem = PROBLEMS[form]
    mat_a, mat_b = (integers(*shape, dtype=torch.float64).requires_grad_() for shape in problem.shapes)
    grouped_mm(mat_a, mat_b, offs=problem.offs).sum().backward()
    ones = torch.ones(problem.result, dtype=torch.float64)
    again = [t.detach().requires_grad_() for t in (mat_a, mat_b)]
    grouped_mm(*again, offs=problem.offs).backward(ones)
    assert torch.equal(mat_a.grad, again[0].grad)
    assert torch.equal(mat_b.grad, again[1].grad)


def test_tails_get_no_gradient(ours):
    problem = PROBLEMS["2D x 3D"]
    mat_a, mat_b = (t.requires_grad_() for t in operands(problem))
    gradient = torch.ones(problem.result, dtype=torch.bfloat16)
    gradient[PAST] = torch.nan
    grouped_mm(mat_a, mat_b, offs=problem.offs).backward(gradient)
    assert not mat_a.grad[PAST].any()
    assert torch.isfinite(mat_b.grad).all()


# --- who is served ----------------------------------------------------------------------------------------------------


def test_enable_and_disable():
    assert not registered()
    assert not is_ours()
    integration.disable()  # without enable()
    integration.enable(["cpu"])
    integration.enable(["cpu"])
    assert registered()
    assert is_ours()
    assert integration.served() == ("cpu",)
    integration.enable()
    assert not registered()
    assert not is_ours()
    assert integration.served() == ("cuda",)
    integration.disable()
    assert not registered()
    assert integration.served() == ()


def test_contexts():
    with integration.enabled("cpu"):
        with integration.enabled("cpu"):
            assert is_ours()
        assert registered()
        assert is_ours()
        integration.enable(["cpu"])
    assert is_ours()
    integration.disable()
    assert not registered()
    with pytest.raises(ZeroDivisionError), integration.enabled("cpu"):
        _ = 1 / 0
    assert not registered()
    assert not is_ours()


def test_other_threads_stay_with_aten():
    found = []
    with integration.enabled("cpu"):
        thread = threading.Thread(target=lambda: found.extend([integration.served(), is_ours(), tail_of_a_product()]))
        thread.start()
        thread.join()
        assert not tail_of_a_product().isnan().any()
    served, explained, _ = found
    assert served == ()
    assert not explained


def test_many_threads_come_and_go():
    """Objects that a thread holds live as long as the thread."""

    def in_and_out() -> None:
        for _ in range(10):
            with integration.enabled("cpu"), integration.enabled("cpu"):
                assert integration.served() == ("cpu",)
        assert integration.served() == ()

    for _ in range(20):
        thread = threading.Thread(target=in_and_out)
        thread.start()
        thread.join()
    assert not registered()


def tail_of_a_product() -> Tensor:
    problem = PROBLEMS["2D x 3D"]
    return grouped_mm(*operands(problem), offs=problem.offs)[PAST]


def _in_a_worker(queue: Any) -> None:
    queue.put((integration.served(), bool(tail_of_a_product().any())))


def test_a_forked_worker_is_served(enabled):
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    worker = context.Process(target=_in_a_worker, args=(queue,))
    worker.start()
    assert queue.get() == (("cpu",), False)
    worker.join()


@pytest.mark.parametrize("bad", ["gpu", ["cpu", "mps"]])
@pytest.mark.parametrize(
    "switch", [integration.enable, lambda types: ExitStack().enter_context(integration.enabled(types))]
)
def test_unknown_devices(bad, switch):
    with pytest.raises(ValueError, match=r"`device_types` must be among .*cpu.*, but got '(gpu|mps)'"):
        switch(bad)
    assert not registered()


def test_explanations(enabled):
    mat_a, mat_b = operands(PROBLEMS["2D x 3D"])
    offs = ends(SIZES)
    served = tgl.explain(OP.default, mat_a, mat_b, offs=offs)
    assert served.chosen.name == "tgl::grouped_gemm"
    assert "not  ATen's own kernel: lower priority" in str(served)
    turned = tgl.explain(OP, mat_b.transpose(1, 2).contiguous(), mat_a.t(), offs)
    assert turned.copies == (("out", N * (ROWS + TAIL) * 2),)
    for change, reason in (
        ({"offs": None}, "needs `offs` for a 2-D operand"),
        ({"mat_a": mat_a.int()}, "`a` must be float64, float32, bfloat16 or float16"),
        ({"mat_a": mat_a[:, :4]}, "K = 4 like `a`"),
        ({"offs": offs.long()}, "`offs` must be int32"),
        ({"mat_a": mat_a[0]}, "needs operands of 2 or 3 dimensions"),
        ({"mat_b": mat_b[:2]}, "of length 2 (one end per group)"),
    ):
        given = {"mat_a": mat_a, "mat_b": mat_b, "offs": offs} | change
        explained = tgl.explain(OP, *given.values())
        assert explained.chosen.name == "ATen's own kernel"
        assert reason in str(explained)


@pytest.mark.parametrize(
    "form, of_a, of_b, reason",
    [(*NEITHER, "needs `mat_a` with one stride for all rows"), ("2D x 2D", *(lambda t: t,) * 2, "has no `bias`")],
)
def test_calls_that_tgl_rejects_run_atens_kernel(enabled, form, of_a, of_b, reason):
    problem = PROBLEMS[form]
    mat_a, mat_b = (of(t) for of, t in zip((of_a, of_b), operands(problem)))
    bias = torch.zeros(N, dtype=torch.bfloat16) if "bias" in reason else None
    explained = tgl.explain(OP, mat_a, mat_b, problem.offs, bias)
    assert explained.chosen.name == "ATen's own kernel"
    assert reason in str(explained)
    if bias is None:
        assert torch.equal(grouped_mm(mat_a, mat_b).double(), expected(problem, mat_a, mat_b))
    else:
        with pytest.raises(RuntimeError, match=r"[Bb]ias"):
            grouped_mm(mat_a, mat_b, offs=problem.offs, bias=bias)


def test_warmup(enabled):
    """Asks, and prepares whatever will serve."""
    problem = PROBLEMS["2D x 3D"]
    assert tgl.warmup(OP, *operands(problem), problem.offs).chosen.name == "tgl::grouped_gemm"


def test_debug_checks(enabled):
    problem = PROBLEMS["2D x 3D"]
    with tgl.debug_checks(), pytest.raises(ValueError, match="`offs` must not descend"):
        grouped_mm(*operands(problem), offs=problem.offs.flip(0))


def test_not_enabled_is_reported():
    explained = tgl.explain(OP, *operands(PROBLEMS["2D x 3D"]), ends(SIZES))
    assert explained.chosen.name == "ATen's own kernel"
    assert "tgl.integrations.torch is not enabled for cpu" in str(explained)


@pytest.mark.parametrize(
    "dtype, packages, chosen, reason",
    [
        (torch.bfloat16, None, "tgl::grouped_gemm", "lower priority"),
        (
            torch.bfloat16,
            "no compiler",
            "ATen's own kernel",
            "no kernel of tgl takes the call: tgl kernel: no compiler",
        ),
        (torch.float32, None, "tgl::grouped_gemm, group by group", "served by loop of mm"),
    ],
)
def test_explanations_of_a_device(monkeypatch, dtype, packages, chosen, reason):
    """On an emulated H100, ATen's kernel serves what tgl has no kernel for, unless it reads on the host as well."""
    monkeypatch.setattr(device, "packages_reason", lambda: packages)
    monkeypatch.setattr(backends.target, "cuda_arch", lambda device: "sm_90")
    monkeypatch.setattr(backends.registry, "_on_device", {})
    with FakeTensorMode(), integration.enabled():
        mat_a, mat_b = (torch.empty(shape, dtype=dtype, device="cuda") for shape in PROBLEMS["2D x 3D"].shapes)
        explained = tgl.explain(OP, mat_a, mat_b, torch.empty(GROUPS, dtype=torch.int32, device="cuda"))
    assert explained.chosen.name == chosen
    assert explained.syncs == ("group by group" in chosen)
    assert reason in str(explained)
