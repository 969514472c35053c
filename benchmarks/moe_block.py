"""The Mixture-of-Experts block from tokens to tokens, on a GPU: tgl's one op beside other packages.

    python benchmarks/moe_block.py [--shapes mixtral ...] [--routings zipf ...] [--arms captured ...] [--out FILE]

A step is the block behind the router (experts chosen and routing weights are given), forward, and backward to the
gradients of tokens, routing weights, experts' weights and, where the shape has them, biases. All arms have the same
values, in bfloat16 with float32 routing weights, SwiGLU, and run in one process:

==================  =================================================================================================
``eager``           tgl.moe as a call; the baseline
``compiled``        the same under torch.compile(fullgraph=True), as a call
``captured``        the same, replayed as a CUDA graph
``current``         tgl.MoE with the recipe Float8CurrentScaling, replayed; quantises weights in each step; no biases
``delayed``         with DelayedScaling
``blocks``          with Float8BlockScaling
``torch``           a sort, gathers, torch._grouped_mm and index_add, compiled, as a call; takes no biases
``torch captured``  the same, replayed
``sonic``           SonicMoE, where it is installed, as a call
``sonic captured``  the same, replayed
==================  =================================================================================================

Nothing is timed before an arm's output and gradients, and the output of a forward without gradients, have passed
against a loop over the experts in float32: at most eight roundings to bfloat16 of error, of arms with a recipe one
rounding to FP8 (E4M3). Arms that fail, or cannot run, are named with the reason.

L2 is flushed before each step, arms take turns in random order, and medians of the device's time are compared; what the
host takes to issue a call is part of it. TFLOP/s are those of the model: nine products of the routed rows in a step,
three in a forward. ``held`` is what the forward leaves allocated beside its result, ``peak`` the highest point of a
step above what was there before it, both in MiB.

A shape with one routing takes about half a minute, and SonicMoE one or more until its kernels are compiled. The file is
written after each, so that a run can be cut off.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from harness.block import by_grouped_mm
from harness.command import cases, choice, gpu_parser, needs_device, run_all
from harness.gates import relative_error
from harness.memory import Allocated
from harness.report import Mean, Table, mean_of, quotient, save, summaries, with_machine
from harness.shapes import split
from harness.sonic import by_sonicmoe, configurations, installed
from harness.timing import Replay, calls, warm_up, why
from torch import Tensor

import tgl

BF16 = torch.bfloat16
BASELINE = "eager"
ROUTINGS = ("balanced", "multinomial", "zipf")
RESULTS = ("output", "gradient of x", "gradient of weights", "gradient of w1", "gradient of w2")
ALONE = "output of a forward alone"
BIASED = (*RESULTS, "gradient of bias1", "gradient of bias2")
BOUND, FP8_BOUND = 8 * torch.finfo(BF16).eps, torch.finfo(torch.float8_e4m3fn).eps
RECIPES: dict[str, tgl.recipes.Recipe] = {
    "current": tgl.recipes.Float8CurrentScaling(),
    "delayed": tgl.recipes.DelayedScaling(),
    "blocks": tgl.recipes.Float8BlockScaling(),
}


class Block(NamedTuple):
    """Tokens, width, width of the activation, experts, top-k slots per token, and whether there are biases."""

    tokens: int
    hidden: int
    inner: int
    experts: int
    top_k: int
    biases: bool = False

    def flops(self, rows: int) -> float:
        """Return the FLOPs of a forward: three products of the routed rows."""
        return 6.0 * rows * self.hidden * self.inner


SHAPES = {
    "qwen3-30b": Block(16384, 2048, 768, 128, 8),
    "qwen3-32768": Block(32768, 2048, 768, 128, 8),
    "sonic-7b": Block(24576, 1536, 256, 128, 8),
    "deepseek-rank": Block(8192, 7168, 2048, 32, 8),
    "mixtral": Block(8192, 4096, 14336, 8, 2),
    "mixtral-16384": Block(16384, 4096, 14336, 8, 2),
    "many-tokens": Block(32768, 4096, 1024, 128, 8),
    "gpt-oss": Block(8192, 2880, 2880, 128, 4, biases=True),
}


def chosen(routing: str, block: Block) -> Tensor:
    """int64 ``[S, k]`` distinct experts of every token, in about the proportion that the routing has for rows."""
    generator = torch.Generator().manual_seed(7)
    if routing == "balanced":
        pairs = torch.arange(block.tokens * block.top_k).view(block.tokens, block.top_k)
        return (pairs % block.experts)[torch.randperm(block.tokens, generator=generator)]
    shares = split(routing, block.experts, block.tokens * block.top_k) if routing == "zipf" else [1] * block.experts
    chances = torch.tensor(shares, dtype=torch.float32).clamp_min(1e-3)
    # The k largest of log(chance) + Gumbel noise are a draw without replacement.
    noise = torch.rand(block.tokens, block.experts, generator=generator).clamp_min(1e-20)
    return (chances.log() - (-noise.log()).log()).topk(block.top_k).indices


class Problem:
    """The values all arms share."""

    def __init__(self, block: Block, routing: str, device: str = "cuda"):
        self.block, self.device = block, device
        tokens, hidden, inner, experts, top_k, biases = block

        def random(*shape: int, scale: float = 1.0) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(shape, device=device, dtype=BF16) * scale)

        self.x, self.dy = random(tokens, hidden), torch.randn(tokens, hidden, device=device, dtype=BF16)
        self.weights = torch.rand(tokens, top_k, device=device).requires_grad_()
        self.w1 = random(experts, 2 * inner, hidden, scale=hidden**-0.5)
        self.w2 = random(experts, hidden, inner, scale=inner**-0.5)
        self.biases = (random(experts, 2 * inner), random(experts, hidden)) if biases else ()
        self.chosen = chosen(routing, block).to(device)

    @property
    def leaves(self) -> list[Tensor]:
        return [self.x, self.weights, self.w1, self.w2, *self.biases]

    def step(self, forward: Callable[[], Tensor]) -> list[Tensor]:
        y = forward()
        return [y.detach(), *torch.autograd.grad(y, self.leaves, self.dy)]

    def oracle(self) -> list[Tensor]:
        """A step in float32, expert by expert."""
        y = torch.zeros_like(self.x, dtype=torch.float32)
        grads = [torch.zeros_like(leaf, dtype=torch.float32) for leaf in self.leaves]
        for g in range(self.block.experts):
            token, choice = torch.where(self.chosen == g)
            own = [self.x[token], self.weights[token, choice], *(leaf[g] for leaf in self.leaves[2:])]
            part = [t.detach().float().requires_grad_() for t in own]
            rows, weight, w1, w2, *biases = part
            bias1, bias2 = biases or (0, 0)
            gate, linear = (rows @ w1.t() + bias1).chunk(2, -1)
            out = (torch.nn.functional.silu(gate) * linear @ w2.t() + bias2) * weight[:, None]
            y.index_add_(0, token, out.detach())
            found = torch.autograd.grad(out, part, self.dy[token].float())
            grads[0].index_add_(0, token, found[0])
            grads[1][token, choice] = found[1]
            for grad, own_grad in zip(grads[2:], found[2:]):
                grad[g] = own_grad
        return [y, *grads]


Forward = Callable[[], Tensor]


def block(p: Problem) -> Forward:
    return lambda: tgl.moe(p.x, p.chosen, p.weights, p.w1.transpose(1, 2), p.w2.transpose(1, 2), *p.biases)


def compiled(p: Problem) -> Forward:
    return torch.compile(block(p), fullgraph=True, dynamic=False)


def quantised(p: Problem, recipe: tgl.recipes.Recipe) -> Forward:
    _without_biases(p)
    experts = tgl.MoE(p.block.experts, p.block.hidden, p.block.inner, device=p.device, recipe=recipe)
    experts.fc1.weight, experts.fc2.weight = p.w1, p.w2
    return lambda: experts(p.x, p.chosen, p.weights)


def grouped_mm(p: Problem) -> Forward:
    _without_biases(p)
    return torch.compile(lambda: by_grouped_mm(p.x, p.chosen, p.weights, p.w1, p.w2), fullgraph=True, dynamic=False)


def sonic(p: Problem) -> Forward:
    chosen, biases = p.chosen.int(), p.biases or (None, None)
    return lambda: by_sonicmoe(p.x, chosen, p.weights, p.w1, p.w2, *biases)


def _without_biases(p: Problem) -> None:
    if p.biases:
        raise ValueError("takes no biases")


ARMS: dict[str, Callable[[Problem], Forward]] = {
    BASELINE: block,
    "compiled": compiled,
    "captured": block,
    **{name: partial(quantised, recipe=recipe) for name, recipe in RECIPES.items()},
    "torch": grouped_mm,
    "torch captured": grouped_mm,
    "sonic": sonic,
    "sonic captured": sonic,
}
REPLAYED = ("captured", "torch captured", "sonic captured", *RECIPES)
# Whose time is divided by whose: a call by a call, a replay by a replay.
AGAINST = (
    ("sonic", "eager"),
    ("sonic captured", "captured"),
    ("torch", "eager"),
    ("torch", "compiled"),
    ("torch captured", "captured"),
)


class Arm:
    """A way to run the block.

    Args:
        replayed: whether steps and forwards are CUDA graphs.
    """

    def __init__(self, problem: Problem, forward: Forward, replayed: bool):
        self.problem, self.forward = problem, forward
        self.calls: dict[str, Callable[[], Any]] = {
            "step": lambda: problem.step(forward),
            "forward": torch.no_grad()(forward),
        }
        self.seconds = 0.0  # until the results had passed
        for call in self.calls.values():
            warm_up(call)
        self.memory = self._memory()
        if replayed:
            self.calls = {name: Replay(call) for name, call in self.calls.items()}

    def _memory(self) -> dict[str, float]:
        """MiB that a call of the forward leaves allocated, and the highest point of a step, above what is there."""
        taken = Allocated()
        y = self.forward()
        held = taken.now() - y.nbytes
        del y
        self.problem.step(self.forward)
        return {"held": held / 2**20, "peak": taken.at_most() / 2**20}

    def results(self, part: str) -> Any:
        call = self.calls[part]
        found = call()
        return call.result if isinstance(call, Replay) else found


def wrong(arm: Arm, wanted: list[Tensor], bound: float) -> str | None:
    """Return the error of an arm's results, or None."""
    alone = (ALONE, arm.results("forward"), wanted[0])
    for name, ours, right in (*zip(BIASED, arm.results("step"), wanted), alone):
        error = relative_error(ours, right)
        if not error <= bound:
            return f"{name}: error {error:.1e}, at most {bound:.1e}"
    return None


