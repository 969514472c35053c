"""Matrices at slots of a buffer, in a graph: the view is made there, and what is written stays within its slots."""

import pytest
import torch
from functorch.compile import make_boxed_func

import tgl
from compile_tests._compiling import Captured
from tests.nn.test_weights_at_slots import NETWORKS, RECIPES, pair, step
from tests.reversed_weights import Readers

T, G, K, N = 9, 3, 8, 16
UNIT = 4  # elements
STARTS = (70, 33, 0)  # units, from the last matrix to the first, each of 32
OFFS = torch.tensor([4, 4, 7], dtype=torch.int32)


def slots(rows, columns, buffer):
    return buffer.as_strided((STARTS[0] + 1, rows, columns), (UNIT, columns, 1))


class Layer(torch.autograd.Function):
    """A product with weights at slots of a buffer, whose gradient is added at slots of another."""

    @staticmethod
    def forward(ctx, x, weights, main_grad, table, offs):
        ctx.save_for_backward(x, weights, table, offs)
        ctx.main_grad = main_grad
        return torch.ops.tgl.grouped_gemm(x, slots(K, N, weights), offs, None, None, table)

    @staticmethod
    def backward(ctx, dy):
        x, weights, table, offs = ctx.saved_tensors
        dx = torch.ops.tgl.grouped_gemm(dy, slots(K, N, weights).transpose(1, 2), offs, None, None, table)
        torch.ops.tgl.grouped_gemm_wgrad_accumulate_(x, dy, offs, slots(K, N, ctx.main_grad), table)
        return dx, None, None, None, None


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_layer_on_slots(backend):
    def step(x, weights, main_grad, table, offs):
        return Layer.apply(x.sin(), weights, main_grad, table, offs).cos()

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    table, results = torch.tensor(STARTS, dtype=torch.int32), []
    for function in (step, compiled):
        torch.manual_seed(0)
        x = torch.randn(T, K, requires_grad=True)
        weights, main_grad = torch.randn(STARTS[0] * UNIT + K * N), torch.randn(STARTS[0] * UNIT + K * N)
        before = main_grad.clone()
        memory = main_grad.data_ptr()
        for _ in range(2):
            function(x, weights, main_grad, table, OFFS).sum().backward()
        assert main_grad.data_ptr() == memory
        outside = torch.ones_like(main_grad, dtype=torch.bool)
        for start in STARTS:
            outside[start * UNIT : start * UNIT + K * N] = False
        assert torch.equal(main_grad[outside], before[outside])
        assert not torch.equal(main_grad, before)
        results.append((x.grad, main_grad))
    torch.testing.assert_close(results[1], results[0])


def test_another_order_of_the_same_slots_is_the_same_graph():
    traced = []

    def count(graph, _):
        traced.append(graph)
        return graph

    a, b = torch.randn(T, K), torch.randn(G, K, N)
    compiled = torch.compile(lambda *args: torch.ops.tgl.grouped_gemm(*args), backend=count, fullgraph=True)
    for order in ([2, 1, 0], [0, 1, 2], [1, 1, -1]):
        table = torch.tensor(order, dtype=torch.int32)
        wanted = tgl.grouped_gemm(a, b, OFFS, slots=table)
        assert torch.equal(compiled(a, b, OFFS, None, None, table), wanted)
    assert len(traced) == 1


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_gradient_of_the_matrices_is_refused(backend):
    a, b = torch.randn(T, K), torch.randn(G, K, N, requires_grad=True)
    table = torch.tensor([2, 1, 0], dtype=torch.int32)
    compiled = torch.compile(lambda *args: torch.ops.tgl.grouped_gemm(*args), backend=backend, fullgraph=True)
    with pytest.raises(Exception, match="`b` must not require grad when `slots` is given"):
        compiled(a, b, OFFS, None, None, table)


class Observed(Captured):
    """Runs AOTAutograd's graphs and notes what reads the weights in them."""

    def __init__(self, readers):
        super().__init__()
        self.readers = readers

    def _keep_forward(self, gm, inputs):
        super()._keep_forward(gm, inputs)
        return self._observed(gm)

    def _keep_backward(self, gm, inputs):
        super()._keep_backward(gm, inputs)
        return self._observed(gm)

    def _observed(self, gm):
        def run(*arguments):
            with self.readers:
                return gm.forward(*arguments)

        return make_boxed_func(run)


QUICK = ("mxfp8", "MLP"), ("fp8 delayed", "linear")


@pytest.mark.parametrize(
    "recipe, network",
    [
        pytest.param(recipe, network, marks=() if (recipe, network) in QUICK else pytest.mark.slow)
        for recipe in RECIPES
        for network in NETWORKS
    ],
)
def test_no_copy_of_weights_in_reverse_order(recipe, network):
    recipe, make = RECIPES[recipe], NETWORKS[network]
    layer, other, buffers = pair(make, recipe)
    backend = Observed(Readers(buffers))
    compiled = torch.compile(other, backend=backend, fullgraph=True)
    for _ in range(2):
        backend.readers.found.clear()
        assert all(map(torch.equal, step(other, compiled), step(layer, layer)))
        assert backend.readers.found == ["tgl.group_quantize.default"] * len(buffers)
    assert backend.compilations == 1


def test_inductor_reads_weights_in_reverse_order():
    layer, other, _ = pair(lambda recipe: tgl.GroupedMLP(4, 64, 96, bias=False, recipe=recipe), RECIPES["fp8 blocks"])
    x, sizes = torch.randn(64, 64), torch.tensor([20, 0, 33, 7])
    compiled = torch.compile(other, fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(x, sizes), torch.compile(layer, fullgraph=True)(x, sizes))
