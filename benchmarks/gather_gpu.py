"""GEMMs that read tokens by an index on a GPU, against rows that are put in order first.

    python benchmarks/gather_gpu.py [--quick] [--ops grouped_gemm ...] [--shapes qwen3-30b ...] [--tiles 128x192pp ...]
        [--busy SECONDS] [--out FILE]

Tokens choose their experts at random. Arms: ``tgl``, the op with its index; ``copied``, ``dispatch`` and the op;
``in order``, the op alone on rows that lie in order already; and the op with its index in each of ``--tiles``, as
``harness.tiled.named`` writes them. Every arm is a captured graph, 256 MB are written before each replay, arms take
turns in rotating order, and medians are compared. With ``--busy`` each replay follows others of its arm instead.

Nothing is timed before tgl's result has the bits of the op on rows in order. Results: a table of ratios of times (above
1: tgl is faster; for ``in order`` the fraction of that speed), and ``--out FILE`` as JSON.
"""

from __future__ import annotations

import argparse
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from harness import tiled
from harness.command import cases, choice, gpu_parser, needs_device, run_all
from harness.compared import Comparison, Result, compared, of_result
from harness.report import save
from torch import Tensor

import tgl
from tgl import backends
from tgl.cutlass_kernels.archs import arch_of

DTYPE = torch.bfloat16


class Shape(NamedTuple):
    """A block of experts."""

    tokens: int
    choices: int
    width: int
    inner: int  # columns of the weight, of a first one gate and linear half
    experts: int


SHAPES = {
    "qwen3-30b": Shape(16384, 8, 2048, 1536, 128),
    "qwen3-30b-fc2": Shape(16384, 8, 2048, 768, 128),
    "sonic-7b": Shape(24576, 8, 1536, 512, 128),
    "many-tokens": Shape(32768, 8, 4096, 2048, 128),
    "gpt-oss": Shape(8192, 4, 2880, 5760, 128),
    "mixtral": Shape(8192, 2, 4096, 28672, 8),
    "deepseek-v3": Shape(4096, 8, 7168, 4096, 64),
    "deepseek-rank": Shape(8192, 8, 7168, 4096, 32),
}


def comparison(*tiles: str) -> Comparison:
    return Comparison(
        names={"op": ">20", "shape": ">13"},
        ms=">9.4f",
        rate=("TFLOP/s", ">8.0f"),
        rivals=(("copied", "in order", *tiles), ">11.3f"),
        speed=lambda result: result["flops"] / result["ms"]["tgl"] / 1e9,
    )


class Problem(ABC):
    """Tokens, their routing, and weights."""

    def __init__(self, shape: Shape, device: str = "cuda"):
        torch.manual_seed(0)
        tokens, self.choices, width, inner, experts = shape
        picked = torch.rand(tokens, experts, device=device).topk(self.choices, 1).indices
        self.token, self.position, self.offs = self.route(picked.int(), experts)
        rows = tokens * self.choices
        self.x = torch.randn(tokens, width, device=device, dtype=DTYPE)
        self.hidden = torch.randn(rows, inner, device=device, dtype=DTYPE)
        self.weights = torch.randn(experts, inner, width, device=device, dtype=DTYPE).transpose(1, 2)
        self.in_order = self.dispatched()
        self.flops = 2 * rows * width * inner

    def route(self, picked: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
        """The token of every row, the row of every choice, and where groups end."""
        order = picked.flatten().long().argsort(stable=True)
        position = torch.empty_like(order)
        position[order] = torch.arange(len(order), device=order.device)
        ends = picked.flatten().long().bincount(minlength=experts).cumsum(0)
        return (order // self.choices).int(), position.int(), ends.int()

    def dispatched(self) -> Tensor:
        return torch.ops.tgl.dispatch(self.x, self.token, self.position, self.choices)

    @abstractmethod
    def product(self, rows: Tensor, index: Tensor | None = None) -> Tensor:
        """The op, on rows in order or on those that an index names."""

    def tgl(self) -> Tensor:
        return self.product(self.x, self.token)

    def by(self, tiles: str) -> Tensor:
        """The op with its index, in tiles of one's choice."""
        arch = arch_of(backends.device_arch(self.x.device)).name
        with tiled.used(tiled.parsed(tiles, arch, band=8), "choose_gathering"):
            return self.tgl()

    def arms(self, tiles: Sequence[str]) -> dict[str, Callable[[], Tensor]]:
        return {
            "tgl": self.tgl,
            "copied": lambda: self.product(self.dispatched()),
            "in order": lambda: self.product(self.in_order),
            **{name: functools.partial(self.by, name) for name in tiles},
        }

    def wrong(self, got: Tensor) -> str | None:
        return None if torch.equal(got, self.product(self.in_order)) else "other bits than of rows in order"


class Forward(Problem):
    """``grouped_gemm``."""

    def product(self, rows: Tensor, index: Tensor | None = None) -> Tensor:
        return tgl.grouped_gemm(rows, self.weights, self.offs, rows=index)


class GradientOfFirst(Problem):
    """``grouped_gemm_wgrad`` of the first weight ``[K, N]``: ``a`` are tokens."""

    def product(self, rows: Tensor, index: Tensor | None = None) -> Tensor:
        return tgl.grouped_gemm_wgrad(rows, self.hidden, self.offs, a_rows=index)


class GradientOfSecond(Problem):
    """``grouped_gemm_wgrad`` of the second weight ``[K, N]``: ``b`` are the tokens' gradients."""

    def product(self, rows: Tensor, index: Tensor | None = None) -> Tensor:
        return tgl.grouped_gemm_wgrad(self.hidden, rows, self.offs, b_rows=index)


PROBLEMS = {"grouped_gemm": Forward, "wgrad, a by index": GradientOfFirst, "wgrad, b by index": GradientOfSecond}


def run_case(op: str, shape: str, args: argparse.Namespace) -> Result:
    problem = PROBLEMS[op](SHAPES[shape])
    return {"flops": problem.flops, **compared(problem.arms(args.tiles), of_result(problem.wrong), args)}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = gpu_parser(__doc__, quick="one shape")
    choice(parser, "--ops", PROBLEMS)
    choice(parser, "--shapes", SHAPES, default=False)
    parser.add_argument("--tiles", nargs="*", default=[], metavar="TILES")
    args = parser.parse_args(argv)
    args.shapes = args.shapes or (["qwen3-30b"] if args.quick else list(SHAPES))
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    table = comparison(*args.tiles)
    print(f"{needs_device()}, torch {torch.__version__}, {DTYPE}\n{table.header()}")
    with torch.no_grad():
        every = cases(op=args.ops, shape=args.shapes)
        results = run_all(every, lambda **case: run_case(**case, args=args), table.line)
    print(table.report(results))
    save(args.out, results)


if __name__ == "__main__":
    main()
