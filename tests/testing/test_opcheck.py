"""``check_op`` finds what it is for: each planted defect is reported under its own name."""

import itertools

import pytest
import torch

import tgl
from tgl.testing import ContractError, Signature, check_op, sample_inputs

COUNT = itertools.count()
OP = torch.ops.tgl.grouped_dbias.default
GEMM = torch.ops.tgl.grouped_gemm.default


def good(x, w, offs):
    """``x[t] * w[g]``, zeros past the end."""
    group = torch.searchsorted(offs, torch.arange(x.shape[0], dtype=torch.int32), right=True)
    padded = torch.cat([w, w.new_zeros(1, w.shape[1])])
    return torch.where((group == w.shape[0])[:, None], 0, x * padded[group]).contiguous()


def rows_of(x, w, offs):
    return offs[-1] if offs.shape[0] else 0


def reads_the_tail(x, w, offs):
    out = good(x, w, offs)
    return out + torch.nan_to_num(x)[rows_of(x, w, offs) :].sum() if x.shape[0] else out


def leaks_nan(x, w, offs):
    past = (torch.arange(x.shape[0]) >= rows_of(x, w, offs))[:, None]
    return (good(torch.nan_to_num(x), w, offs) + x * 0).masked_fill(past & ~x.isnan(), 0)


def leaves_the_tail(x, w, offs):
    out = good(x, w, offs)
    out[rows_of(x, w, offs) :] = 5
    return out


def modifies_an_input(x, w, offs):
    out = good(x, w, offs)
    w += 1
    return out


def depends_on_strides(x, w, offs):
    return good(x, w, offs) + (0 if x.is_contiguous() or not x.shape[0] else w.sum() * 0 + 1) * (good(x, w, offs) != 0)


def permuted_output(x, w, offs):
    return good(x, w, offs).t().contiguous().t()


def wrong_dtype(x, w, offs):
    return good(x, w, offs).float()


def nondeterministic(x, w, offs):
    return good(x, w, offs) * next(COUNT)


DEFECTS = {
    reads_the_tail: "is not zero|depends on the inputs' tail",
    leaks_nan: "is not zero|depends on the inputs' tail",
    leaves_the_tail: "the tail of `y` is not zero",
    modifies_an_input: "modified its argument `w`",
    depends_on_strides: "another layout of the same values gave a different result",
    permuted_output: "the fake predicts",
    wrong_dtype: "the fake predicts",
    nondeterministic: "a second call returned different bits",
}


@pytest.fixture
def library():
    lib = torch.library.Library("planted", "FRAGMENT")
    yield lib
    lib._destroy()


def register(lib, kernel, schema="(Tensor x, Tensor w, Tensor offs) -> Tensor"):
    name = f"{kernel.__name__}_{next(COUNT)}"
    lib.define(name + schema)
    lib.impl(name, kernel, "CPU")
    torch.library.register_fake(f"planted::{name}", lambda x, *_: torch.empty(x.shape, dtype=x.dtype), lib=lib)
    return getattr(torch.ops.planted, name).default


SIGNATURE = Signature("x[T,N], w[G,N], offs[G]:ends -> y[T,N]", differentiable=False)


def test_a_good_op_passes(library):
    assert check_op(register(library, good), SIGNATURE.samples(), opcheck="none") > 50


@pytest.mark.parametrize("kernel", DEFECTS)
def test_planted_defects_are_found(library, kernel):
    op = register(library, kernel)
    with pytest.raises(ContractError, match=rf"planted::{kernel.__name__}_\d+ on .*({DEFECTS[kernel]})"):
        check_op(op, SIGNATURE.samples(), opcheck="none")


def returns_its_argument(x, w, offs):
    return x


def test_an_undeclared_alias_is_found(library):
    op = register(library, returns_its_argument)
    with pytest.raises(ContractError, match="output `y` aliases argument `x`"):
        check_op(op, SIGNATURE.samples(routings=("even",)), opcheck="none")


@pytest.mark.filterwarnings("ignore:planted::good")
def test_opcheck_itself_runs(library):
    """``opcheck`` knows that an op without a formula for the autograd key records no gradient of its own."""
    op = register(library, good)
    samples = list(Signature(SIGNATURE.text).samples(routings=("even",)))
    check_op(op, samples, opcheck="none")
    with pytest.raises(ContractError, match="test_autograd_registration"):
        check_op(op, samples)


