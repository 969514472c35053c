"""Bad values in ``offs``: never a write out of bounds, and ``tgl.debug_checks`` names the bad entry."""

import contextlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

import tgl

BAD = {
    "descending": ([3, 2, 6], r"`offs` must not descend, but offs\[1\] = 2 is less than offs\[0\] = 3"),
    "negative": ([-1, 2, 6], r"`offs` must not descend, but offs\[0\] = -1 is less than 0"),
    "negative later": ([1, -5, 6], r"`offs` must not descend, but offs\[1\] = -5 is less than offs\[0\] = 1"),
    "out of range": ([1, 2, 7], r"`offs` must stay within 6 rows, but offs\[2\] = 7"),
    "far out of range": ([1, 2**31 - 1, 2**31 - 1], r"`offs` must stay within 6 rows, but offs\[1\] = 2147483647"),
}
T, K, N, G = 6, 4, 8, 3


def calls(offs):
    """Every op that takes ``offs``, as name -> call."""
    a, b, dy = torch.ones(T, K), torch.ones(G, K, N), torch.ones(T, N)
    bias, scale, out, dw = torch.ones(G, N), torch.ones(T), torch.zeros(T, N), torch.zeros(G, K, N)
    return {
        "grouped_gemm": lambda: tgl.grouped_gemm(a, b, offs, bias, scale),
        "grouped_gemm.out": lambda: tgl.grouped_gemm(a, b, offs, bias, scale, out=out),
        "grouped_gemm_activation": lambda: tgl.grouped_gemm_activation(a, b, offs, bias, scale),
        "grouped_gemm_low_rank": lambda: tgl.grouped_gemm_low_rank(a, b, a, b, offs, bias, scale),
        "grouped_gemm_low_rank_activation": lambda: tgl.grouped_gemm_low_rank_activation(a, b, a, b, offs, bias, scale),
        "grouped_gemm_low_rank.out": lambda: tgl.grouped_gemm_low_rank(a, b, a, b, offs, bias, scale, out=out),
        "grouped_gemm_wgrad": lambda: tgl.grouped_gemm_wgrad(a, dy, offs),
        "grouped_gemm_wgrad.out": lambda: tgl.grouped_gemm_wgrad(a, dy, offs, out=dw),
        "grouped_gemm_wgrad_accumulate_": lambda: tgl.grouped_gemm_wgrad_accumulate_(a, dy, offs, dw),
        "grouped_dbias": lambda: tgl.grouped_dbias(dy, offs),
        "grouped_dbias_dscales": lambda: tgl.grouped_dbias_dscales(dy, bias, scale, offs),
        "grouped_activation": lambda: tgl.grouped_activation(dy, offs, scale),
        "grouped_activation_backward": lambda: torch.ops.tgl.grouped_activation_backward(a, dy, offs, scale),
        "grouped_gemm_dactivation": lambda: tgl.grouped_gemm_dactivation(a, b, dy, offs, scale, kind="srelu"),
    }


NAMES = list(calls(torch.zeros(G, dtype=torch.int32)))


def guarded(*shape):
    """A buffer inside a larger one, and what lies around it."""
    room = torch.full((torch.Size(shape).numel() + 512,), -7.0)
    inside = room[256:-256].view(shape)
    return inside, lambda: torch.cat([room[:256], room[-256:]])


@given(ends=st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(-8, 16), min_size=G, max_size=G))
def test_bad_offs_never_write_out_of_bounds(ends):
    offs = torch.tensor(ends, dtype=torch.int32)
    for call in calls(offs).values():
        call()
    a, b, dy = torch.ones(T, K), torch.ones(G, K, N), torch.ones(T, N)
    out, around_out = guarded(T, N)
    dw, around_dw = guarded(G, K, N)
    tgl.grouped_gemm(a, b, offs, torch.ones(G, N), out=out)
    tgl.grouped_gemm_wgrad(a, dy, offs, out=dw)
    tgl.grouped_gemm_wgrad_accumulate_(a, dy, offs, dw)
    assert (around_out() == -7).all()
    assert (around_dw() == -7).all()
    assert set(out.unique().tolist()) <= {-7.0, K + 1.0}, "a row is either a group's or untouched"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", BAD)
def test_debug_checks_name_the_bad_entry(name, case):
    ends, message = BAD[case]
    call = calls(torch.tensor(ends, dtype=torch.int32))[name]
    call()
    with tgl.debug_checks(), pytest.raises(ValueError, match=rf"tgl::{name.removesuffix('.out')}: {message}"):
        call()


@pytest.mark.parametrize("name", NAMES)
def test_debug_checks_let_good_offs_pass(name):
    with tgl.debug_checks():
        calls(torch.tensor([0, 3, 5], dtype=torch.int32))[name]()


