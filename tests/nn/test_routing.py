"""Routing against a loop over (token, choice) pairs, its gradients, and sentinels."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

import tgl
from tests.routing_oracle import expected
from tgl.nn.routing import dispatch_both


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
    for name, wanted in expected(index, experts)._asdict().items():
        assert getattr(routing, name).dtype == torch.int32
        assert torch.equal(getattr(routing, name), wanted)
    assert routing.top_k == top_k
    x = torch.cat([torch.randn(tokens, 3), torch.zeros(1, 3)])  # which the last rows have, too
    assert torch.equal(tgl.dispatch(x[:-1], routing), x[routing.token])


@pytest.mark.cover(1)
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8])
@pytest.mark.parametrize("experts", [0, 100, 254, 255])
def test_compiled_route(experts, dtype):
    """A graph for a CPU, which has expressions instead of the op."""
    limits = torch.iinfo(dtype)
    index = torch.randint(max(limits.min, -2), min(limits.max, experts + 2), (200, 3))
    index[::50, 0], index[1::50, 0] = limits.min, limits.max
    routing = torch.compile(tgl.route, fullgraph=True)(index.to(dtype), experts)
    for name, wanted in expected(index, experts)._asdict().items():
        assert getattr(routing, name).dtype == torch.int32
        assert torch.equal(getattr(routing, name), wanted), name


@pytest.mark.parametrize(
    "dtype, experts", [(torch.uint8, 300), (torch.int8, 200), (torch.int16, 300), (torch.int32, 4)]
)
def test_narrow_index_dtypes_with_many_experts(dtype, experts):
    """More experts than the dtype of the choices can count."""
    index = torch.tensor([[3, 1], [0, 100], [2, 2]]).clamp(max=experts - 1).to(dtype)
    assert torch.equal(tgl.route(index, experts).offs, expected(index, experts).offs)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64])
def test_indices_out_of_range_belong_to_no_expert(dtype):
    """Negative and large indices, down to the least value of the dtype, belong to the tail."""
    limits = torch.iinfo(dtype)
    index = torch.tensor([[1, -1], [limits.min, 0], [2, limits.max]], dtype=dtype)
    routing = tgl.route(index, 2)
    assert routing.offs.tolist() == [1, 2]
    assert routing.source.tolist() == [3, 0, -1, -1, -1, -1]
    assert routing.token.tolist() == [1, 0, -1, -1, -1, -1]
    assert routing.position.tolist() == [1, -1, -1, 0, -1, -1]


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


@pytest.mark.parametrize(
    "error, message, call",
    [
        (ValueError, "`num_experts` must be at least 0, but got -1", lambda i, r: tgl.route(i, -1)),
        (TypeError, "`num_experts` must be an integer, but got '4'", lambda i, r: tgl.route(i, "4")),
        (TypeError, "`num_experts` must be an integer, but got 4.0", lambda i, r: tgl.route(i, 4.0)),
        (ValueError, r"`top_k_index` must be \[S, k\] with k of at least 1", lambda i, r: tgl.route(i[:, :0], 4)),
        (
            TypeError,
            "dispatch: `routing` must be a tgl.Routing, but got Tensor",
            lambda i, r: tgl.dispatch(rows(10), i),
        ),
    ],
)
def test_bad_routing(error, message, call):
    index = torch.randint(0, 4, (10, 2))
    with pytest.raises(error, match=message):
        call(index, tgl.route(index, 4))


def rows(count, width=3):
    return torch.randn(count, width)


@pytest.mark.parametrize("by", [-1, 1])
@pytest.mark.parametrize(
    "message, call",
    [
        (r"dispatch: `x` must be \[S, H\] with S = 10", lambda r, by: tgl.dispatch(rows(10 + by), r)),
        (
            r"dispatch_weights: `weights` must be \[S, k\] with S = 10",
            lambda r, by: tgl.dispatch_weights(rows(10 + by, 2), r),
        ),
        (
            r"dispatch_weights: `weights` must be \[S, k\] with k = 2",
            lambda r, by: tgl.dispatch_weights(rows(10, 2 + by), r),
        ),
        (
            r"dispatch_both: `x` must be \[S, H\] with S = 10",
            lambda r, by: dispatch_both(rows(10 + by), rows(10, 2), r),
        ),
        (
            r"dispatch_both: `weights` must be \[S, k\] with S = 10",
            lambda r, by: dispatch_both(rows(10), rows(10 + by, 2), r),
        ),
        (r"combine: `y` must be \[T, H\] with T = 20", lambda r, by: tgl.combine(rows(20 + by), r)),
        (r"combine: `weights` must be \[S, k\] with S = 10", lambda r, by: tgl.combine(rows(20), r, rows(10 + by, 2))),
        (r"combine: `weights` must be \[S, k\] with k = 2", lambda r, by: tgl.combine(rows(20), r, rows(10, 2 + by))),
    ],
)
def test_sizes_are_held_against_the_routing(message, call, by):
    """On a GPU an index out of range would end the process's CUDA context."""
    routing = tgl.route(torch.randint(0, 4, (10, 2)), 4)
    with pytest.raises(ValueError, match=message):
        call(routing, by)
    compiled = torch.compile(call, backend="eager", fullgraph=True, dynamic=True)
    with pytest.raises(Exception, match=re.sub(r" = (\d+)", r"( = \1)?", message)):
        compiled(routing, by)


def test_dimensions_and_devices():
    routing = tgl.route(torch.randint(0, 4, (10, 2)), 4)
    with pytest.raises(ValueError, match=r"dispatch: `x` must be 2-D \[S, H\], but got shape \(10,\)"):
        tgl.dispatch(torch.randn(10), routing)
    with pytest.raises(ValueError, match=r"combine: `y` must be on cpu like `routing`, but got meta"):
        tgl.combine(rows(20).to("meta"), routing)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("share", [None, 1, 3])
def test_one_graph_for_all_sizes(share):
    """The comparisons of sizes add no guard on their values."""
    graphs = CompileCounterWithBackend("aot_eager")

    def there_and_back(x, weights, index):
        routing = tgl.route(index, 4, None if share is None else share * x.shape[0])
        return tgl.combine(tgl.dispatch(x, routing), routing, weights)

    compiled = torch.compile(there_and_back, backend=graphs, fullgraph=True, dynamic=True)
    for tokens in (5, 10, 33):
        arguments = rows(tokens), rows(tokens, 2), torch.randint(0, 4, (tokens, 2))
        torch.testing.assert_close(compiled(*arguments), there_and_back(*arguments))
    assert graphs.frame_count == 1


@pytest.mark.cover(1)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev], ids=["grad", "jacrev"])
@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("weigh", WAYS)
def test_function_transforms(weigh, top_k, transform):
    index = torch.randint(0, 4, (5, top_k))
    arguments = [torch.randn(s, dtype=torch.float64) for s in ((5, 3), (5, top_k), (4,))]

    def loss(f):
        return lambda x, weights, scale: f(x, index, weights, scale).pow(3).sum()

    ours, theirs = loss(lambda *a: routed_layer(*a, weigh)), loss(layer)

    def twice(f):
        return lambda *a: sum(g.pow(2).sum() for g in torch.func.grad(f, (0, 1, 2))(*a))

    for derive in (lambda f: f, twice):
        found, expected = (transform(derive(f), (0, 1, 2))(*arguments) for f in (ours, theirs))
        torch.testing.assert_close(found, expected)
    compiled = torch.compile(transform(ours, (0, 1, 2)), backend="aot_eager")
    torch.testing.assert_close(compiled(*arguments), transform(theirs, (0, 1, 2))(*arguments))
