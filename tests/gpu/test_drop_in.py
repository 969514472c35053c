"""ATen's grouped products on a device, served by kernels: every form, backwards, graphs, and no host reads."""

import warnings

import pytest
import torch
from torch.nn.functional import grouped_mm, scaled_grouped_mm

import tgl
from tests.gpu.device import ARCH, DEVICE, TAIL, ends, integers
from tests.gpu.device import served as served_by_a_kernel
from tests.integrations.test_torch import check_layouts, layouts
from tests.integrations.test_torch_scaled import BLOCKS, BY_FORM, BY_WAY, MX, ROW_WISE, WAYS, scaled, wanted
from tests.kernel_cases import ROUTINGS, gradient, product
from tests.row_scaled_cases import of_columns, of_rows
from tgl.cutlass_kernels.gemm.operand_formats import OPERANDS, ROW_SCALED
from tgl.integrations import torch as integration

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("enabled")]

BF16 = torch.bfloat16
OP = torch.ops.aten._grouped_mm
SCALED, SCALED_V2 = torch.ops.aten._scaled_grouped_mm, torch.ops.aten._scaled_grouped_mm_v2
SIZES = ROUTINGS["edges"]
ROWS = sum(SIZES) + TAIL + (-sum(SIZES) - TAIL) % 8  # ATen wants whole units of 16 bytes where they are columns


@pytest.fixture
def enabled():
    integration.enable()
    yield
    integration.disable()


def served(*args):
    """Return the product, after checking that a kernel of tgl computes it."""
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


def test_enabling_gives_no_warning():
    integration.disable()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        integration.enable()


# --- scaled products --------------------------------------------------------------------------------------------------

has_row_wise_kernels = pytest.mark.skipif(ARCH not in ROW_SCALED.archs, reason="has no kernels of FP8 operands")
EVEN = tuple(size // 16 * 16 for size in SIZES)  # what ATen's kernel takes, too
BY_OP = pytest.mark.parametrize("make", [of_rows, of_columns])


def atens(problem):
    """The operands of ATen's product."""
    a, a_scale, b, b_scale, offs = problem.operands
    if problem.op == "grouped_gemm_row_scaled":
        return a, b.transpose(1, 2), a_scale, b_scale, offs
    return a, b.t(), a_scale.flatten(), b_scale.flatten(), offs


def scaled_product(a, b, a_scale, b_scale, offs):
    return scaled_grouped_mm(a, b, a_scale, scale_b=b_scale, offs=offs, **ROW_WISE)


@pytest.mark.wide_mmas
@has_row_wise_kernels
@BY_OP
@pytest.mark.parametrize("sizes", ROUTINGS)
@pytest.mark.parametrize("columns", [328, 264, 40])
def test_row_wise_products(make, sizes, columns):
    """Groups that begin anywhere, with NaN behind the last one, by a kernel and without copies."""
    sizes = ROUTINGS[sizes]
    problem = make(sizes, 272, columns, -sum(sizes) % 16 + 16).to(DEVICE)
    out = served_by_a_kernel(problem.op, *problem.operands)
    assert torch.equal(out.double().cpu(), problem.wanted.to(BF16).double())
    given = atens(problem)
    explained = tgl.explain(SCALED, *given)
    assert explained.chosen.name == f"tgl::{problem.op}", str(explained)
    for again in (torch._scaled_grouped_mm(*given[:4], offs=given[4]), scaled_product(*given)):
        assert torch.equal(again, out)
        assert again.stride() == out.stride()


@pytest.mark.wide_mmas
@has_row_wise_kernels
@pytest.mark.parametrize("spoiled", range(len(SIZES)))
def test_nan_stays_in_its_group(spoiled):
    problem = of_columns(SIZES, 272, 264, -sum(SIZES) % 16, spoiled=spoiled).to(DEVICE)
    out, expected = served_by_a_kernel(problem.op, *problem.operands).cpu(), problem.wanted.to(BF16)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.nan_to_num(), expected.nan_to_num())


