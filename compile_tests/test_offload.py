"""``cpu_offload`` under torch.compile: a flag in the trace, and ops in the graphs that move what the layers save."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from _compiling import Captured, ends, graph_breaks, leaf
from expecttest import assert_expected_inline
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition

import tgl

T, G, K, N = 12, 3, 8, 16
OFFS = ends(5, 0, 4)
BACKENDS = ["aot_eager", "inductor"]


class Block(nn.Module):
    """A layer of torch, then one of tgl, inside ``context`` if it is given."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(K, K)
        self.experts = tgl.GroupedMLP(G, K, N, bias=True, **options)
        self.context: Callable[[], Any] = nullcontext

    def forward(self, x: Tensor, probs: Tensor | None = None) -> Tensor:
        h = self.linear(x)
        with self.context():
            return self.experts.forward_offsets(h, OFFS, probs).sin()


def everything() -> tgl.cpu_offload:
    return tgl.cpu_offload(min_bytes=0)


def step(function: Callable, x: Tensor, probs: Tensor | None, module: nn.Module, **context: Any) -> tuple[Any, Any]:
    """Result and gradients of one step under a context, and the context."""
    leaves = [*module.parameters()] + ([probs] if probs is not None else [])
    with tgl.cpu_offload(**context) as meter:
        y = function(x, probs)
    return (y, *torch.autograd.grad(y.sum(), leaves)), meter


@pytest.mark.cover(1)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("where", ["inside", "around"])
@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_and_bytes(backend: str, where: str, recompute: bool) -> None:
    """Exactly these are offloaded: fc1's input, the activation's input, its output unless recomputed, and ``probs``."""
    block = Block(recompute_activation=recompute)
    x, probs = torch.randn(T, K), leaf(torch.rand(T))
    expected, nothing = step(block, x, probs, block, enabled=False)
    assert nothing.bytes_offloaded == 0
    compiled = torch.compile(block, backend=backend, fullgraph=True)
    plain, nothing = step(compiled, x, probs, block, enabled=False)
    assert nothing.bytes_offloaded == 0
    if where == "inside":
        block.context = everything
    results, meter = step(compiled, x, probs, block, enabled=where == "around", min_bytes=0)
    columns = K + 2 * N + (0 if recompute else N) + 1
    assert meter.bytes_offloaded == 4 * T * columns
    assert graph_breaks() == 0
    for mine, uncompiled, without in zip(results, expected, plain):
        torch.testing.assert_close(mine, uncompiled)
        torch.testing.assert_close(mine, without)  # not bit by bit: where nothing is moved the activation is no op


def capture(function: Callable, x: Tensor, context: Callable = nullcontext) -> Captured:
    captured = Captured()
    compiled = torch.compile(function, backend=captured, fullgraph=True)
    with context():
        y = compiled(x)
    y.sum().backward()
    return captured


def test_the_graphs_of_a_layer() -> None:
    """Activations that the forward returns for the backward are on the host; the weight stays."""
    layer = tgl.GroupedLinear(G, K, N)
    captured = capture(lambda x: layer.forward_offsets(x * 2, OFFS), leaf(torch.randn(T, K)), everything)
    assert_expected_inline(
        captured.text(),
        """\
forward
  mul: f32[12, 8] = aten.mul.Tensor(primals_1, 2)
  detach: f32[3, 16, 8] = aten.detach(primals_2)
  detach_1: f32[3, 16] = aten.detach(primals_3)
  transpose: f32[3, 8, 16] = aten.transpose.int(detach, 1, 2)
  grouped_gemm: f32[12, 16] = tgl.grouped_gemm(mul, transpose, primals_4, detach_1, out_dtype=torch.float32)
  offload: f32[12, 8] = tgl.offload(mul)
  return [grouped_gemm, primals_4, detach, offload]
backward
  reload: f32[12, 8] = tgl.reload(offload, cpu, tangents_1)
  grouped_dbias: f32[3, 16] = tgl.grouped_dbias(tangents_1, primals_4)
  grouped_gemm_1: f32[12, 8] = tgl.grouped_gemm(tangents_1, detach, primals_4, out_dtype=torch.float32)
  grouped_gemm_wgrad: f32[3, 16, 8] = tgl.grouped_gemm_wgrad(tangents_1, reload, primals_4,
      out_dtype=torch.float32)
  mul_1: f32[12, 8] = aten.mul.Tensor(grouped_gemm_1, 2)
  return [mul_1, grouped_gemm_wgrad, grouped_dbias, None]""",
    )


