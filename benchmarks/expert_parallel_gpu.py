"""Expert parallelism on the GPUs of one host: both engines of ``ExpertParallelMLP``, and what torch alone offers.

    torchrun --nproc-per-node 4 benchmarks/expert_parallel_gpu.py [--shapes qwen3-30b ...] [--arms torch ...] [--gates]

Without torchrun one process is a group by itself, in which nothing crosses a link. On all ranks, in bfloat16 with
float32 routing weights and SwiGLU, every token choosing its experts at random:

====================  ===============================================================================================
``symmetric_memory``  the layer by kernels that write to the memory of the other GPUs; the baseline
``all_to_all``        the layer by collectives of static sizes, over NCCL
``float32 sums``      the baseline with ``wire_dtype=torch.float32``
``capacity 1.1``      the baseline with room for 1.1 times the even load of rows of experts
``capacity worst``    the baseline with room for the worst case
``halves``            the baseline on two halves of the tokens, on two streams and two groups of the same ranks, so that
                      rows of one half can move while the experts run on the other one
``blocks``            the baseline with ``Float8BlockScaling``
``blocks, wire``      and ``wire="quantized"``
``local``             ``tgl.MoE`` of a rank's experts on as many tokens: what is left without an exchange
``torch``             an exchange of exact sizes over NCCL, read on the host, and ``torch._grouped_mm``; not captured
====================  ===============================================================================================

**Gates.** Nothing is timed before they have passed on all ranks: the layers of both engines give equal bits, outputs
and all gradients, called and as a graph that is replayed with changing routings, for any number of tokens, and with a
rank that comes late to every exchange; capacities change no bit; a step that does not fit is NaN on all ranks; the
``torch`` arm agrees within eight roundings, float32 sums and FP8 within theirs. ``--gates`` stops there.

**Figures**, medians over turns of the slowest rank. ``forward`` and ``step`` (with all gradients) are of the whole
layer from tokens to tokens, graphs but for ``torch``, in ms and TFLOP/s per GPU of model FLOPs; ``backward`` is their
difference. All ranks meet on the device before a reading begins. ``route``, ``dispatch`` and ``combine`` are ops, and
``exchange`` is the three behind one another, in us of one of eight in a graph, so that ranks that are late for the
first have no share in it; GB/s are bytes of rows that leave the GPU in that time; ``empty`` is a dispatch without
tokens: a barrier and a launch that finds no rows, or two collectives. ``memory`` is the rank's symmetric memory, beside
what it would be with places for every choice of every token of all ranks.

Of ``symmetric_memory`` both halves of what follows a barrier are timed by themselves, too, by the same kernels on other
operands: ``push`` is a dispatch's writes to other ranks, ``take`` the copy of what has arrived and of its own rows,
``answer`` a combine's writes and ``sum`` its sums. ``push`` and ``answer`` have a small launch more, which sets the
number of drawn pieces back. An op does both halves at a time: it hides one behind the other where it takes as long as
the longer one and a barrier.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from harness.command import choice, gpu_parser, needs_device
from harness.gates import relative_error
from harness.report import summaries
from harness.timing import L2, WARM_UP, DeviceClock, Replay, interleaved, shuffled
from torch import Tensor

import tgl
from tgl.cutlass_kernels.ops import expert_parallel as steps
from tgl.cutlass_kernels.ops.wire import FLOW, FlowCall
from tgl.distributed import ExpertParallelMLP, expert_parallel_host

BF16 = torch.bfloat16
OPS = torch.ops.tgl
BASELINE = "symmetric_memory"
ENGINES = ("all_to_all", BASELINE)
BLOCKS = tgl.recipes.Float8BlockScaling()
LAYERS: dict[str, dict[str, Any]] = {
    BASELINE: {},
    "all_to_all": {"engine": "all_to_all"},
    "float32 sums": {"wire_dtype": torch.float32},
    "capacity 1.1": {"capacity_factor": 1.1},
    "capacity worst": {"capacity_factor": None},
    "halves": {},
    "blocks": {"recipe": BLOCKS},
    "blocks, wire": {"recipe": BLOCKS, "wire": "quantized"},
}
"""Options of the layer of an arm."""
EXACT = ("capacity 1.1", "capacity worst")
"""Arms with the bits of the baseline."""
CALLED = ("torch",)
"""Arms that no graph can hold."""
ARMS = (*LAYERS, "local", "torch")
BOUND, FP8_BOUND = 8 * torch.finfo(BF16).eps, torch.finfo(torch.float8_e4m3fn).eps
COMMON: dict[str, Any] = {"params_dtype": BF16, "device": "cuda"}
LATE = 20_000_000  # cycles
REPLAYS = 200
REPEATS = 8


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
    "deepseek-128": Shape(4096, 7168, 2048, 128, 8),  # half of its experts, which two ranks hold
    "deepseek-v3": Shape(4096, 7168, 2048, 256, 8),
    "few tokens": Shape(128, 7168, 2048, 256, 8),
}
BY_DEFAULT = ("qwen3-30b", "mixtral", "deepseek-128", "few tokens")
SMALL = Shape(300, 512, 256, 16, 3)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    made = gpu_parser(__doc__, busy=False)
    choice(made, "--shapes", SHAPES)
    made.set_defaults(shapes=list(BY_DEFAULT))
    choice(made, "--arms", ARMS)
    made.add_argument("--gates", action="store_true", help="the gates alone")
    return made.parse_args(argv)


Given = tuple[Tensor, Tensor, Tensor, Tensor]
Block = TypeVar("Block", bound=tgl.MoE)


class Problem:
    """One rank's layers, which share their experts, and its tokens.

    Args:
        shape: its sizes.
        groups: two of all ranks. The second is for the half of the tokens that runs beside the other one.
        arms: those that are asked for.
    """

    def __init__(self, shape: Shape, groups: Sequence[Any], arms: Sequence[str]) -> None:
        self.shape, self.group, self.rank = shape, groups[0], groups[0].rank()
        torch.manual_seed(self.rank)
        self.layers: dict[str, ExpertParallelMLP] = {}
        for arm, options in LAYERS.items():  # in one order on all ranks
            if arm in ENGINES or (arm in arms and arm != "halves"):
                self.layers[arm] = self.layer(groups[0], shape.tokens, options)
        half = -(-shape.tokens // 2)
        self.halves = [self.layer(group, half, LAYERS["halves"]) for group in groups if "halves" in arms]
        first = self.layers[BASELINE]
        self.parameters = list(first.parameters())
        self.local = self.sharing(tgl.MoE(shape.experts // groups[0].size(), shape.hidden, shape.inner, **COMMON))
        torch.cuda.empty_cache()
        self.given = self.draw(0)

    def layer(self, group: Any, tokens: int, options: dict[str, Any]) -> ExpertParallelMLP:
        shape = self.shape
        sizes: dict[str, Any] = {"top_k": shape.top_k, "max_tokens": tokens}
        given = {"engine": BASELINE, **COMMON, **options}
        return self.sharing(ExpertParallelMLP(shape.experts, shape.hidden, shape.inner, group=group, **sizes, **given))

    def sharing(self, layer: Block) -> Block:
        """The layer with the experts of the first one: there is no room for those of all."""
        first = next(iter(self.layers.values()), None)
        if first is not None:
            for mine, theirs in ((layer.fc1, first.fc1), (layer.fc2, first.fc2)):
                own, mine.weight = mine.weight, theirs.weight
                own.data = own.data.new_empty(0)  # the layer still knows it
        return layer

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
        if arm == "halves":
            return self.by_halves(x, index, weights)
        if arm == "local":
            return self.local(x, index % self.local.num_gemms, weights)
        assert arm == "torch"
        return expert_parallel_host(self.experts, x, index, weights, self.shape.experts, self.group)

    def by_halves(self, *given: Tensor) -> Tensor:
        """The second half on a stream of its own."""
        here, beside = torch.cuda.current_stream(), self.beside
        halves = list(zip(*(t.split(-(-len(t) // 2)) for t in given)))
        beside.wait_stream(here)
        with torch.cuda.stream(beside):
            second = self.halves[1](*halves[1])
        first = self.halves[0](*halves[0])
        here.wait_stream(beside)
        return torch.cat([first, second])

    @functools.cached_property
    def beside(self) -> torch.cuda.Stream:
        return torch.cuda.Stream()

    def experts(self, rows: Tensor, offs: Tensor) -> Tensor:
        """The experts of this rank by torch's own GEMMs."""
        w1, w2 = self.parameters
        gate, linear = torch._grouped_mm(rows, w1.transpose(1, 2), offs=offs).chunk(2, -1)
        return torch._grouped_mm(torch.nn.functional.silu(gate) * linear, w2.transpose(1, 2), offs=offs)

    def step(self, arm: str, given: Given) -> list[Tensor]:
        """Output and all gradients."""
        x, _, weights, dy = given
        y = self.forward(arm, given)
        return [y.detach(), *torch.autograd.grad(y, [x, weights, *self.parameters], dy)]


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


