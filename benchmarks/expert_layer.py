"""The expert layer, forward and backward, on one CPU thread: tgl against the implementations of transformers.

    python benchmarks/expert_layer.py [--quick] [--dtype float32] [--mode eager] [--case SUBSTRING] [--seconds N]

All arms run one module with the same weights and the same routing, interleaved in one process in an order that rotates.
The figures are medians of CPU milliseconds: with one thread, what a call takes on an idle machine. ``ratio`` is the
better of transformers' own arms (``eager``, its loop over experts, and ``grouped_mm``) divided by ours: above 1 we are
faster. ``ceiling`` is that better arm divided by the same FLOPs as dense matrix products (six products of all the rows
with one expert's matrices): where a layer is little else than its products, nothing can get past that number.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import NamedTuple

import torch
from harness.command import parser
from harness.gates import relative_error
from harness.report import mean_of, medians
from harness.timing import HostClock, interleaved
from torch import Tensor, nn

from tgl.integrations import transformers as integration

ARMS = ("eager", "grouped_mm", "tgl")


class Case(NamedTuple):
    """A layer and a batch: ``experts`` MLPs of ``hidden`` x ``inter``, ``tokens`` tokens with ``top_k`` slots each."""

    experts: int
    hidden: int
    inter: int
    tokens: int
    top_k: int
    routing: str

    def __str__(self) -> str:
        return f"G{self.experts} H{self.hidden} I{self.inter} S{self.tokens} k{self.top_k} {self.routing}"


SHAPES = (
    (8, 128, 256, 512, 2),
    (8, 1024, 2048, 1024, 2),
    (32, 128, 128, 512, 4),
    (32, 1024, 1024, 1024, 4),
    (128, 128, 64, 1024, 8),
    (128, 1024, 512, 1024, 8),
)
ROUTINGS = ("balanced", "skewed")
CASES = tuple(Case(*shape, routing) for shape in SHAPES for routing in ROUTINGS)
QUICK = tuple(Case(*SHAPES[i], "balanced") for i in (0, 3, 4))


def routing(case: Case) -> Tensor:
    """``[S, k]`` distinct experts per token: all equally likely, or with probability proportional to 1 / (1 + rank)."""
    generator = torch.Generator().manual_seed(case.experts)
    chances = torch.ones(case.experts)
    if case.routing == "skewed":
        chances = 1 / torch.arange(1, case.experts + 1)[torch.randperm(case.experts, generator=generator)]
    return torch.multinomial(chances.expand(case.tokens, -1), case.top_k, generator=generator)


class Layer:
    """The experts of one case with their inputs; ``step(arm)`` runs a forward and a backward."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

        torch.manual_seed(0)
        config = SimpleNamespace(
            num_experts=case.experts,
            hidden_size=case.hidden,
            moe_intermediate_size=case.inter,
            hidden_act="silu",
            _experts_implementation="eager",
        )
        self.experts: nn.Module = Qwen3MoeExperts(config).to(dtype)
        for parameter in self.experts.parameters():
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        self.x = torch.randn(case.tokens, case.hidden).to(dtype).requires_grad_()
        self.index = routing(case)
        self.weights = torch.rand(case.tokens, case.top_k).to(dtype).requires_grad_()
        self.dy = torch.randn(case.tokens, case.hidden).to(dtype)
        self.compiled: dict[str, Callable] = {}

    def call(self, arm: str, compiled: bool) -> Callable:
        """The module's forward with implementation ``arm``."""
        self.experts.config._experts_implementation = arm
        if not compiled:
            return self.experts
        if arm not in self.compiled:
            # transformers' loop depends on data, so the compiler breaks it up; the other arms are one graph.
            self.compiled[arm] = torch.compile(self.experts.forward, fullgraph=arm != "eager", dynamic=False)
        return self.compiled[arm]

    def step(self, arm: str, compiled: bool = False) -> list[Tensor]:
        """Output and all gradients."""
        leaves = [self.x, self.weights, *self.experts.parameters()]
        out = self.call(arm, compiled)(self.x, self.index, self.weights)
        out.backward(self.dy)
        results = [out.detach(), *(leaf.grad for leaf in leaves)]
        for leaf in leaves:
            leaf.grad = None
        return results

    def check(self, compiled: bool) -> None:
        """tgl and ``grouped_mm`` compute the same thing: nothing is timed before that. Also warms up."""
        for ours, theirs in zip(self.step("tgl", compiled), self.step("grouped_mm", compiled), strict=True):
            error = relative_error(ours, theirs.float())
            assert error < 8 * torch.finfo(ours.dtype).eps, f"the arms differ by {error:.1e}"
        if compiled:
            self.step("eager", compiled)


