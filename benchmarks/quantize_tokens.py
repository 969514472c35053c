"""Rows of experts from tokens on a GPU, quantised row by row, or every token once before it is copied to its rows.

    python benchmarks/quantize_tokens.py [--formats fp8_block ...] [--shapes qwen3 ...] [--samples N] [--out FILE]

The formats are those whose rowwise scales depend on the row alone. Arms: ``tgl``, ``group_quantize`` of tokens with
``rows``, which reads a token once for each of its choices; ``once``, ``group_quantize`` of the tokens as one group,
``dispatch`` of their codes, and scales gathered, of ``mxfp8`` by ``to_blocked_scale``; ``tokens``, ``codes`` and
``scales``, each of these steps alone; ``copy``, torch's kernel for a change of sign, of as many bytes as must move (the
tokens and the components once), half of them read. Experts are random. Every arm is a captured graph, 256 MB are
written before each replay, arms take turns in rotating order, and medians are compared.

Nothing is timed before ``tgl`` and ``once`` have the bytes of rows that were copied first. Results: a table of ratios
of times (above 1: tgl is faster), and ``--out FILE`` as JSON.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from harness.command import cases, choice, gpu_parser, needs_device, run_all
from harness.compared import Comparison, Result, compared, of_result
from harness.memory import copying
from harness.report import save
from torch import Tensor

import tgl
from tests.memory import same_bytes
from tgl.meta.components import Components

COPIED = torch.bfloat16  # what two codes are called while they are copied


class Block(NamedTuple):
    """Tokens, their width, experts, and choices of a token."""

    tokens: int
    hidden: int
    experts: int
    top_k: int


SHAPES = {
    "mixtral": Block(16384, 4096, 8, 2),
    "gpt-oss": Block(8192, 2880, 128, 4),
    "qwen3": Block(16384, 2048, 128, 8),
    "qwen3-small": Block(2048, 2048, 128, 8),
    "sonic-7b": Block(24576, 1536, 128, 8),
    "deepseek": Block(8192, 7168, 32, 8),
}
FORMATS: dict[str, dict[str, Any]] = {
    "fp8_block": dict(format="fp8_block"),
    "mxfp8": dict(format="mxfp8", scale_layout="blocked"),
}
COMPARISON = Comparison(
    names={"format": ">10", "shape": ">12"},
    ms=">9.4f",
    rate=("TB/s", ">7.2f"),
    rivals=(("once", "tokens", "codes", "scales", "copy"), ">8.3f"),
    speed=lambda result: result["bytes"] / result["ms"]["tgl"] / 1e9,
)


class Problem:
    """Tokens and where they go.

    Attributes:
        bytes: what must move.
    """

    def __init__(self, name: str, shape: Block, device: str = "cuda"):
        torch.manual_seed(0)
        self.name = name
        self.x = torch.randn(shape.tokens, shape.hidden, device=device, dtype=torch.bfloat16)
        index = torch.rand(shape.tokens, shape.experts, device=device).topk(shape.top_k).indices
        self.routing = tgl.route(index, shape.experts)
        self.all_tokens = torch.tensor([shape.tokens], dtype=torch.int32, device=device)
        self.quantised = self.tokens()
        self.bytes = self.x.nbytes + sum(t.nbytes for t in self.tgl())

    def group_quantize(self, x: Tensor, offs: Tensor, rows: Tensor | None = None, **options: Any) -> Components:
        options = {**FORMATS[self.name], "columnwise": False, **options}
        return tgl.group_quantize(x, offs, rows=rows, **options)

    def tgl(self) -> Components:
        return self.group_quantize(self.x, self.routing.offs, self.routing.token)

    def tokens(self) -> Components:
        """The tokens in their order; scales that are not laid out yet."""
        return self.group_quantize(self.x, self.all_tokens, scale_layout="compact")

    def copied(self, t: Tensor) -> Tensor:
        """``t`` of every row's token."""
        return tgl.dispatch(t.view(COPIED), self.routing).view(t.dtype)

    def codes(self) -> Tensor:
        return self.copied(self.quantised.data)

    def scales(self) -> Tensor:
        return self.scales_of(self.quantised.scale)

    def once(self) -> tuple[Tensor, Tensor]:
        """Data and scale."""
        made = self.tokens()
        return self.copied(made.data), self.scales_of(made.scale)

    def scales_of(self, scale: Tensor) -> Tensor:
        """The scales of rows from those of tokens."""
        if FORMATS[self.name].get("scale_layout") != "blocked":
            return scale.t().index_select(1, self.routing.token).t()
        shape = (self.routing.token.shape[0], self.x.shape[1])
        return tgl.to_blocked_scale(scale, self.routing.offs, self.routing.token, shape=shape, format=self.name)

    def copy(self) -> Callable[[], object]:
        return copying(self.bytes, self.x.device)

    def wrong(self, got: Components) -> str | None:
        wanted = self.group_quantize(tgl.dispatch(self.x, self.routing), self.routing.offs)
        for arm, made in (("tgl", got[:2]), ("once", self.once())):
            for component, ours, theirs in zip(Components._fields, made, wanted):
                if not same_bytes(ours, theirs):
                    return f"{component} of {arm} is not that of rows which were copied first"
        return None


def run_case(format: str, shape: str, args: argparse.Namespace) -> Result:
    problem = Problem(format, SHAPES[shape])
    arms = {name: getattr(problem, name) for name in ("tgl", "once", "tokens", "codes", "scales")}
    arms["copy"] = problem.copy()
    return {"bytes": problem.bytes, **compared(arms, of_result(problem.wrong), args)}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = gpu_parser(__doc__)
    choice(parser, "--formats", FORMATS)
    choice(parser, "--shapes", SHAPES)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    print(f"{needs_device()}, torch {torch.__version__}\n{COMPARISON.header()}")
    with torch.no_grad():
        every = cases(format=args.formats, shape=args.shapes)
        results = run_all(every, lambda **case: run_case(**case, args=args), COMPARISON.line)
    print(COMPARISON.report(results))
    save(args.out, results)


if __name__ == "__main__":
    main()
