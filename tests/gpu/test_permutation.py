"""Dispatch, combine and its backward on a device: exact on integers, deterministic, a graph follows the routing."""

import pytest
import torch

import tgl
from tests.gpu.device import DEVICE, served
from tests.ops.test_permutation import NAN, SOME, integers, places
from tgl.cutlass_kernels.launchers.permutation import DTYPES

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
OPS = torch.ops.tgl
# Choices and width: one batch of choices and two, pieces of 2 to 16 bytes, part of a strip of lanes and several.
SIZES = [
    (1, 7168),
    (2, 36),
    (3, 5),
    (4, 2048),
    (6, 264),
    (8, 1),
    (8, 2048),
    (8, 7168),
    (10, 7168),
    (11, 264),
    (16, 520),
]
TOKENS = (1, 7, 700)


def problem(tokens, top_k, columns, dtype, some="both", values=integers):
    """x, y, token, position and weights on the device; NaN where nothing may be read."""
    spare, absent = SOME[some]
    token, position = places(tokens, top_k, spare=spare, absent=absent)
    x, y = values(tokens, columns).to(dtype), values(len(token), columns).to(dtype)
    y[(token < 0) | (token >= tokens)] = NAN
    routed = torch.zeros(tokens, dtype=torch.bool)
    routed[token[(token >= 0) & (token < tokens)].long()] = True
    x[~routed] = NAN
    return [t.to(DEVICE) for t in (x, y, token, position, values(tokens, top_k))]


def expected(x, y, position, top_k, weights):
    """Return dispatch, combine, and combine_backward in float64; the weights are those of all three."""
    row = position.view(-1, top_k).long()
    exists = (row >= 0) & (row < len(y))
    taken = y.double()[row.clamp(0, len(y) - 1)].masked_fill_(~exists[..., None], 0)
    copies = x.double()[:, None] * weights.double()[..., None]
    dispatched = torch.zeros(y.shape, dtype=torch.float64, device=y.device)
    dispatched[row[exists]] = copies[exists]
    combined = (taken * weights.double()[..., None]).sum(1)
    return dispatched, combined, (x.double()[:, None] * taken).sum(2).masked_fill_(~exists, 0)


def check(given, top_k, narrow=False):
    """All three ops, with weights of float32, or of the dtype of rows if ``narrow``, and without."""
    x, y, token, position, weights = given
    by = (token, position, top_k)
    for w in (weights, weights.to(x.dtype)) if narrow else (weights,):
        dispatched, combined, dots = expected(x, y, position, top_k, w)
        assert torch.equal(served(OPS.dispatch, x, *by, w), dispatched.to(x.dtype))
        assert torch.equal(served(OPS.combine, y, *by, w), combined.to(y.dtype))
        dy, dweights = served(OPS.combine_backward, x, y, *by, w)
        assert torch.equal(dy, dispatched.to(x.dtype))
        assert torch.equal(dweights, dots.float())
    dispatched, combined, _ = expected(x, y, position, top_k, torch.ones_like(weights))
    assert torch.equal(served(OPS.dispatch, x, *by), dispatched.to(x.dtype))
    assert torch.equal(served(OPS.combine, y, *by), combined.to(y.dtype))


@pytest.mark.parametrize(("top_k", "columns"), SIZES)
def test_exact(top_k, columns):
    for tokens in TOKENS:
        check(problem(tokens, top_k, columns, BF16), top_k)


@pytest.mark.parametrize("some", SOME)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exact_in_every_dtype_with_unused_rows(dtype, some):
    for top_k, columns in ((8, 264), (11, 36)):
        check(problem(60, top_k, columns, dtype, some), top_k, narrow=True)


@pytest.mark.parametrize(("top_k", "columns"), [(1, 7168), (2, 36), (8, 2048), (10, 7168), (16, 520)])
def test_runs_alike_and_a_token_has_its_bits_in_any_batch(top_k, columns):
    """Random values, whose sums depend on their order."""
    x, y, token, position, weights = problem(500, top_k, columns, BF16, "absent", torch.randn)
    by = (token, position, top_k)
    sums = served(OPS.combine, y, *by, weights)
    dy, dweights = served(OPS.combine_backward, x, y, *by, weights)
    for few in (500, 1, 77):
        part = token, position[: few * top_k], top_k
        assert torch.equal(served(OPS.combine, y, *part, weights[:few]), sums[:few])
        again = served(OPS.combine_backward, x[:few], y, *part, weights[:few])
        assert torch.equal(again[1], dweights[:few])
        own = position[: few * top_k][(position[: few * top_k] >= 0) & (position[: few * top_k] < len(y))].long()
        assert torch.equal(again[0][own], dy[own])


def test_one_graph_for_every_routing():
    tokens, top_k, experts, columns = 300, 4, 7, 520
    x, y = integers(tokens, columns).to(DEVICE, BF16), integers(tokens * top_k, columns).to(DEVICE, BF16)
    weights = integers(tokens, top_k).to(DEVICE)

    def chosen(beyond):
        return torch.randint(-beyond, experts + beyond, (tokens, top_k)).to(DEVICE)

    held = tgl.route(chosen(0), experts)

    def step():
        by = (held.token, held.position, top_k)
        return OPS.dispatch(x, *by, weights), OPS.combine(y, *by, weights), *OPS.combine_backward(x, y, *by, weights)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = step()
    for beyond in (0, 1, 5, 0):
        routing = tgl.route(chosen(beyond), experts)
        held.token.copy_(routing.token)
        held.position.copy_(routing.position)
        for t in made:
            t.fill_(7)
        graph.replay()
        dispatched, combined, dots = expected(x, y, routing.position, top_k, weights)
        wanted = dispatched.to(BF16), combined.to(BF16), dispatched.to(BF16), dots.float()
        for got, right in zip(made, wanted, strict=True):
            assert torch.equal(got, right)
