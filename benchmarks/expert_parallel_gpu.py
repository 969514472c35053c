"""Expert parallelism on the GPUs of one host: both engines of ``ExpertParallelMLP``, and what torch alone offers.

    torchrun --nproc-per-node 4 benchmarks/expert_parallel_gpu.py [--shapes qwen3-30b ...] [--arms torch ...] [--gates]

Without torchrun one process is a group by itself, in which nothing crosses a link. On all ranks, in bfloat16 with
float32 routing weights and SwiGLU, every token choosing its experts at random:

======================  =============================================================================================
``symmetric_memory``    the layer by kernels that write to the memory of the other GPUs; the baseline
``all_to_all``          the layer by collectives of static sizes, over NCCL
``invariant``           the baseline with ``invariant=True``: a row for every choice, bits of one rank with all tokens
``float32 sums``        the baseline with ``wire_dtype=torch.float32``
``capacity 1.1``        the baseline with capacity for 1.1 times the even load of rows of experts
``capacity worst``      the baseline with capacity for the worst case
``halves``              the baseline on two halves of the tokens, on two streams and two groups of the same ranks, so
                        that rows of one half can move while the experts run on the other one
``blocks``              the baseline with ``Float8BlockScaling``
``blocks, wire``        and ``wire="quantized"``
``delayed``             the baseline with ``DelayedScaling``: a scale per expert from the steps before; a dense wire
``..., kept weights``   ``blocks``, ``blocks, wire`` (also with capacity for 1.1 times the even load) and ``delayed``
                        with ``is_first_microbatch=False``: weights that an earlier call has quantised, as in inference
                        and in all microbatches of a step but the first
``recompute dispatch``  the baseline with ``recompute_dispatch=True``: tokens are held, not what arrived
``compiled``            the baseline's layer by ``torch.compile(fullgraph=True, dynamic=False)``
``local``               ``tgl.MoE`` of a rank's experts on as many tokens: what is left without an exchange
``torch``               an exchange of exact sizes over NCCL, read on the host, and ``torch._grouped_mm``; not captured
======================  =============================================================================================

**Gates.** Nothing is timed before they have passed on all ranks: the layers of both engines give equal bits, outputs
and all gradients, eager and as a graph that is replayed with changing routings, for any number of tokens, and with a
rank that comes late to every exchange; for routings in which one rank or one expert takes all, experts are empty, some
choices are of no expert, or all are, by eager calls, by such beside NaN in all unused memory, and by one graph;
capacities change no bit, nor do ``compiled`` and ``recompute dispatch``, eager and as graphs; kept weights give the
bits of the arm that quantises them in every call, eager and as a graph; a step that does not fit is NaN on all ranks;
the ``torch`` arm agrees within eight roundings, ``invariant``, float32 sums and FP8 within theirs. ``--gates`` stops
there. Arms that ``--arms`` leaves out have no gates.

**Figures**, medians over turns of the slowest rank. ``forward`` and ``step`` (with all gradients) are of the whole
layer from tokens to tokens, graphs but for ``torch``, in ms and TFLOP/s per GPU of model FLOPs; ``backward`` is their
difference. All ranks meet on the device before a reading begins. ``route``, ``dispatch`` and ``combine`` are ops, and
``exchange`` is the three behind one another, in us of one of eight in a graph, so that ranks that are late for the
first have no share in it; GB/s are bytes of rows that leave the GPU in that time; ``empty`` is a dispatch without
tokens: a barrier and a launch that finds no rows, or two collectives. ``memory`` is the rank's symmetric memory, beside
what it would be with places for every choice of every token of all ranks. ``held`` is what an eager forward leaves to
its backward, and ``peak`` the most that an eager step has beyond what was there before, gradients of weights included,
both in MiB of the rank that has most.

Of ``symmetric_memory`` both halves of what follows a barrier are timed by themselves, too, by the same kernels on other
operands: ``push`` is a dispatch's writes to other ranks, ``take`` the copy of what has arrived and of its own rows,
``answer`` a combine's writes and ``sum`` its sums. ``push`` and ``answer`` have a small launch more, which sets the
number of drawn pieces back. An op does both halves at a time: it hides one behind the other where it takes as long as
the longer one and a barrier.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from harness.command import choice, gpu_parser, needs_device
from harness.expert_parallel import ARMS, BASELINE, BF16, CALLED, ENGINES, OPS, SHAPES, Problem
from harness.expert_parallel_gates import check, check_overflow, say
from harness.memory import Allocated
from harness.report import save, summaries, with_machine
from harness.timing import L2, WARM_UP, DeviceClock, Replay, interleaved, shuffled
from torch import Tensor

from tgl.cutlass_kernels.launchers import expert_parallel as steps
from tgl.cutlass_kernels.launchers.exchange_kernels import EXCHANGE, ExchangeCall
from tgl.meta.symmetric_memory import WAIT

BY_DEFAULT = ("qwen3-30b", "mixtral", "deepseek-128", "few tokens")
REPEATS = 8


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    made = gpu_parser(__doc__, busy=False)
    choice(made, "--shapes", SHAPES)
    made.set_defaults(shapes=list(BY_DEFAULT))
    choice(made, "--arms", ARMS)
    made.add_argument("--gates", action="store_true", help="the gates alone")
    return made.parse_args(argv)


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


def memory(problem: Problem, arm: str) -> dict[str, float]:
    """Return the MiB of an eager step, of the rank that has most."""
    problem.step(arm, problem.given)  # what lasts is made
    taken = Allocated()
    y = problem.forward(arm, problem.given)
    held = taken.now()
    x, _, weights, dy = problem.given
    grads = torch.autograd.grad(y, [x, weights, *problem.parameters], dy)
    most = torch.tensor([held, taken.at_most()], dtype=torch.float64, device="cuda")
    del grads
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return dict(zip(("held", "peak"), (most / 2**20).tolist()))


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
    empty = torch.full_like(token, -1), position.new_empty(0), sizes.copies

    def dispatch() -> list[Tensor]:
        return OPS.ep_dispatch(x, weights, *places, **group)

    def combine() -> list[Tensor]:
        return OPS.ep_combine(y, None, *places, **group)

    return {
        "route": route,
        "dispatch": dispatch,
        "combine": combine,
        "exchange": lambda: (route(), dispatch(), combine()),
        "empty": lambda: OPS.ep_dispatch(x[:0], None, *empty, **group),
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
        (call,) = (call for launcher, call in all_steps if launcher is EXCHANGE)
        told = {"arrived": call.arrived.clone(), "leaving": call.leaving.clone()}  # later exchanges tell other numbers
        call = call._replace(**told)
        found |= {push: functools.partial(pushed, pushing(call)), take: functools.partial(EXCHANGE.run, taking(call))}
    return found


def pushing(call: ExchangeCall) -> ExchangeCall:
    """Return a call of a kernel that takes nothing, and counts pieces by itself."""
    call = call._replace(epoch=torch.zeros_like(call.epoch))
    if call.position is None:
        return call._replace(arrived=torch.zeros_like(call.arrived))
    nothing = tuple((rows, part, out[:0]) for rows, part, out in call.moved)
    return call._replace(position=call.position[:0], moved=nothing)


def pushed(call: ExchangeCall) -> None:
    call.epoch.zero_()
    EXCHANGE.run(call)


def taking(call: ExchangeCall) -> ExchangeCall:
    """Return a call of a kernel whose pieces have all been drawn, and whose flags belong to no barrier."""
    epoch = torch.tensor([0, 1 << 30], dtype=torch.int32, device="cuda")
    return call._replace(epoch=epoch, flags=torch.zeros_like(call.flags))


def ops(problem: Problem, args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Return the ops of both engines, and the bytes of rows that leave this rank on average."""
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


