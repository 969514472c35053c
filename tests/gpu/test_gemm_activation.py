"""GEMMs with an activation as second output, on a device: the bytes of the two kernels, in one graph per routing."""

import pytest
import torch

import tgl
from tests.activation_cases import CASES
from tests.activation_cases import width as width_of
from tests.gpu.device import DEVICE, TAIL, ends, served
from tests.gpu.test_activation import BF16, F16, F32, ROUTINGS

pytestmark = pytest.mark.gpu


def inputs(kind, sizes, depth, columns, dtype, row_major=False):
    """a, b, offs, bias and probs; NaN in every tail."""
    rows, width = sum(sizes) + TAIL, width_of(kind, columns)
    a = torch.randn(rows, depth, device=DEVICE).to(dtype)
    weight = torch.randn(len(sizes), width, depth, device=DEVICE).to(dtype)
    b = weight.transpose(1, 2).contiguous() if row_major else weight.transpose(1, 2)
    bias, probs = torch.randn(len(sizes), width, device=DEVICE).to(dtype), torch.rand(rows, device=DEVICE)
    a[sum(sizes) :] = probs[sum(sizes) :] = float("nan")
    return a, b, ends(sizes), bias, probs


@pytest.mark.parametrize("sizes", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
@pytest.mark.parametrize(
    ("dtype", "depth", "columns", "out_dtype"),
    [(BF16, 520, 776, None), (F16, 64, 40, None), (BF16, 200, 264, F32), (F16, 2048, 1032, None)],
    ids=str,
)
def test_the_bytes_of_two_kernels(sizes, options, dtype, depth, columns, out_dtype):
    for row_major in (False, True) if not options.get("interleaved") else (False,):
        a, b, offs, bias, probs = inputs(options["kind"], sizes, depth, columns, dtype, row_major)
        for row, factor in ((bias, probs), (None, None)):
            arguments = (a, b, offs, row, factor)
            y, h = served("grouped_gemm_activation", *arguments, **options, out_dtype=out_dtype)
            wanted = tgl.grouped_gemm(a, b, offs, row, out_dtype=out_dtype)
            assert torch.equal(h, wanted)
            assert torch.equal(y, tgl.grouped_activation(wanted, offs, factor, **options))
            assert y[sum(sizes) :].eq(0).all()
            for _ in range(5):
                again = served("grouped_gemm_activation", *arguments, **options, out_dtype=out_dtype)
                assert torch.equal(again[0], y)
                assert torch.equal(again[1], h)


def test_one_graph_for_every_routing():
    a, b, _, bias, probs = inputs("swiglu", (1500, 1423), 520, 264, BF16)
    a[-TAIL:] = probs[-TAIL:] = 1
    offs, rows = ends((1500, 1500)), len(a)
    tgl.warmup("grouped_gemm_activation", a, b, offs, bias, probs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, h = tgl.grouped_gemm_activation(a, b, offs, bias, probs)
    for split in ((0, 0), (0, rows), (1, 2), (777, rows), (rows, rows), (128, 2000)):
        offs.copy_(torch.tensor(split))
        y.fill_(7)
        h.fill_(7)
        graph.replay()
        wanted = tgl.grouped_gemm(a, b, offs, bias)
        assert torch.equal(h, wanted), split
        assert torch.equal(y, tgl.grouped_activation(wanted, offs, probs)), split


def test_gradients_as_of_the_two_ops():
    sizes = ROUTINGS["edges"]
    results = []
    for fused in (True, False):
        torch.manual_seed(0)
        a, b, offs, bias, probs = inputs("swiglu", sizes, 200, 264, BF16)
        leaves = [t.detach().requires_grad_() for t in (a, b, bias, probs)]
        if fused:
            y, _ = served("grouped_gemm_activation", leaves[0], leaves[1], offs, *leaves[2:])
        else:
            y = tgl.grouped_activation(tgl.grouped_gemm(leaves[0], leaves[1], offs, leaves[2]), offs, leaves[3])
        results.append(torch.autograd.grad(y, leaves, torch.ones_like(y)))
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)
