"""Expert parallelism on the GPUs of one host: both engines of ``ExpertParallelMLP``, and what torch alone offers.

    torchrun --nproc-per-node 4 benchmarks/expert_parallel_gpu.py [--shapes qwen3-30b ...] [--gates] [--out FILE]

Without torchrun one process is a group by itself, in which nothing crosses a link. On all ranks, in bfloat16 with
float32 routing weights and SwiGLU, every token choosing its experts at random:

====================  ===============================================================================================
``symmetric_memory``  the layer by kernels that write to the memory of the other GPUs
``all_to_all``        the layer by collectives of static sizes, over NCCL
``torch``             an exchange of exact sizes over NCCL, read on the host, and ``torch._grouped_mm``; not captured
====================  ===============================================================================================

**Gates.** Nothing is timed before they have passed on all ranks: the layers of both engines give equal bits, outputs
and all gradients, called and as a graph that is replayed with changing routings, for any number of tokens, and with a
rank that comes late to every exchange; a step that does not fit is NaN on all ranks; the third arm agrees within
eight roundings. ``--gates`` stops there.

**Figures**, medians over turns of the slowest rank. ``forward`` and ``step`` (with all gradients) are of the whole
layer from tokens to tokens, graphs but for ``torch``, in ms and TFLOP/s per GPU of model FLOPs. ``route``, ``dispatch``
and ``combine`` are ops as graphs, in us; GB/s are bytes of rows that leave the GPU in that time; ``empty`` is a
dispatch without tokens, which is two barriers.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from harness.command import choice, gpu_parser, needs_device
from harness.gates import relative_error
from harness.report import summaries
from harness.timing import L2, WARM_UP, DeviceClock, Replay, interleaved, shuffled
from torch import Tensor

from tgl.distributed import ExpertParallelMLP, expert_parallel_host

BF16 = torch.bfloat16
OPS = torch.ops.tgl
ENGINES = ("all_to_all", "symmetric_memory")
BOUND = 8 * torch.finfo(BF16).eps
LATE = 20_000_000  # cycles
REPLAYS = 200


class Shape(NamedTuple):
    """Tokens of a rank, width, width of the activation, experts of all ranks, choices of each token."""

    tokens: int
    hidden: int
    inner: int
    experts: int
    top_k: int

    @property
    def flops(self) -> float:
        """Of a forward, per rank: three products of the rows of its tokens."""
        return 6.0 * self.tokens * self.top_k * self.hidden * self.inner


SHAPES = {
    "qwen3-30b": Shape(8192, 2048, 768, 128, 8),
    "mixtral": Shape(8192, 4096, 14336, 8, 2),
    "deepseek-v3": Shape(4096, 7168, 2048, 256, 8),
    "few tokens": Shape(128, 7168, 2048, 256, 8),
}
SMALL = Shape(300, 512, 256, 16, 3)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    made = gpu_parser(__doc__)
    choice(made, "--shapes", SHAPES)
    made.add_argument("--gates", action="store_true", help="the gates alone")
    return made.parse_args(argv)


Given = tuple[Tensor, Tensor, Tensor, Tensor]


class Problem:
    """One rank's layers, with equal parameters, and its tokens."""

    def __init__(self, shape: Shape, group: Any) -> None:
        self.shape, self.group, self.rank = shape, group, group.rank()
        torch.manual_seed(self.rank)
        options: dict[str, Any] = {"params_dtype": BF16, "device": "cuda", "top_k": shape.top_k}
        sizes = shape.experts, shape.hidden, shape.inner
        room = {"group": group, "max_tokens": shape.tokens}
        self.layers = {engine: ExpertParallelMLP(*sizes, engine=engine, **room, **options) for engine in ENGINES}
        for layer in self.layers.values():
            layer.load_state_dict(self.layers[ENGINES[0]].state_dict())
        self.parameters = list(self.layers[ENGINES[0]].parameters())
        self.given = self.draw(0)

    def draw(self, seed: int, tokens: int | None = None) -> Given:
        """Tokens, choices, weights and a gradient, other ones on every rank."""
        made = torch.Generator("cuda").manual_seed(1000 * seed + self.rank)
        count, kwargs = self.shape.tokens if tokens is None else tokens, {"device": "cuda", "generator": made}
        x, dy = torch.randn(2, count, self.shape.hidden, **kwargs).to(BF16)
        index = torch.rand(count, self.shape.experts, **kwargs).topk(self.shape.top_k).indices
        return x.requires_grad_(), index, torch.rand(count, self.shape.top_k, **kwargs).requires_grad_(), dy

    def forward(self, arm: str, given: Given) -> Tensor:
        x, index, weights, _ = given
        if arm in self.layers:
            return self.layers[arm](x, index, weights)
        return expert_parallel_host(self.experts, x, index, weights, self.shape.experts, self.group)

    def experts(self, rows: Tensor, offs: Tensor) -> Tensor:
        """The experts of this rank by torch's own GEMMs."""
        w1, w2 = self.parameters
        gate, linear = torch._grouped_mm(rows, w1.transpose(1, 2), offs=offs).chunk(2, -1)
        return torch._grouped_mm(torch.nn.functional.silu(gate) * linear, w2.transpose(1, 2), offs=offs)

    def step(self, arm: str, given: Given) -> list[Tensor]:
        """Output and all gradients."""
        x, _, weights, dy = given
        y = self.forward(arm, given)
        own = self.layers[arm].parameters() if arm in self.layers else self.parameters
        return [y.detach(), *torch.autograd.grad(y, [x, weights, *own], dy)]


# --- gates ------------------------------------------------------------------------------------------------------------


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


