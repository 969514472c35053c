"""Choices of a router grouped by expert on a GPU, against a sort.

    python benchmarks/route_gpu.py [--shapes qwen3 ...] [--samples N] [--out FILE]

Arms: ``tgl``; ``sort`` and ``compiled``, a stable ``torch.sort`` and the small operations that follow it, as they are
and through torch.compile. Choices are random, int64, as ``torch.topk`` makes them. Every arm is a captured graph, 256
MB are written before each replay, arms take turns in rotating order, and medians are compared.

Nothing is timed before tgl's result is that of the CPU. Results: a table of milliseconds, millions of choices per
second and ratios of times (above 1: tgl is faster), and ``--out FILE`` as JSON.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple

import torch
from harness.command import cases, choice, gpu_parser, needs_device, run_all
from harness.compared import Comparison, Result, compared, of_result
from harness.report import save
from torch import Tensor

import tgl  # noqa: F401  (declares the op)


class Choices(NamedTuple):
    """Tokens, choices of each, and experts."""

    tokens: int
    top_k: int
    experts: int


SHAPES = {
    "one token": Choices(1, 8, 128),
    "64 tokens": Choices(64, 8, 128),
    "256 tokens": Choices(256, 8, 128),
    "mixtral": Choices(16384, 2, 8),
    "qwen3": Choices(16384, 8, 128),
    "qwen3-next": Choices(32768, 10, 512),
}
COMPARISON = Comparison(
    names={"shape": ">12"},
    ms=">9.4f",
    rate=("M/s", ">9.1f"),
    rivals=(("sort", "compiled"), ">8.3f"),
    speed=lambda result: result["choices"] / result["ms"]["tgl"] / 1e3,
)


def sort(index: Tensor, experts: int) -> tuple[Tensor, ...]:
    """``source``, ``position``, ``token`` and ``offs``, of choices that are all in range."""
    chosen, source = torch.sort(index.reshape(-1), stable=True)
    rows = torch.arange(source.shape[0], device=index.device)
    position = torch.empty_like(source).scatter_(0, source, rows)
    offs = torch.searchsorted(chosen, torch.arange(experts, device=index.device), right=True, out_int32=True)
    return source, position, source // index.shape[1], offs


compiled = torch.compile(sort, fullgraph=True, dynamic=False)


def run_case(shape: str, args: argparse.Namespace) -> Result:
    tokens, top_k, experts = SHAPES[shape]
    torch.manual_seed(0)
    index = torch.rand(tokens, experts, device="cuda").topk(top_k).indices
    wanted = torch.ops.tgl.route(index.cpu(), experts)

    def wrong(got: Sequence[Tensor]) -> str | None:
        same = all(torch.equal(ours.cpu(), theirs) for ours, theirs in zip(got, wanted, strict=True))
        return None if same else "not the routing of the CPU"

    arms = {
        "tgl": lambda: torch.ops.tgl.route(index, experts),
        "sort": lambda: sort(index, experts),
        "compiled": lambda: compiled(index, experts),
    }
    return {"choices": index.numel(), "experts": experts, **compared(arms, of_result(wrong), args)}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = gpu_parser(__doc__)
    choice(parser, "--shapes", SHAPES)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    print(f"{needs_device()}, torch {torch.__version__}\n{COMPARISON.header()}")
    results = run_all(cases(shape=args.shapes), lambda shape: run_case(shape, args), COMPARISON.line)
    print(COMPARISON.report(results))
    save(args.out, results)


if __name__ == "__main__":
    main()
