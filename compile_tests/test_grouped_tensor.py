"""GroupedTensors inside, into and out of compiled graphs: same bytes, dense gradients, graphs counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from _compiling import Captured, graph_breaks
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import tgl
from tests.tensor.cases import arguments, assert_same_bytes
from tgl.tensor import GroupedTensor, save_for_backward, saved_tensors

K = 96
COUNTS = (200, 129, 128, 5, 2, 300)  # the first with sizes of its own: 200 rows are 4 units of 128 in 3 groups
CASES = ("dense", "mxfp8-blocked", "nvfp4", "fp8_tensor", "fp8_block")
BACKENDS = [(case, "aot_eager") for case in CASES]
INDUCTOR = pytest.param("inductor", marks=pytest.mark.slow)  # where quick tests compile the same ops by Inductor


def ends(rows: int) -> Tensor:
    """Three groups, the second empty, and one row of tail."""
    return torch.tensor([rows // 3, rows // 3, rows - 1], dtype=torch.int32)


def inputs(rows: int, count: int = 2) -> list[Tensor]:
    """The same rows ``count`` times, each a leaf; integers, so that every sum is exact in any order."""
    x = torch.randint(-4, 5, (rows, K)).bfloat16()
    x[-1] = float("nan")
    return [x.clone().requires_grad_() for _ in range(count)]


def compiled(function: Callable, backend: str, **options: Any) -> tuple[CompileCounterWithBackend, Callable]:
    """``function`` compiled whole, and what counts its graphs."""
    counter = CompileCounterWithBackend(backend)
    return counter, torch.compile(function, backend=counter, fullgraph=True, **options)


def check_backward(outputs: list[Tensor], leaves: list[Tensor]) -> None:
    """Values and gradients equal to the bit."""
    gradient = torch.randint_like(outputs[0], -2, 3)
    for output in outputs:
        output.backward(gradient)
    assert torch.equal(*outputs)
    assert all(type(leaf.grad) is Tensor for leaf in leaves)
    assert torch.equal(leaves[0].grad, leaves[1].grad)
    assert leaves[0].grad[:-1].any()


@pytest.mark.parametrize(
    "case, backend",
    [*BACKENDS, ("mxfp8-blocked", "inductor"), pytest.param("nvfp4", "inductor", marks=pytest.mark.slow)],
)
def test_made_inside(case: str, backend: str) -> None:
    def step(x: Tensor, offs: Tensor) -> Tensor:
        t = tgl.quantize(x * 2, offs, **arguments(case))
        assert t.format == case.partition("-")[0]
        assert t.num_groups == 3
        return t.dequantize() + t.rowwise_data.shape[0]

    counter, run = compiled(step, backend, dynamic=True)
    for rows in COUNTS:
        a, b = inputs(rows)
        check_backward([run(a, ends(rows)), step(b, ends(rows))], [a, b])
    assert (counter.frame_count, graph_breaks()) == (1, 0)


@pytest.mark.parametrize(
    "case, backend",
    [*BACKENDS, pytest.param("fp8_tensor", "inductor", marks=pytest.mark.slow)],
)
def test_output(case: str, backend: str) -> None:
    def step(x: Tensor, offs: Tensor) -> GroupedTensor:
        return tgl.quantize(x * 2, offs, **arguments(case))

    counter, run = compiled(step, backend, dynamic=True)
    for rows in COUNTS:
        a, b = inputs(rows)
        actual, expected = run(a, ends(rows)), step(b, ends(rows))
        assert_same_bytes(actual, expected)
        check_backward([actual.dequantize(), expected.dequantize()], [a, b])
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    "case, backend",
    [*BACKENDS, pytest.param("fp8_block", "inductor", marks=pytest.mark.slow)],
)
def test_input(case: str, backend: str) -> None:
    def step(t: GroupedTensor) -> Tensor:
        return t.dequantize(torch.float32) * t.rowwise_data.shape[0]

    counter, run = compiled(step, backend, dynamic=True)
    for rows in COUNTS:
        a, b = inputs(rows)
        quantized = [tgl.quantize(x, ends(rows), **arguments(case)) for x in (a, b)]
        check_backward([run(quantized[0]), step(quantized[1])], [a, b])
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    "case, columnwise, backend, graphs",
    [("mxfp8", False, "aot_eager", 2), ("mxfp8", True, "aot_eager", 3), ("nvfp4", False, "aot_eager", 2)],
)
def test_input_by_default(case: str, columnwise: bool, backend: str, graphs: int) -> None:
    """One graph more when the number of rows first changes, and one when the padded number first does."""
    counter, run = compiled(lambda t: t.dequantize(), backend)
    for rows in (200, 210, 300, 129, 500):
        a, b = inputs(rows)
        quantized = [tgl.quantize(x, ends(rows), **arguments(case, columnwise=columnwise)) for x in (a, b)]
        check_backward([run(quantized[0]), quantized[1].dequantize()], [a, b])
    assert counter.frame_count == graphs


@pytest.mark.parametrize("case", ["dense", "mxfp8", "nvfp4", "fp8_block"])
def test_other_options_are_another_graph(case: str) -> None:
    counter, run = compiled(lambda t: t.dequantize(), "aot_eager")
    w = torch.randn(2, 32, 64)
    options = [{}] if case == "dense" else [{}, {"columnwise": False}]
    for option in (*options, *options):
        t = tgl.quantize(w, None, **arguments(case, **option))
        assert torch.equal(run(t), t.dequantize())
    assert counter.frame_count == len(options)


@pytest.mark.parametrize("case, backend", [("mxfp8", "inductor"), ("nvfp4-2d", "aot_eager")])
def test_parameter_and_its_update(case: str, backend: str) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(tgl.quantize(torch.randn(2, 32, 64), None, **arguments(case)))

        def forward(self, x: Tensor) -> Tensor:
            return torch.bmm(x, self.weight.dequantize().transpose(1, 2))

    def update(layer: Layer, master: Tensor, skip: Tensor) -> None:
        with torch.no_grad():
            layer.weight.quantize_(master, skip)

    layer = Layer()
    counter, run = compiled(layer, backend)
    update_counter, run_update = compiled(update, backend)
    x = torch.randn(2, 4, 64)
    for _ in range(2):
        grads = []
        for forward in (run, layer):
            layer.weight.grad = None
            forward(x).sum().backward()
            grads.append(layer.weight.grad)
        assert type(grads[0]) is Tensor
        assert torch.equal(*grads)
        buffers = {name: part.data_ptr() for name, part in layer.weight.parts().items()}
        master = torch.randn(2, 32, 64)
        run_update(layer, master, torch.zeros(1))
        expected = tgl.quantize(master, None, **arguments(case))
        assert_same_bytes(layer.weight.detach(), expected)
        run_update(layer, master + 1, torch.ones(1))
        assert_same_bytes(layer.weight.detach(), expected)
        assert {name: part.data_ptr() for name, part in layer.weight.parts().items()} == buffers
    assert (counter.frame_count, update_counter.frame_count) == (1, 1)


def test_a_float_is_a_constant() -> None:
    """A float that a graph would take as an input, like the attribute of a module, is guarded on instead."""

    class Layer(nn.Module):
        eps = 1.0

        def forward(self, x: Tensor, offs: Tensor) -> GroupedTensor:
            return tgl.quantize(x, offs, "fp8_tensor", eps=self.eps)

    layer = Layer()
    _, run = compiled(layer, "aot_eager", dynamic=True)
    scales = []
    for layer.eps in (1.0, 64.0):
        for rows in (200, 5):
            x = torch.ones(rows, K) / 8
            expected = tgl.quantize(x, ends(rows), "fp8_tensor", eps=layer.eps)
            assert_same_bytes(run(x, ends(rows)), expected)
        scales.append(expected.rowwise_scale[0])
    assert scales[1] == 64 * scales[0]


@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
def test_row_scale(backend: str) -> None:
    def step(x: Tensor, offs: Tensor, probs: Tensor) -> Tensor:
        return tgl.quantize(x, offs, "mxfp8", row_scale=probs).dequantize()

    counter, run = compiled(step, backend, dynamic=True)
    for rows in COUNTS:
        probs = [torch.linspace(0.1, 1, rows).requires_grad_() for _ in range(2)]
        leaves = inputs(rows)
        check_backward([f(x, ends(rows), p) for f, x, p in zip((run, step), leaves, probs)], leaves)
        assert torch.equal(probs[0].grad, probs[1].grad)
    assert counter.frame_count == 1


class Scaled(torch.autograd.Function):
    """Values times ``w``, saving what it read by its components."""

    @staticmethod
    def forward(ctx: Any, t: GroupedTensor, w: Tensor) -> Tensor:
        save_for_backward(ctx, t, w)
        return t.dequantize() * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        t, w = saved_tensors(ctx)
        return grad * w, (grad * t.dequantize()).sum(0)


def scaled(x: Tensor, offs: Tensor, w: Tensor) -> Tensor:
    """Quantised inside, and saved quantised."""
    return Scaled.apply(tgl.quantize(x, offs, "mxfp8", columnwise=False), w)


@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
def test_saved(backend: str) -> None:
    counter, run = compiled(scaled, backend, dynamic=True)
    for rows in COUNTS:
        leaves = inputs(rows)
        weights = [torch.ones(K, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]
        check_backward([f(x, ends(rows), w) for f, x, w in zip((run, scaled), leaves, weights)], leaves)
        assert torch.equal(weights[0].grad, weights[1].grad)
    assert counter.frame_count == 1


def test_a_graph_saves_components() -> None:
    captured = Captured()
    x, w = torch.randn(5, 64, requires_grad=True), torch.ones(64, requires_grad=True)
    torch.compile(scaled, backend=captured, fullgraph=True)(x, ends(5), w).sum().backward()
    assert_expected_inline(
        captured.text(),
        """\
