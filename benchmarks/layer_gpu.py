"""The whole expert layer, forward and backward, on a GPU: bf16 and every recipe against torch's grouped GEMM.

    python benchmarks/layer_gpu.py [--quick] [--shapes mixtral ...] [--routings zipf ...] [--arms bf16 ...] [--out FILE]

A step is ``GroupedMLP`` (SwiGLU, a probability per row) forward, and backward to the gradients of the rows, the
probabilities and both weights. All arms have the same values and run in one process:

============  =======================================================================================================
``torch``     torch._grouped_mm, SwiGLU times probabilities compiled, autograd; replayed as a CUDA graph: the baseline
``called``    the same in eager mode
``eager``     tgl in bf16 as a call
``compiled``  the same under torch.compile(fullgraph=True), as a call
``bf16``      the same, replayed
a recipe's    replayed; weights are quantised in every step
============  =======================================================================================================

Recipes that some op has no kernel for on this device are named with the reason of ``explain``. Nothing is timed before
an arm's outputs and gradients have passed against a loop over the experts in float32: in bf16 at most twice the error
of the baseline, in a recipe at most four times that of rounding one operand (a result has two to six rounded operands
behind it, whose errors add in squares); and a graph must give the bits of a call for every routing it is replayed with.

L2 is flushed before each step, arms take turns in random order, and medians of the device's time are compared. FLOPs
are those of the routed rows' nine products. Ratios are the baseline's time divided by the arm's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from harness.command import cases, choice, gpu_parser, needs_device, run_all
from harness.gates import relative_error
from harness.report import mean_of, quotient, save, summaries, with_machine
from harness.shapes import MODELS, QUICK_ROUTINGS, ROUTINGS, Expert, split
from harness.timing import WARM_UP, Replay, calls, warm_up, why
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import tgl
from tests.kernel_cases import ends, spans
from tgl import recipes
from tgl.meta import formats

BF16 = torch.bfloat16
BASELINE = "torch"
RECIPES: dict[str, recipes.Recipe] = {
    "fp8_current": recipes.Float8CurrentScaling(),
    "fp8_delayed": recipes.DelayedScaling(),
    "fp8_block": recipes.Float8BlockScaling(),
    "mxfp8": recipes.MXFP8BlockScaling(),
    "nvfp4": recipes.NVFP4BlockScaling(),
}
ARMS = (BASELINE, "called", "eager", "compiled", "bf16", *RECIPES)
RESULTS = ("output", "gradient of rows", "gradient of probabilities", "gradient of w1", "gradient of w2")
SAMPLE = (4, 512, 256)  # experts, rows and width of what `explain` is asked about


def flops(layer: Expert) -> float:
    """Return the FLOPs of a step: three products, each forward and for two gradients."""
    return 18.0 * layer.rows * layer.hidden * layer.inner


QUICK = ("mixtral", "qwen3-g16", "deepseek-g32")


def gated(h: Tensor, probs: Tensor) -> Tensor:
    gate, linear = h.chunk(2, -1)
    return (nn.functional.silu(gate.float()) * linear.float() * probs[:, None]).to(h.dtype)


compiled_gated = torch.compile(gated, dynamic=False)


@dataclass
class Arm:
    """A way to run a step.

    Attributes:
        step: returns what ``RESULTS`` names.
        state: buffers that a step changes, and their values before it.
        graph: of ``step``, if the arm is replayed.
    """

    step: Callable[[], list[Tensor]]
    recipe: recipes.Recipe | None = None
    module: nn.Module | None = None
    state: tuple[Tensor, ...] = ()
    graph: Replay | None = None

    def warm(self, replayed: bool) -> None:
        """Run a few times, so that recipes have seen the values, and capture."""
        if replayed:
            warm_up(self.step)
        else:
            for _ in range(WARM_UP):
                self.step()
        self.state = tuple(b.clone() for b in self.module.buffers()) if self.module else ()
        if replayed:
            self.graph = Replay(self.step, runs=0)

    def run(self) -> None:
        """Run a step for the clock."""
        (self.graph or self.step)()

    def results(self, called: bool = False) -> list[Tensor]:
        """Return the results of a step from the state after warming up; ``called``: eagerly, not by the graph."""
        for buffer, value in zip(self.module.buffers() if self.module else (), self.state):
            buffer.copy_(value)
        if self.graph is None or called:
            return self.step()
        self.graph()
        return [t.clone() for t in self.graph.result]


class Problem:
    """The values all arms share."""

    def __init__(self, layer: Expert, sizes: list[int], device: str = "cuda"):
        self.layer, self.device = layer, device
        groups, rows, hidden, inner = layer
        options: dict = {"device": device, "dtype": BF16}
        self.x = torch.randn(rows, hidden, **options).requires_grad_()
        self.probs = torch.rand(rows, device=device).requires_grad_()
        self.dy = torch.randn(rows, hidden, **options)
        self.w1 = (torch.randn(groups, 2 * inner, hidden, **options) * hidden**-0.5).requires_grad_()
        self.w2 = (torch.randn(groups, hidden, inner, **options) * inner**-0.5).requires_grad_()
        self.offs = torch.zeros(groups, dtype=torch.int32, device=device)
        self.route(sizes)

    def route(self, sizes: list[int]) -> None:
        self.sizes = sizes
        self.offs.copy_(ends(sizes))

    def _step(self, forward: Callable[[], Tensor], w1: Tensor, w2: Tensor) -> list[Tensor]:
        y = forward()
        return [y.detach(), *torch.autograd.grad(y, (self.x, self.probs, w1, w2), self.dy)]

    def torch(self) -> list[Tensor]:
        """A step of the baseline."""

        def forward() -> Tensor:
            h = torch._grouped_mm(self.x, self.w1.transpose(1, 2), offs=self.offs)
            return torch._grouped_mm(compiled_gated(h, self.probs), self.w2.transpose(1, 2), offs=self.offs)

        return self._step(forward, self.w1, self.w2)

    def tgl(self, recipe: recipes.Recipe | None = None, compiled: bool = False) -> Arm:
        """An arm of the layer in bf16 or in a recipe."""
        groups, _, hidden, inner = self.layer
        mlp = tgl.GroupedMLP(groups, hidden, inner, params_dtype=BF16, device=self.device, recipe=recipe)
        w1, w2 = mlp.fc1.weight, mlp.fc2.weight
        w1.data, w2.data = self.w1.detach(), self.w2.detach()
        forward = torch.compile(mlp.forward_offsets, fullgraph=True) if compiled else mlp.forward_offsets
        return Arm(lambda: self._step(lambda: forward(self.x, self.offs, self.probs), w1, w2), recipe, mlp)

    def arm(self, name: str) -> Arm:
        if name in (BASELINE, "called"):
            return Arm(self.torch)
        return self.tgl(RECIPES.get(name), name == "compiled")

    def oracle(self) -> list[Tensor]:
        """A step in float32, expert by expert."""
        leaves = [t.detach().float().requires_grad_() for t in (self.x, self.probs, self.w1, self.w2)]
        x, probs, w1, w2 = leaves
        grads = [torch.zeros_like(t) for t in leaves]
        y = torch.zeros_like(x)
        for g, rows in spans(self.sizes):
            part = [leaf.detach().requires_grad_() for leaf in (x[rows], probs[rows], w1[g], w2[g])]
            out = gated(part[0] @ part[2].t(), part[1]) @ part[3].t()
            for grad, found in zip(
                (grads[0][rows], grads[1][rows], grads[2][g], grads[3][g]),
                torch.autograd.grad(out, part, self.dy[rows].float()),
            ):
                grad.copy_(found)
            y[rows] = out.detach()
        return [y, *grads]


STEPS = {"E4M3": 0.125, "E5M2": 0.25, "E2M1": 0.5}  # of elements, relative, at 1


def rounding(recipe: recipes.Recipe) -> float:
    """Relative error of rounding an operand, the coarsest of the recipe's: evenly spread over half a step."""
    steps = [STEPS[formats.FORMATS[s.format].element_of(s.dtype)] for s in recipe.operands]
    return max(steps) / 2 / 3**0.5


