"""``ExpertParallelMLP`` over symmetric memory on several ranks, against collectives, to the bit.

Each rank is a process, and the memory of all is mapped into each. Between two exchanges a rank fills its own memory
with NaN. One rank after the other is late before each of its launches, so that only barriers keep the order.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

import tgl
from tgl.distributed import ExpertParallelMLP
from tgl.meta import symmetric_memory

from .shared_memory import alike, device
from .test_expert_parallel_mlp import MOST, E, H, Problem, chosen

BF16, F32 = torch.bfloat16, torch.float32
SYMMETRIC = {"engine": "symmetric_memory"}
MXFP8 = tgl.recipes.MXFP8BlockScaling()
# Launches from one where a rank is late to the next, where it is in one run. A rank that is late before every launch
# holds the others in every exchange: none gets ahead of it, and a barrier that does not wait can go unnoticed.
STRIDE = 2

Named = dict[str, Tensor]


def mine(problem: Problem, layer: ExpertParallelMLP) -> Named:
    return problem.results(layer, problem.tokens)


def check_step(case: str, dtype: torch.dtype, options: dict[str, Any], of_layer: dict[str, Any]) -> None:
    """A step, and again with every rank late before each of its launches."""
    with device() as found:
        problem = Problem(case, dtype, **options)
        theirs = mine(problem, problem.layer(**of_layer))
        layer = problem.layer(**of_layer, **SYMMETRIC)
        found.start()
        alike(mine(problem, layer), theirs)
        count = len(found.launches)
        flows, meets = found.launches.count("flows"), found.launches.count("meets")
        assert found.launches.count("tells") == flows + meets
        assert flows > 3
        assert meets > 0
        for rank in range(problem.ranks):
            for first in range(STRIDE):
                found.start(late=range(first, count, STRIDE) if problem.me == rank else ())
                alike(mine(problem, layer), theirs)
            found.start()
            alike(mine(problem, layer), theirs)  # for which the others come to a rank that is late behind a barrier
        layer.check()


QUANTIZED = {"wire": "quantized", "wire_dtype": F32}
STEPS = {
    "float32": ("uneven", F32, {}, {}),
    "quantised, with float32 sums": ("even", BF16, {"recipe": MXFP8}, QUANTIZED),
    "float32 sums": ("uneven", BF16, {}, {"wire_dtype": F32}),
    "tokens sent again": ("uneven", BF16, {}, {"recompute_dispatch": True}),
    "by choice": ("sentinels", BF16, {}, {"invariant": True}),
    "one rank has all": ("one rank has all", F32, {}, {}),
    "no tokens": ("no tokens", F32, {}, {}),
    "one rank takes all": ("one rank takes all", BF16, {}, {}),
}
FAST = ("float32", "quantised, with float32 sums")


@pytest.mark.parametrize(
    "step", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in STEPS]
)
def test_a_step_with_late_ranks(ranks, step):
    ranks(check_step, *STEPS[step])


@pytest.mark.slow
@pytest.mark.parametrize("step", ["float32", "by choice"])
def test_a_step_of_four_ranks(four_ranks, step):
    four_ranks(check_step, *STEPS[step], limit=400)


# --- barriers ---------------------------------------------------------------------------------------------------------


HASTY = {
    "rows come while choices are read": (5, 6, "rows"),
    "rows come before the memory is free": (8, 8, "rows"),
    "rows are read before they have come": (7, 7, "barrier"),
    "answers are added up before they have come": (9, 9, "barrier"),
}
"""Before which launch rank 0 is late, in which rank 1 does not wait for it, and what that one has done by then."""


def check_hasty() -> None:
    with device() as found:
        problem = Problem("even", F32)
        theirs = mine(problem, problem.layer())
        layer = problem.layer(**SYMMETRIC)
        for case, (late, hasty, until) in HASTY.items():
            found.start()
            alike(mine(problem, layer), theirs)
            if problem.me == 0:
                found.start(late=[late], until=until)
            else:
                found.start(hasty=[hasty])
            ours = mine(problem, layer)
            wrong = torch.tensor([not all(torch.equal(t, theirs[name]) for name, t in ours.items())], dtype=torch.int32)
            dist.all_reduce(wrong)
            assert wrong, f"{case}: no result differs"


def test_without_one_wait_results_differ(ranks):
    """Without one wait results differ, so that the tests of late ranks would fail."""
    ranks(check_hasty)


def check_away() -> None:
    """A rank that raises an error before its exchange."""
    with device(seconds=0.2):
        problem = Problem("full", F32)
        layer = problem.layer(name="layer 7", **SYMMETRIC)
        rows = problem.tokens
        x, index, weights = problem.x[rows], problem.index[rows], problem.weights[rows]
        if problem.me == 1:
            with pytest.raises(ValueError, match="layer 7: `top_k_index` must be"):
                layer(x, index[:, 1:], weights)
        else:
            said = "^layer 7: rank 0 of 2 waited 0.2 s for rank 1 in ep_route, in the barrier before its writes"
            with pytest.raises(RuntimeError, match=said):
                layer(x, index, weights)
        dist.barrier()


def test_a_rank_that_raises_is_named_by_the_other(ranks):
    ranks(check_away)


def check_ranks_that_differ() -> None:
    """Ranks that differ get an error each, before any writes to another's memory; the next call works."""
    with device() as found:
        problem = Problem("full", F32)
        layer = problem.layer(name="layer 7", **SYMMETRIC)
        rows, index = problem.x[problem.tokens], problem.index[problem.tokens]
        weights = problem.weights[problem.tokens]
        theirs = mine(problem, problem.layer())
        found.start()
        with pytest.raises(ValueError, match=r"`recompute_activation` must be equal on all ranks"):
            problem.layer(recompute_activation=bool(problem.me), **SYMMETRIC)
        with pytest.raises(ValueError, match=r"`engine` must be equal on all ranks"):
            problem.layer(**({}, SYMMETRIC)[problem.me])
        with pytest.raises(ValueError, match=r"layer 7: `weights\.dtype` must be equal .* \[torch.float32, None\]"):
            layer(rows, index, (weights, None)[problem.me])
        with pytest.raises(ValueError, match=r"layer 7: `x\.dtype` must be equal .* \[torch.float32, torch.bfloat16\]"):
            layer(rows.to((F32, BF16)[problem.me]), index, weights)
        assert not found.launches
        alike(mine(problem, layer), theirs)


