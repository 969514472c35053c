"""Results are rounded once. Operands are integers: their float32 sums are exact, and too long for the output dtype."""

import pytest
import torch

import tgl
from tests.activation_cases import relative_error
from tgl.meta.activations import TABLE
from tgl.ops.grouped_activation import Params

LIMIT = {torch.bfloat16: 255, torch.float16: 31}  # exact in the dtype, products of 64 of them exact in float32
SHAPES = [(1, 1, 1), (3, 5, 7), (16, 16, 16), (40, 64, 24), (64, 33, 65), (160, 64, 64)]


def integers(dtype, *shape):
    return torch.randint(-LIMIT[dtype], LIMIT[dtype] + 1, shape).to(dtype)


def product(a, b, offs):
    out, start = torch.zeros(a.shape[0], b.shape[2], dtype=torch.float64), 0
    for g, end in enumerate(offs.tolist()):
        out[start:end] = a[start:end].double() @ b[g].double()
        start = end
    return out


def per_row(values, offs, rows):
    sizes = torch.diff(offs, prepend=offs.new_zeros(1))
    return torch.cat([values.double().repeat_interleave(sizes, 0), torch.zeros(rows - int(offs[-1]), values.shape[1])])


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("bias", ["none", "narrow", "scaled"])
def test_two_products_are_added_before_rounding(dtype, shape, by_columns, bias):
    rows, depth, width = shape
    offs = torch.tensor([rows // 3, rows // 3, rows], dtype=torch.int32)
    a, low = integers(dtype, rows, depth), integers(dtype, rows, 5)
    b, up = integers(dtype, 3, depth, width), integers(dtype, 3, 5, width)
    if by_columns:
        b, up = (t.mT.contiguous().mT for t in (b, up))
    wanted, added = product(a, b, offs) + product(low, up, offs), ()
    if bias != "none":
        added = (integers(dtype, 3, width),)
        wanted += per_row(added[0], offs, rows)
    if bias == "scaled":
        added += (torch.full((rows,), 2, dtype=dtype),)
        wanted += per_row(added[0], offs, rows)
    assert torch.equal(tgl.grouped_gemm_low_rank(a, b, low, up, offs, *added), wanted.to(dtype))
    assert torch.equal(tgl.grouped_gemm_low_rank(a, b, low, up, offs, *added, out_dtype=torch.float32), wanted.float())


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("wide_bias", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_the_bias_is_added_before_rounding(dtype, shape, wide_bias, scaled):
    rows, depth, width = shape
    offs = torch.tensor([rows // 3, rows // 3, rows], dtype=torch.int32)
    a, b, bias = integers(dtype, rows, depth), integers(dtype, 3, depth, width), integers(dtype, 3, width)
    scale = torch.randint(1, 4, (rows,)).to(dtype) if scaled else None
    bias = bias.float() * 3 if wide_bias else bias
    matrix = product(a, b, offs)
    added = per_row(bias, offs, rows) * (scale.double()[:, None] if scaled else 1)
    result = tgl.grouped_gemm(a, b, offs, bias, scale)
    assert torch.equal(result, (matrix + added).to(dtype))
    if rows * width > 1000:
        twice = (matrix.to(dtype).double() + added).to(dtype)
        assert not torch.equal(twice, (matrix + added).to(dtype)), "these operands would not show a second rounding"


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_round_once(dtype, shape):
    rows, depth, width = shape
    depth = min(depth, 64)
    offs = torch.tensor([min(rows, 64)], dtype=torch.int32)
    a, b = integers(dtype, rows, depth).requires_grad_(), integers(dtype, 1, depth, width).requires_grad_()
    y = tgl.grouped_gemm(a, b, offs)
    dy = integers(dtype, rows, width)
    da, db = torch.autograd.grad(y, (a, b), dy)
    routed = int(offs[-1])
    if width <= 65:
        assert torch.equal(da[:routed], (dy[:routed].double() @ b[0].double().t()).to(dtype))
    assert torch.equal(db[0], (a[:routed].double().t() @ dy[:routed].double()).to(dtype))


@pytest.mark.parametrize("dtype", LIMIT)
def test_accumulation_into_the_operand_dtype_rounds_the_sum_once(dtype):
    offs = torch.tensor([10, 40], dtype=torch.int32)
    a, b, main = integers(dtype, 40, 24), integers(dtype, 40, 32), integers(dtype, 2, 24, 32)
    exact = torch.stack([a[:10].double().t() @ b[:10].double(), a[10:].double().t() @ b[10:].double()]) + main.double()
    tgl.grouped_gemm_wgrad_accumulate_(a, b, offs, main)
    assert torch.equal(main, exact.to(dtype))


@pytest.mark.parametrize("dtype", LIMIT)
def test_float32_results_of_narrow_operands_are_not_rounded_at_all(dtype):
    offs = torch.tensor([10, 40], dtype=torch.int32)
    a, b, dy = integers(dtype, 40, 24), integers(dtype, 2, 24, 32), integers(dtype, 40, 32)
    assert torch.equal(tgl.grouped_gemm(a, b, offs, out_dtype=torch.float32).double(), product(a, b, offs))
    dw = tgl.grouped_gemm_wgrad(a, dy, offs, out_dtype=torch.float32)
    exact = torch.stack([a[:10].double().t() @ dy[:10].double(), a[10:].double().t() @ dy[10:].double()])
    assert torch.equal(dw.double(), exact)


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("kind", TABLE)
def test_activation_rounds_once(dtype, kind):
    """Results are within half a unit in the last place of the exact value, plus the error of float32 steps.

    A sigmoid, or GELU's tail, is 0 where it would be a subnormal number.
    """
    x = (torch.randn(64, 64) * 3).to(dtype)
    probs = torch.rand(64)
    offs = torch.tensor([64], dtype=torch.int32)
    result = tgl.grouped_activation(x, offs, probs, kind=kind).double()
    exact = tgl.grouped_activation(x.double(), offs, probs.double(), kind=kind)
    info = torch.finfo(dtype)
    unit = torch.exp2(torch.floor(torch.log2(exact.abs().clamp_min(info.smallest_normal)))) * info.eps
    params = Params(kind)
    g, u = params.halves(x.double())
    a, a1, linear, _ = params.factors(g, u)
    own = relative_error(params, g, a, a1) * exact.abs()
    lost = 2.0**-126 * g.abs() * (1 if linear is None else linear.abs()) * probs.double()[:, None]
    assert ((result - exact).abs() <= unit / 2 + own + lost).all()
