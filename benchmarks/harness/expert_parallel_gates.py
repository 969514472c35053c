"""Gates that expert parallelism on several GPUs must pass before it is timed, on all ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from harness.expert_parallel import (
    BASELINE,
    BF16,
    ENGINES,
    EXACT,
    KEPT,
    LAYERS,
    REPLAYED,
    ROUTINGS,
    Call,
    Given,
    Problem,
    Shape,
)
from harness.gates import relative_error
from harness.timing import Replay
from tests.memory import new_memory_is_nan
from tgl.cutlass_kernels.launchers.exchange_kernels import BARRIER
from tgl.cutlass_kernels.runtime.launcher import Launcher
from tgl.distributed import ExpertParallelMLP
from tgl.meta import symmetric_memory

SMALL = Shape(300, 512, 256, 16, 3)
BOUND = 8 * torch.finfo(BF16).eps
LATE = 20_000_000  # cycles
REPLAYS, COMPARED = 200, 20  # one of so many
FEW = 3  # replays, each of which is compared
POISON = 0xFF  # NaN in every floating point dtype, and -1


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def agreed(what: str, wrong: str | None) -> None:
    """Every rank stops where one of them has found something wrong."""
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, wrong)
    found = [f"rank {rank}: {text}" for rank, text in enumerate(said) if text]
    if found:
        raise SystemExit(f"{what}: WRONG: {'; '.join(found)}")
    say(f"  {what}: passed")


def differ(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> str | None:
    names = "output", "gradient of x", "gradient of weights", "gradient of w1", "gradient of w2"
    return next((f"{n} differs" for n, a, b in zip(names, ours, theirs, strict=True) if not torch.equal(a, b)), None)


def check(problem: Problem, arms: Sequence[str]) -> None:
    """All gates of one shape."""
    other, ours = (problem.layers[engine] for engine in ENGINES)
    counts = problem.shape.tokens, 0, 1 + problem.rank, problem.shape.tokens * (problem.rank % 2)
    given = [problem.draw(seed, tokens) for seed, tokens in enumerate(counts)]
    agreed("equal bits", differ_in_any(problem, given, lambda: None))
    turns = random.Random(problem.rank)
    late = differ_in_any(problem, given, lambda: torch.cuda._sleep(turns.choice([0, LATE])))
    agreed("equal bits with late ranks", late)
    drawn = map(problem.draw, range(REPLAYS))
    agreed(f"equal bits in {REPLAYS} replays of a graph", differ_in_replays(problem, ours, other, drawn))
    check_routings(problem)
    for arm in arms:
        check_arm(problem, arm)


def check_arm(problem: Problem, arm: str) -> None:
    """Beside the baseline, and what an arm is for."""
    if arm in (*ENGINES, "local"):
        return
    found, base = (problem.step(name, problem.given) for name in (arm, BASELINE))
    if arm in EXACT:
        agreed(f"{arm}: equal bits", differ(found, base))
    else:
        error = max(map(apart, found, base))
        agreed(f"{arm}: near", f"error {error:.1e}" if not error <= bound_of(arm) else None)
    if arm in KEPT:
        quantising = problem.call(KEPT[arm])
        agreed(f"{arm}: bits of {KEPT[arm]}", differ(found, problem.step_of(quantising, problem.given)))
        wrong = differ_in_replays(problem, problem.call(arm), quantising, map(problem.draw, range(FEW)), compared=1)
        agreed(f"{arm}: bits of {KEPT[arm]} in {FEW} replays of a graph", wrong)
    if arm in REPLAYED:
        other, drawn = problem.layers[ENGINES[0]], map(problem.draw, range(REPLAYS))
        wrong = differ_in_replays(problem, problem.call(arm), other, drawn)
        agreed(f"{arm}: equal bits in {REPLAYS} replays of a graph", wrong)
    if arm == "invariant":
        collective = problem.layer({**LAYERS[arm], "engine": ENGINES[0]})
        agreed(f"{arm}: equal bits of both engines", differ(found, problem.step_of(collective, problem.given)))


def bound_of(arm: str) -> float:
    """Return the bound of an arm's error relative to the baseline: some roundings, or one to the recipe's gradients."""
    recipe = LAYERS.get(arm, {}).get("recipe")
    return BOUND if recipe is None else torch.finfo(recipe.operands.grad.dtype).eps


def check_routings(problem: Problem) -> None:
    """Every one of ``ROUTINGS``, by layers with capacity for all choices of all ranks on one of them."""
    room = {"capacity_factor": float(problem.group.size())}
    other, ours = (problem.layer({"engine": engine, **room}) for engine in ENGINES)
    for routing in ROUTINGS:
        given = problem.draw(1, routing=routing)
        theirs = problem.step_of(other, given)
        agreed(f"{routing}: equal bits", differ(problem.step_of(ours, given), theirs))
        with poisoned(ours.exchange.group_name) as filled:
            found = problem.step_of(ours, given)
        wrong = differ(found, theirs) if filled else "no memory was filled"
        agreed(f"{routing}: equal bits beside NaN in all that is unused", wrong)
    drawn = (problem.draw(seed, routing=routing) for seed in range(2) for routing in ROUTINGS)
    wrong = differ_in_replays(problem, ours, other, drawn, compared=1)
    agreed("equal bits of one graph with these routings", wrong)


@contextmanager
def poisoned(group_name: str) -> Iterator[list[int]]:
    """NaN in new memory, and in this rank's symmetric memory in front of every exchange; bytes of each filling."""
    run, filled = Launcher.run, []

    def watched(launcher: Launcher, c: Any) -> Any:
        if launcher is BARRIER and c.token is not None:  # no rank writes here before this one has come
            mine = symmetric_memory.memory_of(group_name)
            rows = mine.memory[mine.control.nbytes + mine.flags.nbytes :]
            filled.append(rows.fill_(POISON).nbytes)
        return run(launcher, c)

    with new_memory_is_nan(warn_only=True), mock.patch.object(Launcher, "run", watched):
        yield filled


