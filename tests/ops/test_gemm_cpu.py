"""``grouped_gemm`` on a CPU: ATen's ``grouped_mm`` where that is safe and exact, our loop elsewhere."""

from itertools import pairwise

import pytest
import torch

import tgl
from tgl.backends.cpu import gemm as _gemm_cpu
from tgl.backends.portable import segments as _segments

K, N, TAIL = 24, 40, 7
ROUTINGS = {
    "ragged": (5, 1, 130, 0, 3),
    "empty first and last": (0, 4, 0, 0, 9, 0),
    "all empty": (0, 0, 0),
    "one": (6,),
}


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request, monkeypatch):
    if request.param == torch.bfloat16 and not _segments._cpu_has_bf16_gemm():
        pytest.skip("no bfloat16 GEMM here")
    work = _gemm_cpu.work
    monkeypatch.setattr(_gemm_cpu, "work", lambda *args: work(*args)._replace(batches=()))
    return request.param


@pytest.fixture
def calls(monkeypatch):
    """Calls of ATen's grouped_mm."""
    made, original = [], torch.nn.functional.grouped_mm

    def counted(*args, **kwargs):
        made.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", counted)
    return made


def integers(*shape, dtype):
    return torch.randint(-3, 4, shape).to(dtype)


def problem(sizes, dtype):
    """Operands of the three products, NaN in the tail, and the offsets."""
    offs = torch.tensor(sizes).cumsum(0).int()
    a, dy = (integers(sum(sizes) + TAIL, width, dtype=dtype) for width in (K, N))
    a[-TAIL:] = dy[-TAIL:] = torch.nan
    return a, integers(len(sizes), K, N, dtype=dtype), dy, offs


def exact(a, b, dy, offs):
    """Product and weight gradient in float64, rounded once."""
    y, dw = torch.zeros(a.shape[0], b.shape[2]), torch.zeros(b.shape)
    for g, (start, end) in enumerate(pairwise([0, *offs.tolist()])):
        y[start:end] = a[start:end].double() @ b[g].double()
        dw[g] = a[start:end].double().t() @ dy[start:end].double()
    return y.to(a.dtype), dw.to(a.dtype)


def padded(t):
    """The same values with unused memory at the end of every row."""
    wide = torch.full((*t.shape[:-1], t.shape[-1] + 16), torch.nan, dtype=t.dtype)
    wide[..., : t.shape[-1]] = t
    return wide[..., : t.shape[-1]]