@pytest.mark.parametrize("partition", [default_partition, min_cut_rematerialization_partition])
@pytest.mark.parametrize("recompute", [False, True])
def test_offloaded_tensors_come_back_in_the_backward(partition: Callable, recompute: bool) -> None:
    """However graphs are divided: a tensor brought back in the forward would be saved instead of that on the host."""
    first, second = (tgl.GroupedMLP(G, K, N, bias=True, recompute_activation=recompute) for _ in range(2))

    def model(x: Tensor) -> Tensor:
        y = first.forward_offsets(x * 2, OFFS)
        return second.forward_offsets(x + y, OFFS)

    captured = Captured(partition)
    with everything():
        y = torch.compile(model, backend=captured, fullgraph=True)(leaf(torch.randn(T, K)))
    y.sum().backward()
    moved = 2 * (2 if recompute else 3)
    assert captured.tgl_calls("forward")["offload"] == captured.tgl_calls("backward")["reload"] == moved
    assert captured.tgl_calls()["offload"] == captured.tgl_calls()["reload"] == moved
    assert captured.forward is not None
    *_, output = captured.forward.graph.nodes
    rows = [n for n in output.args[0][1:] if isinstance(n, fx.Node) and n.meta["val"].shape[:1] == (T,)]
    assert [str(n.target) for n in rows] == ["tgl.offload.default"] * moved


def test_an_inner_context_opts_out() -> None:
    first, second = tgl.GroupedLinear(G, K, K), tgl.GroupedLinear(G, K, K)

    def model(x: Tensor) -> Tensor:
        y = first.forward_offsets(x, OFFS)
        with tgl.cpu_offload(enabled=False):
            y = second.forward_offsets(y, OFFS)
        return first.forward_offsets(y, OFFS)

    calls = capture(model, torch.randn(T, K), everything).tgl_calls()
    assert calls["offload"] == calls["reload"] == 2


@pytest.mark.parametrize("min_bytes, moved", [(4 * T * K, 1), (4 * T * K + 1, 0)])
def test_minimum_size(min_bytes: int, moved: int) -> None:
    layer = tgl.GroupedLinear(G, K, N, bias=False)
    context = lambda: tgl.cpu_offload(min_bytes=min_bytes)  # noqa: E731
    calls = capture(lambda x: layer.forward_offsets(x, OFFS), torch.randn(T, K), context).tgl_calls()
    assert calls.get("offload", 0) == moved


def test_without_gradients_nothing_moves() -> None:
    layer = tgl.GroupedLinear(G, K, N)
    captured = Captured()
    with everything(), torch.no_grad():
        torch.compile(lambda x: layer.forward_offsets(x, OFFS), backend=captured, fullgraph=True)(torch.randn(T, K))
    assert captured.tgl_calls().get("offload", 0) == 0


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_graph_per_value_of_the_flag(dynamic: bool | None) -> None:
    """New contexts and new routings are no new graphs; a context that is off is none at all."""
    layer = tgl.GroupedLinear(G, K, N)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    graphs = []
    for context in (nullcontext, lambda: tgl.cpu_offload(False), everything, lambda: tgl.cpu_offload(min_bytes=1)):
        for split in ([5, 0, 4], [0, 12, 0], [1, 2, 3]):
            with context():
                compiled(torch.randn(T, K), torch.tensor(split)).sum().backward()
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [1, 1, 2, 3]


def test_changing_numbers_of_rows_under_one_graph() -> None:
    layer = tgl.GroupedLinear(G, K, N)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (12, 40, 7, 100):
        with everything() as context:
            y = compiled(torch.randn(rows, K), torch.tensor([2, 0, 4]))
        y.sum().backward()
        assert context.bytes_offloaded == 4 * rows * K
    assert counters["stats"]["unique_graphs"] == 1


