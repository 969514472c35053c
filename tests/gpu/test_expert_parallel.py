"""Expert parallelism on symmetric memory, on one device: a group of one process, and four ranks on four streams.

Several devices have their own program, ``benchmarks/expert_parallel_gpu.py``.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import tgl
from tests.gpu.device import DEVICE
from tests.ranks_on_one_device import Threads, World, world
from tgl.backends.composite import expert_parallel as collectives
from tgl.cutlass_kernels.launchers import expert_parallel as engine
from tgl.cutlass_kernels.launchers.exchange_kernels import EXCHANGE
from tgl.cutlass_kernels.runtime.launcher import Launcher
from tgl.distributed import ExpertParallelMLP
from tgl.meta import expert_parallel as meta
from tgl.meta import symmetric_memory
from tgl.meta.specs import empty_all

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
OPS = torch.ops.tgl
EXPERTS, TOP_K, HIDDEN, INNER, MOST = 8, 3, 256, 128, 200

# --- a group of one process -------------------------------------------------------------------------------------------


@pytest.fixture
def layers() -> Iterator[dict[str, ExpertParallelMLP]]:
    """Return a layer for each engine, with equal parameters."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=DEVICE)
    group = dist.group.WORLD
    options: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": DEVICE, "max_tokens": MOST, "top_k": TOP_K}
    made = {
        name: ExpertParallelMLP(EXPERTS, HIDDEN, INNER, group=group, engine=name, **options) for name in meta.ENGINES
    }
    made["symmetric_memory"].load_state_dict(made["all_to_all"].state_dict())
    yield made
    dist.destroy_process_group()


def problem(seed: int, tokens: int) -> tuple[Tensor, ...]:
    """Tokens, choices of which some are of no expert, routing weights and a gradient."""
    made = torch.Generator().manual_seed(seed)
    x, dy = torch.randn(2, tokens, HIDDEN, generator=made).bfloat16()
    index = torch.rand(tokens, EXPERTS + 1, generator=made).topk(TOP_K).indices
    weights = torch.rand(tokens, TOP_K, generator=made)
    return tuple(t.to(DEVICE) for t in (x, index, weights, dy))


def step(layer: ExpertParallelMLP, given: tuple[Tensor, ...]) -> list[Tensor]:
    x, index, weights, dy = given
    x, weights = x.detach().requires_grad_(), weights.detach().requires_grad_()
    y = layer(x, index, weights)
    return [y.detach(), *torch.autograd.grad(y, [x, weights, *layer.parameters()], dy)]


def test_both_engines_give_equal_bits(layers):
    for seed, tokens in enumerate((MOST, 0, 1, 57)):
        ours, theirs = (step(layer, problem(seed, tokens)) for layer in layers.values())
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)
    ours = layers["symmetric_memory"]
    index = torch.zeros(5, TOP_K, dtype=torch.int64, device=DEVICE)
    sizes = {"group_size": 1, "pair_rows": ours.pair_rows, "expert_rows": ours.expert_rows}
    assert "runs tgl kernels over symmetric memory" in str(
        tgl.explain("ep_route", index, EXPERTS, **sizes, **ours.exchange.group)
    )


@pytest.mark.parametrize("compiled", [False, True])
def test_a_captured_graph_takes_new_routings(layers, compiled):
    layer = layers["symmetric_memory"]
    given = problem(0, MOST)
    if compiled:
        torch._dynamo.reset()
        layer.compile(fullgraph=True, dynamic=False)
    for a, b in zip(step(layer, given), step(layers["all_to_all"], given), strict=True):
        assert torch.equal(a, b)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(layer, given)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(layer, given)
    for seed in range(1, 41):
        other = problem(seed, MOST)
        for mine, theirs in zip(given, other):
            mine.copy_(theirs)
        graph.replay()
        if seed % 10 == 0:
            for a, b in zip(found, step(layers["all_to_all"], other), strict=True):
                assert torch.equal(a, b)
    layer.check()


def test_a_step_over_capacity(layers):
    layer = ExpertParallelMLP(
        EXPERTS, HIDDEN, INNER, group=dist.group.WORLD, engine="symmetric_memory", max_tokens=MOST, top_k=TOP_K,
        capacity_factor=0.5, params_dtype=torch.bfloat16, device=DEVICE,
    )  # fmt: skip
    assert all(t.isnan().all() for t in step(layer, problem(0, MOST)))
    with pytest.raises(RuntimeError, match="rows of experts were needed, but there are 300: raise `capacity_factor`"):
        layer.check()