forward
  clone: i32[3] = aten.clone(primals_2)
  group_quantize = tgl.group_quantize(primals_1, clone, format=mxfp8, columnwise=False,
      dtype=torch.float8_e4m3fn)
  getitem: e4m3[5, 64] = getitem(group_quantize, 0)
  getitem_1: u8[5, 2] = getitem(group_quantize, 1)
  group_dequantize: f32[5, 64] = tgl.group_dequantize(getitem, getitem_1, clone, format=mxfp8,
      out_dtype=torch.float32)
  mul: f32[5, 64] = aten.mul.Tensor(group_dequantize, primals_3)
  return [mul, primals_3, clone, getitem, getitem_1]
backward
  mul_1: f32[5, 64] = aten.mul.Tensor(tangents_1, primals_3)
  group_dequantize_1: f32[5, 64] = tgl.group_dequantize(getitem, getitem_1, clone, format=mxfp8,
      out_dtype=torch.float32)
  mul_2: f32[5, 64] = aten.mul.Tensor(tangents_1, group_dequantize_1)
  sum_1: f32[64] = aten.sum.dim_IntList(mul_2, [0])
  return [mul_1, None, sum_1]""",
    )


OPERATIONS: dict[str, Callable[[GroupedTensor], Any]] = {
    "split": lambda t: t.split(),
    "unbind and stack": lambda t: torch.stack(t.unbind()[1:]),
    "select": lambda t: t[1].dequantize(),
    "clone": lambda t: t.clone(),
    "cast": lambda t: t.to(torch.bfloat16),
    "detach": lambda t: t.detach(),
    "the input itself": lambda t: t,
    "components": lambda t: t.components().scale.float(),
    "list": lambda t: tgl.quantize([t.dequantize()[0], t.dequantize()[1, :6]], None, "mxfp8"),
    "options of another": lambda t: tgl.quantize(t.dequantize() * 2, None, t.options),
    "copy": lambda t: t.clone().copy_(t.dequantize() * 2),
    "empty": lambda t: GroupedTensor.empty(t.shape, "nvfp4", source_dtype=t.dtype).copy_(t.dequantize()),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(name: str) -> None:
    t = nn.Parameter(tgl.quantize(torch.randn(3, 32, 64), None, "mxfp8"))
    _, run = compiled(OPERATIONS[name], "aot_eager")
    actual, expected = run(t), OPERATIONS[name](t)
    for one, other in zip(actual, expected) if isinstance(expected, list) else [(actual, expected)]:
        assert_same_bytes(one, other)


def test_errors_keep_their_message() -> None:
    t = tgl.quantize(torch.randn(3, 32, 64), None, "mxfp8", columnwise=False)
    bad: list[tuple[Callable, str]] = [
        (lambda t: t + 1, "MXFP8GroupedTensor does not support aten.add.Tensor"),
        (lambda t: t.dequantize(columnwise=True), "`columnwise` must be False: no columnwise components"),
        (lambda t: t.quantize_(t.dequantize()[1:]), "`x` must be of shape of this GroupedTensor"),
        (lambda t: tgl.quantize(t.dequantize().double(), None, "mxfp8"), "`x` must be float32, bfloat16 or float16"),
        (lambda t: tgl.quantize(t.dequantize(), None, "int8"), "`format` must be one of"),
    ]
    for function, message in bad:
        torch._dynamo.reset()
        with pytest.raises(Exception, match=message):
            torch.compile(function, backend="aot_eager", fullgraph=True)(t)


def test_export() -> None:
    class Layer(nn.Module):
        def forward(self, x: Tensor, offs: Tensor) -> Tensor:
            return tgl.quantize(x, offs, "nvfp4").dequantize()

    x = torch.randn(9, 64)
    shapes = {"x": {0: torch.export.Dim("T")}, "offs": None}
    program = torch.export.export(Layer(), (x, ends(9)), dynamic_shapes=shapes)
    x = torch.randn(130, 64)
    assert torch.equal(program.module()(x, ends(130)), Layer()(x, ends(130)))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_buffers_of_a_fixed_capacity(backend: str) -> None:
    """New rows and a new routing into the same memory, which a captured graph needs."""
    buffer = GroupedTensor.empty((40, K), "mxfp8", num_groups=3)
    addresses = {name: part.data_ptr() for name, part in buffer.parts().items()}
    counter, run = compiled(lambda t, x, offs: t.quantize_(x, offs=offs).dequantize(), backend)
    for rows in (40, 7, 23):
        x = torch.randn(40, K).bfloat16()
        values = run(buffer, x, ends(rows))
        assert_same_bytes(buffer, tgl.quantize(x, ends(rows), "mxfp8"))
        assert torch.equal(values, buffer.dequantize())
    assert {name: part.data_ptr() for name, part in buffer.parts().items()} == addresses
    assert counter.frame_count == 1
