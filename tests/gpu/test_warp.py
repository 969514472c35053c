"""The kernels with MMAs of warps in place of a Hopper's own: exact, in every tiling, replayed with other routings.

Nothing in them depends on the architecture, so what holds for their code compiled for sm_90 is what can be seen of them
without the chips that they are for.
"""

from dataclasses import replace

import pytest
import torch

import tgl
from tests.cutlass_kernels.gather_cases import random_index, scattered
from tests.gpu.device import ARCH, DEVICE, TAIL, ends, integers, served
from tests.kernel_cases import ROUTINGS, column_major, gradient, poisoned, product
from tgl.cutlass_kernels import archs, tilings
from tgl.cutlass_kernels.archs import ARCHS
from tgl.cutlass_kernels.gemm.warp.tilings import WARPS, Tilings
from tgl.cutlass_kernels.runtime import launcher

pytestmark = pytest.mark.gpu
if ARCH != "sm_90":
    pytest.skip("needs a Hopper, for which they can be compiled", allow_module_level=True)

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
HERE = Tilings(ARCHS["sm_90"].smem_bytes)
LARGE = (700, 0, 3, 1025, 64, 512)


@pytest.fixture(autouse=True)
def kernels_of_warps(monkeypatch):
    forced = replace(ARCHS["sm_90"], folder="warp", target="sm_90", kernels=archs.DENSE, tilings=HERE)
    monkeypatch.setitem(ARCHS, "sm_90", forced)
    monkeypatch.setattr(launcher, "plans", {})
    launcher.forget()
    yield
    launcher.forget()


@pytest.mark.parametrize("sizes", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("place", [lambda b: b, column_major], ids=["row-major", "column-major"])
def test_grouped_gemm(sizes, dtype, place):
    a, b = integers(sum(sizes) + TAIL, 200, dtype=dtype), integers(len(sizes), 200, 328, dtype=dtype)
    bias = integers(len(sizes), 328, dtype=F32)
    got = served(tgl.grouped_gemm, poisoned(a, sizes), place(b), ends(sizes), bias)
    assert torch.equal(got, product(a, b, sizes, bias).to(dtype))


@pytest.mark.parametrize("sizes", ROUTINGS.values(), ids=ROUTINGS)
def test_wgrad(sizes):
    a, b = (poisoned(integers(sum(sizes) + TAIL, width), sizes) for width in (136, 264))
    dw = gradient(a, b, sizes)
    assert torch.equal(served(tgl.grouped_gemm_wgrad, a, b, ends(sizes)), dw.to(BF16))
    main_grad = integers(*dw.shape, dtype=F32)
    total = main_grad.double() + dw
    served(tgl.grouped_gemm_wgrad_accumulate_, a, b, ends(sizes), main_grad)
    assert torch.equal(main_grad.double(), total)


@pytest.mark.parametrize("shape", WARPS, ids=str)
def test_every_tiling(shape, monkeypatch):
    monkeypatch.setattr(tilings, "choose", lambda *_: HERE.deepest(*shape))
    a, b, dy = integers(sum(LARGE), 520), integers(len(LARGE), 520, 776), integers(sum(LARGE), 776)
    assert torch.equal(served(tgl.grouped_gemm, a, b, ends(LARGE)), product(a, b, LARGE).to(BF16))
    got = served(tgl.grouped_gemm_wgrad, a, dy, ends(LARGE), out_dtype=F32)
    assert torch.equal(got, gradient(a, dy, LARGE).float())


def test_rows_by_an_index():
    index = random_index(300, LARGE, TAIL, True)
    tokens, rows = (t.to(DEVICE) for t in scattered(integers(300, 200).cpu(), index))
    b, dy, index = integers(len(LARGE), 200, 328), integers(len(index), 328), index.to(DEVICE)
    got = served(tgl.grouped_gemm, tokens, b, ends(LARGE), rows=index)
    assert torch.equal(got, product(rows, b, LARGE).to(BF16))
    got = served(tgl.grouped_gemm_wgrad, tokens, poisoned(dy, LARGE), ends(LARGE), a_rows=index, out_dtype=F32)
    assert torch.equal(got, gradient(rows, dy, LARGE).float())


def test_one_graph_for_every_routing():
    groups, rows = 8, 2000
    a, b, dy = integers(rows, 264), integers(groups, 264, 328), integers(rows, 328)
    offs = ends((0,) * groups)

    def step():
        return tgl.grouped_gemm(a, b, offs), tgl.grouped_gemm_wgrad(a, dy, offs)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, dw = step()
    for turn in range(10):
        sizes = tuple(torch.randint(0, 240, (groups,)).tolist())
        offs.copy_(ends(sizes))
        graph.replay()
        assert torch.equal(y, product(a, b, sizes).to(BF16)), turn
        assert torch.equal(dw, gradient(a, dy, sizes).to(BF16)), turn
