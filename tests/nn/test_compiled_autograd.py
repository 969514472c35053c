"""Backwards captured by ``torch._dynamo.compiled_autograd``, of forwards that ran eagerly or compiled."""

import copy

import pytest
import torch
from torch._dynamo import compiled_autograd

import tgl
from tests.nn.test_compiled_gradients import LAYERS, OPTIONS, assert_same, give, gradients, linears

S, T = 12, 12


def captured(graph):
    return torch.compile(graph, backend="aot_eager", fullgraph=True)


CASES = {
    "linear": ("linear", {}),
    "linear, discrete": ("linear", {"single_grouped_weight": False}),
    "mlp": ("mlp", {}),
    "mlp, recomputed": ("mlp", {"recompute_activation": True}),
    "moe": ("moe", {}),
    "moe, discrete": ("moe", {"single_grouped_weight": False}),
    "linear, recipe": ("linear", {"recipe": tgl.recipes.Float8CurrentScaling()}),
    "mlp, recipe": ("mlp", {"recipe": tgl.recipes.MXFP8BlockScaling()}),
    "linear, main_grad": ("linear", OPTIONS["main_grad"]),
    "linear, discrete main_grad": ("linear", {**OPTIONS["main_grad"], "single_grouped_weight": False}),
    "moe, main_grad, recipe": ("moe", {**OPTIONS["main_grad"], "recipe": tgl.recipes.Float8BlockScaling()}),
    "linear, delayed": ("linear", OPTIONS["delayed"]),
    "mlp, delayed into main_grad": ("mlp", OPTIONS["delayed into main_grad"]),
}


def make(kind, options):
    torch.manual_seed(0)
    layer = LAYERS[kind][0](params_dtype=torch.bfloat16, **options)
    plain = copy.deepcopy(layer)
    give(layer)
    give(plain)
    for linear in linears(layer):
        if linear.delay_wgrad_compute:
            linear.reserve_delayed_wgrad(2 * S if kind == "moe" else T, microbatches=2)
    return layer, plain, torch.randn(T, 16).bfloat16(), LAYERS[kind][1]


QUICK = ("moe, main_grad, recipe", "mlp, delayed into main_grad")


@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c in QUICK else pytest.mark.slow) for c in CASES])
def test_a_layer_called_eagerly(case, fresh_compiler):
    """Two steps, after an input gradient alone, which writes nothing."""
    layer, plain, x, rest = make(*CASES[case])
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    with compiled_autograd._enable(captured):
        (dx,) = torch.autograd.grad(layer(ours, *rest).square().sum(), ours)
    torch.testing.assert_close(dx, torch.autograd.grad(plain(theirs, *rest).square().sum(), theirs)[0])
    for _ in range(2):
        loss = layer(ours, *rest).square().sum()
        with compiled_autograd._enable(captured):
            loss.backward()
        plain(theirs, *rest).square().sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
    assert_same(gradients(layer), gradients(plain))


@pytest.mark.parametrize("option", ["main_grad", "delayed"])
def test_a_compiled_layer_cannot_know_what_is_requested(option, fresh_compiler):
    """Its graph is inlined into that of the backward, which queries no engine: an error, and nothing written."""
    layer, _, x, rest = make("linear", OPTIONS[option])
    forward = torch.compile(layer, backend="aot_eager", fullgraph=True)
    loss = forward(x.clone().requires_grad_(), *rest).sum()
    with compiled_autograd._enable(captured), pytest.raises((RuntimeError, IndexError)):
        loss.backward()
    assert all(t.eq(t.flatten()[0]).all() for tensors in gradients(layer).values() for t in tensors)  # as they were


OFFS = torch.tensor([5, 5, 10], dtype=torch.int32)


def op_calls():
    x, w, up = torch.randn(T, 8), torch.randn(3, 8, 16), torch.randn(3, 8, 8)
    bias, scale, low = torch.randn(3, 16), torch.rand(T), torch.randn(T, 4)
    routing = tgl.route(torch.tensor([[0, 2], [1, 0], [2, 1]] * 2), 3)
    return {
        "grouped_gemm": (lambda *t: tgl.grouped_gemm(t[0], t[1], OFFS, *t[2:]), (x, w, bias, scale)),
        "grouped_gemm_wgrad": (lambda *t: tgl.grouped_gemm_wgrad(*t, OFFS), (x, torch.randn(T, 6))),
        "grouped_gemm_activation": (lambda *t: tgl.grouped_gemm_activation(*t, OFFS)[0], (x, w)),
        "grouped_gemm_low_rank": (
            lambda *t: tgl.grouped_gemm_low_rank(*t, OFFS),
            (x, w, low, torch.randn(3, 4, 16)),
        ),
        "grouped_activation": (lambda *t: tgl.grouped_activation(t[0], OFFS, t[1]), (torch.randn(T, 16), scale)),
        "grouped_mlp": (lambda *t: torch.ops.tgl.grouped_mlp(*t, OFFS)[0], (x, w, up)),
        "dispatch": (lambda t: tgl.dispatch(t, routing), (torch.randn(6, 8),)),
        "combine": (lambda t: tgl.combine(t, routing), (torch.randn(12, 8),)),
    }


@pytest.mark.parametrize("name", op_calls())
def test_ops_with_a_formula(name, fresh_compiler):
    torch.manual_seed(0)
    call, operands = op_calls()[name]
    ours, theirs = ([t.clone().requires_grad_() for t in operands] for _ in range(2))
    with compiled_autograd._enable(captured):
        call(*ours).square().sum().backward()
    call(*theirs).square().sum().backward()
    for mine, other in zip(ours, theirs):
        torch.testing.assert_close(mine.grad, other.grad)
