"""A token's result has the same bits in batches of 1 to 65,536 tokens, at any place: eager, compiled and captured."""

import pytest
import torch

import tgl
from tests.gpu.device import ARCH, DEVICE
from tests.router_cases import CASES, operands
from tgl.backends.composite import moe

pytestmark = pytest.mark.gpu

EXPERTS, CHOICES, HIDDEN, INNER, PLACES = 16, 4, 512, 256, 200
WIDE = moe.FIRST + 64  # columns of experts that read few tokens in place, and many in a copy
BATCHES = [1, 2, 3, 8, 17, 64, 65, 200, 1000, 4096, 20000, 65536]
RECIPES = {"sm_90": [None, "fp8_block"], "sm_100": [None, "mxfp8"]}
MAKE = {None: lambda: None, "fp8_block": tgl.recipes.Float8BlockScaling, "mxfp8": tgl.recipes.MXFP8BlockScaling}
CHOSEN, SHARES = torch.tensor([3, 11, 0, 7]), torch.tensor([0.5, 0.25, 0.15, 0.1])


def block(recipe, inner=INNER):
    torch.manual_seed(0)
    made = tgl.MoE(EXPERTS, HIDDEN, inner, recipe=MAKE[recipe](), device=DEVICE, params_dtype=torch.bfloat16)
    with torch.no_grad():  # exponents far apart, so that another order of sums has other bits
        for layer in (made.fc1, made.fc2):
            layer.weight.mul_(torch.exp2(torch.randint(-9, 9, layer.weight.shape, device=DEVICE).float()))
    return made


def batch(tokens, place):
    """The token among others of their own routings."""
    made = torch.Generator(DEVICE).manual_seed(tokens + place)
    x = torch.randn(tokens, HIDDEN, generator=made, device=DEVICE).bfloat16()
    chosen = torch.rand(tokens, EXPERTS, generator=made, device=DEVICE).argsort(1)[:, :CHOICES]
    weights = torch.rand(tokens, CHOICES, generator=made, device=DEVICE)
    x[place] = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(1)).to(DEVICE).bfloat16()
    chosen[place], weights[place] = CHOSEN.to(DEVICE), SHARES.to(DEVICE)
    return x, chosen, weights


def captured(module):
    """``module`` as a graph of every call's own shapes."""

    def call(*given):
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            module(*given)  # compiles and loads
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = module(*given)
        graph.replay()
        return y

    return call


WAYS = {"eager": lambda m: m, "compiled": lambda m: torch.compile(m, dynamic=True), "captured": captured}


def test_the_token_lies_at_many_places():
    """The token lies at many positions, as the other tests assume."""
    x, chosen, weights = batch(8, 5)
    y, z, w = batch(9, 0)
    assert all(torch.equal(t[5], u[0]) for t, u in ((x, y), (chosen, z), (weights, w)))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("recipe", RECIPES.get(ARCH, [None]))
@torch.no_grad()
def test_batches(recipe, way):
    module = block(recipe)
    expected = module(*batch(1, 0))[0]
    assert expected.isfinite().all()
    call = WAYS[way](module)
    for tokens in BATCHES:
        for place in sorted({0, tokens // 2, tokens - 1}):
            assert torch.equal(call(*batch(tokens, place))[place], expected), (tokens, place)


@pytest.mark.parametrize("recipe", RECIPES.get(ARCH, [None]))
@torch.no_grad()
def test_positions_in_a_batch(recipe):
    module = block(recipe)
    expected = module(*batch(1, 0))[0]
    for place in torch.linspace(0, 2999, PLACES).long().tolist():
        assert torch.equal(module(*batch(3000, place))[place], expected), place


def parts(module, x, chosen, weights):
    """The ops that the block runs."""
    routing, (w1, w2) = tgl.route(chosen, EXPERTS), (layer.weight.transpose(1, 2) for layer in (module.fc1, module.fc2))
    places = routing.source, routing.position, routing.token, routing.offs
    found = tgl.explain("moe", x, w1, w2, *places, weights, top_k=CHOICES)
    assert found.batch_invariant
    return [part.op for part in found.parts]


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_wide_experts(way):
    """Their first product reads few tokens in place, by small tiles, and many in a copy."""
    module = block(None, WIDE)
    few, many = (parts(module, *batch(tokens, 0)) for tokens in (17, BATCHES[-1]))  # with less, launches overlap
    assert few.count("dispatch") == many.count("dispatch") - 1
    expected = module(*batch(1, 0))[0]
    assert expected.isfinite().all()
    call = WAYS[way](module)
    for tokens in BATCHES:
        for place in sorted({0, tokens // 2, tokens - 1}):
            assert torch.equal(call(*batch(tokens, place))[place], expected), (tokens, place)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.options.get("sums")])
def test_router_weights_do_not_depend_on_the_batch(name, dtype):
    """The token's choices and weights, without sums for losses."""
    case = CASES[name]
    (logits, bias), expected = operands(case, 1, dtype), None
    bias = None if bias is None else bias.to(DEVICE)
    for tokens in BATCHES:
        for place in sorted({0, tokens // 2, tokens - 1}):
            others = torch.randn(
                tokens, case.experts, generator=torch.Generator(DEVICE).manual_seed(place), device=DEVICE
            )
            given = others.to(dtype).index_copy_(0, torch.tensor([place], device=DEVICE), logits.to(DEVICE)), case.top_k
            assert tgl.explain("topk_router", *given, bias, **case.options).batch_invariant
            weights, index, *_ = torch.ops.tgl.topk_router(*given, bias, **case.options)
            expected = expected or (weights[place], index[place])
            assert torch.equal(weights[place], expected[0]), (tokens, place)
            assert torch.equal(index[place], expected[1]), (tokens, place)


def test_explain_reports_batch_invariance():
    x, chosen, _ = batch(8, 5)
    routing, w = tgl.route(chosen, EXPERTS), torch.empty(EXPERTS, HIDDEN, 2 * INNER, device=DEVICE).bfloat16()
    rows = tgl.dispatch(x, routing)
    assert tgl.explain(tgl.grouped_gemm, rows, w, routing.offs).batch_invariant
    assert tgl.explain(tgl.grouped_gemm_activation, rows, w, routing.offs).batch_invariant
    assert tgl.explain("combine", rows, routing.token, routing.position, CHOICES).batch_invariant
    assert not tgl.explain(tgl.grouped_gemm_wgrad, rows, rows, routing.offs).batch_invariant
