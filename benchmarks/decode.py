"""The Mixture-of-Experts block at the sizes of decoding, on a GPU: forward only, against the bytes of the experts hit.

    python benchmarks/decode.py [--shapes mixtral ...] [--tokens 1 16 ...] [--samples N] [--out FILE]

A call goes from tokens ``x [T, H]`` and the router's logits to the block's result: softmax, the best experts of every
token, their weights normalised, and the block itself, in bfloat16 with SwiGLU. Arms:

=============  ======================================================================================================
``tgl``        ``tgl.topk_router`` and ``tgl.moe``
``block``      ``tgl.moe`` alone, its experts and weights chosen before
``torch``      the router, a sort, gathers, torch._grouped_mm and index_add, through torch.compile
``called``     as ``tgl``, but called each time
``apart``      as ``tgl``, by launches that do not overlap
``few``        by launches that overlap, whatever the size of the experts
``waiting``    as ``few``, but the second GEMM asks for no weights before the first one has ended
``wide``       as ``few``, in tiles of 128 columns
=============  ======================================================================================================

The last four are there for few choices alone, where launches overlap. ``--arms`` names those that are measured.

Every arm but ``called`` is a captured graph; what the host takes to issue its launches is part of ``called``. 256 MB
are written before each replay or call, so that no weight is in L2. ``bound`` is the time in which a memory of
``--bandwidth`` TB/s reads the weights of the experts that any token chose; columns beside it are times of the arms as
multiples of it. ``kernels`` is how many kernels, copies and fills a replay of ``tgl`` and of ``block`` runs;
``--kernels`` prints them with their times. The file is written after every case.

Nothing is timed before tgl's result has passed against a loop over the experts in float32: at most eight roundings to
bfloat16 of error.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from harness.block import by_grouped_mm
from harness.command import cases, choice, gpu_parser, needs_device, run_all
from harness.gates import relative_error
from harness.kernels import kernels_of
from harness.report import Table, save, summaries, with_machine
from harness.timing import L2, WARM_UP, DeviceClock, Replay, captured, interleaved, replays
from torch import Tensor

import tgl
from tgl.cutlass_kernels import overlap
from tgl.cutlass_kernels.gemm.sm90 import tilings
from tgl.cutlass_kernels.ops import few
from tgl.cutlass_kernels.runtime import launcher

BF16 = torch.bfloat16
BOUND = 8 * torch.finfo(BF16).eps


class Block(NamedTuple):
    """Width, width of the activation, experts, choices of each token."""

    hidden: int
    inner: int
    experts: int
    top_k: int


SHAPES = {
    "qwen3-30b": Block(2048, 768, 128, 8),
    "mixtral": Block(4096, 14336, 8, 2),
    "gpt-oss": Block(2880, 2880, 128, 4),
}
ANY_SIZE = (few, "FEW_BYTES", 1 << 40)
PARTS: dict[str, tuple[tuple[Any, str, Any], ...]] = {
    "apart": ((overlap, "FEW_CHOICES", 0),),
    "few": (ANY_SIZE,),
    "waiting": (ANY_SIZE, (few.SecondCall, "settled", False)),
    "wide": (ANY_SIZE, (tilings, "FEW_WIDTHS", (128,))),
}
"""What an arm sets for as long as it is captured."""
WITHOUT = tuple(PARTS)
ARMS = ("tgl", "block", "torch", "called", *WITHOUT)
TOKENS = ("1", "4", "16", "64", "256", "1024")


class Problem:
    """The values all arms share."""

    def __init__(self, block: Block, tokens: int, device: str = "cuda"):
        self.block, self.device = block, device
        hidden, inner, experts, _ = block
        self.x = torch.randn(tokens, hidden, device=device, dtype=BF16)
        self.logits = torch.randn(tokens, experts, device=device, dtype=BF16)
        self.w1 = torch.randn(experts, 2 * inner, hidden, device=device, dtype=BF16) * hidden**-0.5
        self.w2 = torch.randn(experts, hidden, inner, device=device, dtype=BF16) * inner**-0.5
        self.routing = self.router()

    def router(self) -> tuple[Tensor, Tensor]:
        """Experts and weights of every token."""
        best, chosen = self.logits.float().softmax(-1).topk(self.block.top_k)
        return chosen, best / best.sum(-1, keepdim=True)

    def experts_hit(self) -> int:
        return int(self.routing[0].unique().numel())

    def bytes(self) -> int:
        """Of the weights that a call must read."""
        return self.experts_hit() * (self.w1[0].nbytes + self.w2[0].nbytes)

    def oracle(self) -> Tensor:
        """In float32, expert by expert."""
        chosen, weights = self.routing
        y = torch.zeros_like(self.x, dtype=torch.float32)
        for g in chosen.unique().tolist():
            token, choice = torch.where(chosen == g)
            gate, linear = (self.x[token].float() @ self.w1[g].float().t()).chunk(2, -1)
            rows = torch.nn.functional.silu(gate) * linear @ self.w2[g].float().t()
            y.index_add_(0, token, rows * weights[token, choice, None])
        return y


def block(p: Problem, chosen: Tensor, weights: Tensor) -> Tensor:
    return tgl.moe(p.x, chosen, weights, p.w1.transpose(1, 2), p.w2.transpose(1, 2))


def served(p: Problem) -> Tensor:
    router = tgl.topk_router(p.logits, p.block.top_k, renormalize=True)
    return block(p, router.top_k_index, router.weights)


@contextmanager
def without(arm: str) -> Iterator[None]:
    """The block as ``arm`` has it."""
    launcher.forget()
    try:
        with ExitStack() as stack:
            for patch in PARTS[arm]:
                stack.enter_context(mock.patch.object(*patch))
            yield
    finally:
        launcher.forget()


def served_without(p: Problem, arm: str) -> Tensor:
    with without(arm):
        return served(p)


def grouped_mm(p: Problem) -> Callable[[], Tensor]:
    return torch.compile(lambda: by_grouped_mm(p.x, *p.router(), p.w1, p.w2), fullgraph=True, dynamic=False)


def arms_of(p: Problem) -> dict[str, Callable[[], Tensor]]:
    parts = WITHOUT if overlap.overlaps(p.routing[0].numel()) else ()
    return {
        "tgl": lambda: served(p),
        "block": lambda: block(p, *p.routing),
        "torch": grouped_mm(p),
        **{arm: lambda arm=arm: served_without(p, arm) for arm in parts},
    }


def gated(graphs: dict[str, Replay], wanted: Tensor) -> dict[str, str]:
    """What is wrong with the results of some arms, which are taken out."""
    reasons: dict[str, str] = {}
    for name, graph in list(graphs.items()):
        graph()
        error = relative_error(graph.result, wanted)
        if not error <= BOUND:
            reasons[name] = f"error {error:.1e}, at most {BOUND:.1e}"
            del graphs[name]
    return reasons


def run_case(shape: str, tokens: str, args: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    problem = Problem(SHAPES[shape], int(tokens))
    graphs, failed = captured({name: call for name, call in arms_of(problem).items() if name in args.arms})
    failed |= gated(graphs, problem.oracle())
    times = replays(graphs, args.samples, args.clean_l2, args.busy)
    if "tgl" in graphs and "called" in args.arms:  # the same call, so it is right too
        clock, turns = DeviceClock(L2(args.clean_l2), host=True), range(args.samples + WARM_UP)
        times |= interleaved({"called": lambda: served(problem)}, clock, turns, warm_up=WARM_UP)
    return {
        **SHAPES[shape]._asdict(),
        "experts hit": problem.experts_hit(),
        "bound": problem.bytes() / args.bandwidth / 1e9,
        "times": summaries(times),
        "kernels": {name: [kernel._asdict() for kernel in kernels_of(graph)] for name, graph in graphs.items()},
        "left out": failed,
    }


TABLE = Table(
    {"shape": "<10", "tokens": ">6", "experts": ">7", "bound us": ">8.1f"}
    | dict.fromkeys((f"{arm} us" for arm in ARMS), ">9.1f")
    | dict.fromkeys(ARMS, ">6.2f")
    | {"kernels": ">7", "of block": ">8"}
)


def lines(result: dict[str, Any]) -> str:
    """Times, their multiples of the bound, and how many kernels ``tgl`` and ``block`` run."""
    bound, kernels = result["bound"], result["kernels"]
    ms = [result["times"][arm]["median"] if arm in result["times"] else None for arm in ARMS]
    counts = [sum(kernel["count"] for kernel in kernels[arm]) if arm in kernels else None for arm in ("tgl", "block")]
    us = [None if t is None else t * 1e3 for t in ms]
    of_bound = [None if t is None else t / bound for t in ms]
    made = [
        TABLE.line([result["shape"], result["tokens"], result["experts hit"], bound * 1e3, *us, *of_bound, *counts])
    ]
    made += [f"  {arm}: {reason}" for arm, reason in result["left out"].items()]
    return "\n".join(made)


def listed(result: dict[str, Any]) -> str:
    """The kernels of each arm."""
    return "\n".join(
        f"  {arm:<8} {kernel['us']:8.1f} us {kernel['count']:3d} x {kernel['name'][:90]}"
        for arm, own in result["kernels"].items()
        for kernel in own
    )


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = gpu_parser(__doc__)
    choice(parser, "--shapes", SHAPES)
    choice(parser, "--tokens", TOKENS)
    parser.add_argument("--bandwidth", type=float, default=4.3, help="TB/s of the memory; an H200's by default")
    parser.add_argument("--kernels", action="store_true", help="print the kernels of each arm")
    choice(parser, "--arms", ARMS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    device = needs_device()
    print(f"{device}, torch {torch.__version__}, {args.samples} samples\n{TABLE.header()}")

    def line(result: dict[str, Any]) -> str:
        return "\n".join([lines(result), *([listed(result)] if args.kernels else [])])

    def keep(results: list[dict[str, Any]]) -> None:
        save(args.out, with_machine(device, results))

    every = cases(shape=args.shapes, tokens=args.tokens)
    run_all(every, lambda **case: run_case(**case, args=args), line, keep)


if __name__ == "__main__":
    main()
