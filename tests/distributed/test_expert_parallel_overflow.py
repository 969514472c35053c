"""More rows than the capacity of ``ExpertParallelMLP``: found on the device, NaN on all ranks, named on the host."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tgl.distributed._rows_needed import Needed

from .test_expert_parallel_mlp import MOST, TOP_K, E, H, Problem, chosen

MESSAGE = r"layer 7: {} were needed, but there are {}: raise `{}`. Outputs and gradients of that step are NaN"

FULL: dict[str, tuple[str, dict[str, Any], tuple[str, int, str]]] = {
    "experts": ("one expert takes all", {"capacity_factor": 1.5}, ("36 rows of experts", 27, "capacity_factor")),
    "pairs": (
        "one rank takes all",
        {"pair_capacity_factor": 0.5},
        ("6 rows of a pair of ranks", 3, "pair_capacity_factor"),
    ),
}


def all_nan(results: dict[str, Tensor]) -> bool:
    return all(bool(t.isnan().all()) for t in results.values())


def check_overflow(what: str, invariant: bool, weighted: bool) -> None:
    case, options, said = FULL[what]
    problem = Problem("full", torch.float64)
    problem.index = chosen(case, len(problem.x))
    layer = problem.layer(invariant=invariant, name="layer 7", **options)
    if invariant and what == "pairs":
        said = ("18 rows of a pair of ranks", layer.pair_rows, said[2])
    assert layer.found_inf.tolist() == 0.0
    results = problem.results(layer if weighted else Unweighted(layer), problem.tokens)
    assert all_nan({name: t for name, t in results.items() if t is not None})
    assert layer.found_inf.tolist() == 1.0
    assert layer.found_inf.dtype == torch.float32
    other = copy.deepcopy(layer)
    for call in (layer.check, lambda: other(problem.x[:0], problem.index[:0], problem.weights[:0])):
        with pytest.raises(RuntimeError, match=MESSAGE.format(*said)):
            call()
    layer.check()  # said once
    problem.index = chosen("even", len(problem.x)) if what == "experts" else problem.index.fill_(-1)
    for model in (layer, other):
        results = problem.results(model, problem.tokens)
        assert not any(t.isnan().any() for t in results.values())
        model.check()


def check_when_counts_travel() -> None:
    """Behind the routing, so that the next call waits for no tokens of this one."""
    events: list[str] = []
    exchange, send = dist.all_to_all_single, Needed.send

    def counted(out: Tensor, t: Tensor, group: dist.ProcessGroup) -> None:
        events.append("exchange")
        exchange(out, t, group=group)

    problem = Problem("full", torch.bfloat16)
    layers = [problem.layer(**options) for options in ({}, {"wire_dtype": torch.float32})]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", counted)
        patch.setattr(Needed, "send", lambda self: (events.append("send"), send(self)))
        for layer in layers:
            events.clear()
            layer(problem.x[problem.tokens], problem.index[problem.tokens], problem.weights[problem.tokens])
            assert events == ["exchange", "exchange", "send", "exchange", "exchange", "exchange"]


def test_counts_are_copied_to_the_host_after_the_routing(ranks):
    ranks(check_when_counts_travel)


class Unweighted(torch.nn.Module):
    """A layer without routing weights in its call, but is differentiated by them all the same."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        y = self.layer(x, index)
        return y + 0 * weights.sum() * y.detach().sum() if len(y) else y + 0 * weights.sum()


@pytest.mark.parametrize("what", FULL)
def test_overflow_is_found_and_named(ranks, what):
    for invariant, weighted in ((False, True), (True, True), (False, False)):
        ranks(check_overflow, what, invariant, weighted)


def check_overflow_before_a_call_that_fits() -> None:
    """Microbatches of one graph, which reports nothing by itself: the step asks after the last of them."""
    case, options, said = FULL["experts"]
    problem = Problem("full", torch.float64)
    rows, layer = problem.tokens, problem.layer(name="layer 7", **options)
    torch._dynamo.reset()
    layer.compile(fullgraph=True, backend="aot_eager")
    for index in (chosen(case, len(problem.x)), chosen("even", len(problem.x))):
        y = layer(problem.x[rows], index[rows], problem.weights[rows])
    assert y.isfinite().all()
    assert layer.found_inf.tolist() == 1.0
    with pytest.raises(RuntimeError, match=MESSAGE.format(*said)):
        layer.check()


