"""The mma.sync kernels instead of a Hopper's own: exact, in every tiling, replayed with other routings.

Lanes load, and TMA where operands have 16 bits. Nothing else in them depends on the architecture, so what holds for
their code compiled for sm_90 is what can be seen of them without the chips that they are for.
"""

import pytest
import torch

import tgl
from tests import kernels_of_warps
from tests.cutlass_kernels.gather_cases import random_index, scattered
from tests.gpu.device import ARCH, DEVICE, TAIL, ends, integers, served
from tests.kernel_cases import ROUTINGS, column_major, exact, gradient, poisoned, product
from tgl.cutlass_kernels import tilings
from tgl.cutlass_kernels.archs import ARCHS
from tgl.cutlass_kernels.config import KINDS
from tgl.cutlass_kernels.gemm.mma_sync.tilings import WARPS
from tgl.cutlass_kernels.gemm.operand_formats import OPERANDS

pytestmark = pytest.mark.gpu
if ARCH != "sm_90":
    pytest.skip("needs a Hopper, for which they can be compiled", allow_module_level=True)

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
E5M2 = torch.float8_e5m2
LOADS = kernels_of_warps.TILINGS
HERE = LOADS["lanes"]
FORMATS = [name for name, form in OPERANDS.items() if "sm_89" in form.archs]
LARGE = (700, 0, 3, 1025, 64, 512)


@pytest.fixture(autouse=True)
def _kernels_of_warps(request):
    with kernels_of_warps.in_place(getattr(request, "param", "lanes")):
        yield


by_lanes_and_tma = pytest.mark.parametrize("_kernels_of_warps", LOADS, indirect=True)


