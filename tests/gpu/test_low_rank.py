"""Two grouped products in one accumulator, on a device: exact on integers, in one graph per routing, in a layer."""

import pytest
import torch

import tgl
from tests.gpu.device import ARCH, DEVICE, TAIL, ends, served
from tests.gpu.test_activation import BF16, F16, F32, ROUTINGS
from tests.kernel_cases import column_major, integers, poisoned, product
from tests.memory import same_bytes
from tgl.cutlass_kernels.archs import PAIRED, chips, having

if ARCH not in chips(having(PAIRED)):
    pytest.skip("needs a device with one kernel for both products", allow_module_level=True)
pytestmark = [pytest.mark.gpu, pytest.mark.wide_mmas]


def inputs(sizes, depth, rank, columns, dtype):
    """a, b, low and up, with NaN in the tails; a product of integers up to 256 is exact in 16 bits."""
    rows = sum(sizes) + TAIL
    a, low = (poisoned(integers(rows, k, dtype=dtype, device=DEVICE), sizes) for k in (depth, rank))
    b, up = (integers(len(sizes), k, columns, dtype=dtype, device=DEVICE) for k in (depth, rank))
    return a, b, low, up


@pytest.mark.parametrize("sizes", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("rank", [8, 16, 24, 64, 104, 128])
@pytest.mark.parametrize(("dtype", "depth", "columns"), [(BF16, 520, 776), (F16, 64, 40), (BF16, 2048, 1032)], ids=str)
def test_exact(sizes, rank, dtype, depth, columns):
    a, b, low, up = inputs(sizes, depth, rank, columns, dtype)
    bias = integers(len(sizes), columns, dtype=dtype, device=DEVICE)
    wanted = (product(a, b, sizes, bias) + product(low, up, sizes)).float()
    for turned in (False, True):
        b, up = (column_major(t) for t in (b, up)) if turned else (b, up)
        for _ in range(5):
            found = served("grouped_gemm_low_rank", a, b, low, up, ends(sizes), bias, out_dtype=F32)
            assert torch.equal(found, wanted)
        found = served("grouped_gemm_low_rank", a, b, low, up, ends(sizes), bias)
        assert torch.equal(found, wanted.to(dtype))


def test_one_graph_for_every_routing():
    a, b, low, up = inputs((1500, 1423), 520, 16, 264, BF16)
    a[-TAIL:] = low[-TAIL:] = 1
    offs, rows = ends((1500, 1500)), len(a)
    tgl.warmup("grouped_gemm_low_rank", a, b, low, up, offs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = tgl.grouped_gemm_low_rank(a, b, low, up, offs)
    for first, last in ((0, 0), (0, rows), (1, 2), (777, rows), (rows, rows), (128, 2000)):
        offs.copy_(torch.tensor((first, last)))
        y.fill_(7)
        graph.replay()
        sizes = first, last - first
        assert torch.equal(y, (product(a, b, sizes) + product(low, up, sizes)).to(BF16)), (first, last)


@pytest.mark.parametrize("sizes", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("rank", [8, 24, 128])
@pytest.mark.parametrize("options", [{}, {"interleaved": True}, {"kind": "srelu"}], ids=str)
@pytest.mark.parametrize(("dtype", "depth", "columns"), [(BF16, 520, 784), (F16, 64, 48), (BF16, 2048, 1040)], ids=str)
def test_with_an_activation(sizes, rank, options, dtype, depth, columns):
    """The bits of two ops, whose sum is exact."""
    a, b, low, up = inputs(sizes, depth, rank, columns, dtype)
    b, up = (column_major(t) for t in (b, up))
    bias = integers(len(sizes), columns, dtype=dtype, device=DEVICE)
    probs = torch.rand(len(a), device=DEVICE)
    wanted = (product(a, b, sizes, bias) + product(low, up, sizes)).to(dtype)
    act = tgl.grouped_activation(wanted, ends(sizes), probs, **options)
    for _ in range(5):
        found = served("grouped_gemm_low_rank_activation", a, b, low, up, ends(sizes), bias, probs, **options)
        assert torch.equal(found[1], wanted)
        assert same_bytes(found[0].cpu(), act.cpu())


@pytest.mark.parametrize("rank", [8, 16, 128])
def test_a_step_of_the_layer(rank):
    """Against its float32 twin on a CPU, of integers."""
    torch.manual_seed(0)
    splits, depth, columns = torch.tensor([130, 0, 300, 70]), 64, 136
    layer = tgl.GroupedLoRALinear(tgl.GroupedLinear(4, depth, columns, bias=False, params_dtype=BF16), rank)
    twin = tgl.GroupedLoRALinear(tgl.GroupedLinear(4, depth, columns, bias=False, params_dtype=F32), rank)
    with torch.no_grad():
        for mine, theirs in zip(layer.parameters(), twin.parameters(), strict=True):
            theirs.copy_(integers(*mine.shape))
            mine.copy_(theirs)
        # Sparse, so that what is rounded between the products is exact.
        twin.lora_A[:, :, 8:], layer.lora_A[:, :, 8:] = 0, 0
    layer.to(DEVICE)
    x, dy = integers(509, depth), integers(509, columns)
    results = []
    for of, rows, grad in ((layer, x.to(DEVICE), dy.to(DEVICE)), (twin, x.float(), dy.float())):
        rows.requires_grad_()
        y = of(rows, splits.to(rows.device))
        results.append([y, *torch.autograd.grad(y, [rows, of.lora_A, of.lora_B], grad)])
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine.cpu(), theirs.bfloat16())
