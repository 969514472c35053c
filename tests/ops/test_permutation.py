"""dispatch, combine and combine_backward against loops over pairs: values, places out of range, gradients, input."""

import itertools

import pytest
import torch

import tgl
from tgl.backends.portable import permutation as aten

OPS = torch.ops.tgl
CHOICES = (1, 2, 4, 6, 8, 10, 16)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
NAN = float("nan")


def places(tokens, top_k, *, spare=0, absent=0.0, dtype=torch.int32):
    """A token for every row and a row for every choice; ``absent`` of the choices and ``spare`` rows have none."""
    pairs = tokens * top_k
    rows = pairs + spare
    position = torch.randperm(rows)[:pairs]
    gone = torch.rand(pairs) < absent
    position[gone] = torch.tensor([-1, rows, -(1 << 31), (1 << 31) - 1])[torch.randint(0, 4, (int(gone.sum()),))]
    token = torch.tensor([-1, tokens, (1 << 31) - 1])[torch.randint(0, 3, (rows,))]
    token[position[~gone]] = torch.arange(pairs)[~gone] // top_k
    return token.to(dtype), position.to(dtype)


def pairs_of(position, top_k, rows):
    """Token, choice and row of every pair that has a row."""
    return [(i // top_k, i % top_k, p) for i, p in enumerate(position.tolist()) if 0 <= p < rows]


def dispatched(x, token, position, top_k, weights=None):
    out = torch.zeros(len(token), *x.shape[1:], dtype=torch.float64)
    for s, j, row in pairs_of(position, top_k, len(token)):
        out[row] = x[s].double() * (1 if weights is None else weights[s, j].double())
    return out


def combined(y, position, top_k, weights=None):
    out = torch.zeros(len(position) // top_k, *y.shape[1:], dtype=torch.float64)
    for s, j, row in pairs_of(position, top_k, len(y)):
        out[s] += y[row].double() * (1 if weights is None else weights[s, j].double())
    return out


def dots(grad, y, position, top_k):
    out = torch.zeros(len(grad), top_k, dtype=torch.float64)
    for s, j, row in pairs_of(position, top_k, len(y)):
        out[s, j] = (grad[s].double() * y[row].double()).sum()
    return out


def integers(*shape, dtype=torch.float32):
    """So small that every sum of 16 products is exact in any dtype."""
    return torch.randint(-3, 4, shape).to(dtype)


def problem(top_k, dtype, columns, *, spare, absent, index=torch.int32, tokens=7):
    token, position = places(tokens, top_k, spare=spare, absent=absent, dtype=index)
    shape = () if columns is None else (columns,)
    x, y = integers(tokens, *shape, dtype=dtype), integers(len(token), *shape, dtype=dtype)
    y[(token < 0) | (token >= tokens)] = NAN
    x[[s for s in range(tokens) if s not in token]] = NAN
    weights = integers(tokens, top_k, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    return x, y, token, position, weights


def check(x, y, token, position, top_k, weights):
    places = (token, position, top_k)
    acc = weights.dtype
    assert torch.equal(OPS.dispatch(x, *places), dispatched(x, *places).to(x.dtype))
    assert torch.equal(OPS.combine(y, *places), combined(y, position, top_k).to(y.dtype))
    for w in (weights, weights.to(x.dtype)):
        assert torch.equal(OPS.dispatch(x, *places, w), dispatched(x, *places, w).to(x.dtype))
        assert torch.equal(OPS.combine(y, *places, w), combined(y, position, top_k, w).to(y.dtype))
        dy, dweights = OPS.combine_backward(x, y, *places, w)
        assert torch.equal(dy, dispatched(x, *places, w).to(x.dtype))
        assert torch.equal(dweights, dots(x, y, position, top_k).to(acc))
        assert dweights.dtype == acc


SOME = {"all": (0, 0.0), "spare rows": (5, 0.0), "absent": (0, 0.3), "both": (3, 0.3), "nothing but": (0, 1.0)}


@pytest.mark.parametrize(("spare", "absent"), SOME.values(), ids=SOME)
@pytest.mark.parametrize("top_k", CHOICES)
def test_against_loops(top_k, spare, absent):
    dtypes = (torch.bfloat16,) if top_k > 2 else DTYPES
    for i, dtype in enumerate(dtypes):
        columns, index = ((5, torch.int32), (16, torch.int64))[i % 2]
        check(*in_order(problem(top_k, dtype, columns, spare=spare, absent=absent, index=index), top_k))


def in_order(found, top_k):
    x, y, token, position, weights = found
    return x, y, token, position, top_k, weights


@pytest.mark.parametrize(("spare", "absent"), SOME.values(), ids=SOME)
@pytest.mark.parametrize("top_k", [1, 3])
def test_one_number_for_each_row(top_k, spare, absent):
    check(*in_order(problem(top_k, torch.float32, None, spare=spare, absent=absent), top_k))


@pytest.mark.parametrize(("tokens", "columns"), [(0, 4), (3, 0), (0, 0)])
def test_no_tokens_or_no_columns(tokens, columns):
    for spare in (0, 2):
        check(*in_order(problem(2, torch.bfloat16, columns, spare=spare, absent=0.0, tokens=tokens), 2))


def test_no_rows():
    token, position = torch.zeros(0, dtype=torch.int32), torch.full((6,), -1, dtype=torch.int32)
    check(torch.full((3, 4), NAN), torch.zeros(0, 4), token, position, 2, torch.ones(3, 2))


@pytest.mark.parametrize("layout", ["column-major", "expanded", "one row", "sliced"])
def test_any_layout(layout):
    x, y, token, position, weights = problem(2, torch.float32, 6, spare=3, absent=0.2)
    lay = {
        "column-major": lambda t: t.t().contiguous().t(),
        "expanded": lambda t: torch.tensor(2.0).expand(t.shape),
        "one row": lambda t: integers(1, t.shape[1]).expand(t.shape),
        "sliced": lambda t: torch.cat([t, t], 1)[:, :6],
    }[layout]
    check(lay(x), lay(y), token, position, 2, weights.t().contiguous().t())


def test_sums_of_choices_are_rounded_once():
    token, position = places(32, 8)
    y, weights = torch.randint(-255, 256, (256, 16)).bfloat16(), torch.randint(-7, 8, (32, 8)).bfloat16()
    exact = combined(y, position, 8, weights)
    error = (exact.to(y.dtype).double() - exact).abs()  # ties go either way
    for w in (weights, weights.float()):
        assert torch.equal((OPS.combine(y, token, position, 8, w).double() - exact).abs(), error)


@pytest.mark.parametrize(("dtype", "out_dtype"), list(itertools.permutations(DTYPES[1:], 2)), ids=str)
def test_sums_of_another_dtype(dtype, out_dtype):
    """Results are sums of the rows in float32, rounded once; so are their gradients."""
    for top_k, columns, (spare, absent) in ((1, 5, SOME["both"]), (3, None, SOME["absent"]), (8, 16, SOME["both"])):
        token, position = places(7, top_k, spare=spare, absent=absent)
        shape = (len(token),) if columns is None else (len(token), columns)
        y, weights = torch.randn(shape).to(dtype).requires_grad_(), torch.rand(7, top_k).requires_grad_()
        for w in (None, weights, weights.detach(), weights.to(dtype).detach().requires_grad_()):
            found = []
            for rows, options in ((y, {"out_dtype": out_dtype}), (y.float(), {})):
                factors = w if w is None or options else w.float()
                sums = OPS.combine(rows, token, position, top_k, factors, **options).to(out_dtype)
                leaves = [t for t in (y, w) if t is not None and t.requires_grad]
                found.append((sums, *torch.autograd.grad(sums, leaves, (sums * 3).detach())))
            assert found[0][0].dtype == out_dtype
            assert all(map(torch.equal, *found))
            rows, sums = y.detach().view(len(token), -1), [torch.empty(7, columns or 1, dtype=out_dtype) for _ in "ab"]
            aten.combine(rows, position, w, top_k=top_k, out=sums[0])
            aten.combine(rows.float(), position, w, top_k=top_k, out=sums[1])
            assert torch.equal(*sums)


@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("columns", [2, None], ids=["rows", "numbers"])
def test_gradients_of_first_and_second_order(top_k, columns):
    token, position = places(4, top_k, spare=2, absent=0.3)
    shape = () if columns is None else (columns,)
    x, y = (torch.randn(n, *shape, dtype=torch.float64, requires_grad=True) for n in (4, len(token)))
    w = torch.rand(4, top_k, dtype=torch.float64, requires_grad=True)
    where = (token, position, top_k)
    for function, leaves in (
        (lambda x: OPS.dispatch(x, *where), (x,)),
        (lambda x, w: OPS.dispatch(x, *where, w), (x, w)),
        (lambda y: OPS.combine(y, *where), (y,)),
        (lambda y, w: OPS.combine(y, *where, w), (y, w)),
        (lambda x, y, w: OPS.combine_backward(x, y, *where, w), (x, y, w)),
    ):
        assert torch.autograd.gradcheck(function, leaves)
        assert torch.autograd.gradgradcheck(function, leaves)


@pytest.mark.parametrize("needed", [(True, False), (False, True), (True, True)], ids=["y", "weights", "both"])
def test_only_what_requires_grad_gets_one(needed):
    token, position = places(4, 2, absent=0.3)
    for op, rows in ((OPS.dispatch, 4), (OPS.combine, 8)):
        leaves = [torch.rand(rows, 3).requires_grad_(needed[0]), torch.rand(4, 2).requires_grad_(needed[1])]
        op(leaves[0], token, position, 2, leaves[1]).sum().backward()
        assert [t.grad is not None for t in leaves] == list(needed)


@pytest.mark.parametrize("weighted", [False, True])
def test_opcheck(weighted):
    for dtype in (torch.float32, torch.bfloat16):
        token, position = places(5, 2, spare=1, absent=0.2, dtype=torch.int64)
        x, y = torch.randn(5, 4, dtype=dtype), torch.randn(len(token), 4, dtype=dtype)
        x, y, w = (t.requires_grad_() for t in (x, y, torch.rand(5, 2)))
        last = (w,) if weighted else ()
        torch.library.opcheck(OPS.dispatch.default, (x, token, position, 2, *last))
        for out_dtype in (None, torch.float32):
            torch.library.opcheck(OPS.combine.default, (y, token, position, 2, *last), {"out_dtype": out_dtype})
    torch.library.opcheck(OPS.combine_backward.default, (x, y, token, position, 2, w))


def test_any_dtype_is_dispatched_without_weights():
    token, position = places(5, 2, absent=0.2)
    for dtype in (torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn):
        x = torch.randint(0, 2, (5, 3)).to(dtype)
        assert torch.equal(OPS.dispatch(x, token, position, 2).double(), dispatched(x, token, position, 2))


def test_steps_of_aten():
    """Steps of aten, for a GPU without a kernel of the call, give the values of the CPU."""
    for top_k in (1, 2, 8):
        for spare, absent in SOME.values():
            for dtype in (torch.float64, torch.bfloat16):
                x, y, token, position, weights = problem(top_k, dtype, 5, spare=spare, absent=absent)
                rows, tokens, dweights = torch.full_like(y, 7), torch.full_like(x, 7), torch.full_like(weights, 7)
                for w in (None, weights):
                    aten.dispatch(x, token, position, w, top_k=top_k, out=rows)
                    assert torch.equal(rows, dispatched(x, token, position, top_k, w).to(dtype))
                    aten.combine(y, position, w, top_k=top_k, out=tokens)
                    assert torch.equal(tokens, combined(y, position, top_k, w).to(dtype))
                rows.fill_(7)
                places = (token, position, weights)
                aten.combine_backward(x, y, *places, top_k=top_k, dy=rows, dweights=dweights)
                assert torch.equal(rows, dispatched(x, token, position, top_k, weights).to(dtype))
                assert torch.equal(dweights, dots(x, y, position, top_k))


INT = torch.zeros(6, dtype=torch.int32)
X, Y = torch.zeros(3, 4), torch.zeros(6, 4)
BAD = {
    "x: dimensions": (OPS.dispatch, (X[None], INT, INT, 2), ValueError, r"dispatch: `x` must be 2-D \[S, H\] or 1-D"),
    "token: dtype": (OPS.dispatch, (X, INT.short(), INT, 2), TypeError, "`token` must be int32 or int64"),
    "token: dimensions": (OPS.combine, (Y, INT[None], INT, 2), ValueError, r"`token` must be 1-D \[T\]"),
    "token: size": (OPS.combine, (Y, INT[1:], INT, 2), ValueError, r"`token` must be \[T\] with T = 6 like `y`"),
    "position: size": (OPS.dispatch, (X, INT, INT[1:], 2), ValueError, r"`position` must be \[S k\] with S = 3"),
    "position: k": (OPS.combine, (Y, INT, INT, 4), ValueError, r"`position` must be \[S k\] with k = 4"),
    "position: device": (OPS.combine, (Y, INT, INT.to("meta"), 2), ValueError, "`position` must be on cpu like `y`"),
    "top_k": (OPS.combine, (Y, INT, INT, 0), ValueError, "`top_k` must be at least 1, but got 0"),
    "y: dtype": (OPS.combine, (Y.int(), INT, INT, 2), TypeError, "`y` must be float64, float32, bfloat16 or float16"),
    "x: dtype": (OPS.dispatch, (X.int(), INT, INT, 2, torch.ones(3, 2)), TypeError, "`x` must be float64, float32"),
    "weights: size": (
        OPS.combine,
        (Y, INT, INT, 2, torch.ones(2, 3)),
        ValueError,
        r"`weights` must be of shape \[S, k",
    ),
    "weights: dtype": (
        OPS.dispatch,
        (X, INT, INT, 2, torch.ones(3, 2).double()),
        TypeError,
        "`weights` must be torch.float32",
    ),
    "grad: size": (
        OPS.combine_backward,
        (Y, Y, INT, INT, 2, torch.ones(3, 2)),
        ValueError,
        r"`grad` must be of shape \[S, H\]",
    ),
    "grad: dtype": (
        OPS.combine_backward,
        (X.double(), Y, INT, INT, 2, torch.ones(3, 2)),
        TypeError,
        "`grad` must be torch.float32 like `y`",
    ),
}


@pytest.mark.parametrize(("op", "args", "error", "message"), BAD.values(), ids=BAD)
def test_bad_input(op, args, error, message):
    with pytest.raises(error, match=message):
        op(*args)


def test_bad_out_dtype_of_sums():
    for y, dtype, known in ((Y.double(), torch.float32, "float64"), (Y, torch.int32, "float32, bfloat16 or float16")):
        with pytest.raises(TypeError, match=f"combine: `out_dtype` must be {known}, but got {dtype}"):
            OPS.combine(y, INT, INT, 2, out_dtype=dtype)


@pytest.mark.parametrize(
    ("token", "position", "message"),
    [
        ([0, 0, 1, 1], [0, 1, 1, 3], r"position\[1\] and position\[2\] are both 1"),
        ([0, 1, 1, 1], [0, 1, 2, 3], r"position\[1\] = 1, which is a slot of token 0, and token\[1\] = 1"),
        ([0, 0, 1, 1], [0, 1, 2, -1], r"token\[3\] = 1 and no slot has row 3"),
    ],
)
def test_debug_checks_compare_tokens_and_positions(token, position, message):
    token, position = (torch.tensor(t, dtype=torch.int32) for t in (token, position))
    with tgl.debug_checks():
        for op, rows in ((OPS.dispatch, 2), (OPS.combine, 4)):
            with pytest.raises(ValueError, match=message):
                op(torch.zeros(rows, 3), token, position, 2)
        with pytest.raises(ValueError, match=message):
            OPS.combine_backward(torch.zeros(2, 3), torch.zeros(4, 3), token, position, 2, torch.ones(2, 2))
        OPS.dispatch(torch.zeros(2, 3), *places(2, 2), 2)
