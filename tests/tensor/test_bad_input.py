"""Errors of unsupported operations, with nothing written."""

import pytest
import torch

import tgl
from tests.tensor.cases import CASES, arguments, assert_same_bytes, rows
from tgl.tensor import GroupedTensor

OFFS = torch.tensor([4, 8], dtype=torch.int32)
X = torch.ones(8, 32)

QUANTIZE = [
    (lambda: tgl.quantize(X, OFFS, "int8"), ValueError, r"quantize: `format` must be one of .*, but got 'int8'"),
    (lambda: tgl.quantize(X, OFFS, "fp8_tensor", scale_layout="blocked"), ValueError, "`scale_layout` must be"),
    (lambda: tgl.quantize(X, OFFS, "mxfp8", eps=1.0), ValueError, "`eps` must be left at its default for mxfp8"),
    (lambda: tgl.quantize(X, OFFS, "mxfp8", block=32), TypeError, "block"),
    (lambda: tgl.quantize(X, OFFS, "dense", rowwise=True), ValueError, "`options` must be none for dense values"),
    (lambda: tgl.quantize(X, OFFS.long(), "mxfp8"), TypeError, "`offs` must be int32"),
    (lambda: tgl.quantize(X, OFFS.long(), "dense"), TypeError, "`offs` must be int32"),
    (lambda: tgl.quantize(X, OFFS.to("meta"), "mxfp8"), ValueError, "`offs` must be on cpu"),
    (lambda: tgl.quantize(X.double(), OFFS, "mxfp8"), TypeError, "`x` must be float32, bfloat16 or float16"),
    (lambda: tgl.quantize(X.double(), OFFS, "dense"), TypeError, "`x` must be float32, bfloat16 or float16"),
    (lambda: tgl.quantize(X[0], None, "mxfp8"), ValueError, "`x` must be 3-D"),
    (lambda: tgl.quantize(X[0], None, "dense"), ValueError, r"`x` must be \[G, N, K\] or \[N, K\]"),
    (lambda: tgl.quantize(X[:, :31], OFFS, "nvfp4"), ValueError, "even"),
    (lambda: tgl.quantize(X, OFFS, "mxfp8", m_splits=OFFS), ValueError, "`offs` must be the only description .* m_spl"),
    (lambda: tgl.quantize(X, None, "mxfp8", num_groups=3), ValueError, "`num_groups` must be a divisor of T = 8, but"),
    (lambda: tgl.quantize([X], OFFS, "mxfp8"), ValueError, "`offs` must be None for a list of matrices"),
    (
        lambda: tgl.quantize([X, X[1:]], None, "mxfp8", row_scale=torch.ones(8)),
        ValueError,
        "`row_scale` must be None for a list of matrices",
    ),
    (lambda: tgl.quantize(X, None, "mxfp8", num_groups=0), ValueError, "`num_groups` must be a divisor of T = 8, but"),
    (lambda: tgl.quantize(X, None, "mxfp8", num_groups=-2), ValueError, "`num_groups` must be a divisor of T = 8, but"),
    (lambda: GroupedTensor.empty((8, 32), "mxfp8", num_groups=-1), ValueError, "`num_groups` must be None or not neg"),
    (lambda: tgl.quantize([], None, "mxfp8"), ValueError, "a list of at least one matrix"),
    (lambda: tgl.quantize([X, X[0]], None, "mxfp8"), ValueError, r"`x\[1\]` must be 2-D \[N, K\]"),
    (lambda: tgl.quantize([X, X[1:].half()], None, "mxfp8"), TypeError, r"`x\[1\]` must be torch.float32 like"),
    (lambda: tgl.quantize(tgl.quantize(X, OFFS, "mxfp8"), OFFS, "nvfp4"), TypeError, "`x` must be a dense tensor, but"),
    (lambda: tgl.quantize(X, OFFS, "dense", scale=torch.ones(2)), ValueError, "`scale` must be None for dense values"),
    (lambda: tgl.quantize(X, OFFS, "mxfp8", scale=torch.ones(2)), ValueError, "`scale` must be left at its default"),
    (
        lambda: tgl.quantize(X, OFFS, tgl.quantize(X, OFFS, "mxfp8").options, eps=1),
        ValueError,
        "`options` must be none",
    ),
    (
        lambda: tgl.quantize(X, OFFS, "mxfp8", foo=1),
        TypeError,
        "quantize: got an unexpected keyword argument `foo`; opt",
    ),
    (lambda: tgl.quantize(X, OFFS, "dense", foo=1), TypeError, "quantize: got an unexpected keyword argument `foo`"),
    (lambda: tgl.quantize(X, OFFS, "mxfp8", dbias=True), TypeError, "quantize: got an unexpected keyword .* `dbias`"),
    (
        lambda: GroupedTensor.empty((8, 32), "mxfp8", foo=1),
        TypeError,
        "empty: got an unexpected keyword argument `foo`",
    ),
    (lambda: GroupedTensor.empty((8,), "mxfp8"), ValueError, r"empty: `shape` must be \(T, K\) with `num_groups`"),
    (lambda: GroupedTensor.empty((8, 8, 8), "mxfp8", num_groups=2), ValueError, "`shape` must be"),
    (lambda: GroupedTensor.empty((8, 8), "mxfp8", source_dtype=torch.int8), TypeError, "`source_dtype` must be"),
    (lambda: GroupedTensor((8, 8), torch.float32, (), {"rowwise_data": X}), TypeError, "GroupedTensor is abstract"),
]


