"""Symmetric products on a device: exact on integers, symmetric to the bit, in one graph, in a step of Muon."""

import pytest
import torch

import tgl
from tests.gpu.device import ARCH, DEVICE, integers, served
from tests.kernel_cases import column_major
from tgl import optim
from tgl.cutlass_kernels import tilings
from tgl.cutlass_kernels.archs import SYMMETRIC, chips, having
from tgl.cutlass_kernels.gemm.sm90.tilings import SYMMETRIC_COSTS
from tgl.cutlass_kernels.runtime import launcher

if ARCH not in chips(having(SYMMETRIC)):
    pytest.skip("needs a device with a kernel for symmetric products", allow_module_level=True)
pytestmark = [pytest.mark.gpu, pytest.mark.wide_mmas]
BF16, F16 = torch.bfloat16, torch.float16


@pytest.fixture(params=SYMMETRIC_COSTS, ids=lambda config: config.words)
def tile(request, monkeypatch):
    """Every product has this tiling."""
    monkeypatch.setattr(tilings, "choose_symmetric", lambda *_: request.param)
    launcher.forget()
    yield
    launcher.forget()


def symmetric(*shape, dtype):
    values = integers(*shape, dtype=dtype)
    return values.tril() + values.tril(-1).mT


def exact(x, c=None, alpha=1.0, beta=1.0):
    """Return the product in float64, rounded once."""
    found = alpha * (x.double() @ x.double().mT)
    return (found if c is None else found + beta * c.double()).to(x.dtype)


@pytest.mark.parametrize(
    ("dtype", "row_major"), [(BF16, True), (BF16, False), (F16, False)], ids=["bfloat16", "along M", "float16, along M"]
)
@pytest.mark.parametrize(
    ("groups", "rows", "depth"), [(3, 8, 64), (1, 136, 200), (5, 264, 72), (40, 520, 1032), (2, 2056, 776)], ids=str
)
def test_exact(tile, groups, rows, depth, dtype, row_major):
    x = integers(groups, rows, depth, dtype=dtype)
    x = x if row_major else column_major(x)
    c = symmetric(groups, rows, rows, dtype=dtype)
    for _ in range(3):
        assert torch.equal(served("batched_syrk", x), exact(x))
        assert torch.equal(served("batched_syrk", x, c, alpha=0.5, beta=-2.0), exact(x, c, 0.5, -2.0))


@pytest.mark.parametrize(("groups", "rows", "depth"), [(2, 1536, 2048), (1, 2880, 2880), (3, 264, 4096)], ids=str)
def test_symmetric_to_the_bit_and_rounded_once(tile, groups, rows, depth):
    torch.manual_seed(0)
    x = torch.randn(groups, rows, depth, device=DEVICE).bfloat16() / depth**0.5
    s = served("batched_syrk", x)
    u = served("batched_syrk", s, s, alpha=2.0315, beta=-4.775)
    for found, wanted, terms in (
        (s, x.double() @ x.double().mT, x.double().abs() @ x.double().abs().mT),
        (u, 2.0315 * s.double() @ s.double() - 4.775 * s.double(), 2.0315 * s.double().abs() @ s.double().abs()),
    ):
        assert torch.equal(found, found.mT)
        # Half a unit of the last of 8 bits, and one of float32 for each of the MMAs of 16 that are summed.
        bound = 2.0**-8 * wanted.abs() + max(rows, depth) / 16 * 2.0**-23 * terms
        assert bool(((found.double() - wanted).abs() <= bound).all())


def test_a_row_of_nan_reaches_a_row_and_a_column(tile):
    x = integers(3, 520, 136)
    x[1, 300] = float("nan")
    expected = torch.zeros(3, 520, 520, dtype=torch.bool, device=DEVICE)
    expected[1, 300] = expected[1, :, 300] = True
    assert torch.equal(served("batched_syrk", x).isnan(), expected)


def test_in_a_graph():
    x = integers(8, 776, 520)
    tgl.warmup("batched_syrk", x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        s = tgl.batched_syrk(x)
    for _ in range(3):
        x.copy_(integers(8, 776, 520))
        s.fill_(7)
        graph.replay()
        assert torch.equal(s, exact(x))


@pytest.mark.parametrize("shape", [(8, 768, 1024), (4, 1536, 520), (3, 264, 264)], ids=str)
def test_muon_is_as_accurate_as_with_torchs_products(shape, monkeypatch):
    torch.manual_seed(0)
    stack = torch.randn(shape, device=DEVICE)
    found = optim.orthogonalized(stack)
    monkeypatch.setattr(optim.backends, "first", lambda *_: None)
    torchs = optim.orthogonalized(stack)
    a, b, c = optim.COEFFICIENTS
    x = stack.double()
    x = x / x.flatten(1).norm(dim=1)[:, None, None]
    for _ in range(5):
        s = x @ x.mT
        x = a * x + (b * s + c * s @ s) @ x
    ours, theirs = ((y.double() - x).norm() for y in (found, torchs))
    assert ours < 1.25 * theirs, (float(ours), float(theirs), float(x.norm()))


def test_unsupported_products_are_left_to_torch():
    x = integers(2, 12, 24)
    explanation = tgl.explain("batched_syrk", x)
    assert explanation.chosen.name == "aten bmm"
    assert "needs strides of `out`" in str(explanation)
    assert torch.equal(tgl.batched_syrk(x), exact(x))
