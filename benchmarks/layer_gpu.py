"""The whole expert layer, forward and backward, on a GPU: bf16 and every recipe against torch's grouped GEMM.

    python benchmarks/layer_gpu.py [--quick] [--shapes mixtral ...] [--routings zipf ...] [--arms bf16 ...] [--out FILE]

A step is ``GroupedMLP`` (SwiGLU, a probability per row) forward, and backward to the gradients of the rows, the
probabilities and both weights. All arms have the same values and run in one process:

============  =======================================================================================================
``torch``     torch._grouped_mm, SwiGLU times probabilities compiled, autograd; replayed as a CUDA graph: the baseline
``called``    the same as a call
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
import itertools
import json
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from grouped_gemm import L2_BYTES, ROUTINGS, SHAPES, relative_error, split, summary
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import tgl
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


class Layer(NamedTuple):
    """Experts, routed rows, width of the layer and of its activation."""

    groups: int
    rows: int
    hidden: int
    inner: int

    @property
    def flops(self) -> float:
        """Of a step: three products, each forward and for two gradients."""
        return 18.0 * self.rows * self.hidden * self.inner


LAYERS = {
    name.removesuffix("-fc1"): Layer(s.groups, s.rows, s.depth, s.columns)
    for name, s in SHAPES.items()
    if name.endswith("-fc1")
}
QUICK = ("mixtral", "qwen3-g16", "deepseek-g32")


def gated(h: Tensor, probs: Tensor) -> Tensor:
    gate, linear = h.chunk(2, -1)
    return (nn.functional.silu(gate.float()) * linear.float() * probs[:, None]).to(h.dtype)


compiled_gated = torch.compile(gated, dynamic=False)


@dataclass
class Arm:
    """One way to run a step.

    Attributes:
        step: returns what ``RESULTS`` names.
        state: buffers that a step changes, and their values before it.
        graph: replays ``step`` if the arm is a graph; its results are then ``held``.
    """

    step: Callable[[], list[Tensor]]
    recipe: recipes.Recipe | None = None
    module: nn.Module | None = None
    state: tuple[Tensor, ...] = ()
    graph: torch.cuda.CUDAGraph | None = None
    held: Sequence[Tensor] = ()

    def warm(self, replayed: bool) -> None:
        """Run a few times, so that recipes have seen the values, and capture."""
        if replayed:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    self.step()
            torch.cuda.current_stream().wait_stream(stream)
        else:
            for _ in range(3):
                self.step()
        self.state = tuple(b.clone() for b in self.module.buffers()) if self.module else ()
        if replayed:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.held = self.step()

    def run(self) -> None:
        """One step for the clock."""
        if self.graph is not None:
            self.graph.replay()
        else:
            self.step()

    def results(self, called: bool = False) -> list[Tensor]:
        """Of a step from the state after warming up; ``called``: not by the graph."""
        for buffer, value in zip(self.module.buffers() if self.module else (), self.state):
            buffer.copy_(value)
        if self.graph is None or called:
            return self.step()
        self.graph.replay()
        return [t.clone() for t in self.held]


class Problem:
    """The values all arms share."""

    def __init__(self, layer: Layer, sizes: list[int], device: str = "cuda"):
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
        self.offs.copy_(torch.tensor(sizes).cumsum(0))

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
        y, start = torch.zeros_like(x), 0
        for g, size in enumerate(self.sizes):
            rows = slice(start, start + size)
            start += size
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
    for spec, values, ends in zip(specs, (x, w, x), (offs, None, offs)):
        scale = torch.empty(groups, device=device) if spec.delayed else None
        rng = torch.empty(2, dtype=torch.int64, device=device) if spec.stochastic else None
        if reason := _refusal("group_quantize", values, ends, scale, None, rng, **spec.options()):
            return reason
        made.append(spec.quantize(values, ends, scale=scale, rng=rng))
    one, matrix, grad = made
    amax = formats.FORMATS[recipe.format].decodes_with_amax
    names = {"format": recipe.format, "scale_layout": specs.input.scale_layout}
    fprop = (one.data, one.scale, matrix.data, matrix.scale, offs, *(one.amax, matrix.amax) * amax)
    columns = (grad.columnwise_data, grad.columnwise_scale, one.columnwise_data, one.columnwise_scale)
    wgrad = (*columns, offs, *(grad.columnwise_amax, one.columnwise_amax) * amax)
    return _refusal("grouped_gemm_scaled", *fprop, **names) or _refusal("grouped_gemm_scaled_wgrad", *wgrad, **names)


def _refusal(op: str, *args: object, **kwargs: object) -> str | None:
    found = tgl.explain(op, *args, **kwargs)
    if found.chosen is None or found.syncs:
        return f"{op} " + "; ".join(reason for _, reason in found.refused)
    return None


def wrong(arm: Arm, wanted: list[Tensor], baseline: list[float]) -> str | None:
    """What is wrong with an arm's results, or None."""
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
        replays: whether arms are captured; without a GPU all are called.
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
            reasons[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
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


def measure(arms: dict[str, Arm], samples: int) -> dict[str, list[float]]:
    """Milliseconds of ``samples`` rounds of all arms, each in an order of its own: a clock follows what ran before."""
    flush = torch.empty(L2_BYTES, dtype=torch.uint8, device="cuda")
    names = list(arms)
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in names}
    order = random.Random(0)
    for sample in range(samples + 3):
        for name in order.sample(names, len(names)):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush.zero_()
            torch.cuda.synchronize()  # what the host takes to issue a call is part of it
            start.record()
            arms[name].run()
            end.record()
            if sample >= 3:
                events[name].append((start, end))
        torch.cuda.synchronize()
    return {name: [start.elapsed_time(end) for start, end in pairs] for name, pairs in events.items()}


