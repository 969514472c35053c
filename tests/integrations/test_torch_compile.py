"""ATen's grouped products in graphs: traced as ours, guarded, and never run on the other side."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import grouped_mm
from torch.utils._pytree import tree_map_only

from tests import interpreters
from tests.integrations.test_torch import BY_FORM, PROBLEMS, N, expected, operands, padded
from tests.kernel_cases import integers
from tests.processes import run_script
from tgl.integrations import torch as integration

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.fixture
def enabled() -> Iterator[None]:
    integration.enable(["cpu"])
    yield
    integration.disable()


class Graphs:
    """A backend of ``torch.compile`` that keeps the graphs it is given and runs them as they are."""

    def __init__(self) -> None:
        self.made: list[fx.GraphModule] = []

    def __call__(self, graph: fx.GraphModule, inputs: list[Tensor]) -> Any:
        self.made.append(graph)
        return graph.forward

    @property
    def ours(self) -> list[bool]:
        """Return for every graph whether its products are ours."""
        return [any("tgl." in str(node.target) for node in graph.graph.nodes) for graph in self.made]


def product(mat_a: Tensor, mat_b: Tensor, offs: Tensor | None, bias: Tensor | None = None) -> Tensor:
    return grouped_mm(mat_a, mat_b, offs=offs, bias=bias) * 2


WAYS = {
    "functional": lambda a, b, offs: grouped_mm(a, b, offs=offs),
    "torch._grouped_mm": lambda a, b, offs: torch._grouped_mm(a, b, offs),
    "packet": lambda a, b, offs: torch.ops.aten._grouped_mm(a, mat2=b, offs=offs),
    "overload": lambda a, b, offs: torch.ops.aten._grouped_mm.default(a, b, offs),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_call_it(enabled, way):
    problem, graphs = PROBLEMS["2D x 3D"], Graphs()
    mat_a, mat_b = operands(problem)
    out = torch.compile(WAYS[way], backend=graphs, fullgraph=True)(mat_a, mat_b, problem.offs)
    assert graphs.ours == [True]
    assert torch.equal(out.double(), expected(problem, mat_a, mat_b))


BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


@BY_FORM
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_forms(enabled, form, backend, dtype):
    """Forms with dtypes and strides among them that ATen's fake kernel refuses."""
    problem = PROBLEMS[form]
    mat_a, mat_b = (padded(t) for t in operands(problem, dtype))
    out = torch.compile(product, backend=backend, fullgraph=True)(mat_a, mat_b, problem.offs)
    assert torch.equal(out.double(), 2 * expected(problem, mat_a, mat_b))


@pytest.mark.parametrize("columns", [16, 13])
@BY_FORM
def test_results_have_atens_strides(enabled, form, columns):
    problem = PROBLEMS[form]
    mat_a, mat_b = operands(problem)
    mat_b, offs = mat_b[..., :columns], None if problem.offs is None else problem.offs.clamp(max=mat_b.shape[-1] - 3)
    compiled = torch.compile(WAYS["functional"], backend="aot_eager", fullgraph=True)
    assert compiled(mat_a, mat_b, offs).stride() == grouped_mm(mat_a, mat_b, offs=offs).stride()


def test_bias(enabled):
    problem = PROBLEMS["2D x 3D"]
    mat_a, mat_b = operands(problem)
    bias = integers(N)
    compiled = torch.compile(product, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(mat_a, mat_b, problem.offs, bias), product(mat_a, mat_b, problem.offs, bias))


@BY_FORM
def test_training(enabled, form):
    problem = PROBLEMS[form]
    gradients = []
    for run in (product, torch.compile(product, backend="aot_eager", fullgraph=True)):
        mat_a, mat_b = (torch.full_like(t, 3).requires_grad_() for t in operands(problem, torch.float32))
        run(mat_a, mat_b, problem.offs).sum().backward()
        gradients.append((mat_a.grad, mat_b.grad))
    for eager, compiled in zip(*gradients):
        assert torch.equal(eager, compiled)