LAYOUTS = {
    "contiguous": lambda t: t,
    "padded rows": padded,
    "weight transposed": lambda t: t.mT.contiguous().mT if t.dim() == 3 else t,
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("sizes", ROUTINGS.values(), ids=ROUTINGS)
def test_exact(calls, dtype, sizes, layout):
    a, b, dy, offs = problem(sizes, dtype)
    y, dw = exact(a, b, dy, offs)
    a, b, dy = map(layout, (a, b, dy))
    for out, expected in ((tgl.grouped_gemm(a, b, offs), y), (tgl.grouped_gemm_wgrad(a, dy, offs), dw)):
        assert torch.equal(out, expected)
        assert out.is_contiguous()
    assert len(calls) == 2


def test_no_tail(calls, dtype):
    a, b, dy, offs = problem((3, 5), dtype)
    a, dy = a[:-TAIL], dy[:-TAIL]
    assert torch.equal(tgl.grouped_gemm(a, b, offs), exact(a, b, dy, offs)[0])
    assert len(calls) == 1


def shifted(t):
    """The same values at an address that is no multiple of 16 bytes."""
    return torch.zeros(t.numel() + 1, dtype=t.dtype)[1:].view(t.shape).copy_(t)


def column_major(t):
    return t.mT.contiguous().mT


OUT_OF_REACH = {
    "a misaligned": lambda a, b, dy, offs: (shifted(a), b, dy, offs),
    "dy misaligned": lambda a, b, dy, offs: (a, shifted(b), shifted(dy), offs),
    "odd width": lambda a, b, dy, offs: (a, b[:, :, :-1].contiguous(), dy[:, :-1].contiguous(), offs),
    "odd pitch": lambda a, b, dy, offs: (a[:, :-1].contiguous(), b[:, :-1].contiguous(), dy, offs),
    "odd column-major pitch": lambda a, b, dy, offs: (column_major(a[:-2]), b, dy[:-2], offs - 2),
    "expanded": lambda a, b, dy, offs: (a[:1].expand(a.shape), b, dy, offs),
    "no rows": lambda a, b, dy, offs: (a[:0], b, dy[:0], torch.zeros_like(offs)),
}


@pytest.mark.parametrize("change", OUT_OF_REACH.values(), ids=OUT_OF_REACH)
def test_operands_that_aten_does_not_take(calls, dtype, change):
    operands = problem((5, 1, 30, 0, 4), dtype)
    a, b, dy, offs = change(*(t.nan_to_num() if t.is_floating_point() else t for t in operands))
    y, dw = exact(a, b, dy, offs)
    assert torch.equal(tgl.grouped_gemm(a, b, offs), y)
    assert torch.equal(tgl.grouped_gemm_wgrad(a, dy, offs), dw)
    assert not calls


@pytest.mark.parametrize("offs", [[9, 4, 12], [-1, 3, 5], [2, 4, 10**6], [2**31 - 1] * 3])
def test_bad_offs_use_the_loop(calls, dtype, offs):
    a, b, dy, _ = problem((3, 5, 6), dtype)
    a, dy, offs = a.nan_to_num(), dy.nan_to_num(), torch.tensor(offs, dtype=torch.int32)
    assert tgl.grouped_gemm(a, b, offs).isfinite().all()
    assert tgl.grouped_gemm_wgrad(a, dy, offs).isfinite().all()
    assert not calls


def test_products_with_another_rounding_use_the_loop(calls):
    a, b, dy, offs = problem((3, 5, 6), torch.float32)
    bias = integers(3, N, dtype=torch.float32)
    y, dw = exact(a, b, dy, offs)
    tgl.grouped_gemm(a, b, offs, bias)
    tgl.grouped_gemm(a.half(), b.half(), offs)
    for out_dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(tgl.grouped_gemm(a, b, offs, out_dtype=out_dtype), y.to(out_dtype))
        assert torch.equal(tgl.grouped_gemm_wgrad(a, dy, offs, out_dtype=out_dtype), dw.to(out_dtype))
    assert torch.equal(tgl.grouped_gemm(a.double(), b.double(), offs), y.double())
    assert not calls


def test_remembered_calls_do_not_serve_calls_that_differ(calls, dtype):
    """Between calls that the loop of ATen takes, one that differs in a single thing that it does not take."""
    a, b, dy, offs = problem((5, 1, 30, 0, 4), dtype)
    a, dy = a.nan_to_num(), dy.nan_to_num()
    y, dw = exact(a, b, dy, offs)
    expected = {
        "values of offs": (offs.flip(0).contiguous(), None),
        "alignment": (offs, (shifted(a), b)),
        "strides": (offs, (a[:1].expand(a.shape), b)),
    }
    for turn, (other, operands) in enumerate(expected.values(), 1):
        assert torch.equal(tgl.grouped_gemm(a, b, offs), y)
        assert torch.equal(tgl.grouped_gemm_wgrad(a, dy, offs), dw)
        tgl.grouped_gemm(*(operands or (a, b)), other)
        assert len(calls) == 2 * turn
    with pytest.raises(TypeError, match="`b` must be"):
        tgl.grouped_gemm(a, b.double(), offs)
    with pytest.raises(ValueError, match="`offs` must be"):
        tgl.grouped_gemm(a, b, offs[:-1])


def test_an_implementation_that_comes_later_is_tried_first(calls, dtype):
    a, b, dy, offs = problem((3, 5, 6), dtype)
    products = (lambda: tgl.grouped_gemm(a, b, offs)), (lambda: tgl.grouped_gemm_wgrad(a, dy, offs))
    for turn in (1, 2):
        for product, expected in zip(products, exact(a, b, dy, offs)):
            assert torch.equal(product(), expected)
        assert len(calls) == 2 * turn
        ones = [
            tgl.register_implementation(op, "ones", device="cpu")(lambda *_, out, **__: out.fill_(1))
            for op in ("grouped_gemm", "grouped_gemm_wgrad")
        ]
        try:
            for product in products:
                assert product().eq(1).all()
        finally:
            for implementation in ones:
                tgl.backends.remove(implementation)
        assert len(calls) == 2 * turn


def test_debug_checks_see_what_is_remembered(calls):
    a, b, dy, offs = problem((3, 5, 6), torch.float32)
    for product in (lambda offs: tgl.grouped_gemm(a, b, offs), lambda offs: tgl.grouped_gemm_wgrad(a, dy, offs)):
        product(offs)
        with tgl.debug_checks(), pytest.raises(ValueError, match="offs"):
            product(offs.flip(0).contiguous())
