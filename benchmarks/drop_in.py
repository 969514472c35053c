"""Experts that call torch's grouped product, on a GPU: by ATen's kernels and by tgl's, with not a line changed.

    python benchmarks/drop_in.py [--steps fp8-forward ...] [--shapes qwen3-g128 ...] [--routings zipf ...]
                                 [--samples N] [--out FILE]

The experts are written after torchtitan's: rows sorted by expert, ``torch.nn.functional.grouped_mm`` for gate, linear
half and output, SiLU and a product between them as calls.

===============  ======================================================================================================
step
===============  ======================================================================================================
``bfloat16``     forward, and backward to the gradients of rows and weights
``fp8-forward``  the forward's products alone, gate and linear half in one, by ``torch._scaled_grouped_mm`` of E4M3
                 operands that are there, with a scale for each row
``fp8-wgrad``    the products of both weight gradients in the same way; ATen wants groups of multiples of 16 rows
===============  ======================================================================================================

==================  ===================================================================================================
``tgl``             under ``tgl.integrations.torch.enabled()``
``torch``           ATen's kernels; of FP8 with ``use_fast_accum``, as torchao calls them
``torch slow``      those without it: sums of FP8 in float32, as tgl's are
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
STEPS = ("bfloat16", "fp8-forward", "fp8-wgrad")
PRODUCTS = ("product of gate and linear half", "product of the output")
SHAPES = dict(MODELS)
COMPARISON = Comparison(
    names={"step": ">11", "shape": ">16", "routing": ">13"},
    ms=">9.3f",
    rate=("TFLOP/s", ">9.0f"),
    rivals=(("torch", "torch slow", "tgl compiled", "torch compiled"), ">8.3f"),
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


def sixteens(sizes: Sequence[int]) -> list[int]:
    """Multiples of 16 of the same sum, which is one; the largest gets what others lose."""
    made = [size // 16 * 16 for size in sizes]
    made[made.index(max(made))] += sum(sizes) - sum(made)
    return made


class ScaledProblem:
    """Products of FP8 operands with a scale for each row.

    Attributes:
        operands: of every product: both as ``torch._scaled_grouped_mm`` takes them, and their scales.
    """

    def __init__(self, shape: Expert, routing: str, step: str):
        groups, rows, hidden, inner = shape
        self.sizes = sixteens(split(routing, groups, rows))
        self.offs = ends(self.sizes, "cuda")
        self.forward = step == "fp8-forward"
        widths = ((hidden, 2 * inner), (inner, hidden))

        def codes(*size: int) -> Tensor:
            return torch.randn(*size, device="cuda", dtype=DTYPE).to(torch.float8_e4m3fn)

        def scales(*size: int) -> Tensor:
            return torch.rand(*size, device="cuda") + 0.5

        def of_forward(depth: int, columns: int) -> tuple[Tensor, ...]:
            weight = codes(groups, columns, depth).transpose(1, 2)
            return codes(rows, depth), weight, scales(rows), scales(groups, columns)

        def of_gradient(depth: int, columns: int) -> tuple[Tensor, ...]:
            return codes(columns, rows), codes(depth, rows).t(), scales(groups * columns), scales(groups * depth)

        self.operands = [(of_forward if self.forward else of_gradient)(*width) for width in widths]

    def products(self, fast: bool) -> list[Tensor]:
        call, options = torch._scaled_grouped_mm, {"out_dtype": DTYPE, "use_fast_accum": fast}
        return [call(*operands, offs=self.offs, **options) for operands in self.operands]

    def enabled_products(self, products: Callable[[bool], list[Tensor]]) -> list[Tensor]:
        with enabled([self.offs.device.type]):
            return products(True)

    def oracle(self) -> list[Tensor]:
        """The products in float32, expert by expert."""
        groups, made = len(self.sizes), []
        for mat_a, mat_b, scale_a, scale_b in self.operands:
            if self.forward:
                out = torch.zeros(mat_a.shape[0], mat_b.shape[2], device=mat_a.device)
                for g, rows in spans(self.sizes):
                    out[rows] = mat_a[rows].float() @ mat_b[g].float() * scale_a[rows, None] * scale_b[g]
            else:
                out = torch.zeros(groups, mat_a.shape[0], mat_b.shape[1], device=mat_a.device)
                of_a, of_b = scale_a.view(groups, -1), scale_b.view(groups, -1)
                for g, rows in spans(self.sizes):
                    out[g] = mat_a[:, rows].float() @ mat_b[rows].float() * of_a[g, :, None] * of_b[g]
            made.append(out)
        return made


def gate(names: Sequence[str], wanted: list[Tensor]) -> Callable[[list[Tensor]], str | None]:
    """What is wrong with results of these names, or None."""

    def wrong(found: list[Tensor]) -> str | None:
        for name, got, want in zip(names, found, wanted, strict=True):
            if not (error := relative_error(got, want)) <= BOUND:
                return f"{name}: error {error:.1e}"
        return None

    return wrong


def run_case(step: str, shape: str, routing: str, args: argparse.Namespace) -> Result:
    torch.manual_seed(0)
    torch.compiler.reset()  # a function is compiled anew for a handful of shapes at most
    groups, rows, hidden, inner = SHAPES[shape]
    flops = {"flops": 6.0 * rows * hidden * inner, "groups": groups}
    if step == "bfloat16":
        problem = Problem(SHAPES[shape], routing)
        ours, theirs = (torch.compile(experts, fullgraph=True, dynamic=False) for _ in range(2))
        arms = {
            "tgl": lambda: problem.enabled_step(experts),
            "torch": lambda: problem.step(experts),
            "tgl compiled": lambda: problem.enabled_step(ours),
            "torch compiled": lambda: problem.step(theirs),
        }
        wrong = gate(RESULTS, problem.oracle())
        return {**flops, "flops": 3 * flops["flops"], **compared(arms, of_result(wrong), args)}
    scaled = ScaledProblem(SHAPES[shape], routing, step)
    ours, theirs = (torch.compile(scaled.products, fullgraph=True, dynamic=False) for _ in range(2))
    arms = {
        "tgl": lambda: scaled.enabled_products(scaled.products),
        "torch": lambda: scaled.products(True),
        "torch slow": lambda: scaled.products(False),
        "tgl compiled": lambda: scaled.enabled_products(ours),
        "torch compiled": lambda: theirs(True),
    }
    return {**flops, **compared(arms, of_result(gate(PRODUCTS, scaled.oracle())), args)}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = gpu_parser(__doc__)
    choice(parser, "--steps", STEPS)
    choice(parser, "--shapes", SHAPES)
    parser.add_argument("--routings", nargs="+", choices=ROUTINGS, default=list(QUICK_ROUTINGS))
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    device = needs_device()
    print(f"{device}, torch {torch.__version__}\n{COMPARISON.header()}")
    every = cases(step=args.steps, shape=args.shapes, routing=args.routings)
    results = run_all(every, lambda **case: run_case(**case, args=args), COMPARISON.line)
    print(COMPARISON.report(results))
    save(args.out, with_machine(device, results))


if __name__ == "__main__":
    main()
