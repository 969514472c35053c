"""The Mixture-of-Experts block at the sizes of decoding, on a GPU: forward only, against the bytes of the experts hit.

    python benchmarks/decode.py [--shapes mixtral ...] [--tokens 1 16 ...] [--layers 1 6 ...] [--samples N]

A call goes from tokens ``x [T, H]`` and the router's logits to the block's result: softmax, the best experts of every
token, their weights normalised, and the block itself, in bfloat16 with SwiGLU. With ``--layers N`` a call is N such
blocks, each with logits and experts of its own, and each takes the result of the one before as its tokens, as in a
decoder without its attention. Whatever is printed or kept is then a block's: of a call, divided by N. Arms:

=============  ======================================================================================================
``tgl``        ``tgl.topk_router`` and ``tgl.moe``
``block``      ``tgl.moe`` alone, its experts and weights chosen before
``torch``      the router, a sort, gathers, torch._grouped_mm and index_add, through torch.compile
``eager``      as ``tgl``, but not captured
=============  ======================================================================================================

Every arm but ``eager`` is a captured graph; what the host takes to issue its launches is part of ``eager``. 256 MB
are written before each replay or call, so that no weight is in L2. ``bound`` is the time in which a memory of
``--bandwidth`` TB/s reads the weights of the experts that any token chose; columns beside it are times of the arms as
multiples of it. ``kernels`` is how many kernels, copies and fills a replay of ``tgl`` and of ``block`` runs;
``--kernels`` prints them with their times. The file is written after every case.

Nothing is timed before the result of each of an arm's blocks has passed against a loop over the experts in float32 on
the tokens that the arm gave the block: at most eight roundings to bfloat16 of error.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from harness.block import by_grouped_mm
from harness.command import cases, choice, gpu_parser, needs_device, run_all
from harness.gates import relative_error
from harness.kernels import kernels_of
from harness.report import Table, save, summaries, with_machine
from harness.timing import Replay, calls, captured, replays
from torch import Tensor

import tgl

BF16 = torch.bfloat16
BOUND = 8 * torch.finfo(BF16).eps


class Block(NamedTuple):
    """Width, width of the activation, experts, top-k slots per token."""

    hidden: int
    inner: int
    experts: int
    top_k: int


SHAPES = {
    "qwen3-30b": Block(2048, 768, 128, 8),
    "mixtral": Block(4096, 14336, 8, 2),
    "gpt-oss": Block(2880, 2880, 128, 4),
}


ARMS = ("tgl", "block", "torch", "eager")
TOKENS = ("1", "4", "16", "64", "256", "1024")


def chosen_of(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Experts and weights of every token."""
    best, chosen = logits.float().softmax(-1).topk(top_k)
    return chosen, best / best.sum(-1, keepdim=True)


class Layer:
    """A router's logits for some tokens, and the experts behind it.

    Attributes:
        w1, w2: ``[E, 2 I, H]`` and ``[E, H, I]``; the second ones make the block's result of ``x`` about 1.
        routing: experts and weights of every token.
    """

    def __init__(self, block: Block, x: Tensor):
        self.block = block
        hidden, inner, experts, _ = block
        options: dict[str, Any] = {"device": x.device, "dtype": BF16}
        self.logits = torch.randn(x.shape[0], experts, **options)
        self.w1 = torch.randn(experts, 2 * inner, hidden, **options).mul_(hidden**-0.5)
        self.w2 = torch.randn(experts, hidden, inner, **options).mul_(inner**-0.5)
        self.routing = chosen_of(self.logits, block.top_k)
        self.w2.mul_(1.0 / self.oracle(x).square().mean().sqrt())

    def experts_hit(self) -> int:
        return int(self.routing[0].unique().numel())

    def bytes(self) -> int:
        """Return the bytes of the weights that a call must read."""
        return self.experts_hit() * (self.w1[0].nbytes + self.w2[0].nbytes)

    def oracle(self, x: Tensor) -> Tensor:
        """The block's result in float32, expert by expert."""
        chosen, weights = self.routing
        y = torch.zeros_like(x, dtype=torch.float32)
        for g in chosen.unique().tolist():
            token, choice = torch.where(chosen == g)
            gate, linear = (x[token].float() @ self.w1[g].float().t()).chunk(2, -1)
            rows = torch.nn.functional.silu(gate) * linear @ self.w2[g].float().t()
            y.index_add_(0, token, rows * weights[token, choice, None])
        return y


class Problem:
    """The values all arms share: tokens, and the layers that they go through."""

    def __init__(self, block: Block, tokens: int, layers: int = 1, device: str = "cuda"):
        self.x = torch.randn(tokens, block.hidden, device=device, dtype=BF16)
        self.layers: list[Layer] = []
        y = self.x
        for _ in range(layers):
            self.layers.append(Layer(block, y))
            y = self.layers[-1].oracle(y).to(BF16)

    def wrong(self, results: Sequence[Tensor]) -> str | None:
        """Return the error of the layers, each of which had the previous result as its tokens, or None."""
        for number, (layer, x, y) in enumerate(zip(self.layers, (self.x, *results), results, strict=False)):
            error = relative_error(y, layer.oracle(x))
            if not error <= BOUND:
                return f"block {number}: error {error:.1e}, at most {BOUND:.1e}"
        return None