def run_case(name: str, routing: str, names: Sequence[str], samples: int) -> dict:
    layer = LAYERS[name]
    torch.manual_seed(0)
    torch._dynamo.reset()
    problem = Problem(layer, split(routing, layer.groups, layer.rows))
    arms, reasons = gated_arms(problem, names)
    times = {arm: summary(t) for arm, t in measure(arms, samples).items()} if arms else {}
    result = {"shape": name, "routing": routing, **layer._asdict(), "flops": layer.flops}
    return {**result, "times": times, "left out": reasons}


def ratio(result: dict, arm: str) -> float | None:
    """The baseline's time divided by the arm's."""
    times = result["times"]
    return times[BASELINE]["median"] / times[arm]["median"] if arm in times and BASELINE in times else None


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
        found = [(r, result) for result in results if (r := ratio(result, name))]
        if found:
            mean = math.exp(statistics.fmean(math.log(r) for r, _ in found))
            low, worst = min(found, key=lambda pair: pair[0])
            where = f"{low:.3f}, {worst['shape']} {worst['routing']}, of {len(found)}"
            lines.append(f"{name:>12} {mean:6.3f}  ({where})")
    reasons: dict[tuple[str, str], list[str]] = {}
    for result in results:
        for arm, reason in result["left out"].items():
            reasons.setdefault((arm, reason), []).append(f"{result['shape']} {result['routing']}")
    for (arm, reason), where in reasons.items():
        lines.append(f"{arm:>12} not in {'all' if len(where) == len(results) else ', '.join(where)}: {reason}")
    return "\n".join(lines)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three shapes, two routings")
    parser.add_argument("--shapes", nargs="+", choices=LAYERS)
    parser.add_argument("--routings", nargs="+", choices=ROUTINGS)
    parser.add_argument("--arms", nargs="+", choices=ARMS[1:], default=ARMS[1:], help=f"besides {BASELINE}")
    parser.add_argument("--samples", type=int, default=30)
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args(argv)
    args.shapes = args.shapes or list(QUICK if args.quick else LAYERS)
    args.routings = args.routings or list(("balanced", "zipf") if args.quick else ROUTINGS)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    if not torch.cuda.is_available():
        raise SystemExit("needs a CUDA device")
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}, {args.samples} samples\n{header(args.arms)}")
    results = []
    for name, routing in itertools.product(args.shapes, args.routings):
        try:
            results.append(run_case(name, routing, args.arms, args.samples))
            print(line(results[-1], args.arms), flush=True)
        except torch.OutOfMemoryError:
            print(f"{name:>15} {routing:>13}  out of memory", flush=True)
        torch.cuda.empty_cache()
    print(report(results, args.arms))
    if args.out:
        found = {"device": device, "torch": torch.__version__, "results": results}
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