def test_a_captured_loop_skips_a_step_over_capacity(layers):
    """The optimizer reads the flag on the device; later steps are taken."""
    layer = ExpertParallelMLP(
        EXPERTS, HIDDEN, INNER, group=dist.group.WORLD, engine="symmetric_memory", max_tokens=MOST, top_k=TOP_K,
        capacity_factor=0.5, params_dtype=torch.bfloat16, device=DEVICE,
    )  # fmt: skip
    optimizer: Any = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True, capturable=True)
    x, index, weights, dy = problem(0, MOST)
    full, fitting = index.clone(), index.clone()
    fitting[MOST // 3 :] = -1

    def loop() -> None:
        optimizer.zero_grad()
        layer(x, index, weights).backward(dy)
        optimizer.grad_scale, optimizer.found_inf = None, layer.found_inf
        optimizer.step()
        layer.clear()

    index.copy_(fitting)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        loop()
    torch.cuda.current_stream().wait_stream(side)
    optimizer.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loop()
    parameters = list(layer.parameters())
    for choices, taken in ((fitting, True), (full, False), (fitting, True), (full, False)):
        before = [p.detach().clone() for p in parameters]
        index.copy_(choices)
        graph.replay()
        assert all(torch.equal(p, was) != taken for p, was in zip(parameters, before, strict=True))
        assert not any(p.isnan().any() for p in parameters)
    layer.check()


STAYS_AWAY = """
import torch
from tests.ranks_on_one_device import world

with world(2, [(12, 64, torch.float32)], "cuda", seconds=0.5) as made:
    group = {"group_name": made.names[0], "engine": "symmetric_memory"}
    index = torch.zeros(3, 2, dtype=torch.int32, device="cuda")
    try:
        for _ in range(2):
            torch.ops.tgl.ep_route(index, 4, group_size=2, pair_rows=6, expert_rows=8, **group)
            try:
                torch.cuda.synchronize()
            except RuntimeError:  # which says nothing of ranks; the device is lost
                pass
    except RuntimeError as error:  # of the first call, if it compiled something behind the barrier, else of the second
        print(error, flush=True)
    import os
    os._exit(0)
"""


def test_a_missing_rank_is_named():
    """The test runs in a process of its own, whose device stops for good."""
    done = subprocess.run([sys.executable, "-c", STAYS_AWAY], cwd=ROOT, capture_output=True, text=True, timeout=120)
    said = "rank 0 of 2 waited 0.5 s for rank 1 in ep_route, in the barrier before its writes"
    assert done.stdout.startswith(f"ep_route: {said}"), done.stderr


# --- four ranks -------------------------------------------------------------------------------------------------------


RANKS, TOKENS = 4, (300, 0, 512, 77)
SIZES = {"group_size": RANKS, "pair_rows": 512, "expert_rows": 8000}


@pytest.fixture
def few_blocks(monkeypatch):
    """So that those of all ranks are on the device together."""
    monkeypatch.setattr(engine, "BLOCKS", 24)


class Streams:
    """The ranks of a group, each on its own stream; launches of a rank wait for the others."""

    def __init__(self, world: World) -> None:
        self.world, self.streams = world, [torch.cuda.Stream() for _ in range(world.ranks)]

    def __call__(self, op: Any, calls: list[tuple[tuple, dict]]) -> list[tuple[Tensor, ...]]:
        """Call every rank once; first with barriers that do not wait, as the first launch of a kernel may."""
        for open_door in (True, False):
            torch.cuda.synchronize()
            self.world.epochs.zero_()
            for name in self.world.names:
                known = symmetric_memory.memory_of(name)
                known.control[: self.world.ranks].fill_((1 << 30) * open_door)
                known.flags.fill_(open_door)  # the epoch of rows behind one barrier
            self.world.poison(0xFF)
            torch.cuda.synchronize()
            made = []
            for stream, name, (args, kwargs) in zip(self.streams, self.world.names, calls):
                with torch.cuda.stream(stream):
                    made.append(op(*args, **kwargs, group_name=name, engine="symmetric_memory"))
            torch.cuda.synchronize()
            if open_door:
                del made  # to be used again, as an allocation may wait for all streams
        return made


@pytest.mark.parametrize("flags", [None, 20])
@pytest.mark.parametrize("invariant", [False, True])
def test_four_ranks(few_blocks, monkeypatch, invariant, flags):
    """A flag for every row, or few flags, some of which are for rows that do not exist."""
    if flags is not None:
        monkeypatch.setattr(symmetric_memory, "FLAGS", flags)
    copies, rows = (TOP_K, 3 * 512) if invariant else (RANKS, 512)
    sizes = {**SIZES, "invariant": invariant, "pair_rows": rows}
    index = [torch.rand(count, EXPERTS).topk(TOP_K).indices for count in TOKENS]
    specs = [(RANKS * rows, HIDDEN, torch.float32), (RANKS * rows, TOP_K, torch.float32)]
    with world(RANKS, specs, "cuda") as made:
        ours = Streams(made)
        plan = ours(OPS.ep_route.default, [((i.to(DEVICE), EXPERTS), sizes) for i in index])
        wanted = [empty_all(meta.ep_route(i, EXPERTS, **sizes)) for i in index]
        names = "position", "token", "index", "needed"
        Threads(RANKS)(
            collectives.route, [((i, EXPERTS), {**sizes, **dict(zip(names, w))}) for i, w in zip(index, wanted)]
        )
        for found, expected in zip(plan, wanted):
            assert all(torch.equal(a.cpu(), b) for a, b in zip(found, expected, strict=True))
        x = [torch.randn(count, HIDDEN).bfloat16() for count in TOKENS]
        weights = [torch.rand(count, TOP_K) for count in TOKENS]
        check(ours, "ep_dispatch", list(zip(x, weights)), wanted, copies)
        y = [torch.randn(RANKS * rows, HIDDEN).bfloat16() for _ in TOKENS]
        weights = [torch.rand(RANKS * rows, TOP_K) for _ in TOKENS]
        check(ours, "ep_combine", list(zip(y, weights)), wanted, copies)


LATE = 20_000_000  # cycles


def test_a_rank_that_is_late_with_its_rows(few_blocks):
    """A rank that reads rows before they arrive reads NaN; each rank is late in turn, after a barrier."""
    places = torch.arange(RANKS)[:, None] * 512 + torch.arange(512)
    token = torch.arange(512, dtype=torch.int32, device=DEVICE).repeat(RANKS)
    position = places.t().flatten().int().to(DEVICE)
    x = [torch.randn(512, HIDDEN, device=DEVICE).bfloat16() for _ in range(RANKS)]
    y = [torch.randn(RANKS * 512, HIDDEN, device=DEVICE).bfloat16() for _ in range(RANKS)]
    sums = sum(t.float().view(RANKS, 512, HIDDEN) for t in y).bfloat16()
    with world(RANKS, [(RANKS * 512, HIDDEN, torch.float32)], "cuda") as made:
        ours, run = Streams(made), Launcher.run
        for late in range(RANKS):

            def slow(launcher: Launcher, c: Any, late: int = late) -> Any:
                if launcher is EXCHANGE and c.rank == late:
                    torch.cuda._sleep(LATE)
                return run(launcher, c)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Launcher, "run", slow)
                rows = ours(OPS.ep_dispatch.default, [((t, None, token, position, RANKS), {}) for t in x])
                answers = ours(OPS.ep_combine.default, [((t, None, token, position, RANKS), {}) for t in y])
            for rank, (found, back) in enumerate(zip(rows, answers)):
                assert torch.equal(found[0], torch.cat(x))
                assert torch.equal(back[0], sums[rank])


def check(ours: Streams, op: str, tensors: list[tuple[Tensor, Tensor]], plan: list, copies: int) -> None:
    """Against collectives in float32 on a CPU."""
    spec, collective = {
        "ep_dispatch": (meta.ep_dispatch, collectives.dispatch),
        "ep_combine": (meta.ep_combine, collectives.combine),
    }[op]
    operands = [(*both, token, position) for both, (position, token, _, _) in zip(tensors, plan)]
    wanted = [[t.float() for t in empty_all(spec(*given, copies))] for given in operands]
    options = [{"top_k": copies, "out": out, "out_weights": weights} for out, weights in wanted]
    Threads(RANKS)(collective, [((t.float(), *rest), given) for (t, *rest), given in zip(operands, options)])
    calls = [((*(t.to(DEVICE) for t in given), copies), {}) for given in operands]
    for rank, found in enumerate(ours(getattr(OPS, op).default, calls)):
        used = (plan[rank][2] >= 0).any(1) if op == "ep_dispatch" else slice(None)
        for a, b in zip(found, wanted[rank], strict=True):
            assert torch.equal(a.cpu()[used], b[used].to(a.dtype))