Served = Callable[[Layer, Tensor], Tensor]
"""A layer's result of some tokens."""


def chain(p: Problem, serve: Served) -> list[Tensor]:
    """The results of all layers."""
    results = [p.x]
    for layer in p.layers:
        results.append(serve(layer, results[-1]))
    return results[1:]


def block(layer: Layer, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    return tgl.moe(x, chosen, weights, layer.w1.transpose(1, 2), layer.w2.transpose(1, 2))


def served(layer: Layer, x: Tensor) -> Tensor:
    router = tgl.topk_router(layer.logits, layer.block.top_k, renormalize=True)
    return block(layer, x, router.top_k_index, router.weights)


def by_torch(x: Tensor, logits: Tensor, top_k: int, w1: Tensor, w2: Tensor) -> Tensor:
    return by_grouped_mm(x, *chosen_of(logits, top_k), w1, w2)


def grouped_mm() -> Served:
    compiled = torch.compile(by_torch, fullgraph=True, dynamic=False)
    return lambda layer, x: compiled(x, layer.logits, layer.block.top_k, layer.w1, layer.w2)


def arms_of(p: Problem) -> dict[str, Callable[[], list[Tensor]]]:
    torchs = grouped_mm()
    return {
        "tgl": lambda: chain(p, served),
        "block": lambda: chain(p, lambda layer, x: block(layer, x, *layer.routing)),
        "torch": lambda: chain(p, torchs),
    }


def gated(graphs: dict[str, Replay], p: Problem) -> dict[str, str]:
    """Remove the arms with wrong results, and return their errors."""
    reasons: dict[str, str] = {}
    for name, graph in list(graphs.items()):
        graph()
        reason = p.wrong(graph.result)
        if reason is not None:
            reasons[name] = reason
            del graphs[name]
    return reasons


def run_case(shape: str, tokens: str, layers: str, args: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    count = int(layers)
    problem = Problem(SHAPES[shape], int(tokens), count)
    graphs, failed = captured({name: call for name, call in arms_of(problem).items() if name in args.arms})
    failed |= gated(graphs, problem)
    times = replays(graphs, args.samples, args.clean_l2, args.busy)
    if "tgl" in graphs and "eager" in args.arms:  # the same call, so it is right too
        times |= calls({"eager": lambda: chain(problem, served)}, args.samples, args.clean_l2)
    return {
        **SHAPES[shape]._asdict(),
        "experts hit": sum(layer.experts_hit() for layer in problem.layers) / count,
        "bound": sum(layer.bytes() for layer in problem.layers) / count / args.bandwidth / 1e9,
        "times": summaries({name: [time / count for time in own] for name, own in times.items()}),
        "kernels": {name: [kernel._asdict() for kernel in kernels_of(graph)] for name, graph in graphs.items()},
        "left out": failed,
    }


TABLE = Table(
    {"shape": "<10", "tokens": ">6", "layers": ">6", "experts": ">7.3g", "bound us": ">8.1f"}
    | dict.fromkeys((f"{arm} us" for arm in ARMS), ">9.1f")
    | dict.fromkeys(ARMS, ">6.2f")
    | {"kernels": ">7.3g", "of block": ">8.3g"}
)


def lines(result: dict[str, Any]) -> str:
    """Times, their multiples of the bound, and how many kernels ``tgl`` and ``block`` run."""
    bound, kernels = result["bound"], result["kernels"]
    ms = [result["times"][arm]["median"] if arm in result["times"] else None for arm in ARMS]
    of_call = [sum(kernel["count"] for kernel in kernels[arm]) if arm in kernels else None for arm in ("tgl", "block")]
    counts = [None if count is None else count / int(result["layers"]) for count in of_call]
    us = [None if t is None else t * 1e3 for t in ms]
    of_bound = [None if t is None else t / bound for t in ms]
    case = [result[name] for name in ("shape", "tokens", "layers", "experts hit")]
    made = [TABLE.line([*case, bound * 1e3, *us, *of_bound, *counts])]
    made += [f"  {arm}: {reason}" for arm, reason in result["left out"].items()]
    return "\n".join(made)


def listed(result: dict[str, Any]) -> str:
    """The kernels of a call of each arm."""
    return "\n".join(
        f"  {arm:<8} {kernel['us']:8.1f} us {kernel['count']:3d} x {kernel['name'][:90]}"
        for arm, own in result["kernels"].items()
        for kernel in own
    )


def _layers(text: str) -> str:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"a call has at least one block, got {text}")
    return text


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = gpu_parser(__doc__)
    choice(parser, "--shapes", SHAPES)
    choice(parser, "--tokens", TOKENS)
    parser.add_argument("--layers", nargs="+", type=_layers, default=["1"], help="blocks of a call, one behind another")
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

    every = cases(shape=args.shapes, tokens=args.tokens, layers=args.layers)
    run_all(every, lambda **case: run_case(**case, args=args), line, keep)


if __name__ == "__main__":
    main()
