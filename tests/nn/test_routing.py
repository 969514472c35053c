"""Routing against a loop over (token, choice) pairs, its gradients, and sentinels."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tgl
from tgl.nn.routing import dispatch_both


def naive(index, num_experts):
    """Pairs sorted by expert, stably; those of no expert last. Returns the pairs and the ends."""
    pairs = [(e if e >= 0 else num_experts, i) for i, e in enumerate(index.reshape(-1).tolist())]
    ordered = [i for e, i in sorted(pairs)]
    ends = [sum(e <= g for e, _ in pairs) for g in range(num_experts)]
    return ordered, ends


def layer(x, index, weights, scale):
    """A mixture of experts whose expert ``g`` multiplies by ``scale[g]``, written as a loop."""
    out = []
    for s in range(index.shape[0]):
        terms = [weights[s, j] * scale[e] * x[s] for j, e in enumerate(index[s].tolist()) if e < scale.shape[0]]
        out.append(sum(terms) if terms else torch.zeros_like(x[s]))
    return torch.stack(out)


WAYS = ("in combine", "rows", "rows dispatched together")


def routed_layer(x, index, weights, scale, weigh):
    routing = tgl.route(index, scale.shape[0])
    if weigh == "rows dispatched together":
        rows, probs = dispatch_both(x, weights, routing)
    else:
        rows, probs = tgl.dispatch(x, routing), tgl.dispatch_weights(weights, routing)
    identity = torch.eye(x.shape[1], dtype=x.dtype)
    y = tgl.grouped_gemm(rows, scale[:, None, None] * identity, routing.offs)
    if weigh == "in combine":
        return tgl.combine(y, routing, weights)
    return tgl.combine(y * probs[:, None], routing)


@given(
    tokens=st.integers(0, 12),
    top_k=st.integers(1, 4),
    experts=st.integers(1, 9),
    sentinel=st.booleans(),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from([torch.int64, torch.int32]),
)
def test_route_against_a_loop(tokens, top_k, experts, sentinel, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    index = torch.randint(-sentinel, experts + sentinel, (tokens, top_k), generator=generator).to(dtype)
    routing = tgl.route(index, experts)
    source, ends = naive(index, experts)
    assert routing.source.tolist() == source
    assert routing.offs.tolist() == ends
    assert routing.offs.dtype == torch.int32
    assert routing.top_k == top_k
    assert [source[p] for p in routing.position.tolist()] == list(range(tokens * top_k))
    x = torch.randn(tokens, 3)
    assert torch.equal(tgl.dispatch(x, routing), x[routing.source // top_k])


@pytest.mark.parametrize(
    "dtype, experts", [(torch.uint8, 300), (torch.int8, 200), (torch.int16, 300), (torch.int32, 4)]
)
def test_narrow_index_dtypes_with_many_experts(dtype, experts):
    """More experts than the dtype of the choices can count."""
    index = torch.tensor([[3, 1], [0, 100], [2, 2]]).clamp(max=experts - 1).to(dtype)
    assert tgl.route(index, experts).offs.tolist() == naive(index, experts)[1]


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64])
def test_indices_out_of_range_belong_to_no_expert(dtype):
    """Both ways, down to the least value of the dtype: the tail, not the first or the last expert."""
    limits = torch.iinfo(dtype)
    index = torch.tensor([[1, -1], [limits.min, 0], [2, limits.max]], dtype=dtype)
    routing = tgl.route(index, 2)
    assert routing.offs.tolist() == [1, 2]
    assert routing.source.tolist()[:2] == [3, 0]
    assert sorted(routing.source.tolist()[2:]) == [1, 2, 4, 5]


@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("sentinel", [False, True])
@pytest.mark.parametrize("weigh", WAYS)
def test_the_whole_layer_and_its_gradients(top_k, sentinel, weigh):
    index = torch.randint(0, 4 + sentinel, (7, top_k))
    if sentinel:
        index[2] = 4  # a token none of whose experts are here
    x, weights, scale = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((7, 5), (7, top_k), (4,)))
    y, expected = routed_layer(x, index, weights, scale, weigh), layer(x, index, weights, scale)
    torch.testing.assert_close(y, expected)
    dy = torch.randn_like(y)
    grads = torch.autograd.grad(y, (x, weights, scale), dy)
    torch.testing.assert_close(grads, torch.autograd.grad(expected, (x, weights, scale), dy))


@pytest.mark.parametrize("top_k", [1, 2])
def test_gradcheck(top_k):
    index = torch.randint(0, 4, (4, top_k))
    leaves = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((4, 3), (4, top_k), (3,))]
    for weigh in WAYS:

        def function(x, weights, scale, weigh=weigh):
            return routed_layer(x, index, weights, scale, weigh)

        assert torch.autograd.gradcheck(function, leaves)
        assert torch.autograd.gradgradcheck(function, leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("top_k", [1, 2, 3, 8])
def test_sums_of_choices_round_once(dtype, top_k):
    """Combine, and the backward of dispatch, are as near to the exact sum as the dtype gets (ties go either way)."""
    limit = {torch.float32: 1000, torch.bfloat16: 255, torch.float16: 2000}[dtype]
    index = torch.randint(0, 4, (32, top_k))
    routing = tgl.route(index, 4)
    y = torch.randint(-limit, limit + 1, (32 * top_k, 16)).to(dtype)
    exact = y.double()[routing.position].view(32, top_k, 16).sum(1)
    error = (exact.to(dtype).double() - exact).abs()
    assert torch.equal((tgl.combine(y, routing).double() - exact).abs(), error)
    x = torch.zeros(32, 16, dtype=dtype, requires_grad=True)
    (grad,) = torch.autograd.grad(tgl.dispatch(x, routing), x, y)
    assert torch.equal((grad.double() - exact).abs(), error)


def test_only_what_requires_grad_gets_one():
    routing = tgl.route(torch.randint(0, 4, (6, 2)), 4)
    x, weights = torch.randn(6, 8, requires_grad=True), torch.rand(6, 2)
    rows, probs = dispatch_both(x, weights, routing)
    rows.sum().backward()
    assert torch.equal(x.grad, torch.full((6, 8), 2.0))
    rows, probs = dispatch_both(x.detach(), weights.requires_grad_(), routing)
    (probs * torch.arange(12)).sum().backward()
    assert torch.equal(weights.grad, routing.position.view(6, 2).float())


def test_dtypes():
    """float32 weights on narrow rows: the answer is narrow, the weights' gradient float32."""
    index = torch.randint(0, 4, (6, 2))
    routing = tgl.route(index, 4)
    x, weights = torch.randn(6, 8, dtype=torch.bfloat16, requires_grad=True), torch.rand(6, 2, requires_grad=True)
    y = tgl.combine(tgl.dispatch(x, routing), routing, weights)
    y.sum().backward()
    assert y.dtype == x.grad.dtype == torch.bfloat16
    assert weights.grad.dtype == torch.float32


def test_no_tokens():
    x = torch.randn(0, 5, requires_grad=True)
    routing = tgl.route(torch.zeros(0, 2, dtype=torch.int64), 3)
    y = tgl.combine(tgl.dispatch(x, routing), routing, torch.zeros(0, 2))
    y.sum().backward()
    assert y.shape == x.grad.shape == (0, 5)
    assert routing.offs.tolist() == [0, 0, 0]


def test_bad_input():
    with pytest.raises(ValueError, match=r"`top_k_index` must be 2-D \[S, k\], but got shape \(3,\)"):
        tgl.route(torch.tensor([0, 1, 2]), 3)
    with pytest.raises(TypeError, match=r"`top_k_index` must be an integer tensor, but got torch\.float32"):
        tgl.route(torch.tensor([[0.5, 1.2]]), 3)