@pytest.mark.parametrize("ends, fits", [([0, 3, 5], True), ([3, 2, 6], False)])
def test_values_are_checked_with_all_options(ends, fits):
    a, b, h, offs = torch.ones(T, K), torch.ones(G, K, N), torch.ones(T, N), torch.tensor(ends, dtype=torch.int32)
    data, ones = a.to(torch.float8_e4m3fn), torch.ones
    weights, columns = b.transpose(1, 2).to(data.dtype), data.t()
    wide = {"out_dtype": torch.float32}
    for call in (
        lambda: tgl.grouped_gemm(a, b, offs, **wide),
        lambda: tgl.grouped_gemm(a, b, offs, rows=offs.new_zeros(T), **wide),
        lambda: tgl.grouped_gemm_activation(a, b, offs, kind="silu", **wide),
        lambda: tgl.grouped_gemm_dactivation(a, b, h, offs, kind="silu"),
        lambda: tgl.ops.grouped_gemm_row_scaled_wgrad(columns, ones(G, K), columns, ones(G, K), offs, **wide),
        lambda: tgl.ops.grouped_gemm_row_scaled(data, ones(T), weights, ones(G, N), offs, **wide),
        lambda: tgl.grouped_activation(h, offs, kind="geglu"),
    ):
        with tgl.debug_checks(), contextlib.nullcontext() if fits else pytest.raises(ValueError, match="descend"):
            call()


def test_nothing_is_written_when_a_check_fails():
    a, b, dy = torch.ones(T, K), torch.ones(G, K, N), torch.ones(T, N)
    offs = torch.tensor([3, 2, 6], dtype=torch.int32)
    out, dw = torch.zeros(T, N), torch.zeros(G, K, N)
    with tgl.debug_checks():
        for call in (
            lambda: tgl.grouped_gemm(a, b, offs, out=out),
            lambda: tgl.grouped_gemm_wgrad(a, dy, offs, out=dw),
            lambda: tgl.grouped_gemm_wgrad_accumulate_(a, dy, offs, dw),
        ):
            with pytest.raises(ValueError, match="must not descend"):
                call()
    assert not out.any()
    assert not dw.any()


def test_contexts_nest_and_end_with_an_exception():
    bad = calls(torch.tensor([3, 2, 6], dtype=torch.int32))["grouped_dbias"]
    with tgl.debug_checks():
        with tgl.debug_checks():
            pass
        with pytest.raises(ValueError, match="must not descend"):
            bad()
    with pytest.raises(ZeroDivisionError), tgl.debug_checks():
        raise ZeroDivisionError
    bad()


def test_negative_splits():
    splits = torch.tensor([2, -1, 3])
    tgl.splits_to_offsets(splits)
    with (
        tgl.debug_checks(),
        pytest.raises(ValueError, match=r"`m_splits` must not be negative, but m_splits\[1\]"),
    ):
        tgl.splits_to_offsets(splits)


@pytest.mark.parametrize(
    "splits, group, total",
    [([2**31 - 1, 5], 1, 2**31 + 4), ([2**32 + 5], 0, 2**32 + 5), ([1, 2**31 - 1, 2**33], 1, 2**31)],
    ids=str,
)
def test_splits_beyond_int32(splits, group, total):
    """Their ends wrap around: a negative end, or a small one that looks right."""
    splits = torch.tensor(splits)
    tgl.splits_to_offsets(splits)
    message = rf"`m_splits` must add up to int32 \(2147483647 at most\), but m_splits\[{group}\] = \d+ makes it {total}"
    with tgl.debug_checks(), pytest.raises(ValueError, match=message):
        tgl.splits_to_offsets(splits)
    with tgl.debug_checks():
        assert tgl.splits_to_offsets(torch.tensor([2**31 - 2, 1])).tolist() == [2**31 - 2, 2**31 - 1]


def test_splits_that_exceed_the_rows_are_found_behind_a_module():
    layer = tgl.GroupedLinear(3, 4, 8)
    with tgl.debug_checks(), pytest.raises(ValueError, match=r"must stay within 6 rows, but offs\[2\] = 7"):
        layer(torch.ones(6, 4), torch.tensor([2, 2, 3]))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_around_a_compiled_call(backend):
    """The check is in the op, so a graph compiled without it checks all the same, and compiles no second time."""
    graphs = CompileCounterWithBackend(backend)
    compiled = torch.compile(tgl.grouped_gemm, backend=graphs, fullgraph=True)
    a, b = torch.ones(T, K), torch.ones(G, K, N)
    good, bad = (torch.tensor(e, dtype=torch.int32) for e in ([1, 2, 6], [3, 2, 6]))
    assert torch.equal(compiled(a, b, good), tgl.grouped_gemm(a, b, good))
    compiled(a, b, bad)
    with tgl.debug_checks():
        compiled(a, b, good)
        with pytest.raises(ValueError, match=r"tgl::grouped_gemm: `offs` must not descend, but offs\[1\] = 2"):
            compiled(a, b, bad)
    assert graphs.frame_count == 1


# --- an input that is quantised already -------------------------------------------------------------------------------


def quantised_for(sizes, format="mxfp8", layout="blocked"):
    options = {"scale_layout": layout} if format in ("mxfp8", "nvfp4") else {}
    return tgl.quantize(torch.ones(64, 32), None, m_splits=torch.tensor(sizes), format=format, rowwise=True, **options)


