"""Dense rows times packed matrices on a device: exact in every format and routing, one graph for any of them."""

import pytest
import torch

import tgl
from tests.cutlass_kernels.packed_cases import components, decoded, every_value_of
from tests.gpu.device import DEVICE, TAIL, ends, integers, served
from tests.kernel_cases import ROUTINGS, poisoned, product
from tests.ops.test_packed_gemm import every_value
from tgl import backends
from tgl.meta import packed
from tgl.meta.formats import FORMATS

pytestmark = pytest.mark.gpu

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
HEIGHT, WIDTH = 328, 416
DIRECTIONS = pytest.mark.parametrize("over_rows", [False, True], ids=["columns", "rows"])


def matrices(format, groups, over_rows):
    """Components of matrices on the device, and these as the product's second operand."""
    parts = components(format, (groups, HEIGHT, WIDTH))
    w = decoded(format, *parts).to(DEVICE)
    here = tuple(None if t is None else t.to(DEVICE) for t in parts)
    return here, w if over_rows else w.transpose(1, 2)


def by(implementation, wanted, format, over_rows, *operands):
    """The product by one implementation, even where a rule from sizes prefers another."""
    there = {i.name: i for i in backends.in_order("grouped_gemm_packed", DEVICE)}
    out = torch.full_like(wanted, float("nan"))
    there[implementation].run(*operands, format=format, over_rows=over_rows, out=out)
    return out


@DIRECTIONS
@pytest.mark.parametrize("sizes", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("format", FORMATS)
def test_every_routing(format, sizes, over_rows):
    (data, scale, amax), right = matrices(format, len(sizes), over_rows)
    a = poisoned(integers(sum(sizes) + TAIL, right.shape[1]), sizes)
    bias, factor = integers(len(sizes), right.shape[2], dtype=F32), integers(len(a), dtype=F32)
    wanted = product(a, right, sizes, bias, factor).float()
    got = by("tgl kernel", wanted, format, over_rows, a, data, scale, ends(sizes), amax, bias, factor)
    assert torch.equal(got, wanted)


@DIRECTIONS
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 9, 20, 40, 200])
@pytest.mark.parametrize("format", FORMATS)
def test_every_tiling(format, rows, dtype, over_rows):
    """Rows of groups vary; each tile is wider than the rest of the columns."""
    sizes = (rows, 0, 2 * rows, rows + 1)
    (data, scale, amax), right = matrices(format, len(sizes), over_rows)
    a = poisoned(integers(sum(sizes) + TAIL, right.shape[1], dtype=dtype), sizes)
    got = served(tgl.grouped_gemm_packed, a, data, scale, ends(sizes), amax, format=format, over_rows=over_rows)
    assert torch.equal(got, product(a, right, sizes).to(dtype))


@pytest.mark.parametrize("rows", [1, 100])
def test_every_element_under_every_scale(rows):
    """Every element under every scale whose products are normal numbers, as the CPU implementation has them."""
    data, scale = every_value(range(2, 256))
    a, offs = torch.zeros(rows * len(scale), 32, dtype=BF16), ends((rows,) * len(scale))
    a[:, 0] = 1.0
    wanted = tgl.grouped_gemm_packed(a, data, scale, offs.cpu(), format="mxfp4", out_dtype=F32)
    operands = (t.to(DEVICE) for t in (a, data, scale, offs))
    got = served(tgl.grouped_gemm_packed, *operands, format="mxfp4", out_dtype=F32).cpu()
    assert torch.equal(got.isnan(), wanted.isnan())
    assert torch.equal(got.nan_to_num(), wanted.nan_to_num())