def dense(case: Case, dtype: torch.dtype) -> Callable[[], None]:
    """The layer's FLOPs as the products of a dense MLP on all routed rows."""
    rows = case.tokens * case.top_k
    x, up = torch.randn(rows, case.hidden).to(dtype), torch.randn(2 * case.inter, case.hidden).to(dtype)
    h, down = torch.randn(rows, case.inter).to(dtype), torch.randn(case.hidden, case.inter).to(dtype)
    dh, dy = torch.randn(rows, 2 * case.inter).to(dtype), torch.randn(rows, case.hidden).to(dtype)
    pairs = ((x, up.t()), (h, down.t()), (dy, down), (dy.t(), h), (dh, up), (dh.t(), x))
    outs = [a @ b for a, b in pairs]

    def run() -> None:
        for (a, b), out in zip(pairs, outs):
            torch.mm(a, b, out=out)

    return run


def measure(case: Case, dtype: torch.dtype, compiled: bool, seconds: float) -> dict[str, float]:
    """Median seconds of every arm and of the dense products."""
    torch._dynamo.reset()
    layer = Layer(case, dtype)
    layer.check(compiled)
    arms: dict[str, Callable[[], object]] = {arm: (lambda arm=arm: layer.step(arm, compiled)) for arm in ARMS}
    arms["dense"] = dense(case, dtype)
    clock = HostClock()
    once = medians(interleaved(arms, clock, range(1)))
    if once["eager"] > 3 * once["grouped_mm"]:
        del arms["eager"]  # its backward fills a gradient of all experts for each expert: no contender, and very slow
    repeats = max(5, min(60, int(seconds / sum(once[name] for name in arms))))
    return once | medians(interleaved(arms, clock, range(repeats)))


def rows(options: argparse.Namespace) -> Iterator[tuple[str, float]]:
    """Measure and print every case; yields its name and ratio."""
    print(f"{'mode':9} {'dtype':9} {'case':42} {'eager':>8} {'grp_mm':>8} {'tgl':>8} {'dense':>8}   ratio  ceiling")
    for mode in options.mode:
        for dtype in options.dtype:
            for case in QUICK if options.quick else CASES:
                if options.case not in str(case):
                    continue
                t = measure(case, getattr(torch, dtype), mode == "compiled", options.seconds)
                best = min(t["eager"], t["grouped_mm"])
                columns = " ".join(f"{t[name] * 1e3:8.2f}" for name in (*ARMS, "dense"))
                print(
                    f"{mode:9} {dtype:9} {case!s:42} {columns} {best / t['tgl']:7.2f} {best / t['dense']:8.2f}",
                    flush=True,
                )
                yield f"{mode} {dtype} {case}", best / t["tgl"]


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    made = parser(__doc__, quick="three balanced cases instead of all")
    made.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    made.add_argument("--mode", nargs="+", default=["eager", "compiled"], choices=["eager", "compiled"])
    made.add_argument("--case", default="", help="only cases whose name contains this")
    made.add_argument("--seconds", type=float, default=8.0, help="time to spend on each line, roughly")
    return made.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(argv)
    torch.set_num_threads(1)
    integration.register()
    ratios = dict(rows(options))
    mean = mean_of(ratios.items())
    if mean is not None:
        print(f"geometric mean {mean.mean:.2f} over {mean.of} cases; worst {mean.worst:.2f} ({mean.where})")


if __name__ == "__main__":
    main()