def gated_arms(problem: Problem, names: Sequence[str]) -> tuple[dict[str, Arm], dict[str, str]]:
    """The arms that may be timed, and what is wrong with the others."""
    arms: dict[str, Arm] = {}
    reasons: dict[str, str] = {}
    wanted = problem.oracle()
    for name in names:
        start = time.perf_counter()
        try:
            arm = Arm(problem, ARMS[name](problem), name in REPLAYED)
            reason = wrong(arm, wanted, FP8_BOUND if name in RECIPES else BOUND)
        except Exception as error:  # of an arm; the others go on
            reason = why(error)
        if reason is None:
            arms[name] = arm
            arm.seconds = time.perf_counter() - start
        else:
            reasons[name] = reason
    return arms, reasons


def run_case(shape: str, routing: str, args: argparse.Namespace) -> dict[str, Any]:
    block = SHAPES[shape]
    torch.manual_seed(0)
    torch._dynamo.reset()
    problem = Problem(block, routing)
    arms, reasons = gated_arms(problem, args.arms)

    def timed(part: str) -> dict[str, dict[str, float]]:
        return summaries(calls({name: arm.calls[part] for name, arm in arms.items()}, args.samples, args.clean_l2))

    return {
        **block._asdict(),
        "flops": block.flops(block.tokens * block.top_k),
        "step": timed("step"),
        "forward": timed("forward"),
        "memory": {name: arm.memory for name, arm in arms.items()},
        "prepared": {name: arm.seconds for name, arm in arms.items()},
        "left out": reasons,
        "sonic configurations": configurations(),
    }