def unserved(recipe: recipes.Recipe, device: str) -> str | None:
    """Why a step in a recipe does not run on kernels, or None; nothing is computed."""
    with FakeTensorMode():
        return _unserved(recipe, device)


def _unserved(recipe: recipes.Recipe, device: str) -> str | None:
    groups, rows, width = SAMPLE
    x = torch.empty(rows, width, device=device, dtype=BF16)
    w = torch.empty(groups, width, width, device=device, dtype=BF16)
    offs = torch.empty(groups, device=device, dtype=torch.int32)
    specs = recipe.operands
    made = []
    for spec, values, given in zip(specs, (x, w, x), (offs, None, offs)):
        scale = torch.empty(groups, device=device) if spec.delayed else None
        rng = torch.empty(2, dtype=torch.int64, device=device) if spec.stochastic else None
        if reason := _refusal("group_quantize", values, given, scale, None, rng, **spec.options()):
            return reason
        made.append(spec.quantize(values, given, scale=scale, rng=rng))
    one, matrix, grad = made
    amax = formats.FORMATS[recipe.format].decodes_with_amax
    names = {"format": recipe.format, "scale_layout": specs.input.scale_layout}
    fprop = (one.data, one.scale, matrix.data, matrix.scale, offs, *(one.amax, matrix.amax) * amax)
    columns = (grad.columnwise_data, grad.columnwise_scale, one.columnwise_data, one.columnwise_scale)
    wgrad = (*columns, offs, *(grad.columnwise_amax, one.columnwise_amax) * amax)
    return _refusal("grouped_gemm_scaled", *fprop, **names) or _refusal("grouped_gemm_scaled_wgrad", *wgrad, **names)


def _refusal(op: str, *args: object, **kwargs: object) -> str | None:
    found = tgl.explain(op, *args, **kwargs)
    if found.chosen is None or found.syncs or found.emulates:
        return f"{op} " + "; ".join(reason for _, reason in found.refused)
    return None


