"""The gates of ``benchmarks/expert_parallel_gpu.py`` on two emulated ranks: they pass, and find what is wrong."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

from tests.memory import same_bytes
from tgl.distributed._exchange import Arrived, Exchange
from tgl.distributed._wire_format import Wire

from .shared_memory import device

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ARMS = ("invariant", "capacity worst", "recompute dispatch", "compiled")
KEPT = ("blocks, kept weights", "blocks, wire, kept weights", "delayed, kept weights")


class Replay:
    """A call instead of its graph."""

    def __init__(self, call: Any) -> None:
        self.call, self.result = call, call()

    def __call__(self) -> None:
        self.result = self.call()


@contextmanager
def gates(arms: tuple[str, ...]) -> Iterator[tuple[Any, Any, pytest.MonkeyPatch]]:
    """The module, a problem of these arms, and what changes both until the end."""
    with device(), pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        gates, arms_of = (importlib.import_module(f"harness.expert_parallel{end}") for end in ("_gates", ""))
        patch.setattr(gates, "Replay", Replay)
        patch.setattr(gates, "REPLAYS", 1)
        patch.setattr(torch.cuda, "_sleep", lambda cycles: None)
        patch.setitem(arms_of.COMPILED, "backend", "aot_eager")
        shape = arms_of.Shape(tokens=5, hidden=32, inner=32, experts=8, top_k=3)
        yield gates, arms_of.Problem(shape, (dist.group.WORLD,) * 2, arms, device="cpu"), patch


def check_all() -> None:
    with gates(ARMS) as (module, problem, _):
        module.check(problem, ARMS)


@pytest.mark.slow
def test_gates(ranks):
    ranks(check_all, limit=400)


def check_compiled() -> None:
    """Rank 1 alone is wrong, and all ranks stop."""
    with gates(()) as (module, problem, patch):
        module.check_arm(problem, "compiled")
        right = problem.compiled
        patch.setattr(problem, "compiled", lambda *given: right(*given) + problem.rank)
        with pytest.raises(SystemExit, match=r"^compiled: equal bits: WRONG: rank 1: output differs$"):
            module.check_arm(problem, "compiled")


def check_recomputed() -> None:
    """The gate finds recomputed rows that differ from the rows of the forward."""
    arm = "recompute dispatch"
    with gates((arm,)) as (module, problem, patch):
        module.check_arm(problem, arm)
        right = Wire.rows
        patch.setattr(Wire, "rows", lambda way, kept: right(way, kept * 0.5 if way.arrived is None else kept))
        with pytest.raises(SystemExit, match=f"^{arm}: equal bits: WRONG: rank 0: gradient of w1 differs"):
            module.check_arm(problem, arm)


def check_kept() -> None:
    """Quantised weights are kept; if the weights of rank 1 change without notice, all ranks stop."""
    with gates(KEPT) as (module, problem, patch):
        patch.setattr(module, "FEW", 2)
        for arm in KEPT:
            quantised = problem.layers[arm].fc1.gemms._kept().data.clone()
            module.check_arm(problem, arm)
            assert same_bytes(problem.layers[arm].fc1.gemms._kept().data, quantised)
        with torch.no_grad():
            problem.parameters[0].mul_(1 + 0.02 * problem.rank)  # near, as FP8 is
        for arm in KEPT:
            with pytest.raises(SystemExit, match=f"^{arm}: bits of {module.KEPT[arm]}: WRONG: .*rank 1: "):
                module.check_arm(problem, arm)


@pytest.mark.parametrize(
    "check",
    [check_compiled, *(pytest.param(check, marks=pytest.mark.slow) for check in (check_recomputed, check_kept))],
)
def test_an_arm_with_other_bits(ranks, check):
    ranks(check)


def check_unused() -> None:
    """A layer whose results depend on memory that is never written, and a gate that fills none."""
    with gates(()) as (module, problem, patch):
        answer = Exchange.answer

        def telling(exchange: Exchange, answers: torch.Tensor, arrived: Arrived) -> torch.Tensor:
            new = torch.empty(1 << 24)  # pages that the system clears
            return answer(exchange, answers, arrived) + new.isnan().any()

        with pytest.MonkeyPatch.context() as fault:
            fault.setattr(Exchange, "answer", telling)
            with pytest.raises(SystemExit, match=r"one rank takes all: .* unused: WRONG: rank 0: output differs"):
                module.check_routings(problem)
        patch.setattr(module, "ENGINES", ("all_to_all", "all_to_all"))
        with pytest.raises(SystemExit, match=r"unused: WRONG: rank 0: no memory was filled"):
            module.check_routings(problem)


@pytest.mark.slow
def test_unused_memory_that_is_read(ranks):
    ranks(check_unused)