@pytest.mark.parametrize("rows", [16, 100])
def test_every_code_of_nvfp4_under_every_scale(rows):
    """By the kernels for few rows and for many, whether a factor splits or not, as the CPU implementation has them; no
    product is below the smallest normal number."""
    data, scale, amax = every_value_of("nvfp4", None)
    some = (amax == 0) | ~(amax < 1e-30)
    data, scale, amax = data[some], scale[some], amax[some]
    a, offs = torch.eye(rows, 32, dtype=BF16).repeat(len(data), 1), ends((rows,) * len(data))
    wanted = tgl.grouped_gemm_packed(a, data, scale, offs.cpu(), amax, format="nvfp4", out_dtype=F32)
    operands = (t.to(DEVICE) for t in (a, data, scale, offs, amax))
    got = served(tgl.grouped_gemm_packed, *operands, format="nvfp4", out_dtype=F32).cpu()
    assert torch.equal(got.isnan(), wanted.isnan())
    assert torch.equal(got.nan_to_num(), wanted.nan_to_num())


@DIRECTIONS
@pytest.mark.parametrize("format", FORMATS)
def test_a_row_has_the_same_bits_beside_few_and_many(format, over_rows):
    """Exponents lie far apart, so that another order of sums has other bits."""
    groups, shape = 4, (4, HEIGHT, WIDTH)
    w = torch.randn(shape, device=DEVICE) * torch.exp2(torch.randint(-9, 9, shape, device=DEVICE).float())
    form = FORMATS[format]
    made = tgl.group_quantize(w, None, format=format, columnwise=False, block_2d=form.square_scales)
    amax = made.amax if form.decodes_with_amax else None
    options = {"format": format, "over_rows": over_rows, "out_dtype": F32}
    rows = torch.randn(groups, 2000, HEIGHT if over_rows else WIDTH, device=DEVICE).to(BF16)

    def of_first(count, by=served):
        a = rows[:, :count].flatten(0, 1)
        got = by(tgl.grouped_gemm_packed, a, made.data, made.scale, ends((count,) * groups), amax, **options)
        return got.unflatten(0, (groups, count))[:, 0]

    def by_what_is_faster(op, *args, **kwargs):
        assert "batch-invariant" in str(tgl.explain(op, *args, **kwargs))
        return op(*args, **kwargs)

    wanted = of_first(2000, by_what_is_faster)
    for count in (1, 2, 3, 4, 7, 8, 16, 32, 33, 64, 65, 200):
        assert torch.equal(of_first(count), wanted), count


@DIRECTIONS
@pytest.mark.parametrize("budget", [1, 1 << 19, packed.BYTES], ids=["one", "some", "all"])
def test_all_implementations_agree(budget, over_rows, monkeypatch):
    """The kernel and decoded pieces, on rows enough for either."""
    monkeypatch.setattr(packed, "BYTES", budget)
    sizes = (700, 0, 1025, 3)
    (data, scale, _), right = matrices("mxfp4", len(sizes), over_rows)
    a, offs = poisoned(integers(sum(sizes) + TAIL, right.shape[1]), sizes), ends(sizes)
    wanted = product(a, right, sizes).bfloat16()
    for name in ("tgl kernel", "decoded in pieces, dense GEMM"):
        assert torch.equal(by(name, wanted, "mxfp4", over_rows, a, data, scale, offs, None, None, None), wanted), name


def test_gradient():
    sizes = (5, 0, 130)
    (data, scale, _), right = matrices("mxfp4", len(sizes), False)
    a = poisoned(integers(sum(sizes) + TAIL, WIDTH), sizes).requires_grad_()
    y = tgl.grouped_gemm_packed(a, data, scale, ends(sizes), format="mxfp4")
    dy = poisoned(integers(*y.shape), sizes)
    (da,) = torch.autograd.grad(y, a, dy)
    assert torch.equal(da, product(dy, right.transpose(1, 2), sizes).bfloat16())


def test_one_graph_for_every_routing():
    groups, rows = 8, 600
    (data, scale, _), right = matrices("mxfp4", groups, False)
    a, offs = integers(rows, WIDTH), ends((0,) * groups)

    def step():
        return tgl.grouped_gemm_packed(a, data, scale, offs, format="mxfp4")

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    for turn in range(10):
        sizes = tuple(torch.randint(0, 70, (groups,)).tolist())
        offs.copy_(ends(sizes))
        graph.replay()
        assert torch.equal(y, product(a, right, sizes).bfloat16()), turn
