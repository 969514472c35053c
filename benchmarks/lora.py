"""LoRA on frozen experts: a training step against the frozen layer's forward and input gradient, and their memory.

    python benchmarks/lora.py [--quick] [--device cpu] [--shapes small ...] [--ranks 16 ...] [--arms lora ...]

A step is an expert MLP (SwiGLU, a probability per row) forward, and backward to the gradient of the rows and of what is
trained. All arms have the same values and run in one process:

================  =====================================================================================================
``frozen``        ``GroupedMLP`` of which nothing is trained: the baseline
``lora``          ``GroupedLoRALinear`` in the place of both layers
``compiled``      the same under torch.compile(fullgraph=True)
``materialised``  ``weight + scaling B A`` in full by ``torch.baddbmm``, and ``tgl.grouped_mlp`` of the sums: what
                  adapters compute that parametrise a weight
================  =====================================================================================================

On a GPU weights are bfloat16 and steps are replayed as CUDA graphs with L2 flushed before each; on a CPU weights are
float32 and steps are called. Arms take turns, and medians are compared. Nothing is timed before results have passed
against a loop over the experts in a wider dtype: at most eight roundings of error. ``x`` columns are times divided by
the baseline's. ``MiB`` is the highest point of a step that is called, above what was there before it: results,
gradients and temporaries, but not the weights.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from harness.command import cases, choice, gpu_parser, run_all
from harness.gates import relative_error
from harness.memory import Allocated
from harness.report import Table, medians, quotient, save, summaries, with_machine
from harness.shapes import MODELS, ROUTINGS, Expert, split
from harness.timing import WARM_UP, HostClock, captured, interleaved, replays, why
from torch import Tensor, nn

import tgl
from tests.kernel_cases import ends, spans
from tests.peak_memory import peak_memory

BASELINE = "frozen"
ARMS = (BASELINE, "lora", "compiled", "materialised")
SHAPES = {"small": Expert(8, 2048, 512, 1024), **MODELS}
RANKS = (8, 16, 64, 128)
QUICK = {"cpu": ("small",), "cuda": ("mixtral", "qwen3-g128")}
QUICK_RANKS = (16,)
MIB = 1 << 20
Step = Callable[[], list[Tensor]]


class Problem:
    """The values that all arms share: of a layer with updates of one rank."""

    def __init__(self, shape: Expert, routing: str, rank: int, device: str):
        self.sizes = split(routing, shape.groups, shape.rows)
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.offs = ends(self.sizes, device)
        self.x = torch.randn(shape.rows, shape.hidden, **options).requires_grad_()
        self.dy = torch.randn(shape.rows, shape.hidden, **options)
        self.probs = torch.rand(shape.rows, device=device)
        self.frozen = tgl.GroupedMLP(*shape[:1], *shape[2:], params_dtype=dtype, device=device).requires_grad_(False)
        self.mlp = tgl.GroupedMLP(*shape[:1], *shape[2:], params_dtype=dtype, device="meta")
        self.adapters = []
        for name in ("fc1", "fc2"):
            adapter = tgl.GroupedLoRALinear(getattr(self.frozen, name), rank)
            nn.init.normal_(adapter.lora_B, std=rank**-0.5)
            setattr(self.mlp, name, adapter)
            self.adapters.append(adapter)
        self.trained = [p for adapter in self.adapters for p in (adapter.lora_A, adapter.lora_B)]

    def materialised(self, x: Tensor, offs: Tensor, probs: Tensor) -> Tensor:
        w1, w2 = (
            torch.baddbmm(a.base.weight, a.lora_B, a.lora_A, alpha=a.scaling).transpose(1, 2) for a in self.adapters
        )
        return tgl.grouped_mlp(x, w1, w2, offs, probs)

    def step(self, arm: str) -> Step:
        """The result, the gradient of the rows, and but for the baseline those of the four trained matrices."""
        forward = {
            BASELINE: lambda: self.frozen.forward_offsets,
            "lora": lambda: self.mlp.forward_offsets,
            "compiled": lambda: torch.compile(self.mlp.forward_offsets, fullgraph=True),
            "materialised": lambda: self.materialised,
        }[arm]()
        leaves = [self.x, *(() if arm == BASELINE else self.trained)]

        def run() -> list[Tensor]:
            y = forward(self.x, self.offs, self.probs)
            return [y.detach(), *torch.autograd.grad(y, leaves, self.dy)]

        return run

    def oracle(self) -> list[Tensor]:
        """A step with updates, expert by expert, in float64 of float32 and in float32 of bfloat16."""
        wide = torch.float64 if self.x.dtype == torch.float32 else torch.float32
        found = [torch.zeros_like(t, dtype=wide) for t in (self.x, self.x, *self.trained)]
        for g, rows in spans(self.sizes):
            own = [self.x[rows], *(t[g] for t in self.trained)]
            leaves = [t.detach().to(wide).requires_grad_() for t in own]
            x, *factors = leaves
            w1, w2 = (
                a.base.weight[g].to(wide) + a.scaling * factors[2 * i + 1] @ factors[2 * i]
                for i, a in enumerate(self.adapters)
            )
            gate, linear = (x @ w1.t()).chunk(2, -1)
            y = nn.functional.silu(gate) * linear * self.probs[rows, None].to(wide) @ w2.t()
            dx, *gradients = torch.autograd.grad(y, leaves, self.dy[rows].to(wide))
            found[0][rows], found[1][rows] = y.detach(), dx
            for whole, part in zip(found[2:], gradients):
                whole[g] = part
        return found


RESULTS = ("output", "gradient of rows", *(f"gradient of fc{i}.lora_{m}" for i in (1, 2) for m in "AB"))


def wrong(results: Sequence[Tensor], wanted: Sequence[Tensor]) -> str | None:
    """What is wrong with the results of a step, or None."""
    for name, ours, right in zip(RESULTS, results, wanted, strict=True):
        error, bound = relative_error(ours, right), 8 * torch.finfo(ours.dtype).eps
        if not error <= bound:
            return f"{name}: error {error:.1e}, at most {bound:.1e}"
    return None


def peak(step: Step, device: str) -> float:
    """MiB that a step which has been called takes at its highest point."""
    if device == "cpu":
        return peak_memory(step) / MIB
    step()
    taken = Allocated()
    step()
    return taken.at_most() / MIB


def measured(steps: dict[str, Step], args: argparse.Namespace) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Milliseconds of the arms, and why others have none."""
    if args.device != "cpu":
        graphs, failed = captured(steps)
        return replays(graphs, args.samples, args.clean_l2, args.busy), failed
    seconds = interleaved(steps, HostClock(time.perf_counter), range(args.samples + WARM_UP), warm_up=WARM_UP)
    return {name: [1e3 * t for t in own] for name, own in seconds.items()}, {}


