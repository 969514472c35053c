"""Rows by an index in the dense GEMMs: the bits of the op on gathered rows, and no other row is read."""

import pytest
import torch
import torch._dynamo.testing
from hypothesis import given, settings
from hypothesis import strategies as st

import tgl
from tgl.backends.portable import loops

SIZES, TAIL = (3, 0, 5, 1), 3
ROUTED = sum(SIZES)
ROWS, TOKENS, K, N = ROUTED + TAIL, 7, 8, 16
NEVER = 6  # a token of no row
LOW, HIGH = -(1 << 31), (1 << 31) - 1
CANARY = 7.0
NAN = float("nan")
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def ends(sizes=SIZES):
    return torch.tensor(sizes).cumsum(0).int()


def index(*tail):
    """Tokens of the rows, one of them three times and one twice in a group, and numbers for the tail."""
    return torch.tensor([0, 5, 2, 5, 4, 4, 0, 1, 5, *(tail or (-1,) * TAIL)], dtype=torch.int32)


def tokens(columns, dtype=torch.float32):
    """Values that round, NaN for the token of no row."""
    made = torch.randn(TOKENS, columns, dtype=torch.float64).to(dtype)
    made[NEVER] = NAN
    return made


def matrices(dtype=torch.float32):
    return torch.randn(len(SIZES), K, N, dtype=torch.float64).to(dtype)


def gathered(t, rows=None):
    """``t[rows]``, NaN in the tail."""
    rows = index() if rows is None else rows
    made = torch.full((rows.shape[0], t.shape[1]), NAN, dtype=t.dtype)
    made[:ROUTED] = t.detach()[rows[:ROUTED].long()]
    return made


@dtypes
@pytest.mark.parametrize("tail", [(-1,) * TAIL, (LOW, HIGH, TOKENS), (NEVER,) * TAIL], ids=str)
@pytest.mark.parametrize("vectors", ["", "bias", "scaled"])
def test_grouped_gemm(dtype, tail, vectors):
    a, b, rows = tokens(K, dtype), matrices(dtype), index(*tail)
    bias = torch.randn(len(SIZES), N).to(dtype) if vectors else None
    scale = torch.randn(ROWS).to(dtype) if vectors == "scaled" else None
    wanted = tgl.grouped_gemm(gathered(a), b, ends(), bias, scale)
    assert torch.equal(tgl.grouped_gemm(a, b, ends(), bias, scale, rows=rows), wanted)
    turned = a.t().contiguous().t()
    assert torch.equal(tgl.grouped_gemm(turned, b, ends(), bias, scale, rows=rows), wanted)
    out = torch.full_like(wanted, CANARY)
    tgl.grouped_gemm(a, b, ends(), bias, scale, rows=rows, out=out)
    assert torch.equal(out[:ROUTED], wanted[:ROUTED])
    assert out[ROUTED:].eq(CANARY).all()
    slots = torch.arange(len(SIZES) - 1, -1, -1, dtype=torch.int32)
    assert torch.equal(tgl.grouped_gemm(a, b.flip(0), ends(), bias, scale, slots, rows), wanted)


WAYS = {"a": (True, False), "b": (False, True), "both": (True, True)}


