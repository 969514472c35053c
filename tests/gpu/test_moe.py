"""The block from tokens to tokens on a device: near a CPU's, deterministic, and a graph follows the routing."""

import pytest
import torch

import tgl
from tests import moe_cases
from tests.gpu.device import DEVICE
from tgl.backends.composite import moe

pytestmark = pytest.mark.gpu

EXPERTS, TOKENS, CHOICES, HIDDEN, INNER = 9, 700, 3, 192, 128


def tensors(seed=0):
    """x, routing weights, w1 and w2, as leaves."""
    made = torch.Generator().manual_seed(seed)
    shapes = (TOKENS, HIDDEN), (TOKENS, CHOICES), (EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER)
    drawn = [torch.randn(shape, generator=made) for shape in shapes]
    drawn[1] = drawn[1].softmax(1)
    return [t.mul_(t.shape[-1] ** -0.5 if t.dim() == 3 else 1).bfloat16() for t in drawn]


def chosen(seed=0, unrouted=0):
    """Experts of every token, some of none; the first ``unrouted`` tokens have chosen no expert at all."""
    made = torch.randint(-1, EXPERTS + 1, (TOKENS, CHOICES), generator=torch.Generator().manual_seed(seed))
    made[:unrouted] = EXPERTS
    return made


def step(experts, given, dy):
    """Output and gradients."""
    x, weights, w1, w2 = leaves = [t.detach().requires_grad_() for t in given]
    y = tgl.moe(x, experts, weights, w1.transpose(1, 2), w2.transpose(1, 2))
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def on_device(ts):
    return [t.to(DEVICE) for t in ts]


def test_values_are_near_those_of_a_cpu_and_repeat():
    given, dy = tensors(), torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16)
    near = step(chosen(), [t.double() for t in given], dy.double())
    one, two = (step(chosen().to(DEVICE), on_device(given), dy.to(DEVICE)) for _ in range(2))
    for first, second, cpu in zip(one, two, near, strict=True):
        assert torch.equal(first, second)
        # Three products and a sum, each rounded to bfloat16.
        assert (first.double().cpu() - cpu).norm() <= 2.0**-7 * cpu.norm()


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", moe_cases.KINDS)
def test_integers_have_the_bits_of_a_cpu(kind, biased, copies, monkeypatch):
    """Forward and every gradient, of tokens read by an index or in a copy."""
    for bound in moe_cases.BOUNDS if copies else ():
        monkeypatch.setattr(moe, bound, 0)
    operands = moe_cases.block(moe_cases.Sizes(EXPERTS, TOKENS, CHOICES, HIDDEN, INNER), kind, biased)
    found = moe_cases.step({name: t.to(DEVICE) for name, t in operands.items()}, kind)
    for name, wanted in moe_cases.expected(operands, kind).items():
        assert torch.equal(found[name].cpu(), wanted), name


def pieces(experts, given, dy):
    """``step`` by route, dispatch, the expert's ops one by one, and combine."""
    x, weights, w1, w2 = leaves = [t.detach().requires_grad_() for t in given]
    routing = tgl.route(experts, EXPERTS)
    probs, offs = tgl.dispatch_weights(weights, routing), routing.offs
    h = tgl.grouped_gemm(tgl.dispatch(x, routing), w1.transpose(1, 2), offs)
    y = tgl.combine(tgl.grouped_gemm(tgl.grouped_activation(h, offs, probs), w2.transpose(1, 2), offs), routing)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def test_the_bits_of_its_pieces():
    """But for the weights' gradient, whose sums over a row have an order of their own."""
    given, dy = on_device(tensors()), torch.randn(TOKENS, HIDDEN, device=DEVICE).bfloat16()
    experts = chosen(unrouted=5).to(DEVICE)
    found, wanted = step(experts, given, dy), pieces(experts, given, dy)
    for got, apart in zip((found[0], found[1], *found[3:]), (wanted[0], wanted[1], *wanted[3:]), strict=True):
        assert torch.equal(got, apart)
    torch.testing.assert_close(found[2], wanted[2], rtol=2.0**-7, atol=2.0**-7 * wanted[2].abs().max().item())


def test_tensors_saved_for_the_backward():
    given = on_device(tensors())
    held = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):
        x, weights, w1, w2 = (t.requires_grad_() for t in given)
        tgl.moe(x, chosen().to(DEVICE), weights, w1.transpose(1, 2), w2.transpose(1, 2))
    known = {t.untyped_storage().data_ptr() for t in (x, weights, w1, w2)}
    floating = [t for t in held if t.is_floating_point() and t.untyped_storage().data_ptr() not in known]
    assert [tuple(t.shape) for t in floating] == [(TOKENS * CHOICES, 2 * INNER)]


def test_nan_of_an_unrouted_token_reaches_nothing_else():
    unrouted = 5
    given, dy = on_device(tensors()), torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16, device=DEVICE)
    experts = chosen(unrouted=unrouted).to(DEVICE)
    plain = step(experts, given, dy)
    given[0][:unrouted] = float("nan")
    dy[:unrouted] = float("nan")
    for got, wanted in zip(step(experts, given, dy), plain, strict=True):
        assert torch.equal(got, wanted)


def test_a_captured_graph_takes_new_routings():
    given, dy = on_device(tensors()), torch.randn(TOKENS, HIDDEN, device=DEVICE).bfloat16()
    experts = chosen().to(DEVICE)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(experts, given, dy)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(experts, given, dy)
    for seed in range(1, 5):
        experts.copy_(chosen(seed, unrouted=100 * seed))
        graph.replay()
        for got, wanted in zip(found, step(experts, given, dy), strict=True):
            assert torch.equal(got, wanted)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic):
    given, dy = on_device(tensors()), torch.randn(TOKENS, HIDDEN, device=DEVICE).bfloat16()
    compiled = torch.compile(tgl.moe, fullgraph=True, dynamic=dynamic)
    x, weights, w1, w2 = leaves = [t.requires_grad_() for t in given]
    for seed in range(2):
        experts = chosen(seed).to(DEVICE)
        y = compiled(x, experts, weights, w1.transpose(1, 2), w2.transpose(1, 2))
        for got, wanted in zip([y, *torch.autograd.grad(y, leaves, dy)], step(experts, given, dy), strict=True):
            assert torch.equal(got, wanted)


def test_expected_rows_change_no_bit():
    """Hints below, above and at the actual number agree, except for weight gradients, whose order is the tiling's."""
    given, dy = on_device(tensors()), torch.randn(TOKENS, HIDDEN, device=DEVICE).bfloat16()
    routing, found = tgl.route(chosen().to(DEVICE), EXPERTS, 40 * TOKENS * CHOICES), []
    for rows in (None, EXPERTS * 8, TOKENS * CHOICES, EXPERTS * 3000):
        x, weights, w1, w2 = leaves = [t.detach().requires_grad_() for t in given]
        y = tgl.moe(x, routing, weights, w1.transpose(1, 2), w2.transpose(1, 2), expected_rows=rows)
        found.append([y.detach(), *torch.autograd.grad(y, leaves, dy)])
    for other in found[1:]:
        for number, (got, wanted) in enumerate(zip(other, found[0], strict=True)):
            if number == 2:
                torch.testing.assert_close(got, wanted, rtol=2.0**-7, atol=2.0**-7 * wanted.abs().max().item())
            else:
                assert torch.equal(got, wanted)