def wrong(arm: Arm, wanted: list[Tensor], baseline: list[float]) -> str | None:
    """Return the error of an arm's results, or None."""
    got = arm.results()
    for name, ours, right, theirs in zip(RESULTS, got, wanted, baseline):
        error = relative_error(ours, right)
        bound = 4 * rounding(arm.recipe) if arm.recipe else 2 * theirs + 1e-5
        if not error <= bound:
            return f"{name}: error {error:.1e}, at most {bound:.1e}"
    if arm.graph is not None and not same(got, arm.results(called=True)):
        return "a replay does not give the bits of a call"
    return None


def same(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others))


def gated_arms(problem: Problem, names: Sequence[str], replays: bool = True) -> tuple[dict[str, Arm], dict[str, str]]:
    """The arms that may be timed, and what is wrong with the others.

    Args:
        problem: its routing changes on the way, and is what it was in the end.
        names: of ``ARMS``; the baseline is always there.
        replays: whether arms are captured; without a GPU all run eagerly.
    """
    arms: dict[str, Arm] = {}
    reasons: dict[str, str] = {}
    for name in dict.fromkeys((BASELINE, *names)):
        recipe = RECIPES.get(name)
        if recipe is not None and (reason := unserved(recipe, problem.device)):
            reasons[name] = reason
            continue
        try:
            arms[name] = problem.arm(name)
            arms[name].warm(replays and name not in ("called", "eager", "compiled"))
        except Exception as error:  # of an arm; the others go on
            arms.pop(name, None)
            reasons[name] = why(error)
    sizes = problem.sizes
    for attempt in (sizes[1:] + sizes[:1], sizes):
        problem.route(attempt)
        wanted = problem.oracle()
        # Without the baseline its bound is that of a few roundings to bf16.
        errors = [8 * torch.finfo(BF16).eps] * len(RESULTS)
        if BASELINE in arms:
            errors = [relative_error(*pair) for pair in zip(arms[BASELINE].results(), wanted)]
        for name in [n for n in arms if n not in (BASELINE, "called")]:
            if reason := wrong(arms[name], wanted, errors):
                reasons[name] = reason
                del arms[name]
    return arms, reasons


def run_case(shape: str, routing: str, args: argparse.Namespace) -> dict:
    layer = MODELS[shape]
    torch.manual_seed(0)
    torch._dynamo.reset()
    problem = Problem(layer, split(routing, layer.groups, layer.rows))
    arms, reasons = gated_arms(problem, args.arms)
    times = summaries(calls({name: arm.run for name, arm in arms.items()}, args.samples, args.clean_l2))
    return {**layer._asdict(), "flops": flops(layer), "times": times, "left out": reasons}


def ratio(result: dict, arm: str) -> float | None:
    """The baseline's time divided by the arm's."""
    return quotient(result["times"], BASELINE, arm)


def header(names: Sequence[str]) -> str:
    return f"{'shape':>15} {'routing':>13} {'torch ms':>9} {'TF/s':>5}" + "".join(f"{name:>12}" for name in names)


def line(result: dict, names: Sequence[str]) -> str:
    """A row of the table: the baseline, then the ratio of every arm."""
    base = result["times"].get(BASELINE)
    head = f"{result['shape']:>15} {result['routing']:>13} "
    head += f"{base['median']:9.3f} {result['flops'] / base['median'] / 1e9:5.0f}" if base else f"{'-':>9} {'-':>5}"
    cells = (f"{r:12.3f}" if (r := ratio(result, name)) else f"{'-':>12}" for name in names)
    return head + "".join(cells)


def report(results: list[dict], names: Sequence[str]) -> str:
    """Geometric means and worst cases, then the arms that were left out and why."""
    lines = ["", "time of torch / time of the arm: geometric mean (worst, where)"]
    for name in names:
        if mean := mean_of((f"{r['shape']} {r['routing']}", ratio(r, name)) for r in results):
            lines.append(f"{name:>12} {mean}")
    reasons: dict[tuple[str, str], list[str]] = {}
    for result in results:
        for arm, reason in result.get("left out", {}).items():
            reasons.setdefault((arm, reason), []).append(f"{result['shape']} {result['routing']}")
    for (arm, reason), where in reasons.items():
        lines.append(f"{arm:>12} not in {'all' if len(where) == len(results) else ', '.join(where)}: {reason}")
    return "\n".join(lines)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = gpu_parser(__doc__, quick="three shapes, two routings", busy=False)
    choice(parser, "--shapes", MODELS, default=False)
    choice(parser, "--routings", ROUTINGS, default=False)
    choice(parser, "--arms", ARMS[1:])
    args = parser.parse_args(argv)
    args.shapes = args.shapes or list(QUICK if args.quick else MODELS)
    args.routings = args.routings or list(QUICK_ROUTINGS if args.quick else ROUTINGS)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    device = needs_device()
    print(f"{device}, torch {torch.__version__}, {args.samples} samples\n{header(args.arms)}")
    every = cases(shape=args.shapes, routing=args.routings)
    run = lambda **case: run_case(**case, args=args)  # noqa: E731
    results = run_all(every, run, lambda result: line(result, args.arms))
    print(report(results, args.arms))
    save(args.out, with_machine(device, results))


if __name__ == "__main__":
    main()