@pytest.mark.wide_mmas
@has_row_wise_kernels
@BY_OP
@pytest.mark.skipif(ARCH != "sm_90", reason="ATen's kernel is one of sm_90")
def test_row_wise_products_of_random_values_agree_with_atens(make):
    """The result is as near to the product in float64 as ATen's, which adds FP8 products in fewer bits."""
    torch.manual_seed(0)
    problem = make(EVEN, 512, 272, -sum(EVEN) % 16)
    a, a_scale, b, b_scale, offs = problem.operands
    a, b = (torch.randn(t.shape).to(t.dtype) for t in (a, b))
    a_scale, b_scale = (torch.rand(t.shape) + 0.5 for t in (a_scale, b_scale))
    given = [t.to(DEVICE) for t in atens(problem._replace(operands=(a, a_scale, b, b_scale, offs)))]
    ours = torch._scaled_grouped_mm(*given[:4], offs=given[4])
    exact = getattr(tgl, problem.op)(a, a_scale, b, b_scale, offs, out_dtype=torch.float32)
    integration.disable()
    theirs = torch._scaled_grouped_mm(*given[:4], offs=given[4])
    assert (ours.shape, ours.stride()) == (theirs.shape, theirs.stride())
    end = sum(EVEN) if problem.op == "grouped_gemm_row_scaled" else len(EVEN)
    # ATen's leaves the products of empty groups of columns, and rows behind the last group, as they were.
    kept = [i for i in range(end) if problem.op == "grouped_gemm_row_scaled" or EVEN[i]]
    errors = [(out.cpu().float() - exact)[kept].norm() for out in (ours, theirs)]
    assert errors[0] <= 2 * errors[1] + 1e-5 * exact.norm()


@pytest.mark.wide_mmas
@BY_FORM
@BY_WAY
def test_every_form_of_row_wise_products(form, way):
    """Rows of few columns are not aligned to 16 bytes, so that they are copied."""
    case = scaled(form, DEVICE)
    explained = tgl.explain(SCALED, *case.given, case.offs)
    assert explained.chosen.name.startswith("tgl::"), str(explained)
    assert not explained.syncs
    assert torch.equal(WAYS[way](*case.given, case.offs).cpu(), wanted(form, case))


@pytest.mark.wide_mmas
@has_row_wise_kernels
@BY_OP
@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
@pytest.mark.usefixtures("fresh_compiler")
def test_row_wise_products_in_graphs(make, mode):
    problem = make(SIZES, 272, 264, -sum(SIZES) % 16).to(DEVICE)
    given = atens(problem)
    # Not scaled_grouped_mm, whose op Dynamo of torch 2.11 does not trace, with or without tgl.
    run = torch.compile(
        lambda *given: torch._scaled_grouped_mm(*given[:4], offs=given[4]) * 2, fullgraph=True, mode=mode
    )
    for _ in range(3):  # the first of which record graphs
        out = run(*given)
    assert torch.equal(out.double().cpu(), 2 * problem.wanted.to(BF16).double())


@pytest.mark.wide_mmas
@has_row_wise_kernels
def test_scaled_products_read_nothing_on_the_host():
    calls = [atens(make(SIZES, 272, 264, -sum(SIZES) % 16).to(DEVICE)) for make in (of_rows, of_columns)]
    for call in calls:
        scaled_product(*call)  # loads the kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        for call in calls:
            scaled_product(*call)
            torch._scaled_grouped_mm(*call[:4], offs=call[4])
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.wide_mmas
@has_row_wise_kernels
@BY_OP
def test_a_cuda_graph_of_a_scaled_product_takes_new_routings(make):
    several = (SIZES, SIZES[::-1], (0,) * len(SIZES))
    tail = -sum(SIZES) % 16
    given = atens(make(SIZES, 272, 264, tail).to(DEVICE))
    tgl.warmup(SCALED, *given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = scaled_product(*given)
    for sizes in several:
        problem = make(sizes, 272, 264, sum(SIZES) + tail - sum(sizes)).to(DEVICE)
        for held, made in zip(given, atens(problem)):
            held.copy_(made)
        graph.replay()
        assert torch.equal(out.double().cpu(), problem.wanted.to(BF16).double())


@pytest.mark.parametrize("form", MX)
def test_mxfp8_products(form):
    """Kernels serve where there are any; elsewhere the call goes to ATen, which may have none either."""
    make, op = MX[form]
    ours, given, offs = make(DEVICE)
    explained = tgl.explain(SCALED_V2, *given[:2], [given[2]], [3], [1], [given[3]], [3], [1], offs)
    if ARCH not in OPERANDS["mxfp8"].archs:
        assert explained.chosen.name == integration.OWN, str(explained)
        return
    assert explained.chosen.name.startswith("tgl::grouped_gemm_scaled"), str(explained)
    want = op(**ours)
    assert torch.equal(torch._scaled_grouped_mm(*given, offs=offs), want)
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = scaled_grouped_mm(*given[:3], scale_b=given[3], offs=offs, **BLOCKS)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(again, want)
