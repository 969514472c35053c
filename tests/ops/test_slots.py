"""Matrices at slots of a packed tensor: in any order and place, exact, nothing else read or written."""

import math

import pytest
import torch

import tgl
import tgl.testing
from tests.covers import covering, graph_form
from tgl.meta.formats import FORMATS
from tgl.meta.table import OnePerName
from tgl.testing import Signature
from tgl.testing.signatures import overload

SIZES = (3, 0, 5, 1)
ROWS, K, N = sum(SIZES) + 2, 8, 16
BACKWARDS = (3, 2, 1, 0)
LOW, HIGH = -(1 << 31), (1 << 31) - 1
CANARY = 7.0


def integers(*shape, dtype=torch.float32):
    return torch.randint(-2, 3, shape).to(dtype)


def offs():
    return torch.tensor(SIZES).cumsum(0).int()


def spans():
    ends = offs().tolist()
    return list(zip([0, *ends], ends))


def table(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def at_distances(matrices, starts):
    """``matrices`` from elements ``starts`` of one buffer of NaN on, the view of slots they are in, and the table."""
    size, unit = matrices[0].numel(), math.gcd(*starts)
    buffer = matrices.new_full((max(starts) + size,), float("nan"))
    for matrix, start in zip(matrices, starts):
        buffer[start : start + size] = matrix.reshape(-1)
    rows, columns = matrices.shape[1:]
    view = buffer.as_strided((max(starts) // unit + 1, rows, columns), (unit, columns, 1))
    return view, table(*(start // unit for start in starts))


UNEVEN = tuple(start * 8 for start in (60, 40, 17, 0))  # a matrix is 16 units of 8 elements


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vectors", ["", "bias", "scaled"])
def test_grouped_gemm(dtype, vectors):
    a, b = integers(ROWS, K, dtype=dtype), integers(4, K, N, dtype=dtype)
    a[sum(SIZES) :] = float("nan")
    bias = integers(4, N, dtype=dtype) if vectors else None
    scale = integers(ROWS, dtype=dtype) if vectors == "scaled" else None
    wanted = tgl.grouped_gemm(a, b, offs(), bias, scale)
    assert torch.equal(tgl.grouped_gemm(a, b.flip(0), offs(), bias, scale, table(*BACKWARDS)), wanted)
    view, slots = at_distances(b, UNEVEN)
    assert torch.equal(tgl.grouped_gemm(a, view, offs(), bias, scale, slots), wanted)
    out = torch.full_like(wanted, CANARY)
    tgl.grouped_gemm(a, view, offs(), bias, scale, slots, out=out)
    assert torch.equal(out[: sum(SIZES)], wanted[: sum(SIZES)])
    assert out[sum(SIZES) :].eq(CANARY).all()
    # The transposed view of the same slots, which the input gradient takes.
    dy = integers(ROWS, N, dtype=dtype)
    wanted = tgl.grouped_gemm(dy, b.transpose(1, 2), offs())
    assert torch.equal(tgl.grouped_gemm(dy, view.transpose(1, 2), offs(), slots=slots), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_matrix_without_a_slot_is_zeros(dtype):
    a, b, bias = integers(ROWS, K, dtype=dtype), integers(2, K, N, dtype=dtype), integers(4, N, dtype=dtype)
    for absent in (LOW, -1, 2, HIGH):
        slots = table(1, 0, absent, 0)
        kept = torch.stack([b[1], b[0], torch.zeros_like(b[0]), b[0]])
        assert torch.equal(tgl.grouped_gemm(a, b, offs(), bias, None, slots), tgl.grouped_gemm(a, kept, offs(), bias))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("how", ["out", "accumulate", "overwrite"])
@pytest.mark.parametrize("wide", [False, True])
def test_wgrad(dtype, how, wide):
    a, b = integers(ROWS, K, dtype=dtype), integers(ROWS, N, dtype=dtype)
    a[sum(SIZES) :] = b[sum(SIZES) :] = float("nan")
    out_dtype = torch.float32 if wide and dtype != torch.float64 else dtype
    dw = tgl.grouped_gemm_wgrad(a, b, offs(), out_dtype=out_dtype)
    view, slots = at_distances(torch.full((4, K, N), CANARY, dtype=out_dtype), UNEVEN)
    slots[0] = HIGH  # a group without a slot
    expected = view._base.clone()
    for g in (1, 2, 3):
        start = UNEVEN[g]
        expected[start : start + K * N] = dw[g].reshape(-1) + (CANARY if how == "accumulate" else 0)
    write(how, a, b, view, slots)
    assert torch.equal(view._base.nan_to_num(-99), expected.nan_to_num(-99))


def write(how, a, b, view, slots):
    if how == "out":
        tgl.grouped_gemm_wgrad(a, b, offs(), slots, out=view)
    else:
        tgl.grouped_gemm_wgrad_accumulate_(a, b, offs(), view, slots, overwrite=how == "overwrite")


def test_gradients_of_all_but_b():
    a, b = integers(ROWS, K).requires_grad_(), integers(4, K, N)
    bias, scale = integers(4, N).requires_grad_(), integers(ROWS).requires_grad_()
    dy = integers(ROWS, N)
    wanted = torch.autograd.grad(tgl.grouped_gemm(a, b, offs(), bias, scale), (a, bias, scale), dy)
    view, slots = at_distances(b, UNEVEN)
    got = torch.autograd.grad(tgl.grouped_gemm(a, view, offs(), bias, scale, slots), (a, bias, scale), dy)
    assert all(map(torch.equal, got, wanted))
    with pytest.raises(RuntimeError, match="`b` must not require grad when `slots` is given"):
        tgl.grouped_gemm(a, b.requires_grad_(), offs(), slots=table(*BACKWARDS))


def test_second_derivatives():
    a, b = integers(ROWS, K, dtype=torch.float64).requires_grad_(), integers(4, K, N, dtype=torch.float64)
    slots = table(*BACKWARDS)
    assert torch.autograd.gradcheck(lambda a: tgl.grouped_gemm(a, b, offs(), slots=slots), (a,))
    assert torch.autograd.gradgradcheck(lambda a: tgl.grouped_gemm(a, b, offs(), slots=slots), (a,))


def test_autocast_casts_only_the_matrices_in_the_table():
    a, b = integers(ROWS, K), integers(4, K, N)
    view, slots = at_distances(b, UNEVEN)
    slots[3] = -1
    b[3] = 0
    with torch.autocast("cpu", torch.bfloat16):
        wanted = tgl.grouped_gemm(a, b, offs())
        got = tgl.grouped_gemm(a, view, offs(), slots=slots)
        turned = tgl.grouped_gemm(a, b.transpose(1, 2).contiguous().transpose(1, 2), offs(), slots=table(0, 1, 2, 3))
    assert got.dtype == wanted.dtype == torch.bfloat16
    assert torch.equal(got, wanted)
    assert torch.equal(turned, wanted)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="`b` must not require grad"):
        tgl.grouped_gemm(a, b.requires_grad_(), offs(), slots=table(*BACKWARDS))


BAD = {
    "int64": (lambda s: s.long(), TypeError, r"`slots` must be int32 \(the slot of every group in `\w+`\), but got"),
    "short": (lambda s: s[1:], ValueError, r"`slots` must be of shape \[G\] = \(4,\), but got shape \(3,\)"),
    "2-D": (lambda s: s[None], ValueError, r"`slots` must be of shape \[G\] = \(4,\), but got shape \(1, 4\)"),
    "strided": (lambda s: torch.stack([s, s], 1)[:, 0], ValueError, "`slots` must be contiguous, but got strides"),
    "elsewhere": (lambda s: s.to("meta"), ValueError, "`slots` must be on cpu like `a`, but got meta"),
}


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_bad_tables(case):
    change, error, message = case
    a, b, dy = integers(ROWS, K), integers(4, K, N), integers(ROWS, N)
    slots = change(table(*BACKWARDS))
    main_grad = torch.full((4, K, N), CANARY)
    for call in (
        lambda: tgl.grouped_gemm(a, b, offs(), slots=slots),
        lambda: tgl.grouped_gemm_wgrad(a, dy, offs(), slots, out=main_grad),
        lambda: tgl.grouped_gemm_wgrad_accumulate_(a, dy, offs(), main_grad, slots),
    ):
        with pytest.raises(error, match=message):
            call()
    assert main_grad.eq(CANARY).all()


def test_bad_packed_tensors():
    a, dy, slots = integers(ROWS, K), integers(ROWS, N), table(*BACKWARDS)
    with pytest.raises(ValueError, match=r"`b` must be of 1 to 2\^31 - 1 slots when `slots` is given, but got shape"):
        tgl.grouped_gemm(a, integers(0, K, N), offs(), slots=slots)
    with pytest.raises(ValueError, match=r"`main_grad` must be 3-D \[S, M, N\], but got shape"):
        tgl.grouped_gemm_wgrad_accumulate_(a, dy, offs(), integers(K, N), slots)
    with pytest.raises(ValueError, match=r"`main_grad` must be of shape \[S, M, N\] = \(4, 8, 16\), but got"):
        tgl.grouped_gemm_wgrad_accumulate_(a, dy, offs(), integers(4, K, N + 1), slots)
    with pytest.raises(ValueError, match=r"`main_grad` must be of shape \[G, M, N\] = \(4, 8, 16\), but got"):
        tgl.grouped_gemm_wgrad_accumulate_(a, dy, offs(), integers(5, K, N))
    with pytest.raises(ValueError, match="`main_grad` must be free of overlapping rows"):
        tgl.grouped_gemm_wgrad_accumulate_(a, dy, offs(), torch.zeros(999).as_strided((4, K, N), (1, 1, 1)), slots)
    with pytest.raises(ValueError, match="`slots` must be None when there is no `out`"):
        tgl.grouped_gemm_wgrad(a, dy, offs(), slots)


def test_debug_checks():
    a, b, dy = integers(ROWS, K), integers(4, K, N), integers(ROWS, N)
    view, _ = at_distances(integers(4, K, N), UNEVEN)
    with tgl.debug_checks():
        tgl.grouped_gemm(a, b, offs(), slots=table(1, 1, 1, 1))
        for bad in (-1, 4):
            with pytest.raises(ValueError, match=rf"`slots` must stay within the 4 slots of `b`, .*slots\[2\] = {bad}"):
                tgl.grouped_gemm(a, b, offs(), slots=table(0, 0, bad, 0))
        tgl.grouped_gemm_wgrad_accumulate_(a, dy, offs(), view, table(60, 44, 16, 0))
        with pytest.raises(ValueError, match=r"do not overlap, but slots\[3\] = 0 and slots\[1\] = 15 do"):
            tgl.grouped_gemm_wgrad_accumulate_(a, dy, offs(), view, table(60, 15, 31, 0))
        with pytest.raises(ValueError, match=r"matrices of `out` that do not overlap, but"):
            tgl.grouped_gemm_wgrad(a, dy, offs(), table(5, 5, 50, 30), out=view)


def test_explain():
    a, b, dy, slots = integers(ROWS, K), integers(4, K, N), integers(ROWS, N), table(*BACKWARDS)
    assert tgl.explain(tgl.grouped_gemm, a, b, offs(), slots=slots).chosen.name == "loop of mm"
    assert tgl.explain(tgl.grouped_gemm_wgrad, a, dy, offs(), slots, out=b).chosen.name == "loop of mm"
    explained = tgl.explain(tgl.grouped_gemm_wgrad_accumulate_, a, dy, offs(), b, slots)
    assert explained.chosen.name == "loop of mm"


def test_an_implementation_without_slots_is_not_tried():
    a, b = integers(ROWS, K), integers(4, K, N)

    @tgl.register_implementation("grouped_gemm", "plain", device="cpu")
    def plain(a, b, offs, bias, bias_scale, *, out, zero_tail):
        out.fill_(CANARY)

    try:
        assert tgl.grouped_gemm(a, b, offs()).eq(CANARY).all()
        assert not tgl.grouped_gemm(a, b, offs(), slots=table(*BACKWARDS)).eq(CANARY).all()
        explained = str(tgl.explain(tgl.grouped_gemm, a, b, offs(), slots=table(*BACKWARDS)))
        assert "not  plain: takes matrices in the order of the groups, not at `slots`" in explained
    finally:
        tgl.backends.remove(plain)


LAYOUTS_OF = OnePerName(
    FORMATS,
    "LAYOUTS_OF",
    {
        "mxfp8": {"scale_layout": "blocked"},
        "nvfp4": {"scale_layout": "blocked"},
        "mxfp4": {"scale_layout": "blocked"},
        "fp8_tensor": {},
        "fp8_block": {},
    },
)


def quantized_columns(x, format):
    """Return the columns of ``x`` for a weight gradient: data, scale and amax if the format has one."""
    made = tgl.group_quantize(x, offs(), format=format, rowwise=False, **LAYOUTS_OF[format])
    return made.columnwise_data, made.columnwise_scale, made.columnwise_amax if format == "nvfp4" else None


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_scaled_wgrad(format, overwrite):
    a, a_scale, a_amax = quantized_columns(integers(ROWS, K), format)
    b, b_scale, b_amax = quantized_columns(integers(ROWS, N), format)
    options = {"format": format, "scale_layout": LAYOUTS_OF[format].get("scale_layout", "compact")}
    dw = tgl.grouped_gemm_scaled_wgrad(
        a, a_scale, b, b_scale, offs(), a_amax, b_amax, **options, out_dtype=torch.float32
    )
    view, slots = at_distances(torch.full((4, K, N), CANARY), UNEVEN)
    slots[0] = -1  # a group without a slot
    expected = view._base.clone()
    for g in (2, 3) if not overwrite else (1, 2, 3):
        expected[UNEVEN[g] : UNEVEN[g] + K * N] = dw[g].reshape(-1) + (0 if overwrite else CANARY)
    operands = (a, a_scale, b, b_scale, offs(), view, a_amax, b_amax, slots)
    explained = tgl.explain(tgl.grouped_gemm_scaled_wgrad_accumulate_, *operands, **options)
    assert explained.chosen.name == "decode and mm"
    tgl.grouped_gemm_scaled_wgrad_accumulate_(*operands, **options, overwrite=overwrite)
    assert torch.equal(view._base.nan_to_num(-99), expected.nan_to_num(-99))
    with pytest.raises(TypeError, match=r"`slots` must be int32 \(the slot of every group in `main_grad`\)"):
        tgl.grouped_gemm_scaled_wgrad_accumulate_(*operands[:-1], slots.long(), **options)
    with tgl.debug_checks(), pytest.raises(ValueError, match=r"`slots` must stay within .*slots\[0\] = -1"):
        tgl.grouped_gemm_scaled_wgrad_accumulate_(*operands, **options)


def some_slots(sample, made, tail):
    """Return slots from the last to the first, and beyond, so that of many groups most have none."""
    return {"slots": 5 - torch.arange(len(sample.routing.sizes), dtype=torch.int32)}


LETTERS = {"dimensions": {"K": 8, "M": 8, "N": 16, "S": 6}, "derive": some_slots}
GEMM = "a[T,K], b[S,K,N], offs[G]:ends, bias[G,N]?, bias_scale[T]?, slots[G]:derived"
SIGNATURES = {
    "grouped_gemm.default": Signature(
        f"{GEMM} -> y[T,N]", {"bias_scale": "bias"}, ("bias", "bias_scale"), differentiable=False, **LETTERS
    ),
    "grouped_gemm.out": Signature(
        f"{GEMM}, out[T,N]! ->", {"bias_scale": "bias"}, ("bias", "bias_scale", "out"), **LETTERS
    ),
    "grouped_gemm_wgrad.out": Signature(
        "a[T,M], b[T,N], offs[G]:ends, slots[G]:derived, out[S,M,N]! ->", wide=("out",), **LETTERS
    ),
    "grouped_gemm_wgrad_accumulate_.default": Signature(
        "a[T,M], b[T,N], offs[G]:ends, main_grad[S,M,N]!, slots[G]:derived ->",
        wide=("main_grad",),
        accumulates=True,
        **LETTERS,
    ),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_contracts(name):
    samples = list(SIGNATURES[name].samples(routings=("ragged_tail", "empty_first", "groups_300")))
    assert tgl.testing.check_op(overload(name), samples, opcheck="none")
    assert tgl.testing.check_op(overload(name), covering(samples, graph_form, 1))
