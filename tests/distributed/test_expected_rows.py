"""``ExpertParallelMLP`` passes the even load to the ops of its block, whatever the capacity and the wire format."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from tgl.nn import _expert_path

from .test_expert_parallel_mlp import MOST, TOP_K, Problem, chosen

OPS = ("moe", "moe_backward_hidden", "moe_backward_input")
FORMS: dict[str, dict[str, Any]] = {
    "as always": {},
    "by choice": {"invariant": True},
    "float32 sums": {"wire_dtype": torch.float32},
    "recompute dispatch": {"recompute_dispatch": True},
    "both": {"wire_dtype": torch.float32, "recompute_dispatch": True},
}
FACTORS = (None, 2.0, 1.1, 0.5)


class Seen(TorchDispatchMode):
    """The block's ops, and the ``expected_rows`` of each."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int | None]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name.removeprefix("tgl::")
        if name in OPS:
            self.found.append((name, kwargs.get("expected_rows")))
        return function(*args, **kwargs or {})


def step(layer: Any, problem: Problem) -> list[Tensor]:
    """The output and all gradients, for this rank's tokens but the last."""
    rows = slice(problem.tokens.start, problem.tokens.stop - 1)
    x, weights = problem.x[rows].requires_grad_(), problem.weights[rows].requires_grad_()
    y = layer(x, problem.index[rows], weights)
    return [y.detach(), *torch.autograd.grad(y.sum(), [x, weights, *layer.parameters()])]


def check_ops(form: str) -> None:
    """Fewer than the even load only where the capacity is smaller; equal bits where all rows fit."""
    problem, results = Problem("full", torch.float32 if "sums" not in form and form != "both" else torch.bfloat16), []
    for factor in FACTORS:
        layer = problem.layer(capacity_factor=factor, **FORMS[form])
        with Seen() as seen:
            found = step(layer, problem)
        expected = min(MOST * TOP_K, layer.expert_rows)
        inputs = 2 if "recompute_dispatch" in FORMS[form] else 1
        assert seen.found == [(name, expected) for name in (*OPS[:2], *OPS[2:] * inputs)]
        assert expected == MOST * TOP_K or factor == 0.5
        if not layer.found_inf:
            results.append(found)
        layer.clear()
    assert expected < MOST * TOP_K
    assert len(results) >= 2
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_the_ops_expect_the_even_load(ranks, form):
    ranks(check_ops, form)


def check_graph() -> None:
    """The ops that a graph for a GPU has take a constant, and one graph serves all routings."""
    problem = Problem("full", torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_expert_path, "compiled_without_kernels", lambda _: False)
        layer = problem.layer(capacity_factor=None)
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
        for case in ("even", "empty experts", "one rank takes all"):
            x = problem.x[:MOST].clone().requires_grad_()
            y = compiled(x, chosen(case, MOST), problem.weights[:MOST])
            torch.autograd.grad(y.sum(), x)
        assert counter.frame_count == 1
        (graph,) = counter.graphs
        given = [n.kwargs["expected_rows"] for n in graph.graph.nodes if n.target is torch.ops.tgl.moe.default]
        assert given == [MOST * TOP_K]


def test_one_graph_has_the_number(ranks):
    ranks(check_graph)