@pytest.mark.parametrize("call, error, message", QUANTIZE, ids=range(len(QUANTIZE)))
def test_bad_arguments_of_quantize(call, error, message):
    with pytest.raises(error, match=message):
        call()


IN_PLACE = [
    (
        lambda t, x: t.quantize_(x[1:]),
        ValueError,
        r"quantize_: `x` must be of shape of this GroupedTensor = \(48, 96\)",
    ),
    (lambda t, x: t.quantize_(x.double()), TypeError, "`x` must be float32, bfloat16 or float16"),
    (lambda t, x: t.quantize_(x.to("meta")), ValueError, "`x` must be on cpu like `self`, but got meta"),
    (lambda t, x: t.quantize_(t), TypeError, "`x` must be a dense tensor, but got MXFP8GroupedTensor"),
    (lambda t, x: t.quantize_(x, offs=OFFS), ValueError, "`offs` must be of length 4"),
    (lambda t, x: t.quantize_(x, offs=t.offs.long()), TypeError, "`offs` must be int32"),
    (lambda t, x: t.quantize_(x, torch.ones(2)), ValueError, "`noop` must be"),
    (lambda t, x: t.quantize_(x, scale=torch.ones(4)), ValueError, "`scale` must be left at its default for mxfp8"),
    (lambda t, x: t.quantize_(x.requires_grad_()), RuntimeError, "but `x` requires grad; use torch.no_grad"),
    (lambda t, x: t.requires_grad_().quantize_(x), RuntimeError, "but `self` requires grad; use torch.no_grad"),
    (lambda t, x: t.copy_(x[1:]), ValueError, "`x` must be of shape of this GroupedTensor"),
    (lambda t, x: t.copy_(tgl.quantize(x[1:], t.offs, "mxfp8")), NotImplementedError, "does not support aten.copy_"),
]


@pytest.mark.parametrize("call, error, message", IN_PLACE, ids=range(len(IN_PLACE)))
def test_bad_arguments_of_quantize_in_place(call, error, message):
    x, _, t = rows("mxfp8")
    before = t.clone()
    with pytest.raises(error, match=message):
        call(t, x)
    assert_same_bytes(t.detach(), before)


def test_dense_values_cannot_be_written():
    x, _, t = rows("dense")
    with pytest.raises(TypeError, match="quantize_: `x` must be float32, bfloat16 or float16"):
        t.quantize_(x.double())
    with pytest.raises(ValueError, match="`noop` must be of one element"):
        t.quantize_(x, torch.ones(2))
    with pytest.raises(ValueError, match="`rng` must be None for dense values"):
        t.quantize_(x, rng=torch.ones(2))