@dtypes
@pytest.mark.parametrize("which", WAYS.values(), ids=WAYS)
def test_wgrad(dtype, which):
    a, b = tokens(K, dtype), tokens(N, dtype)
    x, y = gathered(a), gathered(b, index().flip(0).roll(-TAIL))
    indices = {}
    if which[0]:
        indices["a_rows"] = index(LOW, HIGH, TOKENS)
    if which[1]:
        indices["b_rows"] = torch.cat([index()[:ROUTED].flip(0), index(LOW, HIGH, TOKENS)[ROUTED:]])
    operands = (a if which[0] else x, b if which[1] else y, ends())
    wide = torch.float32 if dtype != torch.float64 else dtype
    for out_dtype in (dtype, wide):
        wanted = tgl.grouped_gemm_wgrad(x, y, ends(), out_dtype=out_dtype)
        assert torch.equal(tgl.grouped_gemm_wgrad(*operands, **indices, out_dtype=out_dtype), wanted)
        assert torch.equal(tgl.grouped_gemm_wgrad(*operands, **indices, out_dtype=out_dtype, alignment=64), wanted)
        for slots in (None, torch.tensor([3, 1, 0, 2], dtype=torch.int32)):
            order = slice(None) if slots is None else slots.long()
            out = torch.full_like(wanted, CANARY)
            tgl.grouped_gemm_wgrad(*operands, slots, **indices, out=out)
            assert torch.equal(out[order], wanted)
            mine, theirs = torch.full_like(wanted, CANARY), torch.full_like(wanted, CANARY)
            tgl.grouped_gemm_wgrad_accumulate_(*operands, mine, slots, **indices)
            tgl.grouped_gemm_wgrad_accumulate_(x, y, ends(), theirs)
            assert torch.equal(mine[order], theirs)
            tgl.grouped_gemm_wgrad_accumulate_(*operands, mine, slots, **indices, overwrite=True)
            assert torch.equal(mine[order], wanted)


