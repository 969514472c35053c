"""``group_quantize`` of rows by an index: the bytes of the rows in order, and no other row is read."""

import pytest
import torch
import torch._dynamo.testing
from hypothesis import given, settings
from hypothesis import strategies as st

import tgl
from tests.memory import raw
from tests.quantize.comparing import spread
from tgl.meta.components import Components

SIZES, TAIL, TOKENS = (3, 0, 40, 1, 17), 3, 12
ROUTED = sum(SIZES)
ROWS = ROUTED + TAIL
NEVER = TOKENS - 1  # a token of no row
LOW, HIGH = -(1 << 31), (1 << 31) - 1
NAN = float("nan")
OPTIONS = {
    "mxfp8": {"format": "mxfp8", "scale_layout": "blocked"},
    "mxfp8, compact": {"format": "mxfp8", "dtype": torch.float8_e5m2, "scaling": "even"},
    "nvfp4": {"format": "nvfp4", "scale_layout": "blocked"},
    "nvfp4, transformed": {"format": "nvfp4", "rht": True},
    "nvfp4, stochastic": {"format": "nvfp4", "rng": torch.tensor([3, 5])},
    "fp8_tensor": {"format": "fp8_tensor"},
    "fp8_tensor, delayed": {"format": "fp8_tensor", "scale": torch.tensor([1.0, 0.5, 4.0, 2.0, 1.5])},
    "fp8_block": {"format": "fp8_block"},
    "fp8_block, any scale": {"format": "fp8_block", "power_of_two": False, "eps": 0.25},
}
options_of = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
DIRECTIONS = {"both": (True, True), "rows": (True, False), "columns": (False, True)}


def ends(sizes=SIZES):
    return torch.tensor(sizes).cumsum(0).int()