def check(problem: Problem, arms: Sequence[str]) -> None:
    """All gates of one shape."""
    other, ours = ENGINES
    counts = problem.shape.tokens, 0, 1 + problem.rank, problem.shape.tokens * (problem.rank % 2)
    given = [problem.draw(seed, tokens) for seed, tokens in enumerate(counts)]
    agreed("equal bits", differ_in_any(problem, given, lambda: None))
    turns = random.Random(problem.rank)
    late = differ_in_any(problem, given, lambda: torch.cuda._sleep(turns.choice([0, LATE])))
    agreed("equal bits with late ranks", late)
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
    del graph
    base = problem.step(ours, problem.given)
    for arm in arms:
        if arm in EXACT:
            agreed(f"{arm}: equal bits", differ(problem.step(arm, problem.given), base))
        elif arm not in (*ENGINES, "local"):
            bound = FP8_BOUND if arm.startswith("blocks") else BOUND
            error = max(map(apart, problem.step(arm, problem.given), base))
            agreed(f"{arm}: near", f"error {error:.1e}" if not error <= bound else None)


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


# --- figures ----------------------------------------------------------------------------------------------------------


class Together(DeviceClock):
    """All ranks begin a reading together."""

    def take(self, call: Callable[[], Any]) -> Any:
        dist.barrier()
        torch.cuda.synchronize()
        return super().take(call)


