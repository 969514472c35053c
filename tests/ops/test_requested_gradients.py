"""A backward forms the requested gradients only: by ``torch.autograd.grad``, or ``backward(inputs=...)``."""

import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import tgl
from tgl.ops import _engine

G, K, N, T = 3, 16, 24, 12
OFFS = torch.tensor([4, 4, 10], dtype=torch.int32)


def flops(call):
    counter = FlopCounterMode(display=False)
    with counter:
        call()
    return counter.get_total_flops()


def linear(leaf):
    """A grouped GEMM of leaves or of what comes after them, the operands, and products per gradient."""
    x, w = torch.randn(T, K, requires_grad=True), torch.randn(G, K, N, requires_grad=True)
    operands = {"x": x, "w": w} if leaf else {"x": x * 1, "w": w * 1}
    return tgl.grouped_gemm(*operands.values(), OFFS), operands, {"x": {"dx"}, "w": {"dw"}}, 2 * T * K * N


def mlp(leaf):
    """An MLP of square layers; one product, through FC2, serves the three gradients before it."""
    x, probs = torch.randn(T, K, requires_grad=True), torch.rand(T, requires_grad=True)
    w1, w2 = torch.randn(G, K, K, requires_grad=True), torch.randn(G, K, K, requires_grad=True)
    operands = {"x": x, "w1": w1, "w2": w2, "probs": probs}
    if not leaf:
        operands = {name: t * 1 for name, t in operands.items()}
    y = tgl.grouped_mlp(*(operands[name] for name in ("x", "w1", "w2")), OFFS, operands["probs"], kind="srelu")
    products = {"x": {"back", "dx"}, "w1": {"back", "dw1"}, "w2": {"dw2"}, "probs": {"back"}}
    return y, operands, products, 2 * T * K * K


def moe(leaf):
    """The block of square layers, with two choices per token."""
    x, weights = torch.randn(T, K, requires_grad=True), torch.rand(T, 2, requires_grad=True)
    w1, w2 = torch.randn(G, K, K, requires_grad=True), torch.randn(G, K, K, requires_grad=True)
    operands = {"x": x, "weights": weights, "w1": w1, "w2": w2}
    if not leaf:
        operands = {name: t * 1 for name, t in operands.items()}
    x, *rest = operands.values()
    y = tgl.moe(x, torch.arange(2 * T).view(T, 2) % G, *rest, kind="srelu")
    products = {"x": {"back", "dx"}, "weights": {"back"}, "w1": {"back", "dw1"}, "w2": {"dw2"}}
    return y, operands, products, 2 * 2 * T * K * K


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("leaf", [False, True])
@pytest.mark.parametrize("make", [linear, mlp, moe])
def test_products_of_the_requested_gradients(make, leaf, create_graph):
    y, operands, products, one = make(leaf)
    dy = torch.randn_like(y)
    every = dict(zip(operands, torch.autograd.grad(y, list(operands.values()), dy, retain_graph=True)))
    for count in range(1, len(operands) + 1):
        for wanted in itertools.combinations(operands, count):
            result = {}

            def call(wanted=wanted, result=result):
                inputs = [operands[name] for name in wanted]
                grads = torch.autograd.grad(y, inputs, dy, retain_graph=True, create_graph=create_graph)
                result.update(zip(wanted, grads))

            assert flops(call) == one * len(set().union(*(products[name] for name in wanted))), wanted
            for name in wanted:
                torch.testing.assert_close(result[name], every[name])


@pytest.mark.parametrize("make", [linear, mlp, moe])
def test_backward_into_some_inputs(make):
    y, operands, products, one = make(True)
    for name, operand in operands.items():
        assert flops(lambda operand=operand: y.sum().backward(inputs=[operand], retain_graph=True)) == one * len(
            products[name]
        )
        assert operand.grad.any()
        operand.grad = None
    assert flops(lambda: y.sum().backward()) == one * len(set().union(*products.values()))
    assert all(operand.grad.any() for operand in operands.values())


def test_a_gradient_inside_of_a_backward():
    """The engine that runs a node's backward is queried, at any depth."""
    x, w = torch.randn(T, K, requires_grad=True), torch.randn(G, K, N, requires_grad=True)
    inner = tgl.grouped_gemm(x, w, OFFS)
    counts = []

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t):
            return t.clone()

        @staticmethod
        def backward(ctx, grad):
            counts.append(flops(lambda: torch.autograd.grad(inner, x, torch.ones_like(inner), retain_graph=True)))
            return grad

    y = tgl.grouped_gemm(Nested.apply(x), w, OFFS)
    total = flops(lambda: torch.autograd.grad(y.sum(), (x, w)))
    assert counts == [2 * T * K * N]
    assert total == 3 * counts[0]


@pytest.mark.parametrize("lacks", ["_will_execute", "_running_task"])
def test_all_gradients_are_formed_if_torch_cannot_report_them(monkeypatch, lacks):
    monkeypatch.setattr(_engine, lacks, None)
    y, operands, _, one = linear(False)
    assert flops(lambda: torch.autograd.grad(y.sum(), operands["x"])) == 2 * one


def test_func_grad():
    x, w = torch.randn(T, K), torch.randn(G, K, N)
    count = flops(lambda: torch.func.grad(lambda x: tgl.grouped_gemm(x, w, OFFS).sum())(x))
    assert count == 2 * 2 * T * K * N  # the forward, and the gradient of the input