def run_case(shape: str, routing: str, rank: str, args: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    problem = Problem(SHAPES[shape], routing, int(rank), args.device)
    wanted, steps, memory = problem.oracle(), {}, {}
    reasons: dict[str, str] = {}
    for arm in dict.fromkeys((BASELINE, *args.arms)):
        step = problem.step(arm)
        try:
            reason = wrong(step(), wanted) if arm != BASELINE else None
            memory[arm] = peak(step, args.device)
        except Exception as error:  # of an arm; the others go on
            reason = why(error)
        if reason is None:
            steps[arm] = step
        else:
            reasons[arm] = reason
    del wanted
    times, failed = measured(steps, args)
    return {"ms": medians(times), "times": summaries(times), "MiB": memory, "left out": reasons | failed}


TABLE = Table(
    {"shape": "<14", "routing": "<12", "rank": ">4", "frozen ms": "9.3f"}
    | {f"x {arm}": f"{len(arm) + 2}.3f" for arm in ARMS[1:]}
    | {f"MiB {arm}": f"{len(arm) + 4}.0f" for arm in ARMS}
)


def line(result: dict[str, Any]) -> str:
    names, times, memory = (result[n] for n in ("shape", "routing", "rank")), result["times"], result.get("MiB", {})
    ratios = (quotient(times, arm, BASELINE) for arm in ARMS[1:])
    cells = [*names, result.get("ms", {}).get(BASELINE), *ratios, *(memory.get(arm) for arm in ARMS)]
    left_out = (f"\n  {arm} left out: {reason}" for arm, reason in result.get("left out", {}).items())
    return TABLE.line(cells) + "".join(left_out)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    made = gpu_parser(__doc__, quick="two models on a GPU, one rank")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    made.add_argument("--device", choices=("cpu", "cuda"), default=device, help=f"default here: {device}")
    made.add_argument("--shapes", nargs="+", choices=SHAPES, help="default: small on a CPU, models' on a GPU")
    made.add_argument("--ranks", nargs="+", type=int, help=f"of the updates; default: {RANKS}")
    choice(made, "--routings", ROUTINGS, default=False)
    choice(made, "--arms", ARMS)
    return made.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    if args.device == "cpu":
        torch.set_num_threads(1)
    shapes = QUICK[args.device] if args.quick else {"cpu": QUICK["cpu"], "cuda": tuple(MODELS)}[args.device]
    ranks = [str(rank) for rank in args.ranks or (QUICK_RANKS if args.quick else RANKS)]
    print(TABLE.header())
    every = cases(shape=args.shapes or shapes, routing=args.routings or ["balanced"], rank=ranks)
    results = run_all(every, lambda **case: run_case(**case, args=args), line)
    name = "cpu" if args.device == "cpu" else torch.cuda.get_device_name()
    save(args.out, with_machine(name, results))


if __name__ == "__main__":
    main()