def timed(
    calls: dict[str, Callable[[], Any]], problem: Problem, args: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Milliseconds of every call: of each turn those of the slowest rank."""
    turns = range(args.samples + WARM_UP)
    clock = Together(L2(args.clean_l2), before=Replay(exchange(problem, BASELINE)["empty"]))
    own = interleaved(calls, clock, turns, shuffled, WARM_UP)
    slowest = torch.tensor(list(own.values()), device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return summaries(dict(zip(own, slowest.tolist())))


def layers(problem: Problem, args: argparse.Namespace) -> dict[str, Any]:
    calls: dict[str, Callable[[], Any]] = {}
    pool = torch.cuda.graph_pool_handle()
    for arm in args.arms:
        for way, of in (("forward", problem.forward), ("step", problem.step)):
            call = functools.partial(of, arm, problem.given)
            calls[f"{arm} {way}"] = call if arm in CALLED else Replay(call, pool=pool)
    return timed(calls, problem, args)


def exchange(problem: Problem, engine: str) -> dict[str, Callable[[], Any]]:
    """Calls of the ops of an engine, of rows that are there already."""
    layer, (x, index, weights, _) = problem.layers[engine], (t.detach() for t in problem.given)
    sizes, group = layer.exchange.sizes, layer.exchange.group
    of_route: dict[str, Any] = {"group_size": sizes.ranks, "pair_rows": sizes.pair_rows, **group}
    of_route["expert_rows"] = sizes.expert_rows

    def route() -> list[Tensor]:
        return OPS.ep_route(index, problem.shape.experts, **of_route)

    position, token, _, _ = route()
    y = torch.randn(len(token), problem.shape.hidden, device="cuda", dtype=BF16)
    places = token, position, sizes.copies
    nobody = torch.full_like(token, -1), position.new_empty(0), sizes.copies

    def dispatch() -> list[Tensor]:
        return OPS.ep_dispatch(x, weights, *places, **group)

    def combine() -> list[Tensor]:
        return OPS.ep_combine(y, None, *places, **group)

    return {
        "route": route,
        "dispatch": dispatch,
        "combine": combine,
        "exchange": lambda: (route(), dispatch(), combine()),
        "empty": lambda: OPS.ep_dispatch(x[:0], None, *nobody, **group),
    }


def behind_barriers(problem: Problem) -> dict[str, Callable[[], Any]]:
    """Halves of what a dispatch and a combine launch on places of a routing: all write what is there already."""
    layer, (x, index, weights, _) = problem.layers[BASELINE], (t.detach() for t in problem.given)
    sizes, group = layer.exchange.sizes, layer.exchange.group
    options = {"group_size": sizes.ranks, "pair_rows": sizes.pair_rows, "expert_rows": sizes.expert_rows}
    position, token, _, _ = OPS.ep_route(index, problem.shape.experts, **options, **group)
    rows, row_weights = OPS.ep_dispatch(x, weights, token, position, sizes.copies, **group)
    y, none = torch.empty_like(x), weights.new_empty(0)
    places, ends = {"token": token, "position": position, "top_k": sizes.copies}, [group["group_name"], BASELINE]
    taken = {
        ("push", "take"): ("ep_dispatch", (x, weights), (rows, row_weights)),
        ("answer", "sum"): ("ep_combine", (rows, None), (y, none)),
    }
    found: dict[str, Callable[[], Any]] = {}
    for (push, take), (op, given, made) in taken.items():
        all_steps = next(o for o in steps.OPS if o.name == op).of((*given, *places.values(), *ends, *made), {})
        (call,) = (call for launcher, call in all_steps if launcher is FLOW)
        told = {"arrived": call.arrived.clone(), "leaving": call.leaving.clone()}  # later exchanges tell other numbers
        call = call._replace(**told)
        found |= {push: functools.partial(pushed, pushing(call)), take: functools.partial(FLOW.run, taking(call))}
    return found


def pushing(call: FlowCall) -> FlowCall:
    """One that takes nothing, and counts pieces by itself."""
    call = call._replace(epoch=torch.zeros_like(call.epoch))
    if call.position is None:
        return call._replace(arrived=torch.zeros_like(call.arrived))
    nothing = tuple((rows, part, out[:0]) for rows, part, out in call.moved)
    return call._replace(position=call.position[:0], moved=nothing)


def pushed(call: FlowCall) -> None:
    call.epoch.zero_()
    FLOW.run(call)


def taking(call: FlowCall) -> FlowCall:
    """One whose pieces have all been drawn, and whose flags are those of no barrier."""
    epoch = torch.tensor([0, 1 << 30], dtype=torch.int32, device="cuda")
    return call._replace(epoch=epoch, flags=torch.zeros_like(call.flags))


def ops(problem: Problem, args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Of both engines, and the bytes of rows that leave this rank on average."""
    pool = torch.cuda.graph_pool_handle()
    made = {engine: exchange(problem, engine) for engine in ENGINES}
    made[BASELINE] |= behind_barriers(problem)
    calls = {
        f"{engine} {name}": Replay(lambda call=call: [call() for _ in range(REPEATS)][-1], pool=pool)
        for engine, own in made.items()
        for name, call in own.items()
    }
    times = timed(calls, problem, args)
    for of_one in times.values():
        of_one.update({statistic: value / REPEATS for statistic, value in of_one.items()})
    return times, leaving(problem)


def leaving(problem: Problem) -> int:
    """Bytes of tokens that leave a rank, on average of all."""
    ranks = problem.group.size()
    owners = problem.given[1] // (problem.shape.experts // ranks)
    goes = torch.zeros(len(owners), ranks, dtype=torch.bool, device="cuda").scatter_(1, owners, True)
    goes[:, problem.rank] = False
    sent = goes.sum().double()
    dist.all_reduce(sent)
    return round(sent.item() / ranks) * problem.shape.hidden * BF16.itemsize


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def run(name: str, groups: Sequence[Any], args: argparse.Namespace) -> dict[str, Any]:
    shape = SHAPES[name]
    problem = Problem(shape, groups, args.arms)
    say(f"{name}, {dist.get_world_size()} ranks")
    check(problem, args.arms)
    if args.gates:
        return {"shape": name}
    whole = layers(problem, args)
    for arm in args.arms:
        forward, step = (whole[f"{arm} {way}"]["median"] for way in ("forward", "step"))
        backward = step - forward
        times = {"forward": (forward, 1), "backward": (backward, 2), "step": (step, 3)}
        said = (f"{way} {ms:8.3f} ms {n * shape.flops / ms / 1e9:4.0f} TFLOP/s" for way, (ms, n) in times.items())
        say(f"  {arm:17s} {'   '.join(said)}")
    parts, sent = ops(problem, args)
    for arm, times in parts.items():
        moves = arm.endswith(("dispatch", "combine", "push", "answer"))
        rate = f"{sent / times['median'] / 1e6:7.0f} GB/s out" if moves else ""
        say(f"  {arm:28s} {times['median'] * 1e3:9.1f} us {rate}")
    sizes = problem.layers[BASELINE].exchange.sizes
    memory = sizes.memory(shape.hidden, BF16), sizes.ranks * shape.tokens * shape.top_k * shape.hidden * BF16.itemsize
    say("  memory of the exchange {:.0f} MiB, of every choice {:.0f} MiB".format(*(size / 2**20 for size in memory)))
    return {"shape": name, "layers": whole, "ops": parts, "bytes out": sent, "memory": memory}


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
        found = {"device": device, "torch": torch.__version__, "ranks": dist.get_world_size(), "results": []}
        groups = dist.group.WORLD, dist.new_group()
        for name in args.shapes:
            found["results"].append(run(name, groups, args))
            torch.cuda.empty_cache()
            if args.out and dist.get_rank() == 0:
                args.out.write_text(json.dumps(found, indent=1))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