def test_unbacked_rows() -> None:
    """An unknown size counts as large."""
    layer, x = tgl.GroupedLinear(G, K, N), torch.randn(T, K)
    torch._dynamo.decorators.mark_unbacked(x, 0)
    with tgl.cpu_offload(min_bytes=1 << 30) as context:
        y = torch.compile(layer, backend="aot_eager", fullgraph=True)(x, torch.tensor([2, 0, 4]))
    y.sum().backward()
    assert context.bytes_offloaded == 4 * T * K


class Twice(nn.Module):
    """Two layers of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = tgl.GroupedLinear(G, K, N), tgl.GroupedLinear(G, K, N)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        return self.one.forward_offsets(x, OFFS) + self.other.forward_offsets(x, OFFS)


def test_a_tensor_that_two_layers_save_moves_once() -> None:
    """Inductor's partitioner merges the two calls."""
    module = Twice()
    with everything() as context:
        y = torch.compile(module, backend="inductor", fullgraph=True)(torch.randn(T, K))
    y.sum().backward()
    assert context.tensors_offloaded == 1


@pytest.mark.parametrize("backend", ["eager", *BACKENDS])
def test_nothing_that_a_graph_saves_moves_by_hooks(backend: str) -> None:
    """Around a compiled function the hooks see its weights as views without a base: they must not touch them."""
    layer = tgl.GroupedLinear(G, K, N, bias=False)
    with everything() as context:
        y = torch.compile(lambda x: layer.forward_offsets(x, OFFS), backend=backend, fullgraph=True)(torch.randn(T, K))
    y.sum().backward()
    assert (context.tensors_offloaded, context.bytes_offloaded) == (1, 4 * T * K)


def test_discrete_parameters_and_main_grad_stay() -> None:
    layer = tgl.GroupedLinear(G, K, N, single_grouped_weight=False, fuse_wgrad_accumulation=True)
    main_grads = tgl.allocate_wgrad(G, (N, K), torch.float32).zero_()
    for i in range(G):
        getattr(layer, f"weight{i}").main_grad = main_grads[i]
    results = []
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x, splits = torch.randn(T, K), torch.tensor([5, 0, 4])
    for context in (everything, lambda: tgl.cpu_offload(False)):
        main_grads.zero_()
        with context() as meter:
            y = compiled(x, splits)
        y.sum().backward()
        results.append((main_grads.clone(), meter.bytes_offloaded))
    assert torch.equal(results[0][0], results[1][0])
    assert [moved for _, moved in results] == [4 * T * K, 0]


@pytest.mark.cover(1)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("recipe", ["MXFP8BlockScaling", "NVFP4BlockScaling", "DelayedScaling"])
def test_every_component_of_a_quantised_input_moves_or_none(recipe: str, backend: str) -> None:
    """One graph without, one with, the same bits; the weight and ``offs`` stay."""
    layer = tgl.GroupedLinear(G, 128, 256, recipe=getattr(tgl.recipes, recipe)(), params_dtype=torch.bfloat16)
    x, offs = torch.randn(384, 128, dtype=torch.bfloat16), ends(128, 0, 172)
    captured = Captured()
    moved = {"MXFP8BlockScaling": 51712, "NVFP4BlockScaling": 36876, "DelayedScaling": 57356}[recipe]
    results = []
    for compiler in (backend, captured):
        torch._dynamo.reset()
        compiled = torch.compile(layer.forward_offsets, backend=compiler, fullgraph=True)
        for min_bytes in (moved + 1, moved):
            layer.gemms.reset_state()
            with tgl.cpu_offload(min_bytes=min_bytes) as context:
                y = compiled(x, offs)
            results.append(torch.autograd.grad(y.float().sin().sum(), list(layer.parameters())))
            assert context.bytes_offloaded == (moved if min_bytes == moved else 0)
    for grads in results[1:]:
        for mine, theirs in zip(grads, results[0]):
            assert torch.equal(mine, theirs)
    tensors = 3 if recipe == "NVFP4BlockScaling" else 2
    assert captured.tgl_calls("forward")["offload"] == captured.tgl_calls("backward")["reload"] == tensors
    assert graph_breaks() == 0
