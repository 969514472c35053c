"""One graph serves every routing and every token count; compilations are counted, not assumed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from _compiling import Captured, ExpertLayer, graph_breaks
from torch import Tensor
from torch._dynamo.decorators import mark_unbacked
from torch._dynamo.testing import CompileCounterWithBackend

import tgl

G, K, N = 4, 8, 16
COUNTS = (2, 3, 17, 64, 127, 128, 129)


def routings(rows: int) -> list[Tensor]:
    """Group sizes for ``rows`` rows: all in the first group, all in the last, uneven, and with a tail."""
    uneven = torch.multinomial(torch.tensor([4.0, 0.5, 2.0, 1.0]), rows, replacement=True).bincount(minlength=G)
    first, last = torch.tensor([rows, 0, 0, 0]), torch.tensor([0, 0, 0, rows])
    return [first, last, uneven, torch.tensor([rows // 2, 0, rows // 4, 0]), torch.zeros(G, dtype=torch.int64)]


Step = Callable[[Tensor, Tensor], Tensor]


def gemm_step() -> Step:
    """The op itself, with a bias."""
    b, bias = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((G, K, N), (G, N)))
    return lambda x, splits: tgl.grouped_gemm(x, b, tgl.splits_to_offsets(splits), bias)


def mlp_step() -> Step:
    """The expert MLP, with probabilities and biases."""
    mlp = tgl.GroupedMLP(G, K, N, bias=True, params_dtype=torch.float64)
    return lambda x, splits: mlp(x, splits, x[:, 0])


def layer_step() -> Step:
    """Router, dispatch, experts and combine; the routing follows from the tokens."""
    layer = ExpertLayer(K, N, G).double()
    return lambda x, splits: layer(x)


def block_step(block: Callable[..., Tensor] = tgl.moe) -> Step:
    """Run the router and then the block."""
    shapes = (K, G), (G, K, 2 * N), (G, N, K)
    router, w1, w2 = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes)

    def step(x: Tensor, splits: Tensor) -> Tensor:
        weights, chosen = (x @ router).softmax(-1).topk(2)
        return block(x, tgl.route(chosen, G), weights, w1, w2)

    return step


def block_op_step() -> Step:
    """The block as the op, which ``tgl.moe`` is not in a graph compiled for a CPU."""

    def block(x: Tensor, routing: tgl.Routing, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        source, position, offs, top_k, token = routing
        return torch.ops.tgl.moe(x, w1, w2, source, position, token, offs, weights, top_k=top_k)[0]

    return block_step(block)


STEPS = {"op": gemm_step, "mlp": mlp_step, "layer": layer_step, "block": block_step, "block op": block_op_step}


def check(compiled: Step, eager: Step, rows: int, splits: Tensor, mark: Callable[[Tensor], None] | None) -> None:
    """Forward and backward of one float64 call, equal to eager; ``mark`` marks the input beforehand."""
    x = torch.randn(rows, K, dtype=torch.float64)
    grads = []
    for step in (compiled, eager):
        leaf = x.clone().requires_grad_()
        if mark is not None and step is compiled:
            mark(leaf)
        step(leaf, splits).square().sum().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(*grads)


@pytest.mark.cover(1)
@pytest.mark.parametrize("how", ["dynamic=True", "mark_dynamic"])
@pytest.mark.parametrize("what", STEPS)
def test_one_graph_from_two_tokens_on(what: str, how: str) -> None:
    step = STEPS[what]()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, backend=counter, fullgraph=True, dynamic=True if how == "dynamic=True" else None)
    mark = (lambda t: torch._dynamo.mark_dynamic(t, 0)) if how == "mark_dynamic" else None
    for rows in COUNTS:
        for splits in routings(rows):
            check(compiled, step, rows, splits, mark)
    assert (counter.frame_count, graph_breaks()) == (1, 0)


@pytest.mark.parametrize("what", STEPS)
def test_one_graph_from_no_tokens_on_when_unbacked(what: str) -> None:
    step = STEPS[what]()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, backend=counter, fullgraph=True)
    for rows in (5, 1, 0, *COUNTS):
        for splits in routings(rows) if rows else [torch.zeros(G, dtype=torch.int64)]:
            check(compiled, step, rows, splits, lambda t: mark_unbacked(t, 0))
    assert (counter.frame_count, graph_breaks()) == (1, 0)


def test_two_graphs_by_default() -> None:
    step = mlp_step()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, backend=counter, fullgraph=True)
    for rows in COUNTS:
        check(compiled, step, rows, routings(rows)[2], None)
    assert counter.frame_count == 2  # the first call specialises on its token count


@pytest.mark.parametrize("what", ["mlp", pytest.param("layer", marks=pytest.mark.slow)])
def test_one_graph_with_inductor(what: str) -> None:
    step = STEPS[what]()
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(step, backend=counter, fullgraph=True, dynamic=True)
    for rows in COUNTS:
        for splits in routings(rows)[:2]:
            check(compiled, step, rows, splits, None)
    assert (counter.frame_count, graph_breaks()) == (1, 0)


def test_one_graph_for_every_dimension_and_number_of_groups() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(tgl.grouped_gemm, backend=counter, fullgraph=True, dynamic=True)
    for rows, groups, k, n in ((5, 3, 8, 4), (7, 9, 6, 10), (130, 300, 2, 33)):
        a, b = torch.randn(rows, k), torch.randn(groups, k, n)
        offs = torch.full((groups,), rows, dtype=torch.int32)
        assert torch.equal(compiled(a, b, offs), tgl.grouped_gemm(a, b, offs))
    assert counter.frame_count == 1


def test_the_graph_does_not_depend_on_the_token_count_it_was_captured_with() -> None:
    texts = []
    for rows in (5, 128):
        torch._dynamo.reset()
        captured = Captured()
        step = torch.compile(mlp_step(), backend=captured, fullgraph=True, dynamic=True)
        step(torch.randn(rows, K, dtype=torch.float64, requires_grad=True), routings(rows)[2]).sum().backward()
        texts.append([str(gm.graph) for gm in (captured.forward, captured.backward) if gm is not None])
    assert texts[0] == texts[1]


LISTED = {
    "linear": lambda: tgl.GroupedLinear(3, 8, 8),
    "mlp": lambda: tgl.GroupedMLP(3, 8, 8),
    "low rank": lambda: tgl.GroupedLoRALinear(tgl.GroupedLinear(3, 8, 8), 4),
    "packed": lambda: tgl.GroupedPackedLinear(3, 32, 32),
    "sequential": lambda: tgl.Sequential(tgl.GroupedLinear(3, 8, 8), tgl.GroupedLinear(3, 8, 8)),
}


@pytest.mark.filterwarnings("ignore:.*m_splits")
@pytest.mark.parametrize("kind", LISTED)
def test_lists_of_sizes_are_symbols_of_few_graphs(kind: str) -> None:
    """Three graphs: one of numbers, one of symbols, and one where a size is 0 or 1, a constant for a compiler."""
    counter = CompileCounterWithBackend("aot_eager")
    layer = LISTED[kind]()
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    width, dtype = (32, torch.bfloat16) if kind == "packed" else (8, torch.float32)
    x = torch.randn(20, width, dtype=dtype)
    for i in range(10):
        splits = [i, 2 * i % 7, 19 - i - 2 * i % 7]
        assert torch.equal(compiled(x, splits), layer(x, torch.tensor(splits)))
    assert counter.frame_count <= 3
