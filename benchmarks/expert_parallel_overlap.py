"""Exchanges beside GEMMs on the GPUs of one host: whether rows can be on their way while experts work.

    torchrun --nproc-per-node 4 benchmarks/expert_parallel_overlap.py [--shapes qwen3-30b ...] [--quick] [--samples 12]

Of one layer over symmetric memory, with the tokens and choices of ``expert_parallel_gpu``, in bfloat16:

**Side by side.** A dispatch and FC1 with its activation, of all rows of a rank that came with another dispatch; a
combine and FC2. The exchange runs on a stream of its own, with a higher priority, forked and joined in one graph. An
exchange gets at most ``blocks`` blocks, of which three fit on a multiprocessor. A CTA of these GEMMs takes a
multiprocessor for itself, and none is started for ``left`` of them. Where there are more blocks than are left, CTAs
have to be there first, or blocks spread over all: such an exchange begins 6 us late. (264, 0) is what an op does today.

For every such share, in us: the exchange alone, the GEMM alone, and ``both``. ``hidden`` is the part of the shorter one
that takes no time: 1 where both take as long as the longer one, 0 where they take as long as one behind the other.
``won`` is what both save over one behind the other with shares of (264, 0), which is what a layer does.

**Pieces.** What the GEMMs take if the rows come in pieces, one behind the other, nothing beside them: ``own first``,
those of the rank's own tokens and all others; ``ranks``, those of each rank; ``experts, halves`` and ``quarters``,
groups of neighbouring experts; ``tokens``, every other row that came. A piece has a routing of its own. ``route``,
``weights`` and ``sum`` are the rest of a rank's block: places of rows, their routing weights, and the sums over a
token's choices.

**Own first.** The whole forward in the form of ``harness.expert_parallel_own_first``, beside that of the layer.

Bits are compared before anything is timed: what both make side by side and what each makes alone, and forwards. Figures
are medians over turns of the slowest rank, of one of four repetitions in a graph.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from expert_parallel_gpu import joined, timed
from harness.command import choice, gpu_parser, needs_device
from harness.expert_parallel import BASELINE, BF16, OPS, SHAPES, Problem
from harness.expert_parallel_gates import agreed, say
from harness.expert_parallel_own_first import OwnFirst, Share, Started, beside, blocks_of
from harness.report import Table, save
from harness.timing import Replay
from torch import Tensor

from tgl.cutlass_kernels.launchers import expert_parallel as steps
from tgl.cutlass_kernels.launchers.gemm import GROUPED_GEMM, GemmCall
from tgl.cutlass_kernels.launchers.gemm_activation import GROUPED_GEMM_ACTIVATION, GemmActivationCall
from tgl.cutlass_kernels.runtime.launcher import Launcher
from tgl.nn.routing import Routing, combine, dispatch_weights, route
from tgl.ops.grouped_activation import Params

BY_DEFAULT = ("qwen3-30b", "deepseek-v3")  # others copy rows before FC1, or have few
REPEATS = 4
SECONDS = 180.0  # that a rank waits for another one, which may compile meanwhile

TODAY = Share(steps.BLOCKS, 0)
QUICK = (TODAY, Share(16, 16), Share(48, 16), Share(72, 24), Share(96, 32))
SHARES = (
    *QUICK,
    *(Share(blocks, 0) for blocks in (8, 32, 66, 132)),
    *(Share(left, left) for left in (8, 24, 32, 48, 66)),
    *(Share(3 * left, left) for left in (8, 12, 20, 48, 66)),
)
OWN_FIRST = (Share(48, 16), Share(72, 24), Share(96, 32))
PAIRS = {"dispatch": "FC1", "combine": "FC2"}
COLUMNS = {"blocks": ">6", "left": ">4", "exchange": "8.1f", "GEMM": "8.1f", "both": "8.1f"}
COLUMNS |= {"hidden": "6.2f", "won": "7.1f"}

Call = Callable[[], Any]


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    made = gpu_parser(__doc__, quick="a few shares", busy=False)
    choice(made, "--shapes", BY_DEFAULT)
    return made.parse_args(argv)


class Given(NamedTuple):
    """What a rank has: tokens and their weights, where they go, and what has come: rows, choices and weights."""

    x: Tensor
    weights: Tensor
    token: Tensor
    position: Tensor
    rows: Tensor
    choices: Tensor
    row_weights: Tensor


class Layer:
    """The parts of one layer's forward on one rank, each a call whose result is held."""

    def __init__(self, problem: Problem) -> None:
        layer = problem.layers[BASELINE]
        self.rank, self.sizes, self.group = problem.rank, layer.exchange.sizes, layer.exchange.group
        self.experts, self.room = layer.num_gemms, layer.expert_rows
        x, index, weights, _ = (t.detach() for t in problem.given)
        room = {"group_size": self.sizes.ranks, "pair_rows": layer.pair_rows, "expert_rows": self.room}
        places = OPS.ep_route(index, problem.shape.experts, **room, invariant=False, **self.group)
        position, token, choices, _ = places
        rows, row_weights = OPS.ep_dispatch(x, weights, token, position, self.sizes.copies, **self.group)
        self.given = Given(x, weights, token, position, rows, choices, row_weights)
        self.w1, self.w2 = (w.detach().transpose(1, 2) for w in problem.parameters)
        made = {"device": x.device, "dtype": BF16}
        self.h, self.y = (torch.empty(self.room, w.shape[2] // n, **made) for w, n in ((self.w1, 1), (self.w1, 2)))
        self.answers = torch.empty(self.room, self.w2.shape[2], **made)
        self.back = torch.randn(rows.shape, **made)
        self.whole = self.routed(choices, self.room)
        self.started = Started()

    def routed(self, choices: Tensor, room: int) -> tuple[Routing, Tensor]:
        """Places of rows for these choices of what has come, and the rows' weights."""
        routing = route(choices, self.experts, room)
        return routing, dispatch_weights(self.given.row_weights, routing)

    # --- exchanges ----------------------------------------------------------------------------------------------------

    def dispatch(self) -> tuple[Tensor, ...]:
        g = self.given
        return tuple(OPS.ep_dispatch(g.x, g.weights, g.token, g.position, self.sizes.copies, **self.group))

    def combine(self) -> tuple[Tensor, ...]:
        g = self.given
        return tuple(OPS.ep_combine(self.back, None, g.token, g.position, self.sizes.copies, **self.group)[:1])

    def exchange(self, name: str, blocks: int) -> Call:
        """An exchange by at most so many blocks."""
        call = {"dispatch": self.dispatch, "combine": self.combine}[name]

        def by_blocks() -> tuple[Tensor, ...]:
            with blocks_of(Share(blocks, 0)):
                return call()

        return by_blocks

    # --- GEMMs --------------------------------------------------------------------------------------------------------

    def gemm(self, name: str, left: int, given: tuple[Routing, Tensor] | None = None) -> Call:
        """FC1 or FC2 of the rows of a routing, by CTAs on all multiprocessors but so many."""
        routing, probs = given or self.whole
        rows = len(routing.token)
        h, y, answers = (t[:rows] for t in (self.h, self.y, self.answers))
        of_fc1 = self.given.rows, self.w1, routing.offs, None, probs, Params(), y, h, routing.token, False
        of_fc2 = y, self.w2, routing.offs, None, None, answers, False
        calls: dict[str, tuple[Launcher, Any]] = {
            "FC1": (GROUPED_GEMM_ACTIVATION, GemmActivationCall(*of_fc1)),
            "FC2": (GROUPED_GEMM, GemmCall(*of_fc2)),
        }
        return self.started(*calls[name], left)

    def made(self, name: str) -> tuple[Tensor, ...]:
        """What a GEMM has written, of rows that there are."""
        rows = int(self.whole[0].offs[-1])
        return {"FC1": (self.h[:rows], self.y[:rows]), "FC2": (self.answers[:rows],)}[name]

    def arrived(self, name: str, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Likewise an exchange, of what came."""
        there = (self.given.choices >= 0).any(1)
        return results if name == "combine" else tuple(t[there] for t in results)

    # --- pieces -------------------------------------------------------------------------------------------------------

    def pieces(self) -> Iterator[tuple[str, list[Tensor]]]:
        """Names, and of every piece which ``[W P, k]`` choices are in it."""
        choices, ranks = self.given.choices, self.sizes.ranks
        places = torch.arange(len(choices), device=choices.device)[:, None]
        source = places // self.sizes.pair_rows
        yield "whole", [choices >= 0]
        yield "own first", [(source == self.rank).expand_as(choices), (source != self.rank).expand_as(choices)]
        yield "ranks", [(source == rank).expand_as(choices) for rank in range(ranks)]
        for name, count in (("experts, halves", 2), ("experts, quarters", 4)):
            yield name, [choices * count // self.experts == part for part in range(count)]
        yield "tokens", [(places % 2 == part).expand_as(choices) for part in range(2)]

    def by_pieces(self, name: str, masks: list[Tensor]) -> Call:
        """The GEMM of every piece, which has the room of its share."""
        share = self.room // len(masks)
        given = []
        for mask in masks:
            chosen = self.given.choices.masked_fill(~mask, -1)
            given.append(self.routed(chosen, max(share, int((chosen >= 0).sum()))))
        calls = [self.gemm(name, 0, one) for one in given]

        def all_pieces() -> None:
            for call in calls:
                call()

        return all_pieces

    def rest(self) -> dict[str, Call]:
        """Of the block, what is no GEMM."""
        routing, _ = self.whole
        return {
            "route": lambda: route(self.given.choices, self.experts, self.room),
            "weights": lambda: dispatch_weights(self.given.row_weights, routing),
            "sum": lambda: combine(self.answers, routing),
        }


def both_of(exchange: Call, gemm: Call, stream: Any, share: Share) -> Call:
    """An exchange on a stream of its own, and a GEMM on the current one."""

    def side_by_side() -> Any:
        with beside(stream, share):
            results = exchange()
        gemm()
        torch.cuda.current_stream().wait_stream(stream)
        return results

    return side_by_side


def check(layer: Layer, shares: Sequence[Share], stream: Any) -> None:
    """Equal bits side by side; all ranks take part in every exchange, whatever one of them finds."""
    for exchange, gemm in PAIRS.items():
        expected = layer.arrived(exchange, layer.exchange(exchange, TODAY.blocks)())
        layer.gemm(gemm, 0)()
        products = [t.clone() for t in layer.made(gemm)]
        wrong = None
        for share in shares:
            for t in layer.made(gemm):
                t.zero_()
            both = both_of(layer.exchange(exchange, share.blocks), layer.gemm(gemm, share.left), stream, share)
            found = layer.arrived(exchange, both())
            pairs = zip((*found, *layer.made(gemm)), (*expected, *products), strict=True)
            if not all(torch.equal(a, b) for a, b in pairs):
                wrong = wrong or f"{share} differs"
        agreed(f"{exchange} beside {gemm}: equal bits", wrong)


def own_first(problem: Problem, stream: Any) -> dict[str, Callable[..., Tensor]]:
    """Forwards by name."""
    layer, rank = problem.layers[BASELINE], problem.rank
    return {f"own first, {share}": OwnFirst(layer, rank, share, stream) for share in OWN_FIRST}


def check_own_first(problem: Problem, forwards: dict[str, Callable[..., Tensor]]) -> None:
    """Equal bits of whole forwards, of as many tokens as there can be and of few."""
    most = problem.shape.tokens
    for name, forward in forwards.items():
        wrong = None
        for seed, tokens in enumerate((most, 1 + problem.rank, most)):
            given = [t.detach() for t in problem.draw(seed, tokens)[:3]]
            expected, found = problem.layers[BASELINE](*given), forward(*given)
            wrong = wrong or (None if torch.equal(found, expected) else f"{tokens} tokens differ")
        agreed(f"{name}: equal bits", wrong)


def arms(layer: Layer, shares: Sequence[Share], stream: Any) -> dict[str, Call]:
    """All that is timed, by name."""
    calls: dict[str, Call] = {}
    for exchange, gemm in PAIRS.items():
        for share in shares:
            alone = layer.exchange(exchange, share.blocks), layer.gemm(gemm, share.left)
            calls[f"{exchange}: {share.blocks} blocks"] = alone[0]
            calls[f"{gemm}: {share.left} left"] = alone[1]
            calls[f"{exchange} beside {gemm}: {share}"] = both_of(*alone, stream, share)
        calls |= {f"{gemm} in pieces: {name}": layer.by_pieces(gemm, masks) for name, masks in layer.pieces()}
    return calls | layer.rest()


def repeated(call: Call) -> Any:
    for _ in range(REPEATS):
        made = call()
    return made


def lines(times: dict[str, float], shares: Sequence[Share]) -> Iterator[str]:
    """Tables, in us."""
    for exchange, gemm in PAIRS.items():
        yield f"{exchange} beside {gemm}, us"
        table = Table(COLUMNS)
        yield table.header()
        serial = times[f"{exchange}: {TODAY.blocks} blocks"] + times[f"{gemm}: {TODAY.left} left"]
        for share in shares:
            alone = times[f"{exchange}: {share.blocks} blocks"], times[f"{gemm}: {share.left} left"]
            both = times[f"{exchange} beside {gemm}: {share}"]
            hidden = (sum(alone) - both) / min(alone)
            yield table.line((str(share.blocks), str(share.left), *alone, both, hidden, serial - both))
    for name, us in times.items():
        if " beside " not in name and " blocks" not in name and " left" not in name:
            yield f"{name:32s} {us:8.1f} us"


def run(name: str, args: argparse.Namespace) -> dict[str, Any]:
    problem = Problem(SHAPES[name], (dist.group.WORLD,) * 2, ())
    layer, shares = Layer(problem), QUICK if args.quick else SHARES
    stream = torch.cuda.Stream(priority=-1)
    say(f"{name}, {dist.get_world_size()} ranks")
    check(layer, shares, stream)
    forwards = own_first(problem, stream)
    check_own_first(problem, forwards)
    pool = torch.cuda.graph_pool_handle()
    given = [t.detach() for t in problem.given[:3]]
    calls = arms(layer, shares, stream)
    for arm, forward in {"forward of the layer": problem.layers[BASELINE], **forwards}.items():
        calls[arm] = functools.partial(forward, *given)
    graphs = {arm: Replay(functools.partial(repeated, call), pool=pool) for arm, call in calls.items()}
    times = timed(graphs, problem, args)
    for of_one in times.values():
        of_one.update({statistic: 1e3 * value / REPEATS for statistic, value in of_one.items()})
    for line in lines({arm: of_one["median"] for arm, of_one in times.items()}, shares):
        say(f"  {line}")
    return {"shape": name, "us": times}


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    name = needs_device()
    with joined(SECONDS):
        found = {"device": name, "torch": torch.__version__, "ranks": dist.get_world_size(), "results": []}
        say(f"{name}, torch {torch.__version__}")
        for shape in args.shapes:
            found["results"].append(run(shape, args))
            torch.cuda.empty_cache()
            if dist.get_rank() == 0:
                save(args.out, found)


if __name__ == "__main__":
    main()
