"""Whole models of transformers on a GPU: a training step with its experts run by tgl, and by others.

    python benchmarks/transformers_models.py [--models mixtral ...] [--arms "tgl captured" ...] [--attention causal]
                                             [--out FILE]

Models have the widths of their namesakes, few layers, random weights in bfloat16, and a batch of one sequence of random
tokens. A step is the loss of a causal language model and its gradients for all parameters. An arm is a way to run the
experts and a way to run the model:

==============  =====================================================================================================
``grouped_mm``  transformers' own, by torch's grouped products; in eager mode it is the baseline
``tgl``         ``set_experts_implementation("tgl")``
``sonicmoe``    transformers' own, where its kernel can be had
==============  =====================================================================================================

============  =======================================================================================================
``eager``     the step as a call
``compiled``  the loss under torch.compile(fullgraph=True), the step as a call
``captured``  that step, replayed as a CUDA graph
============  =======================================================================================================

``--attention sdpa`` is transformers' setting, which passes a mask in compiled models before torch 2.14, and ``causal``
passes none (docs/compile_a_model.md).

Nothing is timed before the loss and the gradients' norm have passed against the model in float32, whose experts run in
transformers' loop: at most eight roundings to bfloat16 of error. Arms that fail, or cannot run, are named with the
reason. L2 is flushed before each step, arms take turns in random order, and medians of the device's time are compared;
what the host takes to issue a call is part of it. ``peak`` is the highest point of a step above what was there before
it, in MiB.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from harness.command import cases, choice, gpu_parser, needs_device, run_all
from harness.memory import Allocated
from harness.report import Table, mean_of, quotient, save, summaries, with_machine
from harness.timing import Replay, calls, warm_up, why
from torch import Tensor

from tgl.integrations import transformers as tgl_transformers

BOUND = 8 * torch.finfo(torch.bfloat16).eps
BASELINE = "grouped_mm eager"
EXPERTS = ("tgl", "grouped_mm", "sonicmoe")
WAYS = ("eager", "compiled", "captured")
ARMS = {f"{experts} {way}": (experts, way) for experts, way in itertools.product(EXPERTS, WAYS)}
_ATTENTION = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}


class Model(NamedTuple):
    """A configuration of transformers, and the tokens of a step."""

    config: str
    tokens: int
    sizes: dict[str, Any]


MODELS = {
    "qwen3-moe": Model(
        "Qwen3MoeConfig",
        8192,
        {
            **_ATTENTION,
            "num_hidden_layers": 4,
            "hidden_size": 2048,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
        },
    ),
    "mixtral": Model(
        "MixtralConfig",
        8192,
        {
            **_ATTENTION,
            "num_hidden_layers": 2,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    "gpt-oss": Model(
        "GptOssConfig",
        2048,  # attention with sinks holds the scores of all pairs of tokens
        {
            "num_hidden_layers": 4,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
        },
    ),
}


class Problem:
    """A model, a batch, and what its step must give."""

    def __init__(self, model: Model, attention: str = "sdpa", device: str = "cuda"):
        import transformers
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        config = getattr(transformers, model.config)(**model.sizes)
        with torch.device(device):
            self.model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        self.parameters = list(self.model.parameters())
        self.batch = torch.randint(0, config.vocab_size, (1, model.tokens), device=device)
        self.wanted = self._in_float32()
        if attention == "causal":
            transformers.AttentionInterface.register("sdpa_causal", sdpa_attention_forward)
            self.model.set_attn_implementation("sdpa_causal")

    def loss(self) -> Tensor:
        return self.model(input_ids=self.batch, labels=self.batch, use_cache=False).loss

    def step(self, loss: Callable[[], Tensor]) -> list[Tensor]:
        """The loss and its gradients."""
        value = loss()
        return [value.detach(), *torch.autograd.grad(value, self.parameters)]

    def _in_float32(self) -> list[float]:
        self.model.float().set_experts_implementation("eager")
        wanted = summary_of(self.step(self.loss))
        self.model.bfloat16()
        return wanted

    def wrong(self, results: Sequence[Tensor]) -> str | None:
        """Return the error of an arm's results, or None."""
        for name, ours, right in zip(("loss", "norm of gradients"), summary_of(results), self.wanted):
            if not abs(ours - right) <= BOUND * right:
                return f"{name}: {ours:.6g}, in float32 {right:.6g}"
        return None