TABLE = Table(
    {
        "shape": "<14",
        "routing": "<12",
        "arm": "<14",
        "step ms": "8.3f",
        "TF/s": "5.0f",
        "forward ms": "10.3f",
        "TF/s ": "5.0f",
        "ratio": "6.3f",
        "held": "8.0f",
        "peak": "8.0f",
    }
)


def lines(result: dict[str, Any]) -> str:
    """A line for every arm; ``ratio`` is the baseline's step divided by the arm's."""
    if "wrong" in result:
        return f"{result['shape']} {result['routing']}: {result['wrong']}"
    made = []
    for arm, step in result["step"].items():
        forward, memory = result["forward"][arm], result["memory"][arm]
        flops = result["flops"]
        rates = 3 * flops / step["median"] / 1e9, flops / forward["median"] / 1e9
        ratio = quotient(result["step"], BASELINE, arm)
        cells = step["median"], rates[0], forward["median"], rates[1], ratio, memory["held"], memory["peak"]
        made.append(TABLE.line([result["shape"], result["routing"], arm, *cells]))
    for arm, reason in result["left out"].items():
        made.append(f"{result['shape']} {result['routing']}: not {arm}: {reason}")
    prepared = ", ".join(f"{arm} {seconds:.0f}" for arm, seconds in result["prepared"].items())
    return "\n".join([*made, f"  seconds until an arm had passed: {prepared}"])


def ratios(results: Iterable[dict[str, Any]], part: str, arm: str, of: str) -> Mean | None:
    """Return the ratios of the times of one part, over all results."""
    return mean_of((f"{r['shape']} {r['routing']}", quotient(r.get(part, {}), arm, of)) for r in results)


def report(results: Sequence[dict[str, Any]]) -> str:
    """Geometric means and worst cases of the ratios of steps and forwards."""
    made = ["", "time of the first / time of the second: geometric mean (worst, where)"]
    pairs = [(BASELINE, name) for name in ARMS if name != BASELINE]
    for arm, of in (*pairs, *AGAINST):
        for part in ("step", "forward"):
            if mean := ratios(results, part, arm, of):
                made.append(f"{arm:>14} / {of:14} {part:>7} {mean}")
    return "\n".join(made)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = gpu_parser(__doc__, busy=False)
    choice(parser, "--shapes", SHAPES)
    choice(parser, "--routings", ROUTINGS)
    choice(parser, "--arms", ARMS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    device = needs_device()
    print(f"{device}, torch {torch.__version__}, {args.samples} samples\n{installed()}\n{TABLE.header()}", flush=True)

    def keep(results: list[dict[str, Any]]) -> None:
        save(args.out, with_machine(device, results) | {"sonic": installed()})

    every = cases(shape=args.shapes, routing=args.routings)
    print(report(run_all(every, lambda **case: run_case(**case, args=args), lines, keep)))


if __name__ == "__main__":
    main()