def index(*tail, tokens=TOKENS):
    """Tokens of the rows, of which there are fewer, and numbers for the tail."""
    numbers = torch.randint(0, tokens - 1, (ROUTED,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    return torch.cat([numbers, torch.tensor(tail or (-1,) * TAIL, dtype=torch.int32)])


def tokens(columns, dtype=torch.bfloat16, count=TOKENS):
    """Values of many exponents, NaN for the token of no row."""
    made = spread(count, columns, dtype=dtype)
    made[-1] = NAN
    return made


def in_order(x, rows):
    """``x[rows]``, NaN in the tail."""
    made = torch.full((rows.shape[0], x.shape[1]), NAN, dtype=x.dtype)
    made[:ROUTED] = x[rows[:ROUTED].long()]
    return made


def directed(options, directions):
    rowwise, columnwise = directions
    return dict(options, rowwise=rowwise, columnwise=columnwise, rht=options.get("rht", False) and columnwise)


def differing(ours, theirs):
    """The names of the components that are not equal to the byte, or whose layouts differ."""
    return [
        name
        for name, a, b in zip(Components._fields, ours, theirs)
        if a.dtype != b.dtype or a.stride() != b.stride() or not torch.equal(raw(a), raw(b))
    ]


@options_of
@pytest.mark.parametrize("directions", DIRECTIONS.values(), ids=DIRECTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bytes_of_the_rows_in_order(options, directions, dtype):
    options = directed(options, directions)
    for columns, count in ((200, TOKENS), (64, 3 * ROWS)):  # fewer tokens than rows, and more
        x, rows = tokens(columns, dtype, count), index(LOW, HIGH, count - 1, tokens=count)
        wanted = tgl.group_quantize(in_order(x, rows), ends(), **options)
        assert not differing(tgl.group_quantize(x, ends(), rows=rows, **options), wanted)
        for layout in (x.t().contiguous().t(), torch.cat([x, x], 1)[:, :columns]):
            assert not differing(tgl.group_quantize(layout, ends(), rows=rows, **options), wanted)
    ones = torch.ones(ROWS, 64, dtype=dtype)
    out = tgl.group_quantize(ones, ends(), **options)
    tgl.group_quantize(x, ends(), rows=rows, noop=torch.tensor(True), out=out, **options)
    assert not differing(out, tgl.group_quantize(ones, ends(), **options))
    tgl.group_quantize(x, ends(), rows=rows, out=out, **options)
    assert not differing(out, wanted)


@options_of
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_factors_and_sums_of_rows(options, scale_dtype):
    x, rows, factors = tokens(48), index(), torch.randn(ROWS).to(scale_dtype)
    factors[ROUTED:] = NAN
    for extra in ({"row_scale": factors}, {"dbias": True}, {"row_scale": factors, "dbias": True}):
        wanted = tgl.group_quantize(in_order(x, rows), ends(), **extra, **options)
        assert not differing(tgl.group_quantize(x, ends(), rows=rows, **extra, **options), wanted)


@options_of
@pytest.mark.parametrize("absent", [LOW, -1, TOKENS, HIGH])
@pytest.mark.parametrize("weighted", [False, True])
def test_an_index_out_of_range_reads_zeros(options, absent, weighted):
    """A factor of it that is not finite makes NaN of it, as of any row of zeros."""
    x, rows = tokens(48), index()
    ordered = in_order(x, rows)
    ordered[[1, 20]] = 0
    rows[[1, 20]] = absent
    factors = torch.rand(ROWS)
    factors[20] = float("inf")
    extra = {"row_scale": factors} if weighted else {"dbias": True}
    wanted = tgl.group_quantize(ordered, ends(), **extra, **options)
    assert not differing(tgl.group_quantize(x, ends(), rows=rows, **extra, **options), wanted)


@options_of
def test_no_tokens_no_rows_and_no_columns(options):
    x = tokens(48)
    wanted = tgl.group_quantize(torch.zeros(ROWS, 48, dtype=x.dtype), ends(), **options)
    assert not differing(tgl.group_quantize(x[:0], ends(), rows=index(), **options), wanted)
    wanted = tgl.group_quantize(x[:0], ends() * 0, **options)
    assert not differing(tgl.group_quantize(x, ends() * 0, rows=index()[:0], **options), wanted)
    wanted = tgl.group_quantize(torch.zeros(ROWS, 0, dtype=x.dtype), ends(), **options)
    assert not differing(tgl.group_quantize(x[:, :0], ends(), rows=index(), **options), wanted)


@pytest.mark.parametrize("columnwise", [False, True])
@options_of
def test_steps_of_many(options, columnwise):
    """More rows than a step takes."""
    options = {name: value for name, value in directed(options, (True, columnwise)).items() if name != "scale"}
    x, offs = spread(96, 1032, dtype=torch.bfloat16), ends((700, 1, 0, 800))
    for rows in (torch.randint(0, 96, (1510,), dtype=torch.int32), torch.randint(0, 40, (1510,), dtype=torch.int32)):
        wanted = tgl.group_quantize(x[rows.long()], offs, **options)
        assert not differing(tgl.group_quantize(x, offs, rows=rows, **options), wanted)


def routings(draw):
    sizes = draw(st.lists(st.integers(0, 140), min_size=1, max_size=5))
    tail, count = draw(st.integers(0, 3)), draw(st.integers(1, 300))
    numbers = draw(st.integers(0, 1 << 20))
    rows = torch.randint(0, count, (sum(sizes),), generator=torch.Generator().manual_seed(numbers), dtype=torch.int32)
    return sizes, count, torch.cat([rows, torch.full((tail,), -1, dtype=torch.int32)])


@settings(max_examples=20)
@given(routing=st.composite(routings)(), name=st.sampled_from(sorted(set(OPTIONS) - {"fp8_tensor, delayed"})))
def test_any_routing(routing, name):
    sizes, count, rows = routing
    x = spread(count, 36, dtype=torch.bfloat16)
    wanted = tgl.group_quantize(x[rows.clamp(min=0).long()], ends(sizes), **OPTIONS[name])
    assert not differing(tgl.group_quantize(x, ends(sizes), rows=rows, **OPTIONS[name]), wanted)


@options_of
def test_never_a_copy_of_all_rows(options):
    """A step of them is put in order, or the codes of all tokens where a row has its own scales."""
    options = {name: value for name, value in options.items() if name != "scale"}
    x, rows, offs = spread(256, 1024), torch.randint(0, 256, (4096,), dtype=torch.int32), ends((1000, 3000, 96))
    out = tgl.group_quantize(x, offs, rows=rows, **options)
    with torch.profiler.profile(profile_memory=True) as profiled:
        tgl.group_quantize(x, offs, rows=rows, out=out, **options)
    assert max(event.self_cpu_memory_usage for event in profiled.events()) < 4096 * 1024 * 4 / 4


def test_compiled():
    """One graph serves other numbers of tokens and rows."""
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def call(x, rows, offs):
        return tgl.group_quantize(x, offs, rows=rows, format="mxfp8")

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=graphs)
    for more in (0, 3, 5):
        x, rows = spread(TOKENS + more, 40), torch.cat([index(), index()[:more]])
        assert not differing(compiled(x, rows, ends()), call(x, rows, ends()))
    assert graphs.frame_count == 1


# --- bad calls --------------------------------------------------------------------------------------------------------


BAD = {
    "int64": (lambda r: r.long(), TypeError, r"`rows` must be int32 \(numbers of rows of `x`\), but got torch.int64"),
    "2-D": (lambda r: r[None], ValueError, rf"`rows` must be 1-D \[T\], but got shape \(1, {ROWS}\)"),
    "strided": (lambda r: torch.stack([r, r], 1)[:, 0], ValueError, "`rows` must be contiguous, but got strides"),
    "elsewhere": (lambda r: r.to("meta"), ValueError, "`rows` must be on cpu like `x`, but got meta"),
}


def refused(error, message, x, offs, rows, **options):
    """Every way to quantise ``x`` raises, and writes nothing."""
    out = tgl.group_quantize(torch.ones(ROWS, 32), ends(), format="mxfp8")
    before = [t.clone() for t in out]
    for into in (None, out):
        with pytest.raises(error, match=message):
            tgl.group_quantize(x, offs, rows=rows, format="mxfp8", out=into, **options)
    assert not differing(out, before)


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_bad_indices(case):
    change, error, message = case
    refused(error, message, spread(TOKENS, 32), ends(), change(index()))


def test_arguments_that_do_not_fit_row_indices():
    x, rows = spread(TOKENS, 32), index()
    refused(ValueError, r"`rows` must be None when `offs` is None \(they are in groups\)", x[None], None, rows)
    refused(ValueError, r"`x` must be 2-D \[S, K\] when `rows` is given, but got", x[0], ends(), rows)
    message = rf"`row_scale` must be of shape \[T\] = \({ROWS},\), but got shape \({TOKENS},\)"
    refused(ValueError, message, x, ends(), rows, row_scale=torch.ones(TOKENS))
    wider = tgl.group_quantize(torch.ones(TOKENS, 32), ends() * 0, format="mxfp8")
    with pytest.raises(ValueError, match=rf"`data` must be \({ROWS}, 32\), the shape of compact mxfp8"):
        tgl.group_quantize(x, ends(), rows=rows, format="mxfp8", out=wider)


def test_an_output_that_holds_the_index():
    buffer = torch.zeros(ROWS * 32, dtype=torch.uint8)
    rows = buffer.view(torch.int32)[:ROWS]
    out = tgl.group_quantize(torch.ones(ROWS, 32), ends(), format="mxfp8", columnwise=False)
    out = out._replace(data=buffer.view(ROWS, 32).view(torch.float8_e4m3fn))
    with pytest.raises(ValueError, match="`data` must be disjoint from `rows`, but got overlapping memory"):
        tgl.group_quantize(spread(TOKENS, 32), ends(), rows=rows, format="mxfp8", columnwise=False, out=out)


@pytest.mark.parametrize("bad", [-1, TOKENS])
def test_debug_checks(bad):
    x, rows = spread(TOKENS, 32), index()
    out = tgl.group_quantize(x, ends(), rows=rows, format="mxfp8")
    message = rf"`rows` must be numbers below {TOKENS} before row offs\[-1\] = {ROUTED}, but rows\[4\] = {bad}"
    with tgl.debug_checks():
        tgl.group_quantize(x, ends(), rows=rows, format="mxfp8", out=out)
        rows[4] = bad
        for into in (None, out):
            with pytest.raises(ValueError, match=message):
                tgl.group_quantize(x, ends(), rows=rows, format="mxfp8", out=into)
            with pytest.raises(ValueError, match=r"`offs` must stay within 64 rows, but offs\[4\] = 65"):
                offs = ends()
                offs[-1] = ROWS + 1
                tgl.group_quantize(x, offs, rows=rows, format="mxfp8", out=into)


def test_explain():
    x, rows = spread(TOKENS, 32), index()
    overload = torch.ops.tgl.group_quantize.default
    for op, args, kwargs in (
        (tgl.group_quantize, (x, ends()), {"rows": rows}),
        (overload, (x, ends()), {"rows": rows}),
        (overload, (x, ends(), None, None, None, None, rows), {}),
    ):
        assert tgl.explain(op, *args, format="mxfp8", **kwargs).chosen.name == "steps of aten"
        with pytest.raises(TypeError, match="`rows` must be int32"):
            bad = [t.long() if t is rows else t for t in args]
            tgl.explain(op, *bad, format="mxfp8", **{name: t.long() for name, t in kwargs.items()})


def test_an_implementation_without_an_index_is_not_tried():
    x = spread(TOKENS, 32)

    @tgl.register_implementation("group_quantize", "in order", device="cpu")
    def in_order(*operands, options, out):
        raise AssertionError("it must not be asked")

    try:
        report = tgl.explain(tgl.group_quantize, x, ends(), rows=index(), format="mxfp8")
        assert report.chosen.name == "steps of aten"
        assert "reads rows in the order of the groups, not by `rows`" in str(report)
        tgl.group_quantize(x, ends(), rows=index(), format="mxfp8")
    finally:
        tgl.backends.remove(in_order)