def summary_of(results: Sequence[Tensor]) -> list[float]:
    """The loss, and the norm of all gradients."""
    loss, *gradients = results
    return [loss.item(), torch.stack([g.float().norm() for g in gradients]).norm().item()]


class Arm:
    """A way to run a step."""

    def __init__(self, problem: Problem, experts: str, way: str):
        if way not in WAYS:
            raise ValueError(f"`way` must be one of {', '.join(WAYS)}, but got {way!r}")
        self.problem, self.experts = problem, experts
        self.choose()
        loss = problem.loss if way == "eager" else torch.compile(problem.loss, fullgraph=True, dynamic=False)
        self.step: Callable[[], Any] = lambda: problem.step(loss)
        warm_up(self.step)
        self.peak = self._peak()
        if way == "captured":
            self.step = Replay(self.step)

    def choose(self) -> None:
        """Make the model run its experts this way, which each of its calls looks up."""
        self.problem.model.set_experts_implementation(self.experts)

    def __call__(self) -> Any:
        self.choose()
        return self.step()

    def _peak(self) -> float:
        taken = Allocated()
        self.step()
        return taken.at_most() / 2**20

    def results(self) -> Sequence[Tensor]:
        found = self()
        return self.step.result if isinstance(self.step, Replay) else found


def gated_arms(problem: Problem, names: Sequence[str]) -> tuple[dict[str, Arm], dict[str, str]]:
    """The arms that may be timed, and what is wrong with the others."""
    arms: dict[str, Arm] = {}
    reasons: dict[str, str] = {}
    torch._dynamo.reset()
    for name in dict.fromkeys((BASELINE, *names)):
        try:
            arm = Arm(problem, *ARMS[name])
            reason = problem.wrong(arm.results())
        except Exception as error:  # of an arm; the others go on
            reason = why(error)
        if reason is None:
            arms[name] = arm
        else:
            reasons[name] = reason
    return arms, reasons


def run_case(model: str, args: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    arms, reasons = gated_arms(Problem(MODELS[model], args.attention), args.arms)
    step = summaries(calls(arms, args.samples, args.clean_l2))
    peak = {name: arm.peak for name, arm in arms.items()}
    return {"attention": args.attention, "step": step, "peak": peak, "left out": reasons}


TABLE = Table({"model": "<12", "arm": "<20", "step ms": "8.2f", "ratio": "6.3f", "peak": "8.0f"})


def lines(result: dict[str, Any]) -> str:
    """A line for every arm; ``ratio`` is the baseline's step divided by the arm's."""
    made = []
    for arm, step in result.get("step", {}).items():
        ratio = quotient(result["step"], BASELINE, arm)
        made.append(TABLE.line([result["model"], arm, step["median"], ratio, result["peak"][arm]]))
    for arm, reason in result.get("left out", {}).items():
        made.append(f"{result['model']}: not {arm}: {reason}")
    return "\n".join(made)


def report(results: Sequence[dict[str, Any]]) -> str:
    """Compare tgl's experts with transformers', in each way to run the model."""
    made = ["", "time of a step with grouped_mm / with tgl: geometric mean (worst, where)"]
    for way in WAYS:
        pairs = ((r["model"], quotient(r.get("step", {}), f"grouped_mm {way}", f"tgl {way}")) for r in results)
        if mean := mean_of(pairs):
            made.append(f"{way:>12} {mean}")
    return "\n".join(made)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = gpu_parser(__doc__, busy=False)
    choice(parser, "--models", MODELS)
    choice(parser, "--arms", [name for name in ARMS if name != BASELINE])
    parser.add_argument("--attention", choices=("sdpa", "causal"), default="sdpa")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    device = needs_device()
    tgl_transformers.register()
    print(f"{device}, torch {torch.__version__}, {args.samples} samples\n{TABLE.header()}")
    results = run_all(cases(model=args.models), lambda **case: run_case(**case, args=args), lines)
    print(report(results))
    save(args.out, with_machine(device, results))


if __name__ == "__main__":
    main()