@by_lanes_and_tma
@pytest.mark.parametrize("sizes", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("place", [lambda b: b, column_major], ids=["row-major", "column-major"])
def test_grouped_gemm(sizes, dtype, place):
    a, b = integers(sum(sizes) + TAIL, 200, dtype=dtype), integers(len(sizes), 200, 328, dtype=dtype)
    bias = integers(len(sizes), 328, dtype=F32)
    got = served(tgl.grouped_gemm, poisoned(a, sizes), place(b), ends(sizes), bias)
    assert torch.equal(got, product(a, b, sizes, bias).to(dtype))


@by_lanes_and_tma
@pytest.mark.parametrize("sizes", ROUTINGS.values(), ids=ROUTINGS)
def test_wgrad(sizes):
    a, b = (poisoned(integers(sum(sizes) + TAIL, width), sizes) for width in (136, 264))
    dw = gradient(a, b, sizes)
    assert torch.equal(served(tgl.grouped_gemm_wgrad, a, b, ends(sizes)), dw.to(BF16))
    main_grad = integers(*dw.shape, dtype=F32)
    total = main_grad.double() + dw
    served(tgl.grouped_gemm_wgrad_accumulate_, a, b, ends(sizes), main_grad)
    assert torch.equal(main_grad.double(), total)


@by_lanes_and_tma
@pytest.mark.parametrize("shape", WARPS, ids=str)
def test_every_tiling(shape, monkeypatch):
    monkeypatch.setattr(tilings, "choose", lambda *_: ARCHS["sm_90"].tilings.deepest(*shape))
    a, b, dy = integers(sum(LARGE), 520), integers(len(LARGE), 520, 776), integers(sum(LARGE), 776)
    assert torch.equal(served(tgl.grouped_gemm, a, b, ends(LARGE)), product(a, b, LARGE).to(BF16))
    got = served(tgl.grouped_gemm_wgrad, a, dy, ends(LARGE), out_dtype=F32)
    assert torch.equal(got, gradient(a, dy, LARGE).float())


@by_lanes_and_tma
def test_rows_by_an_index():
    index = random_index(300, LARGE, TAIL, True)
    tokens, rows = (t.to(DEVICE) for t in scattered(integers(300, 200).cpu(), index))
    b, dy, index = integers(len(LARGE), 200, 328), integers(len(index), 328), index.to(DEVICE)
    got = served(tgl.grouped_gemm, tokens, b, ends(LARGE), rows=index)
    assert torch.equal(got, product(rows, b, LARGE).to(BF16))
    got = served(tgl.grouped_gemm_wgrad, tokens, poisoned(dy, LARGE), ends(LARGE), a_rows=index, out_dtype=F32)
    assert torch.equal(got, gradient(rows, dy, LARGE).float())


@by_lanes_and_tma
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


def quantised(x, offs, format, **options):
    """Components. FP8 tensor-wise by a given power of two: 448 / amax would cost the sums seven bits."""
    if format == "fp8_tensor":
        options["scale"] = 2.0 ** torch.arange(len(x) if offs is None else len(offs), device=DEVICE).remainder(4)
    if format == "fp8_block":
        options["block_2d"] = offs is None
    return tgl.group_quantize(x, offs, format=format, **options)


def exact_here(*shape):
    return exact(*shape).to(DEVICE)


@pytest.mark.parametrize("sizes", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("direction", ["rowwise", "columnwise"])
@pytest.mark.parametrize("format", FORMATS)
def test_grouped_gemm_of_fp8(format, direction, sizes):
    offs = ends(sizes)
    x = poisoned(exact_here(sum(sizes) + TAIL, 336), sizes)
    w = exact_here(len(sizes), *((264, 336) if direction == "rowwise" else (336, 264)))
    q, p = quantised(x, offs, format), quantised(w, None, format)
    bias = integers(len(sizes), 264, dtype=F32)
    b = p[:2] if direction == "rowwise" else p[3:5]
    operands, options = (*q[:2], *b, offs, None, None, bias), {"format": format, "b_direction": direction}
    got = served(tgl.grouped_gemm_scaled, *operands, **options)
    matrices = w.transpose(1, 2) if direction == "rowwise" else w
    assert torch.equal(got, product(x, matrices, sizes, bias).to(BF16))


@pytest.mark.parametrize("sizes", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("dtype", [None, E5M2], ids=["alike", "mixed"])
@pytest.mark.parametrize("format", FORMATS)
def test_wgrad_of_fp8(format, dtype, sizes):
    offs = ends(sizes)
    x, dy = (poisoned(exact_here(sum(sizes) + TAIL, width), sizes) for width in (144, 264))
    q, p = quantised(x, offs, format), quantised(dy, offs, format, dtype=dtype)
    components = (*q[3:5], *p[3:5], offs)
    dw = gradient(x, dy, sizes)
    assert torch.equal(served(tgl.grouped_gemm_scaled_wgrad, *components, format=format, out_dtype=F32).double(), dw)
    main_grad = integers(*dw.shape, dtype=F32)
    total = main_grad.double() + dw
    served(tgl.grouped_gemm_scaled_wgrad_accumulate_, *components, main_grad, format=format)
    assert torch.equal(main_grad.double(), total)


@pytest.mark.parametrize("shape", [(m, n) for m, n in WARPS if m * n <= 128 * 128], ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_every_tiling_of_fp8(format, shape, monkeypatch):
    form = OPERANDS[format]
    monkeypatch.setattr(tilings, "choose_scaled", lambda _, kind, *rest: HERE.deepest(*shape, kind, form))
    for kind in KINDS:
        assert tilings.reason("sm_90", kind, HERE.deepest(*shape, kind, form), form) is None
    offs, sizes = ends(LARGE), LARGE
    x, dy, w = exact_here(sum(sizes), 1008), exact_here(sum(sizes), 776), exact_here(len(sizes), 776, 1008)
    q, d, p = quantised(x, offs, format), quantised(dy, offs, format), quantised(w, None, format)
    got = served(tgl.grouped_gemm_scaled, *q[:2], *p[:2], offs, format=format, out_dtype=F32)
    assert torch.equal(got.double(), product(x, w.transpose(1, 2), sizes))
    got = served(tgl.grouped_gemm_scaled_wgrad, *q[3:5], *d[3:5], offs, format=format, out_dtype=F32)
    assert torch.equal(got.double(), gradient(x, dy, sizes))


@pytest.mark.parametrize("format", FORMATS)
def test_fp8_is_close_to_float32_and_the_same_bits(format):
    """On sums that grow: tensor cores that add with 13 bits would be off by more, were they to add up all of them."""
    torch.manual_seed(0)
    sizes, offs, options = (1000, 0, 37, 900), ends((1000, 0, 37, 900)), {"format": format, "out_dtype": F32}
    x, w = torch.rand(sum(sizes), 4096, device=DEVICE), torch.rand(len(sizes), 384, 4096, device=DEVICE)
    q, p = quantised(x, offs, format), quantised(w, None, format)
    left = tgl.group_dequantize(*q[:2], offs, **options)
    right = tgl.group_dequantize(*p[:2], **options, block_2d=format == "fp8_block")
    got = tgl.grouped_gemm_scaled(*q[:2], *p[:2], offs, **options)
    for _ in range(20):
        assert torch.equal(tgl.grouped_gemm_scaled(*q[:2], *p[:2], offs, **options), got)
    wanted = product(left, right.transpose(1, 2), sizes)
    assert ((got - wanted).norm() / wanted.norm()).item() < 2.0**-10
