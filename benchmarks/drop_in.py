"""Experts that call torch's grouped product, on a GPU: by ATen's kernels and by tgl's, with not a line changed.

    python benchmarks/drop_in.py [--shapes qwen3-g128 ...] [--routings zipf ...] [--samples N] [--out FILE]

The experts are written after torchtitan's: rows sorted by expert, ``torch.nn.functional.grouped_mm`` for gate, linear
half and output, SiLU and a product between them as calls. A step is forward, and backward to the gradients of rows and
weights, in bfloat16.

==================  ===================================================================================================
``tgl``             under ``tgl.integrations.torch.enabled()``
``torch``           ATen's kernels
``tgl compiled``    the first under torch.compile(fullgraph=True)
``torch compiled``  the second under it
==================  ===================================================================================================

Every arm is a captured graph, 256 MB are written before each replay, arms take turns in rotating order, and medians are
compared. Nothing is timed before output and gradients have passed against a loop over the experts in float32: at most
eight roundings to bfloat16 of error. Results: a table of milliseconds, model TFLOP/s and ratios of times (above 1: tgl
is faster), and ``--out FILE`` as JSON.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch
from harness.command import cases, choice, gpu_parser, needs_device, run_all
from harness.compared import Comparison, Result, compared, of_result
from harness.gates import relative_error
from harness.report import save, with_machine
from harness.shapes import MODELS, QUICK_ROUTINGS, ROUTINGS, Expert, split
from torch import Tensor
from torch.nn.functional import grouped_mm, silu

from tests.kernel_cases import ends, spans
from tgl.integrations.torch import enabled

DTYPE = torch.bfloat16
BOUND = 8 * torch.finfo(DTYPE).eps
RESULTS = ("output", "gradient of x", "gradient of w1", "gradient of w2", "gradient of w3")
SHAPES = dict(MODELS)
COMPARISON = Comparison(
    names={"shape": ">20", "routing": ">13"},
    ms=">9.3f",
    rate=("TFLOP/s", ">9.0f"),
    rivals=(("torch", "tgl compiled", "torch compiled"), ">8.3f"),
    speed=lambda result: result["flops"] / result["ms"]["tgl"] / 1e9,
)


def experts(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, offs: Tensor) -> Tensor:
    """``[T, H] -> [T, H]``; weights are ``[G, out, in]``."""
    gate = grouped_mm(x, w1.transpose(1, 2), offs=offs)
    linear = grouped_mm(x, w3.transpose(1, 2), offs=offs)
    return grouped_mm(silu(gate) * linear, w2.transpose(1, 2), offs=offs)


class Problem:
    """The values that all arms share."""

    def __init__(self, shape: Expert, routing: str):
        groups, rows, hidden, inner = shape
        self.sizes = split(routing, groups, rows)

        def random(*size: int) -> Tensor:
            return torch.randn(*size, device="cuda", dtype=DTYPE)

        weights = [
            random(groups, *size) / size[1] ** 0.5 for size in ((inner, hidden), (hidden, inner), (inner, hidden))
        ]
        self.leaves = [t.requires_grad_() for t in (random(rows, hidden), *weights)]
        self.dy, self.offs = random(rows, hidden), ends(self.sizes, "cuda")

    def step(self, forward: Callable[..., Tensor]) -> list[Tensor]:
        y = forward(*self.leaves, self.offs)
        return [y.detach(), *torch.autograd.grad(y, self.leaves, self.dy)]

    def enabled_step(self, forward: Callable[..., Tensor]) -> list[Tensor]:
        with enabled([self.dy.device.type]):
            return self.step(forward)

    def oracle(self) -> list[Tensor]:
        """A step in float32, expert by expert."""
        x, *weights = self.leaves
        y = torch.zeros_like(x, dtype=torch.float32)
        grads = [torch.zeros_like(leaf, dtype=torch.float32) for leaf in self.leaves]
        for g, rows in spans(self.sizes):
            own = [t.detach().float().requires_grad_() for t in (x[rows], *(w[g] for w in weights))]
            part, w1, w2, w3 = own
            out = (silu(part @ w1.t()) * (part @ w3.t())) @ w2.t()
            y[rows] = out.detach()
            found = torch.autograd.grad(out, own, self.dy[rows].float())
            grads[0][rows] = found[0]
            for grad, of_group in zip(grads[1:], found[1:]):
                grad[g] = of_group
        return [y, *grads]


def run_case(shape: str, routing: str, args: argparse.Namespace) -> Result:
    torch.manual_seed(0)
    torch.compiler.reset()  # a function is compiled anew for a handful of shapes at most
    problem = Problem(SHAPES[shape], routing)
    wanted = problem.oracle()

    def wrong(found: list[Tensor]) -> str | None:
        for name, got, want in zip(RESULTS, found, wanted, strict=True):
            if not (error := relative_error(got, want)) <= BOUND:
                return f"{name}: error {error:.1e}"
        return None

    ours, theirs = (torch.compile(experts, fullgraph=True, dynamic=False) for _ in range(2))
    arms = {
        "tgl": lambda: problem.enabled_step(experts),
        "torch": lambda: problem.step(experts),
        "tgl compiled": lambda: problem.enabled_step(ours),
        "torch compiled": lambda: problem.step(theirs),
    }
    groups, rows, hidden, inner = SHAPES[shape]
    return {"flops": 18.0 * rows * hidden * inner, "groups": groups, **compared(arms, of_result(wrong), args)}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = gpu_parser(__doc__)
    choice(parser, "--shapes", SHAPES)
    parser.add_argument("--routings", nargs="+", choices=ROUTINGS, default=list(QUICK_ROUTINGS))
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    device = needs_device()
    print(f"{device}, torch {torch.__version__}\n{COMPARISON.header()}")
    every = cases(shape=args.shapes, routing=args.routings)
    results = run_all(every, lambda **case: run_case(**case, args=args), COMPARISON.line)
    print(COMPARISON.report(results))
    save(args.out, with_machine(device, results))


if __name__ == "__main__":
    main()