def test_sizes_may_change(enabled):
    problem, graphs = PROBLEMS["2D x 3D"], Graphs()
    mat_a, mat_b = operands(problem)
    compiled = torch.compile(product, backend=graphs, fullgraph=True)
    for rows in (10, 11, 13, 16):
        torch._dynamo.maybe_mark_dynamic(mat_a[:rows], 0)
        out = compiled(mat_a[:rows], mat_b, problem.offs.clamp(max=rows))
        assert torch.equal(out, product(mat_a[:rows], mat_b, problem.offs.clamp(max=rows)))
    assert graphs.ours == [True, True]


def test_a_graph_is_recompiled_when_the_integration_is_enabled():
    problem, graphs = PROBLEMS["2D x 3D"], Graphs()
    given = (*operands(problem), problem.offs)
    compiled = torch.compile(product, backend=graphs, fullgraph=True)
    compiled(*given)
    assert graphs.ours == [False]
    with integration.enabled("cpu"):
        compiled(*given)
        assert graphs.ours == [False, True]
        thread = threading.Thread(target=compiled, args=given)
        thread.start()
        thread.join()
    integration.enable(["cpu"])
    compiled(*given)
    integration.disable()
    compiled(*given)
    assert graphs.ours == [False, True]  # all others found one of these


BEFORE = """
import torch
product = torch.compile(lambda a, b, offs: torch.nn.functional.grouped_mm(a, b, offs=offs), backend="eager")
a, b, offs = torch.full((8, 8), torch.nan), torch.ones(2, 8, 8), torch.zeros(2, dtype=torch.int32)
a, b = a.bfloat16(), b.bfloat16()
product(a, b, offs)
import tgl.integrations.torch
tgl.integrations.torch.enable(["cpu"])
counters = torch._dynamo.utils.counters
counters.clear()
assert not product(a, b, offs).any()
assert counters["stats"]["unique_graphs"] == 1
"""


def run(code: str, folder: Path) -> None:
    (folder / "script.py").write_text(code)
    status, printed = run_script(folder / "script.py", {}, timeout=300)
    assert status == 0, printed[-3000:]


def test_a_graph_from_before_the_import_is_not_run(tmp_path):
    run(BEFORE, tmp_path)


DTENSORS = """
import sys
from pathlib import Path

import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.functional import grouped_mm

store = Path(sys.argv[1], "store").as_uri()
torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
mesh = torch.distributed.init_device_mesh("cpu", (1,))

import tgl.integrations.torch

tgl.integrations.torch.enable(["cpu"])
assert "tgl.distributed" not in sys.modules
a, b, offs = torch.full((8, 8), 2.0), torch.ones(2, 8, 8), torch.tensor([3, 5], dtype=torch.int32)
a[5:] = torch.nan
placed = [(a, Replicate()), (b, Shard(2)), (offs, Replicate())]
a, b, offs = (distribute_tensor(t, mesh, [placement]) for t, placement in placed)
weight = torch.nn.Parameter(b)


def product(a, weight):
    return grouped_mm(a, weight, offs=offs)


eager, found = product(a, weight), torch.compile(product, backend="aot_eager", fullgraph=True)(a, weight)
assert found.placements == eager.placements == (Shard(1),)
assert found.to_local()[:, 0].tolist() == [16.0] * 5 + [0.0] * 3
gradients = [torch.autograd.grad(y, weight, torch.ones_like(y))[0] for y in (eager, found)]
assert torch.equal(gradients[0].full_tensor(), gradients[1].full_tensor())
torch.distributed.destroy_process_group()
"""


def test_dtensors(tmp_path):
    """DTensors keep ATen's rules of placement; products of shards are ours, here of a dtype that only ours takes."""
    done = interpreters.run(DTENSORS, arguments=[tmp_path])
    assert done.returncode == 0, done.stderr[-3000:]