def check(problem: Problem) -> None:
    """All gates of one shape."""
    other, ours = ENGINES
    counts = problem.shape.tokens, 0, 1 + problem.rank, problem.shape.tokens * (problem.rank % 2)
    given = [problem.draw(seed, tokens) for seed, tokens in enumerate(counts)]
    agreed("equal bits", differ_in_any(problem, given, lambda: None))
    turns = random.Random(problem.rank)
    agreed(
        "equal bits with late ranks", differ_in_any(problem, given, lambda: torch.cuda._sleep(turns.choice([0, LATE])))
    )
    held = tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in problem.given)
    graph = Replay(lambda: problem.step(ours, held))
    wrong = None
    for seed in range(REPLAYS):
        drawn = problem.draw(seed)
        with torch.no_grad():
            for mine, theirs in zip(held, drawn):
                mine.copy_(theirs)
        graph()
        if seed % 20 == 0:
            wrong = wrong or differ(graph.result, problem.step(other, drawn))
    agreed(f"equal bits in {REPLAYS} replays of a graph", wrong)
    pairs = zip(problem.step(ours, problem.given), problem.step("torch", problem.given))
    errors = [relative_error(a, b.float()) for a, b in pairs]
    agreed("near torch", f"error {max(errors):.1e}" if not max(errors) <= BOUND else None)


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


# --- figures ----------------------------------------------------------------------------------------------------------


class Together(DeviceClock):
    """All ranks begin a reading together."""

    def take(self, call: Callable[[], Any]) -> Any:
        dist.barrier()
        torch.cuda.synchronize()
        return super().take(call)


def timed(calls: dict[str, Callable[[], Any]], args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Milliseconds of every call: of each turn those of the slowest rank."""
    turns = range(args.samples + WARM_UP)
    own = interleaved(calls, Together(L2(args.clean_l2)), turns, shuffled, WARM_UP)
    slowest = torch.tensor(list(own.values()), device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return summaries(dict(zip(own, slowest.tolist())))


def layers(problem: Problem, args: argparse.Namespace) -> dict[str, Any]:
    calls: dict[str, Callable[[], Any]] = {}
    for arm in (*ENGINES, "torch"):
        ways = {"forward": problem.forward, "step": problem.step}
        for way, call in ways.items():
            calls[f"{arm} {way}"] = lambda call=call, arm=arm: call(arm, problem.given)
            if arm in ENGINES:
                calls[f"{arm} {way}"] = Replay(calls[f"{arm} {way}"])
    return timed(calls, args)


def ops(problem: Problem, args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Of both engines, and the bytes of rows that leave this rank on average."""
    x, index, weights, _ = (t.detach() for t in problem.given)
    calls: dict[str, Callable[[], Any]] = {}
    for engine, layer in problem.layers.items():
        sizes, group = layer.exchange.sizes, layer.exchange.group
        of_route: dict[str, Any] = {"group_size": sizes.ranks, "pair_rows": sizes.pair_rows, **group}
        of_route["expert_rows"] = sizes.expert_rows
        route = Replay(lambda given=of_route: OPS.ep_route(index, problem.shape.experts, **given))
        route()
        position, token, _, _ = route.result
        y = torch.randn(len(token), problem.shape.hidden, device="cuda", dtype=BF16)
        places = token, position, sizes.copies
        nobody = torch.full_like(token, -1), position.new_empty(0), sizes.copies
        calls[f"{engine} route"] = route
        for name, call in (
            ("dispatch", lambda p=places, g=group: OPS.ep_dispatch(x, weights, *p, **g)),
            ("combine", lambda y=y, p=places, g=group: OPS.ep_combine(y, None, *p, **g)),
            ("empty", lambda p=nobody, g=group: OPS.ep_dispatch(x[:0], None, *p, **g)),
        ):
            calls[f"{engine} {name}"] = Replay(call)
    leaving = (token.view(dist.get_world_size(), -1) >= 0).sum(1)
    leaving[dist.get_rank()] = 0
    sent = leaving.sum().double()
    dist.all_reduce(sent)
    return timed(calls, args), round(sent.item() / dist.get_world_size()) * problem.shape.hidden * BF16.itemsize


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def run(name: str, args: argparse.Namespace) -> dict[str, Any]:
    shape = SHAPES[name]
    problem = Problem(shape, dist.group.WORLD)
    say(f"{name}, {dist.get_world_size()} ranks")
    check(problem)
    if args.gates:
        return {"shape": name}
    whole = layers(problem, args)
    for arm, times in whole.items():
        products = 3 if arm.endswith("step") else 1
        rate = products * shape.flops / times["median"] / 1e9
        say(f"  {arm:28s} {times['median']:9.3f} ms {rate:7.0f} TFLOP/s")
    parts, sent = ops(problem, args)
    for arm, times in parts.items():
        moves = arm.endswith(("dispatch", "combine"))
        rate = f"{sent / times['median'] / 1e6:7.0f} GB/s out" if moves else ""
        say(f"  {arm:28s} {times['median'] * 1e3:9.1f} us {rate}")
    return {"shape": name, "layers": whole, "ops": parts, "bytes out": sent}


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    device = needs_device()
    if dist.is_torchelastic_launched():
        torch.cuda.set_device(dist.get_node_local_rank())
        dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    else:
        alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group("nccl", device_id=torch.device("cuda", 0), **alone)
    try:
        say(f"{device}, torch {torch.__version__}")
        check_overflow(dist.group.WORLD)
        results = []
        for name in args.shapes:
            results.append(run(name, args))
            torch.cuda.empty_cache()
        if args.out and dist.get_rank() == 0:
            found = {"device": device, "torch": torch.__version__, "ranks": dist.get_world_size(), "results": results}
            args.out.write_text(json.dumps(found, indent=1))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
