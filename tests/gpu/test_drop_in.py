"""ATen's grouped products on a device, served by kernels: every form, backwards, graphs, and no host reads."""

import warnings

import pytest
import torch
from torch.nn.functional import grouped_mm

import tgl
from tests.gpu.device import DEVICE, TAIL, ends, integers
from tests.integrations.test_torch import check_layouts, layouts
from tests.kernel_cases import ROUTINGS, gradient, product
from tgl.integrations import torch as integration

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("enabled")]

BF16 = torch.bfloat16
OP = torch.ops.aten._grouped_mm
SIZES = ROUTINGS["edges"]
ROWS = sum(SIZES) + TAIL + (-sum(SIZES) - TAIL) % 8  # ATen wants whole units of 16 bytes where they are columns


@pytest.fixture
def enabled():
    integration.enable()
    yield
    integration.disable()


def served(*args):
    """The product, after proof that a kernel of ours makes it."""
    explained = tgl.explain(OP, *args)
    assert explained.chosen.name.startswith("tgl::"), str(explained)
    return grouped_mm(args[0], args[1], offs=args[2] if len(args) > 2 else None)


def rows(columns):
    """``[T, columns]`` with NaN past the last group."""
    t = integers(ROWS, columns)
    t[sum(SIZES) :] = torch.nan
    return t


@pytest.mark.parametrize("columns", [328, 325])
def test_rows_by_matrices(columns):
    a, b = rows(200), integers(len(SIZES), 200, columns)
    out = served(a, b, ends(SIZES))
    assert torch.equal(out, product(a, b, SIZES).to(BF16))
    assert out.stride() == (328, 1)


def test_rows_by_rows():
    a, b = rows(136), rows(200)
    assert torch.equal(served(a.t(), b, ends(SIZES)), gradient(a, b, SIZES).to(BF16))


def test_matrices_by_columns():
    a, b = integers(len(SIZES), 136, 200), rows(200)
    out = served(a, b.t(), ends(SIZES))
    assert torch.equal(out, product(b, a.transpose(1, 2), SIZES).to(BF16).t())
    assert out.stride() == (ROWS, 1)


def test_matrices_by_matrices():
    a, b = integers(5, 136, 200), integers(5, 200, 328)
    wanted = (a.double() @ b.double()).to(BF16)
    assert torch.equal(served(a, b), wanted)
    assert torch.equal(served(a.transpose(1, 2).contiguous().transpose(1, 2), b), wanted)


@layouts
def test_layouts_of_torchs_tests(form, a_row_major, b_row_major, strided):
    check_layouts(form, (a_row_major, b_row_major), strided, DEVICE)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("mode", [None, "default", "reduce-overhead", "max-autotune"])
@pytest.mark.usefixtures("fresh_compiler")
def test_a_training_step(transposed, mode):
    """Its backward runs in a thread of autograd's, with a gradient of strides 0."""
    offs = ends(SIZES)

    def loss(a, w):
        return grouped_mm(a, w.transpose(1, 2) if transposed else w, offs=offs).sum()

    a, b = rows(200).requires_grad_(), integers(len(SIZES), 200, 328)
    w = (b.transpose(1, 2).contiguous() if transposed else b).requires_grad_()
    run = torch.compile(loss, fullgraph=True, mode=mode) if mode else loss
    for _ in range(3):  # the first of which record graphs
        a.grad = w.grad = None
        run(a, w).backward()
    ones = torch.ones(ROWS, 328, dtype=BF16, device=DEVICE)
    assert torch.equal(a.grad, product(ones, b.transpose(1, 2), SIZES).to(BF16))
    db = gradient(a.detach(), ones, SIZES).to(BF16)
    assert torch.equal(w.grad, db.transpose(1, 2) if transposed else db)


def test_a_context_reaches_the_backward():
    integration.disable()
    a, w = rows(200).requires_grad_(), integers(len(SIZES), 200, 328).requires_grad_()
    with integration.enabled():
        grouped_mm(a, w, offs=ends(SIZES)).backward(rows(328))  # NaN behind the last group, which ATen's may read
    assert torch.isfinite(w.grad).all()
    assert not a.grad[sum(SIZES) :].any()


def test_no_host_reads():
    a, b, offs = rows(200), integers(len(SIZES), 200, 328), ends(SIZES)
    calls = ((a, b, offs), (a.t(), rows(64), offs), (b.transpose(1, 2), a.t(), offs), (b.transpose(1, 2), b))
    for call in calls:
        served(*call)  # loads the kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        for call in calls:
            grouped_mm(call[0], call[1], offs=call[2] if len(call) > 2 else None)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_cuda_graph_takes_new_routings():
    a, b, offs = integers(ROWS, 200), integers(len(SIZES), 200, 328), ends(SIZES)
    tgl.warmup(OP, a, b, offs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = grouped_mm(a, b, offs=offs)
    for sizes in (SIZES, SIZES[::-1], (0,) * len(SIZES)):
        offs.copy_(ends(sizes))
        graph.replay()
        assert torch.equal(out, product(a, b, sizes).to(BF16))


def test_enabling_says_nothing():
    integration.disable()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        integration.enable()