KINDS = pytest.mark.parametrize("kind, columns", [("swiglu", N // 2), ("srelu", N)])


@dtypes
@KINDS
@pytest.mark.parametrize("weighted", [False, True])
def test_activation(dtype, kind, columns, weighted):
    a, b, bias, rows = tokens(K, dtype), matrices(dtype), torch.randn(len(SIZES), N).to(dtype), index(LOW, HIGH, TOKENS)
    probs = torch.rand(ROWS).to(dtype) if weighted else None
    wanted = tgl.grouped_gemm_activation(gathered(a), b, ends(), bias, probs, kind=kind)
    got = tgl.grouped_gemm_activation(a, b, ends(), bias, probs, rows, kind=kind)
    assert wanted[0].shape[1] == columns
    assert all(map(torch.equal, got, wanted))


@dtypes
@KINDS
@pytest.mark.parametrize("weighted", [False, True])
def test_dactivation(dtype, kind, columns, weighted):
    dy, b, rows = tokens(K, dtype), matrices(dtype)[..., :columns], index(LOW, HIGH, TOKENS)
    h, probs = torch.randn(ROWS, N).to(dtype), torch.rand(ROWS).to(dtype) if weighted else None
    h[ROUTED:] = NAN
    wanted = tgl.grouped_gemm_dactivation(gathered(dy), b, h, ends(), probs, kind=kind)
    got = tgl.grouped_gemm_dactivation(dy, b, h, ends(), probs, rows, kind=kind)
    assert all(map(torch.equal, got, wanted))


def test_the_backward_of_a_weighted_sum_reads_the_gradient_of_every_token():
    """Of ``out[s] = sum of probs[t] A(h[t]) w over the rows t of s``, by autograd of expressions and by the op."""
    h, w = torch.randn(ROWS, N).double().requires_grad_(), torch.randn(len(SIZES), N // 2, K).double()
    probs, grad = torch.rand(ROWS).double().requires_grad_(), torch.randn(TOKENS, K).double()
    out = torch.zeros(TOKENS, K).double()
    start = 0
    for g, end in enumerate(ends().tolist()):
        gate, linear = h[start:end].chunk(2, 1)
        rows = (torch.nn.functional.silu(gate) * linear * probs[start:end, None]) @ w[g]
        out = out.index_add(0, index()[start:end], rows)
        start = end
    wanted = torch.autograd.grad(out, (h, probs), grad)
    got = tgl.grouped_gemm_dactivation(grad, w.transpose(1, 2), h.detach(), ends(), probs.detach(), index())
    torch.testing.assert_close(got, wanted)


@dtypes
@pytest.mark.parametrize("absent", [-1, LOW, TOKENS, HIGH])
def test_an_index_out_of_range_reads_zeros(dtype, absent):
    a, b, rows, bias = tokens(K, dtype), matrices(dtype), index(), torch.randn(len(SIZES), N).to(dtype)
    rows[1] = rows[5] = absent
    x = gathered(a)
    x[[1, 5]] = 0
    assert torch.equal(tgl.grouped_gemm(a, b, ends(), bias, rows=rows), tgl.grouped_gemm(x, b, ends(), bias))
    y = torch.randn(ROWS, N).to(dtype)
    assert torch.equal(tgl.grouped_gemm_wgrad(a, y, ends(), a_rows=rows), tgl.grouped_gemm_wgrad(x, y, ends()))


@dtypes
def test_no_tokens(dtype):
    """Then no number is a row's."""
    a, b, bias = tokens(K, dtype)[:0], matrices(dtype), torch.randn(len(SIZES), N).to(dtype)
    wanted = tgl.grouped_gemm(torch.zeros(ROWS, K, dtype=dtype), b, ends(), bias)
    assert torch.equal(tgl.grouped_gemm(a, b, ends(), bias, rows=index()), wanted)
    assert not tgl.grouped_gemm_wgrad(a, torch.randn(ROWS, N).to(dtype), ends(), a_rows=index()).any()


@dtypes
@pytest.mark.parametrize("absent", [2, -1])
def test_the_loops_of_aten(dtype, absent):
    """The loops serve calls without a kernel on CUDA, and read no values on the host."""
    a, b, rows = tokens(K, dtype), matrices(dtype), index(LOW, HIGH, TOKENS)
    x, dy = gathered(a), torch.randn(ROWS, N).to(dtype)
    rows[2] = absent
    x[2] = a[2] if absent == 2 else 0
    y, wanted = torch.full((ROWS, N), NAN, dtype=dtype), tgl.grouped_gemm(x, b, ends())
    loops.grouped_gemm(a, b, ends(), None, None, out=y, zero_tail=True, rows=rows)
    assert torch.equal(y, wanted)
    dw, wanted = torch.full_like(b, CANARY), tgl.grouped_gemm_wgrad(x, dy, ends())
    loops.grouped_gemm_wgrad(a, dy, ends(), out=dw, a_rows=rows)
    assert torch.equal(dw, wanted)
    mine, theirs = (
        torch.full((len(SIZES), N, K), CANARY, dtype=dtype),
        torch.full((len(SIZES), N, K), CANARY, dtype=dtype),
    )
    loops.grouped_gemm_wgrad_accumulate(dy, a, ends(), out=mine, b_rows=rows)
    tgl.grouped_gemm_wgrad_accumulate_(dy, x, ends(), theirs)
    assert torch.equal(mine, theirs)


def routings(draw):
    sizes = draw(st.lists(st.integers(0, 40), min_size=1, max_size=6))
    tail, count = draw(st.integers(0, 3)), draw(st.integers(1, 9))
    numbers = draw(st.lists(st.integers(0, count - 1), min_size=sum(sizes), max_size=sum(sizes)))
    return sizes, count, torch.tensor([*numbers, *[-1] * tail], dtype=torch.int32)


@settings(max_examples=40)
@given(routing=st.composite(routings)(), dtype=st.sampled_from(DTYPES))
def test_any_routing(routing, dtype):
    sizes, count, rows = routing
    a, b, dy = (torch.randn(*shape).to(dtype) for shape in ((count, 8), (len(sizes), 8, 16), (len(rows), 16)))
    x = a[rows.clamp(min=0).long()]
    assert torch.equal(tgl.grouped_gemm(a, b, ends(sizes), rows=rows), tgl.grouped_gemm(x, b, ends(sizes)))
    assert torch.equal(
        tgl.grouped_gemm_wgrad(a, dy, ends(sizes), a_rows=rows), tgl.grouped_gemm_wgrad(x, dy, ends(sizes))
    )


@pytest.mark.parametrize("sizes", [(60, 64, 3, 62, 0, 64, 61, 59), (64,) * 8])
def test_batches(sizes):
    """Small bfloat16 groups are gathered as they are put into batches."""
    rows = torch.randint(0, 100, (sum(sizes) + 2,), dtype=torch.int32)
    rows[-2:] = -1
    a, b = torch.randn(100, 128).bfloat16(), torch.randn(len(sizes), 128, 128).bfloat16()
    x, dy = a[rows.long()], torch.randn(len(rows), 128).bfloat16()
    assert torch.equal(tgl.grouped_gemm(a, b, ends(sizes), rows=rows), tgl.grouped_gemm(x, b, ends(sizes)))
    assert torch.equal(
        tgl.grouped_gemm_wgrad(a, dy, ends(sizes), a_rows=rows), tgl.grouped_gemm_wgrad(x, dy, ends(sizes))
    )


# --- gradients --------------------------------------------------------------------------------------------------------


def through_gather(call, a):
    """``call`` on rows of ``a`` that aten gathers: zeros in the tail."""
    return call(torch.cat([a[index()[:ROUTED].long()], a.new_zeros(TAIL, a.shape[1])]))


@dtypes
def test_the_gradient_is_the_sum_over_the_rows_of_a_token(dtype):
    a = torch.randint(-2, 3, (TOKENS, K)).to(dtype).requires_grad_()
    b = torch.randint(-2, 3, (len(SIZES), K, N)).to(dtype).requires_grad_()
    bias, scale = (torch.randint(-2, 3, shape).to(dtype).requires_grad_() for shape in ((len(SIZES), N), (ROWS,)))
    dy = torch.randint(-2, 3, (ROWS, N)).to(dtype)
    dy[ROUTED:] = NAN
    leaves = a, b, bias, scale
    got = torch.autograd.grad(tgl.grouped_gemm(a, b, ends(), bias, scale, rows=index(LOW, NEVER, 0)), leaves, dy)
    wanted = torch.autograd.grad(through_gather(lambda x: tgl.grouped_gemm(x, b, ends(), bias, scale), a), leaves, dy)
    assert all(map(torch.equal, got, wanted))
    column = b.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    (db,) = torch.autograd.grad(tgl.grouped_gemm(a, column, ends(), rows=index()), column, dy)
    assert torch.equal(db, wanted[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_gradient_is_rounded_once_and_repeats(dtype):
    a, b, dy = tokens(K, dtype).requires_grad_(), matrices(dtype), torch.randn(ROWS, N).to(dtype)
    (da,) = torch.autograd.grad(tgl.grouped_gemm(a, b, ends(), rows=index()), a, dy)
    (again,) = torch.autograd.grad(tgl.grouped_gemm(a, b, ends(), rows=index()), a, dy)
    assert torch.equal(da, again)
    by_row, wanted = tgl.grouped_gemm(dy, b.transpose(1, 2), ends()), torch.zeros(TOKENS, K)
    for row, token in enumerate(index()[:ROUTED].tolist()):
        wanted[token] += by_row[row].float()
    torch.testing.assert_close(da, wanted.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)
    assert not da[NEVER].any()


def test_the_gradients_of_the_activation_op():
    a, b = (torch.randint(-2, 3, shape).double().requires_grad_() for shape in ((TOKENS, K), (len(SIZES), K, N)))
    probs = torch.randint(-2, 3, (ROWS,)).double().requires_grad_()

    def call(x, rows=None):
        return tgl.grouped_gemm_activation(x, b, ends(), None, probs, rows, kind="srelu")

    seeds = [torch.randint(-2, 3, (ROWS, N)).double() for _ in range(2)]
    got = torch.autograd.grad(call(a, index(LOW, NEVER, 0)), (a, b, probs), seeds)
    wanted = torch.autograd.grad(through_gather(call, a), (a, b, probs), seeds)
    assert all(map(torch.equal, got, wanted))


def test_second_derivatives():
    a, b, dy = torch.randn(TOKENS, 3).double(), torch.randn(len(SIZES), 3, 2).double(), torch.randn(TOKENS, 2).double()
    leaves, other = (a.requires_grad_(), b.requires_grad_(), dy.requires_grad_()), index().flip(0).roll(-TAIL)

    def both(a, b, dy):
        return tgl.grouped_gemm(a, b, ends(), rows=index()), tgl.grouped_gemm_wgrad(
            a, dy, ends(), a_rows=index(), b_rows=other
        )

    assert torch.autograd.gradcheck(both, leaves)
    assert torch.autograd.gradgradcheck(both, leaves)


def test_autocast():
    a, b = tokens(K), matrices()
    with torch.autocast("cpu", torch.bfloat16):
        y = tgl.grouped_gemm(a, b, ends(), rows=index())
        dw = tgl.grouped_gemm_wgrad(a, torch.ones(ROWS, N), ends(), a_rows=index())
    assert torch.equal(y, tgl.grouped_gemm(a.bfloat16(), b.bfloat16(), ends(), rows=index()))
    assert dw.dtype == torch.bfloat16


def test_compiled():
    """One graph serves other numbers of tokens and rows, forward and backward."""
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    b = torch.randint(-2, 3, (len(SIZES), K, N)).double().requires_grad_()

    def call(a, b, rows, offs):
        return tgl.grouped_gemm(a, b, offs, rows=rows)

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=graphs)
    for more in (0, 3, 5):
        a = torch.randint(-2, 3, (TOKENS + more, K)).double().requires_grad_()
        rows, dy = torch.cat([index(), index()[:more]]), torch.randint(-2, 3, (ROWS + more, N)).double()
        got, wanted = compiled(a, b, rows, ends()), call(a, b, rows, ends())
        assert torch.equal(got, wanted)
        assert all(map(torch.equal, *(torch.autograd.grad(y, (a, b), dy) for y in (got, wanted))))
    assert graphs.frame_count == 1


# --- bad calls --------------------------------------------------------------------------------------------------------


BAD = {
    "int64": (lambda r: r.long(), TypeError, r"must be int32 \(numbers of rows of `{}`\), but got torch.int64"),
    "2-D": (lambda r: r[None], ValueError, r"must be 1-D \[T\], but got shape \(1, 12\)"),
    "strided": (lambda r: torch.stack([r, r], 1)[:, 0], ValueError, "must be contiguous, but got strides"),
    "elsewhere": (lambda r: r.to("meta"), ValueError, "must be on cpu like `{}`, but got meta"),
}


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_bad_indices(case):
    change, error, message = case
    a, b, dy, rows = tokens(K), matrices(), torch.randn(ROWS, N), change(index())
    main_grad = torch.full((len(SIZES), K, N), CANARY)
    other = torch.full((len(SIZES), N, K), CANARY)
    for call, name, operand in (
        (lambda: tgl.grouped_gemm(a, b, ends(), rows=rows), "rows", "a"),
        (lambda: tgl.grouped_gemm(a, b, ends(), rows=rows, out=torch.empty(ROWS, N)), "rows", "a"),
        (lambda: tgl.grouped_gemm_activation(a, b, ends(), rows=rows), "rows", "a"),
        (lambda: tgl.grouped_gemm_dactivation(a, b, dy.repeat(1, 2), ends(), rows=rows), "rows", "dy"),
        (lambda: tgl.grouped_gemm_wgrad(a, dy, ends(), a_rows=rows), "a_rows", "a"),
        (lambda: tgl.grouped_gemm_wgrad(dy, a, ends(), b_rows=rows, out=other), "b_rows", "b"),
        (lambda: tgl.grouped_gemm_wgrad_accumulate_(a, dy, ends(), main_grad, a_rows=rows), "a_rows", "a"),
    ):
        with pytest.raises(error, match=f"`{name}` " + message.format(operand)):
            call()
    assert main_grad.eq(CANARY).all()
    assert other.eq(CANARY).all()


def test_other_numbers_of_rows():
    a, b, dy = tokens(K), matrices(), torch.randn(ROWS + 1, N)
    with pytest.raises(ValueError, match=r"`b` must be \[T, N\] with T = 12 like `a_rows`, but got shape \(13, 16\)"):
        tgl.grouped_gemm_wgrad(a, dy, ends(), a_rows=index())
    with pytest.raises(ValueError, match=r"`b_rows` must be \[T\] with T = 13 like `a`, but got shape \(12,\)"):
        tgl.grouped_gemm_wgrad(dy, a, ends(), b_rows=index())
    with pytest.raises(ValueError, match=r"`bias_scale` must be of shape \[T\] = \(12,\), but got shape \(7,\)"):
        tgl.grouped_gemm(a, b, ends(), torch.ones(len(SIZES), N), torch.ones(TOKENS), rows=index())
    with pytest.raises(ValueError, match=r"`h` must be of shape \[T, 2 I\] = \(12, 32\), but got shape \(7, 32\)"):
        tgl.grouped_gemm_dactivation(a, b, torch.ones(TOKENS, 2 * N), ends(), rows=index())
    with pytest.raises(ValueError, match=r"`probs` must be of shape \[T\] = \(12,\), but got shape \(7,\)"):
        tgl.grouped_gemm_activation(a, b, ends(), None, torch.ones(TOKENS), index())
    with pytest.raises(ValueError, match=r"`a` must be 2-D \[S, K\], but got shape"):
        tgl.grouped_gemm(a[0], b, ends(), rows=index())


def test_an_output_that_holds_the_index():
    a, b, buffer = tokens(4), torch.randn(len(SIZES), 4, 4), torch.empty(ROWS, 4)
    rows = buffer.view(torch.int32).view(-1)[:ROWS]
    rows.copy_(index())
    with pytest.raises(ValueError, match="`out` must be disjoint from `rows`, but got overlapping memory"):
        tgl.grouped_gemm(a, b, ends(), rows=rows, out=buffer)


@pytest.mark.parametrize("bad", [-1, TOKENS])
def test_debug_checks(bad):
    a, b, dy, rows = tokens(K), matrices(), torch.randn(ROWS, N), index()
    message = rf"`{{0}}` must be numbers below 7 before row offs\[-1\] = 9, but {{0}}\[4\] = {bad}"
    with tgl.debug_checks():
        tgl.grouped_gemm(a, b, ends(), rows=rows)
        tgl.grouped_gemm_wgrad(a, dy, ends(), a_rows=rows)
        rows[4] = bad
        with pytest.raises(ValueError, match=message.format("rows")):
            tgl.grouped_gemm(a, b, ends(), rows=rows)
        with pytest.raises(ValueError, match=message.format("rows")):
            tgl.grouped_gemm_activation(a, b, ends(), rows=rows)
        with pytest.raises(ValueError, match=message.format("rows")):
            tgl.grouped_gemm_dactivation(a, b, dy.repeat(1, 2), ends(), rows=rows)
        with pytest.raises(ValueError, match=message.format("a_rows")):
            tgl.grouped_gemm_wgrad(a, dy, ends(), a_rows=rows)
        with pytest.raises(ValueError, match=message.format("b_rows")):
            tgl.grouped_gemm_wgrad_accumulate_(dy, a, ends(), torch.zeros(len(SIZES), N, K), b_rows=rows)


@pytest.mark.parametrize("op", [torch.ops.tgl.grouped_gemm_wgrad, torch.ops.tgl.grouped_gemm_wgrad.default], ids=str)
def test_explain_takes_the_arguments_of_an_overload(op):
    """The one without ``out`` has indices where the other has slots."""
    a, b, rows = tokens(K), tokens(N), index()
    calls = [
        ((a, b, ends(), rows, rows), {}),
        ((a, b, ends(), rows), {"b_rows": rows}),
        ((a, b, ends()), {"a_rows": rows, "b_rows": rows}),
    ]
    for args, kwargs in calls:
        assert op(*args, **kwargs).shape == (len(SIZES), K, N)
        assert tgl.explain(op, *args, **kwargs).chosen.name == "loop of mm"


def test_an_implementation_states_whether_it_takes_an_index():
    a, b = tokens(K), matrices()
    before = tgl.grouped_gemm(a, b, ends(), rows=index())

    @tgl.register_implementation("grouped_gemm", "in order", device="cpu")
    def in_order(*operands, out, zero_tail):
        raise AssertionError("it must not be asked")

    try:
        report = tgl.explain(tgl.grouped_gemm, a, b, ends(), rows=index())
        assert report.chosen.name == "loop of mm"
        assert "reads rows in the order of the groups, not by `rows`" in str(report)
        assert torch.equal(tgl.grouped_gemm(a, b, ends(), rows=index()), before)
    finally:
        tgl.backends.remove(in_order)
