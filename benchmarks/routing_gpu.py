"""Tokens to rows of experts and back on a GPU: each op against a copy of as many bytes.

    python benchmarks/routing_gpu.py [--quick] [--ops combine ...] [--choices 8 ...] [--widths 7168 ...] [--out FILE]

About 131,072 rows of bfloat16, of which every one is a choice of a token at random: reads of ``combine`` and writes of
``dispatch`` are scattered by rows. Arms: ``tgl``; ``aten``, what torch has for it (``index_select`` for dispatch,
``embedding_bag`` for combine); ``copy``, torch's kernel for a change of sign, of as many bytes as the op must move,
half of them read. Every arm is a captured graph, 256 MB are written before each replay, arms take turns in rotating
order, and medians are compared.

Nothing is timed before tgl's result agrees with float64 on the first tokens. Results: a table of ratios of times (above
1: tgl is faster; for ``copy`` the fraction of its bandwidth that tgl reaches), and ``--out FILE`` as JSON.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch
from harness.command import cases, choice, gpu_parser, needs_device, run_all
from harness.compared import Comparison, Result, compared, of_result
from harness.memory import copying
from harness.report import save
from torch import Tensor

import tgl  # noqa: F401  (registers the ops)

DTYPE = torch.bfloat16
ROWS = 131072
SHOWN = 64  # tokens that are compared with float64
CHOICES = ("1", "2", "4", "6", "8", "10")
WIDTHS = ("1536", "2048", "4096", "7168")
COMPARISON = Comparison(
    names={"op": ">18", "choices": ">8", "width": ">6"},
    ms=">9.4f",
    rate=("TB/s", ">7.2f"),
    rivals=(("copy", "aten"), ">8.3f"),
    speed=lambda result: result["bytes"] / result["ms"]["tgl"] / 1e9,
)
OPS = torch.ops.tgl


class Problem:
    """Tokens, rows and places.

    Attributes:
        bytes: what the op must move.
    """

    def __init__(self, choices: int, width: int, rows: int, device: str = "cuda"):
        torch.manual_seed(0)
        tokens = rows // choices

        def normal(count: int) -> Tensor:
            return torch.randn(count, width, device=device, dtype=DTYPE)

        self.x, self.y = normal(tokens), normal(tokens * choices)
        self.weights = torch.rand(tokens, choices, device=device)
        order = torch.randperm(tokens * choices, device=device)
        self.position = order.int()
        self.token = torch.empty_like(self.position)
        self.token[order] = torch.arange(tokens, device=device, dtype=torch.int32).repeat_interleave(choices)
        self.places = (self.token, self.position, choices)
        self.shown = order[: SHOWN * choices].view(-1, choices)  # the rows of the first tokens
        self.bytes = self.x.nbytes + self.y.nbytes

    def copy(self) -> Callable[[], object]:
        return copying(self.bytes, self.x.device)

    def aten(self) -> Callable[[], object] | None:
        return None

    def sums(self, weights: Tensor | None = None) -> Tensor:
        """Of the first tokens, in float64."""
        terms = self.y[self.shown].double()
        return (terms if weights is None else terms * weights[: len(terms), :, None]).sum(1)


class Dispatch(Problem):
    """``dispatch``."""

    def tgl(self) -> Tensor:
        return OPS.dispatch(self.x, *self.places)

    def aten(self) -> Callable[[], object]:
        return lambda: self.x.index_select(0, self.token)

    def wrong(self, got: Tensor) -> str | None:
        return far(got[self.shown].double(), self.x[: len(self.shown), None].double())


class Combine(Problem):
    """``combine`` without weights."""

    def tgl(self) -> Tensor:
        return OPS.combine(self.y, *self.places)

    def aten(self) -> Callable[[], object]:
        starts = torch.arange(0, len(self.y), self.places[2], device=self.y.device, dtype=torch.int32)
        return lambda: torch.embedding_bag(self.y, self.position, starts, mode=0)[0]

    def wrong(self, got: Tensor) -> str | None:
        return far(got[: len(self.shown)].double(), self.sums())


class Weighted(Problem):
    """``combine`` with weights."""

    def tgl(self) -> Tensor:
        return OPS.combine(self.y, *self.places, self.weights)

    def wrong(self, got: Tensor) -> str | None:
        return far(got[: len(self.shown)].double(), self.sums(self.weights.double()))


class Backward(Problem):
    """``combine_backward``, which reads and writes rows."""

    def __init__(self, choices: int, width: int, rows: int, device: str = "cuda"):
        super().__init__(choices, width, rows, device)
        self.bytes += self.y.nbytes

    def tgl(self) -> Sequence[Tensor]:
        return OPS.combine_backward(self.x, self.y, *self.places, self.weights)

    def wrong(self, got: Sequence[Tensor]) -> str | None:
        grad, weights = self.x[: len(self.shown), None].double(), self.weights[: len(self.shown), :, None].double()
        dots = (grad * self.y[self.shown].double()).sum(2)
        return far(got[0][self.shown].double(), grad * weights) or far(got[1][: len(dots)].double(), dots)


PROBLEMS = {"dispatch": Dispatch, "combine": Combine, "combine weighted": Weighted, "combine_backward": Backward}


def far(got: Tensor, wanted: Tensor) -> str | None:
    """What is wrong with a result, or None."""
    error = ((got - wanted).norm() / wanted.norm()).item()
    return None if error < 2**-8 else f"error {error:.2e}"


def run_case(op: str, choices: str, width: str, args: argparse.Namespace) -> Result:
    problem = PROBLEMS[op](int(choices), int(width), ROWS)
    arms = {"tgl": problem.tgl, "copy": problem.copy()}
    rival = problem.aten()
    if rival is not None:
        arms["aten"] = rival
    return {"rows": len(problem.y), "bytes": problem.bytes, **compared(arms, of_result(problem.wrong), args)}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = gpu_parser(__doc__, quick="8 choices, two widths")
    choice(parser, "--ops", PROBLEMS)
    choice(parser, "--choices", CHOICES, default=False)
    choice(parser, "--widths", WIDTHS, default=False)
    args = parser.parse_args(argv)
    args.choices = args.choices or (["8"] if args.quick else list(CHOICES))
    args.widths = args.widths or (["2048", "7168"] if args.quick else list(WIDTHS))
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    print(f"{needs_device()}, torch {torch.__version__}, {DTYPE}\n{COMPARISON.header()}")
    with torch.no_grad():
        every = cases(op=args.ops, choices=args.choices, width=args.widths)
        results = run_all(every, lambda **case: run_case(**case, args=args), COMPARISON.line)
    print(COMPARISON.report(results))
    save(args.out, results)


if __name__ == "__main__":
    main()