OTHER_GROUPS = r"`inp` must be quantised with the group ends of the call, but was with offs\[1\] = 40 where .* to 20"


@pytest.mark.cover(1)
@pytest.mark.parametrize("module", ["linear", "mlp"])
@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
@pytest.mark.parametrize("recipe", ["MXFP8BlockScaling", "Float8CurrentScaling"])
def test_an_input_quantised_for_other_groups(recipe, backend, module, fresh_compiler):
    recipe = getattr(tgl.recipes, recipe)()
    layer = {"linear": tgl.GroupedLinear, "mlp": tgl.GroupedMLP}[module](3, 32, 32, recipe=recipe)
    run = layer if backend is None else torch.compile(layer, backend=backend, fullgraph=True)
    x, splits = quantised_for([10, 30, 24], recipe.format), torch.tensor([10, 10, 24])
    run(x, splits)
    with tgl.debug_checks():
        run(x, torch.tensor([10, 30, 24]))
        with pytest.raises(ValueError, match=OTHER_GROUPS):
            run(x, splits)


def test_the_copy_of_group_ends_in_a_graph():
    offs = torch.tensor([1, 2, 6], dtype=torch.int32)
    torch.library.opcheck(torch.ops.tgl.same_offs.default, (offs, offs.clone()))
    with pytest.raises(ValueError, match="must be of length 3"):
        torch.ops.tgl.same_offs(offs, offs[:2])


# --- what a router has chosen -----------------------------------------------------------------------------------------

NO_EXPERT = r"`top_k_index` must be experts from 0 to 3 unless `sentinels` .*, but top_k_index\[1, 0\] = "
COMPILERS = [None, "aot_eager"]  # the checks are the ops', which Inductor calls as it does the one above


def compiled(function, backend):
    return function if backend is None else torch.compile(function, backend=backend, fullgraph=True)


@pytest.mark.parametrize("backend", COMPILERS)
def test_experts_out_of_range(backend, fresh_compiler):
    layer, x, weights = tgl.MoE(4, 8, 8), torch.ones(2, 8), torch.rand(2, 2)
    good = torch.tensor([[0, 3], [1, 2]])
    run = compiled(layer, backend)
    expected = run(x, good, weights)
    for expert in (-1, 4, 1 << 20):
        bad = torch.tensor([[0, 3], [expert, 2]])
        dropped = run(x, bad, weights)
        with tgl.debug_checks():
            assert torch.equal(run(x, good, weights), expected)
            with pytest.raises(ValueError, match=f"tgl::route: {NO_EXPERT}{expert}"):
                run(x, bad, weights)
        assert torch.equal(run(x, bad, weights), dropped)


@pytest.mark.parametrize("backend", COMPILERS)
def test_sentinels_allow_experts_out_of_range(backend, fresh_compiler):
    w1, w2, x, weights = torch.ones(4, 8, 8), torch.ones(4, 8, 8), torch.ones(2, 8), torch.rand(2, 2)
    index = torch.tensor([[0, 3], [4, 2]])

    def block(i, **options):
        return tgl.moe(x, tgl.route(i, 4, **options), weights, w1, w2, kind="relu")

    run = compiled(block, backend)
    with tgl.debug_checks():
        assert torch.equal(run(index, sentinels=True), block(index, sentinels=True))
        with pytest.raises(ValueError, match=f"tgl::route: {NO_EXPERT}4"):
            run(index)
        with pytest.raises(ValueError, match=f"tgl::route: {NO_EXPERT}4"):
            tgl.moe(x, index, weights, w1, w2, kind="relu")
    assert torch.equal(run(index), block(index, sentinels=True))


def test_more_slots_of_a_token_than_experts():
    index = torch.zeros(2, 3, dtype=torch.int64)
    with tgl.debug_checks():
        tgl.route(index, 2, sentinels=True)
        with pytest.raises(ValueError, match=r"`top_k_index` must have at most 2 slots for each token, .* but got 3"):
            tgl.route(index, 2)


@pytest.mark.parametrize("backend", COMPILERS)
def test_logits_with_nan(backend, fresh_compiler):
    route = compiled(lambda logits, bias: tgl.topk_router(logits, 2, bias).weights, backend)
    logits, bias = torch.randn(3, 4), torch.zeros(4)
    logits[0, 0] = -torch.inf  # an expert that is masked
    nan, nan_bias = logits.clone(), bias.clone()
    nan[2, 1] = nan_bias[3] = torch.nan
    with tgl.debug_checks():
        assert route(logits, bias).isfinite().all()
        with pytest.raises(ValueError, match=r"tgl::topk_router: `logits` must be numbers, but logits\[2, 1\] is NaN"):
            route(nan, bias)
        with pytest.raises(ValueError, match=r"tgl::topk_router: `bias` must be numbers, but bias\[3\] is NaN"):
            route(logits, nan_bias)
    route(nan, bias)