def run(name: str, groups: Sequence[Any], args: argparse.Namespace) -> dict[str, Any]:
    shape = SHAPES[name]
    problem = Problem(shape, groups, args.arms)
    say(f"{name}, {dist.get_world_size()} ranks")
    check(problem, args.arms)
    if args.gates:
        return {"shape": name}
    room = {arm: memory(problem, arm) for arm in args.arms}
    whole = layers(problem, args)
    width = max(18, *map(len, args.arms))
    for arm in args.arms:
        forward, step = (whole[f"{arm} {way}"]["median"] for way in ("forward", "step"))
        backward = step - forward
        times = {"forward": (forward, 1), "backward": (backward, 2), "step": (step, 3)}
        said = (f"{way} {ms:8.3f} ms {n * shape.flops / ms / 1e9:4.0f} TFLOP/s" for way, (ms, n) in times.items())
        mib = "   ".join(f"{what} {amount:6.0f} MiB" for what, amount in room[arm].items())
        say(f"  {arm:{width}s} {'   '.join(said)}   {mib}")
    parts, sent = ops(problem, args)
    for arm, times in parts.items():
        moves = arm.endswith(("dispatch", "combine", "push", "answer"))
        rate = f"{sent / times['median'] / 1e6:7.0f} GB/s out" if moves else ""
        say(f"  {arm:28s} {times['median'] * 1e3:9.1f} us {rate}")
    sizes = problem.layers[BASELINE].exchange.sizes
    buffers = sizes.memory(shape.hidden, BF16), sizes.ranks * shape.tokens * shape.top_k * shape.hidden * BF16.itemsize
    say("  memory of the exchange {:.0f} MiB, of every choice {:.0f} MiB".format(*(size / 2**20 for size in buffers)))
    return {"shape": name, "layers": whole, "ops": parts, "bytes out": sent, "memory": buffers, "MiB of steps": room}


@contextmanager
def joined(seconds: float = WAIT) -> Iterator[None]:
    """The group of torchrun's processes, or of this one alone, in which ranks wait so long for each other."""
    limit = timedelta(seconds=seconds)
    if dist.is_torchelastic_launched():
        torch.cuda.set_device(dist.get_node_local_rank())
        here = torch.device("cuda", torch.cuda.current_device())
        dist.init_process_group("nccl", device_id=here, timeout=limit)
    else:
        alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group("nccl", device_id=torch.device("cuda", 0), timeout=limit, **alone)
    try:
        yield
    finally:
        dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    device = needs_device()
    with joined():
        say(f"{device}, torch {torch.__version__}")
        check_overflow(dist.group.WORLD)
        results: list[dict[str, Any]] = []
        groups = dist.group.WORLD, dist.new_group()
        for name in args.shapes:
            results.append(run(name, groups, args))
            torch.cuda.empty_cache()
            if dist.get_rank() == 0:
                save(args.out, with_machine(device, results) | {"ranks": dist.get_world_size()})


if __name__ == "__main__":
    main()