def differ_in_replays(
    problem: Problem, ours: Call, other: Call, given: Iterable[Given], compared: int = COMPARED
) -> str | None:
    """A captured step of one call beside steps of another one; one of so many replays is ``compared``."""
    held: Any = tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in problem.given)
    graph = Replay(lambda: problem.step_of(ours, held))
    wrong = None
    for turn, drawn in enumerate(given):
        with torch.no_grad():
            for mine, theirs in zip(held, drawn):
                mine.copy_(theirs)
        graph()
        if turn % compared == 0:
            expected = problem.step_of(other, drawn)  # in which all ranks take part
            wrong = wrong or differ(graph.result, expected)
    return wrong


def apart(got: Tensor, wanted: Tensor) -> float:
    """The relative error, of a matrix at a time."""
    if got.dim() == 3:
        return max(map(apart, got, wanted))
    return relative_error(got, wanted.float())


def differ_in_any(problem: Problem, given: list[Given], before: Callable[[], None]) -> str | None:
    wrong = None
    for drawn in given:
        results = []
        for engine in ENGINES:
            before()
            results.append(problem.step(engine, drawn))
        wrong = wrong or differ(*results)
    return wrong


def check_overflow(group: Any) -> None:
    """Rank 0 chooses too often what one rank has."""
    room = {"group": group, "max_tokens": SMALL.tokens, "top_k": SMALL.top_k, "capacity_factor": 0.5}
    sizes = SMALL.experts, SMALL.hidden, SMALL.inner
    layer = ExpertParallelMLP(*sizes, engine=ENGINES[1], params_dtype=BF16, device="cuda", **room)
    x = torch.randn(SMALL.tokens, SMALL.hidden, device="cuda", dtype=BF16, requires_grad=True)
    y = layer(x, torch.zeros(SMALL.tokens, SMALL.top_k, dtype=torch.int32, device="cuda"))
    made = [y, *torch.autograd.grad(y.sum(), [x, *layer.parameters()])]
    agreed("NaN of a step that does not fit", None if all(t.isnan().all() for t in made) else "some are not")