def test_offs_for_matrices():
    t = tgl.quantize(torch.ones(2, 4, 32), None, "mxfp8")
    with pytest.raises(ValueError, match="`offs` must be None for a tensor without groups of rows"):
        t.quantize_(torch.ones(2, 4, 32), offs=OFFS)
    with pytest.raises(ValueError, match=r"`x` must be matrices of the shapes \(\(2, 4\), \(6, 2\)\), but got"):
        tgl.quantize([torch.ones(2, 4), torch.ones(6, 2)], None, "mxfp8").quantize_([torch.ones(2, 4)])


def test_reading_missing_components():
    with pytest.raises(ValueError, match="dequantize: `columnwise` must be False: no columnwise components"):
        tgl.quantize(X, OFFS, "mxfp8", columnwise=False).dequantize(columnwise=True)
    with pytest.raises(ValueError, match="`columnwise` must be True: no rowwise components"):
        tgl.quantize(X, OFFS, "mxfp8", rowwise=False).dequantize(columnwise=False)
    with pytest.raises(ValueError, match="`columnwise` must be None or False for dense values"):
        tgl.quantize(X, OFFS, "dense").dequantize(columnwise=True)
    for dtype in (torch.float64, torch.int8, torch.float8_e4m3fn):
        with pytest.raises(TypeError, match="dequantize: `dtype` must be bfloat16, float16 or float32, but got"):
            tgl.quantize(X, OFFS, "mxfp8").dequantize(dtype)
        with pytest.raises(TypeError, match="the dtype of a GroupedTensor must be bfloat16, float16 or float32, but"):
            tgl.quantize(X, OFFS, "mxfp8").to(dtype)


UNSUPPORTED = {
    "aten.add.Tensor": lambda t: t + 1,
    "aten.add_.Tensor": lambda t: t.add_(1),
    "aten.mm.default": lambda t: torch.mm(torch.ones(2, 48), t),
    "aten.view.default": lambda t: t.view(-1),
    "aten.slice.Tensor": lambda t: t[1:],
    "aten.select.int": lambda t: t[0],
    "aten.transpose.int": lambda t: t.transpose(0, 1),
    "aten.sum.default": lambda t: t.sum(),
    "aten.stack.default": lambda t: torch.stack([t, t]),
    "aten.unbind.int": lambda t: t.unbind(),
    "tgl.grouped_gemm.default": lambda t: tgl.grouped_gemm(t, torch.ones(4, 96, 8).bfloat16(), t.offs),
}


@pytest.mark.parametrize("op", UNSUPPORTED)
@pytest.mark.parametrize("case", ["dense", "mxfp8"])
def test_an_op_that_it_does_not_take(op, case):
    _, _, t = rows(case)
    with pytest.raises(NotImplementedError, match=rf"GroupedTensor does not support {op}.*dequantize\(\)"):
        UNSUPPORTED[op](t)


@pytest.mark.parametrize("case", CASES)
def test_stacking_tensors_that_do_not_fit(case):
    w = tgl.quantize(torch.ones(2, 32, 16), None, **arguments(case))
    other = tgl.quantize(torch.ones(16, 16), None, **arguments(case))
    with pytest.raises(NotImplementedError, match=r"does not support aten\.stack"):
        torch.stack([w[0], other])


@pytest.mark.parametrize(
    ("format", "shapes", "scale", "message"),
    [
        ("fp8_tensor", ((4, 32), (2, 64)), torch.ones(1), r"`scale` must be of shape \[G\] = \(2,\)"),
        ("fp8_tensor", ((4, 32), (2, 64)), torch.ones(7), r"`scale` must be of shape \[G\] = \(2,\)"),
        ("nvfp4", ((4, 32), (3, 6)), None, "an even N"),
    ],
)
def test_a_list_is_written_whole_or_not_at_all(format, shapes, scale, message):
    t = GroupedTensor.empty(shapes, format, source_dtype=torch.float32)
    before = t.clone()
    with pytest.raises(ValueError, match=message):
        t.quantize_([torch.ones(shape) for shape in shapes], scale=scale)
    assert_same_bytes(t, before)


def test_a_flag_of_another_dtype():
    with pytest.raises(TypeError, match=r"`noop` must be torch\.float32 or torch\.bool"):
        tgl.quantize(X, OFFS, "dense").quantize_(X, torch.zeros(1, dtype=torch.int32))