def through_numpy(x, w, offs):
    return good(x.detach(), w.detach(), offs)


@pytest.mark.filterwarnings("ignore:planted::through")
def test_a_missing_formula_is_noticed(library):
    op = register(library, through_numpy)
    with pytest.raises(ContractError, match="no gradient reaches any argument"):
        check_op(op, Signature(SIGNATURE.text).samples(), opcheck="none")


def test_a_wrong_reference_is_noticed():
    def wrong(dy, offs):
        return dy.new_ones(offs.shape[0], dy.shape[1])

    with pytest.raises(ContractError, match="`dbias` differs from the reference"):
        check_op(OP, sample_inputs(OP), reference=wrong, opcheck="none")


def planted_gradient(defect):
    """grouped_gemm whose backward, and only that, has a defect."""

    def run(a, b, offs, bias, bias_scale, *, out, zero_tail):
        with torch.no_grad():
            end = int(offs[-1]) if offs.shape[0] else 0
            start = 0
            for g, stop in enumerate(offs.tolist()):
                torch.mm(a[start:stop], b[g], out=out[start:stop]) if stop > start else None
                start = stop
            if zero_tail:
                out[end:] = 0
        defect(a, b, offs, out)

    return run


def tail_of_gradient(a, b, offs, out):
    if b.stride(-1) != 1 and out.shape[0] and offs.shape[0]:  # dgrad alone has a transposed b
        out[int(offs[-1]) :] = 1


class Strided(torch.autograd.Function):
    """The identity, whose derivative is wrong for a gradient of strides 0."""

    @staticmethod
    def forward(ctx, t):
        return t.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad + 1 if grad.stride() == (0, 0) else grad


def stride_of_gradient(x, w, offs):
    return Strided.apply(good(x, w, offs))


def test_a_gradient_that_depends_on_strides_is_noticed(library):
    op = register(library, stride_of_gradient)
    with pytest.raises(ContractError, match="a stride-0 gradient gave a different result than a dense one"):
        check_op(op, Signature(SIGNATURE.text).samples(), opcheck="none")


def test_a_defect_of_a_gradient_is_found():
    def supports(a, b, offs, bias, bias_scale, *, out, zero_tail):
        return None if bias is None and a.dtype == torch.float32 else "not the case in question"

    register_it = tgl.register_implementation("grouped_gemm", "planted", device="cpu", supports=supports)
    implementation = register_it(planted_gradient(tail_of_gradient))
    signature = Signature("a[T,K], b[G,K,N], offs[G]:ends -> y[T,N]")
    try:
        with pytest.raises(ContractError, match="the tail of the gradient of `a` is not zero"):
            check_op(GEMM, signature.samples(dtypes=(torch.float32,)), opcheck="none")
    finally:
        tgl.backends.remove(implementation)


@pytest.mark.parametrize(
    "write, message",
    [
        (lambda out, end: out[end:].fill_(1), "wrote outside the part of `out` that it may write"),
        (
            lambda out, end: out.as_strided((1,), (1,), out.storage_offset() + out.shape[1]).fill_(9),
            "wrote outside the part of `out`",
        ),
    ],
    ids=["tail", "padding"],
)
def test_stray_writes_into_a_buffer_are_found(write, message):
    def run(a, b, offs, bias, bias_scale, *, out, zero_tail):
        end = int(offs[-1]) if offs.shape[0] else 0
        out[:end] = 1
        if out.stride(0) > out.shape[1] or end < out.shape[0]:
            write(out, end)

    implementation = tgl.register_implementation("grouped_gemm", "planted", device="cpu")(run)
    op = torch.ops.tgl.grouped_gemm.out
    try:
        with pytest.raises(ContractError, match=message):
            check_op(op, sample_inputs(op, routings=("even", "ragged_tail")), opcheck="none")
    finally:
        tgl.backends.remove(implementation)


def test_no_samples_is_an_error():
    with pytest.raises(ValueError, match="`samples` must not be empty"):
        check_op(OP, [])