def test_ranks_that_differ(ranks):
    ranks(check_ranks_that_differ)


# --- one graph --------------------------------------------------------------------------------------------------------


def check_graph(dtype: torch.dtype, options: dict[str, Any], exchanges: int) -> None:
    """One graph serves all routings; its exchanges are kernels in one order on all ranks."""
    with device() as found:
        problem = Problem("full", dtype)
        other, layer = problem.layer(**options), problem.layer(**options, **SYMMETRIC)
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        layer.compile(fullgraph=True, backend=counter)
        for case in ("one rank takes all", "sentinels", "nothing is routed"):
            problem.index = chosen(case, len(problem.x))
            theirs = mine(problem, other)
            found.start()
            alike(mine(problem, layer), theirs)
            made = [found.launches.count(kind) for kind in ("tells", "meets", "flows")]
            assert made == [1 + exchanges, 1, exchanges]  # behind a routing, which both tells and meets
        assert counter.frame_count == 1
        layer.check()


GRAPHS: dict[str, tuple[torch.dtype, dict[str, Any], int]] = {
    "float32": (F32, {}, 4),
    "by choice": (BF16, {"invariant": True}, 4),
    "float32 sums": (BF16, {"wire_dtype": F32}, 5),  # gradients of routing weights go by themselves
    "tokens sent again": (BF16, {"wire_dtype": F32, "recompute_dispatch": True}, 6),
}


# What sends tokens again has sums in float32 as well.
@pytest.mark.parametrize(
    "graph", [pytest.param(name, marks=[pytest.mark.slow] * (name == "float32 sums")) for name in GRAPHS]
)
def test_one_graph_for_all_routings(ranks, graph):
    ranks(check_graph, *GRAPHS[graph])


# --- layers -----------------------------------------------------------------------------------------------------------


class Stack:
    """Three layers: checkpointed, with frozen parameters, and with a backward that sends tokens again."""

    def __init__(self, problem: Problem, **options: Any) -> None:
        self.problem, self.options = problem, options
        self.layers = [problem.layer(max_tokens=most, **options) for most in (MOST, MOST - 1)]
        for parameter in (self.layers[1].fc1.weight, self.layers[1].fc2.bias):
            parameter.requires_grad_(False)

    def grow(self) -> None:
        """The last layer, which takes more tokens than the others."""
        self.layers.append(self.problem.layer(max_tokens=2 * MOST, recompute_dispatch=True, **self.options))

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            call = functools.partial(checkpoint, layer, use_reentrant=False) if i == 0 else layer
            x = x + call(x, index, weights)
        return x

    def step(self) -> Named:
        """Two microbatches, of which the second begins before the first has gone back; no gradient of its tokens."""
        problem, rows = self.problem, self.problem.tokens
        count = len(problem.x[rows])
        batches = []
        for shift, needs in ((0, True), (1, False)):
            x = problem.x[rows].roll(shift, 0).requires_grad_(needs)
            index = (problem.index[rows] + shift) % E
            batches.append((x, index, problem.weights[rows].clone().requires_grad_()))
        results = [self.forward(*batch) for batch in batches]
        for layer in self.layers:
            layer.zero_grad()
        for y in results:
            y.backward(problem.grad[rows].view(count, H))
        found = {f"y{i}": y.detach() for i, y in enumerate(results)}
        found |= {f"weights{i}": batch[2].grad for i, batch in enumerate(batches)} | {"x": batches[0][0].grad}
        for i, layer in enumerate(self.layers):
            found |= {f"{i}.{name}": p.grad for name, p in layer.named_parameters() if p.requires_grad}
        return found


def check_stack() -> None:
    with device() as found:
        problem = Problem("even", F32)
        theirs, ours = Stack(problem), Stack(problem, **SYMMETRIC)
        before = memory()
        alike(ours.step(), theirs.step())
        for stack in (theirs, ours):
            stack.grow()
        assert memory() > before
        found.start()
        wanted = theirs.step()
        alike(ours.step(), wanted)
        behind_a_barrier = len(found.launches) - found.launches[::-1].index("flows")
        found.start(late=range(0, behind_a_barrier, 11) if problem.me == 1 else ())
        alike(ours.step(), wanted)


def memory() -> int:
    return symmetric_memory.memory_of(str(dist.group.WORLD.group_name)).memory.nbytes


def test_layers_and_two_microbatches_share_a_growing_memory(ranks):
    ranks(check_stack)