def test_overflow_is_kept_through_calls_that_fit(ranks):
    ranks(check_overflow_before_a_call_that_fits)


def check_what_fits_exactly() -> None:
    """As many rows as there are is no overflow."""
    for case, options in (("one expert takes all", {}), ("one rank takes all", {"pair_capacity_factor": 1.0})):
        problem = Problem("full", torch.float64)
        problem.index = chosen(case, len(problem.x))
        layer = problem.layer(capacity_factor=2.0, **options)
        results = problem.results(layer, problem.tokens)
        assert (layer.pair_rows, layer.expert_rows) == (MOST, 2 * MOST * TOP_K)
        assert not any(t.isnan().any() for t in results.values()), case
        layer.check()


def test_rows_that_fit_exactly_do_not_overflow(ranks):
    ranks(check_what_fits_exactly)


def check_overflow_of_another_rank() -> None:
    """A rank without tokens, and one whose experts have no rows, see the overflow of the others."""
    problem = Problem("one rank has all", torch.float64)
    problem.index = torch.zeros_like(problem.index)
    layer = problem.layer(capacity_factor=0.5)
    results = problem.results(layer, problem.tokens)
    assert all_nan(results)
    layer.clear()
    assert layer.found_inf.tolist() == 0.0
    layer.check()


def test_overflow_of_another_rank(ranks, four_ranks):
    ranks(check_overflow_of_another_rank)
    four_ranks(check_overflow_of_another_rank)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": functools.partial(torch.optim.AdamW, fused=True),
    "Adam, amsgrad": functools.partial(torch.optim.Adam, fused=True, amsgrad=True, weight_decay=0.1),
    "SGD": functools.partial(torch.optim.SGD, fused=True, momentum=0.9),
}


def check_skipped_step(name: str) -> None:
    """An optimizer that reads the flag on the device skips the step, as in a captured loop."""
    problem = Problem("full", torch.float32)
    layers = [problem.layer(capacity_factor=1.5) for _ in range(2)]
    batches = [chosen(case, len(problem.x)) for case in ("empty experts", "one expert takes all", "even")]
    for layer, steps in zip(layers, (batches, [batches[0], batches[2]])):
        optimizer = OPTIMIZERS[name](layer.parameters(), lr=0.1)
        for problem.index in steps:
            rows, before = problem.tokens, [p.detach().clone() for p in layer.parameters()]
            optimizer.zero_grad()
            layer(problem.x[rows], problem.index[rows], problem.weights[rows]).square().sum().backward()
            optimizer.grad_scale, optimizer.found_inf = None, layer.found_inf  # type: ignore[attr-defined]
            optimizer.step()
            layer.clear()
            taken = [not torch.equal(p, was) for p, was in zip(layer.parameters(), before)]
            assert any(taken) == (problem.index is not batches[1])
            assert all(p.grad.isnan().all() for p in layer.parameters()) == (problem.index is batches[1])
    for skipped, never in zip(*(layer.parameters() for layer in layers), strict=True):
        assert torch.equal(skipped, never)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_skips_a_step_by_the_flag(ranks, name):
    ranks(check_skipped_step, name)


def check_default_room() -> None:
    problem = Problem("full", torch.float64)
    layer = problem.layer(capacity_factor=2.0, max_tokens=100)
    assert (layer.pair_rows, layer.expert_rows) == (100, 600)
    assert problem.layer(capacity_factor=None, max_tokens=100).expert_rows == 2 * 100 * TOP_K
    assert problem.layer(max_tokens=100, invariant=True, pair_capacity_factor=1.2).pair_rows == 180
    small = problem.layer(capacity_factor=0.01, pair_capacity_factor=0.01)
    assert (small.pair_rows, small.expert_rows) == (1, E // 2 + 2)
    row = 2 * H * 4 + TOP_K * 8
    assert layer.traffic(torch.float32) == (2 * 100 * row, 200 * row)
    half = problem.layer(max_tokens=100, invariant=True, pair_capacity_factor=None)
    assert half.traffic(torch.float32) == (2 * 300 * row, 300 * row)


def test_default_capacity(ranks):
    ranks(check_default_room)