class Pair(torch.Tensor):
    """Two tensors in one, which has a product of its own: of every op of ATen's, and of no other library's."""

    both: tuple[Tensor, Tensor]

    @staticmethod
    def __new__(cls, first: Tensor, second: Tensor) -> Pair:
        made = torch.Tensor._make_wrapper_subclass(
            cls, first.shape, strides=first.stride(), dtype=first.dtype, device=first.device
        )
        made.both = (first, second)
        return made

    first = property(lambda self: self.both[0])
    second = property(lambda self: self.both[1])

    def __repr__(self, *, tensor_contents: str | None = None) -> str:
        return f"Pair({self.first!r}, {self.second!r})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["first", "second"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], context: None, size: Any, stride: Any) -> Pair:
        return Pair(parts["first"], parts["second"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.namespace in ("aten", "prim"), func
        of_each = [tree_map_only(Pair, lambda pair, i=i: pair.both[i], (args, kwargs or {})) for i in range(2)]
        first, second = (func(*some, **named) for some, named in of_each)
        return Pair(first, second) if isinstance(first, Tensor) else first


@pytest.mark.parametrize("operand", [0, 1])
def test_other_subclasses(enabled, operand):
    """Other tensor subclasses implement the product themselves."""
    problem = PROBLEMS["2D x 3D"]
    given = list(operands(problem))
    plain = expected(problem, *given)
    given[operand] = Pair(given[operand], 2 * given[operand])
    out = torch.compile(WAYS["functional"], backend="aot_eager", fullgraph=True)(*given, problem.offs)
    assert torch.equal(out.first.double(), plain)
    assert torch.equal(out.second.double(), 2 * plain)


def test_calls_that_tgl_rejects_stay_atens(enabled):
    graphs = Graphs()
    mat_a, mat_b = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in operands(PROBLEMS["3D x 3D"]))
    torch.compile(product, backend=graphs, fullgraph=True)(mat_a, mat_b, None)
    assert graphs.ours == [False]


# --- traces without Dynamo --------------------------------------------------------------------------------------------


@BY_FORM
def test_fake_tensors(form):
    problem = PROBLEMS[form]
    mat_a, mat_b = (padded(t) for t in operands(problem, torch.float32))
    with integration.enabled("cpu"), FakeTensorMode() as mode:
        real = (mat_a, mat_b, problem.offs)
        fakes = [t if t is None else mode.from_tensor(t) for t in real]
        fake = grouped_mm(fakes[0], fakes[1], offs=fakes[2])
        assert fake.shape == problem.result
        assert fake.dtype == torch.float32
    with integration.enabled("cpu"):
        assert grouped_mm(mat_a, mat_b, offs=problem.offs).stride() == fake.stride()
    with FakeTensorMode() as mode:
        fakes = [t if t is None else mode.from_tensor(t) for t in real]
        with pytest.raises(RuntimeError, match=r"BF16|BFloat16"):  # as torch 2.13 says it, and 2.14
            grouped_mm(fakes[0], fakes[1], offs=fakes[2])


def test_a_bias_needs_dynamo(enabled):
    """Inductor lowers ATen's product without its bias, so no trace may hold one."""
    mat_a, mat_b = operands(PROBLEMS["2D x 3D"])
    with FakeTensorMode() as mode, pytest.raises(RuntimeError, match=r"[Bb]ias"):
        fakes = [mode.from_tensor(t) for t in (mat_a, mat_b, PROBLEMS["2D x 3D"].offs, integers(N))]
        grouped_mm(fakes[0], fakes[1], offs=fakes[2], bias=fakes[3])


class Product(torch.nn.Module):
    def forward(self, mat_a: Tensor, mat_b: Tensor, offs: Tensor) -> Tensor:
        return grouped_mm(mat_a, mat_b, offs=offs)


@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs(strict):
    """A program exported without Dynamo keeps ATen's product, which the current implementation serves when it runs."""
    problem = PROBLEMS["2D x 3D"]
    mat_a, mat_b = operands(problem)
    with integration.enabled("cpu"):
        program = torch.export.export(Product(), (mat_a, mat_b, problem.offs), strict=strict)
        targets = [str(node.target) for node in program.graph.nodes]
        assert ("tgl.grouped_gemm.default" if strict else "aten._grouped_mm.default") in targets
        out = program.module()(mat_a, mat_b, problem.offs)
        assert torch.equal(out.double(), expected(problem, mat_a, mat_b))
    assert torch.equal(program.module()(mat_a, mat_b, problem.offs)[:5], out[:5])


def test_symbolic_traces(enabled):
    problem = PROBLEMS["2D x 3D"]
    mat_a, mat_b = operands(problem, torch.float32)
    traced = make_fx(WAYS["functional"], tracing_mode="symbolic")(mat_a, mat_b, problem.offs)
    assert torch.equal(traced(mat_a, mat_b, problem.offs), grouped_mm(mat_a, mat_b, offs=problem.offs))
