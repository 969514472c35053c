"""A router on a GPU: from logits to experts and weights, and back, against the operations that models spell out.

    python benchmarks/router_gpu.py [--shapes qwen3 ...] [--passes forward both] [--samples N] [--out FILE]

Arms: ``tgl``; ``eager`` and ``compiled``, a score, ``torch.topk`` and the small operations around them, as they are and
through torch.compile. Pass ``both`` is the forward and the gradient of the logits from one of the weights; ``losses``
adds the load balancing and the z loss, and their gradients. Logits are random, bfloat16, float32 for DeepSeek, as the
models have them. Every arm is a captured graph, 256 MB are written before each replay, arms take turns in rotating
order, and medians are compared.

Nothing is timed before tgl's results are close to those of the CPU in float64: weights and losses within 1e-5 of them,
gradients within the rounding of their dtype. Results: a table of milliseconds, GB/s of logits read and gradients
written and ratios of times (above 1: tgl is faster), and ``--out FILE`` as JSON.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from harness.command import cases, choice, gpu_parser, needs_device, run_all
from harness.compared import Comparison, Result, compared, of_result
from harness.report import save
from torch import Tensor

import tgl


class Shape(NamedTuple):
    """Tokens, experts, choices of each token, the dtype of logits, and the options of the op."""

    tokens: int
    experts: int
    top_k: int
    dtype: torch.dtype
    options: dict
    bias: bool = False


_QWEN = {"renormalize": True}
_DEEPSEEK = {
    "score_function": "sigmoid",
    "renormalize": True,
    "scale": 2.5,
    "num_groups": 8,
    "topk_groups": 4,
    "group_score": "top2_sum",
}
SHAPES = {
    "one token": Shape(1, 128, 8, torch.bfloat16, _QWEN),
    "64 tokens": Shape(64, 128, 8, torch.bfloat16, _QWEN),
    "256 tokens": Shape(256, 128, 8, torch.bfloat16, _QWEN),
    "mixtral": Shape(16384, 8, 2, torch.bfloat16, _QWEN),
    "qwen3": Shape(16384, 128, 8, torch.bfloat16, _QWEN),
    "qwen3-next": Shape(32768, 512, 10, torch.bfloat16, _QWEN),
    "deepseek": Shape(8192, 256, 8, torch.float32, _DEEPSEEK, True),
}
COMPARISON = Comparison(
    names={"shape": ">12", "pass": ">8"},
    ms=">9.4f",
    rate=("GB/s", ">8.1f"),
    rivals=(("eager", "compiled"), ">8.3f"),
    speed=lambda result: result["bytes"] / result["ms"]["tgl"] / 1e6,
)
WEIGHT_OF_LOSS = 0.01
compiled = functools.partial(torch.compile, fullgraph=True, dynamic=False)

Router = Callable[[Tensor, Tensor | None], Sequence[Tensor]]


def softmax_router(shape: Shape) -> Router:
    """As in Mixtral and Qwen3."""

    def call(logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        probabilities = torch.softmax(logits, 1, dtype=torch.promote_types(logits.dtype, torch.float32))
        weights, index = torch.topk(probabilities, shape.top_k, dim=1)
        return weights / weights.sum(1, keepdim=True), index

    return call


def grouped_sigmoid_router(shape: Shape) -> Router:
    """As in DeepSeek-V3."""
    options = shape.options

    def call(logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        scores = logits.sigmoid()
        ranked = scores + bias
        of_groups = ranked.unflatten(1, (options["num_groups"], -1)).topk(2, dim=2).values.sum(2)
        kept = of_groups.topk(options["topk_groups"], dim=1, sorted=False).indices
        mask = torch.zeros_like(of_groups).scatter(1, kept, 1).bool()
        mask = mask[:, :, None].expand(-1, -1, shape.experts // options["num_groups"]).flatten(1)
        index = ranked.masked_fill(~mask, -float("inf")).topk(shape.top_k, dim=1, sorted=False).indices
        weights = scores.gather(1, index)
        return weights / (weights.sum(1, keepdim=True) + 1e-20) * options["scale"], index

    return call


PLAIN = {"softmax": softmax_router, "sigmoid": grouped_sigmoid_router}


def tgl_router(shape: Shape) -> Router:
    def call(logits: Tensor, bias: Tensor | None) -> Sequence[Tensor]:
        return torch.ops.tgl.topk_router(logits, shape.top_k, bias, **shape.options)[:2]

    return call


def of_losses(shape: Shape, router: Router) -> Router:
    """``router``, with the weighted sum of both losses beside its results."""

    def call(logits: Tensor, bias: Tensor | None) -> Sequence[Tensor]:
        weights, index = router(logits, bias)
        x = logits.to(weights.dtype)
        shares = x.softmax(1) if shape.options.get("score_function", "softmax") == "softmax" else x.sigmoid()
        shares = shares / shares.sum(1, keepdim=True)
        counts = torch.zeros(shape.experts, device=x.device, dtype=x.dtype)
        counts = counts.scatter_add(0, index.flatten().long(), torch.ones_like(weights).flatten())
        balance = shape.experts * (counts * shares.sum(0)).sum() / shape.tokens**2
        return weights, index, WEIGHT_OF_LOSS * (balance + x.logsumexp(1).square().mean())

    return call


def of_tgl_losses(shape: Shape) -> Router:
    def call(logits: Tensor, bias: Tensor | None) -> Sequence[Tensor]:
        made = tgl.topk_router(logits, shape.top_k, bias, losses=True, **shape.options)
        return made.weights, made.top_k_index, WEIGHT_OF_LOSS * (made.load_balancing_loss + made.z_loss)

    return call


def with_gradient(router: Router) -> Callable[[Tensor, Tensor | None, Tensor], Sequence[Tensor]]:
    """The results and the gradient of the logits."""

    def call(logits: Tensor, bias: Tensor | None, grad: Tensor) -> Sequence[Tensor]:
        leaf = logits.detach().requires_grad_()
        weights, index, *loss = router(leaf, bias)
        made = torch.autograd.grad([weights, *loss], leaf, [grad, *(torch.ones_like(value) for value in loss)])
        return weights.detach(), index, *(value.detach() for value in loss), *made

    return call


def forward_alone(router: Router) -> Callable[[Tensor, Tensor | None, Tensor], Sequence[Tensor]]:
    def call(logits: Tensor, bias: Tensor | None, grad: Tensor) -> Sequence[Tensor]:
        with torch.no_grad():
            return router(logits, bias)

    return call


PASSES = {"forward": (False, forward_alone), "both": (False, with_gradient), "losses": (True, with_gradient)}
"""Whether there are losses, and what is done to a router."""


def calls(shape: Shape, name: str) -> dict[str, Callable]:
    """The arms, as functions of logits, bias and gradient."""
    losses, around = PASSES[name]
    plain = PLAIN[shape.options.get("score_function", "softmax")](shape)
    plain = of_losses(shape, plain) if losses else plain
    ours = of_tgl_losses(shape) if losses else tgl_router(shape)
    return {"tgl": around(ours), "eager": around(plain), "compiled": around(compiled(plain))}


def run_case(shape: str, name: str, args: argparse.Namespace) -> Result:
    of = SHAPES[shape]
    torch.manual_seed(0)
    torch._dynamo.reset()  # of ever new shapes, and with gradients and without
    logits = torch.randn(of.tokens, of.experts, device="cuda").to(of.dtype)
    bias = 0.1 * torch.randn(of.experts, device="cuda") if of.bias else None
    grad = torch.randn(of.tokens, of.top_k, device="cuda")
    arms = calls(of, name)
    wide = [None if t is None else t.double().cpu() for t in (logits, bias, grad)]
    wanted = arms["tgl"](*wide)
    exact = {"weights": 1e-5, "loss": 1e-5, "gradient": max(1e-5, 4 * torch.finfo(of.dtype).eps)}
    kinds = {"forward": ("weights",), "both": ("weights", "gradient"), "losses": ("weights", "loss", "gradient")}[name]

    def wrong(got: Sequence[Tensor]) -> str | None:
        weights, chosen, *others = got
        same = (chosen.cpu() == wanted[1]).all(1)
        if (~same).sum() > of.tokens // 1000:  # a bias may put two experts next to each other, beyond float32
            return "not the choices of the CPU"
        for kind, ours, theirs in zip(kinds, (weights, *others), (wanted[0], *wanted[2:]), strict=True):
            by_token = theirs.dim() == 2
            ours, theirs = ours.double().cpu(), theirs.double()
            if by_token:
                ours, theirs = ours[same], theirs[same]
            if (ours - theirs).abs().max() > exact[kind] * theirs.abs().max():
                return f"{kind} not close to float64"
        return None

    run = {arm: (lambda call=call: call(logits, bias, grad)) for arm, call in arms.items()}
    moved = logits.nbytes * (1 if name == "forward" else 3) + of.tokens * of.top_k * (8 if name == "forward" else 20)
    return {"bytes": moved, **compared(run, of_result(wrong), args)}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = gpu_parser(__doc__)
    choice(parser, "--shapes", SHAPES)
    choice(parser, "--passes", PASSES)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    print(f"{needs_device()}, torch {torch.__version__}\n{COMPARISON.header()}")
    each = cases(shape=args.shapes, **{"pass": args.passes})
    results = run_all(each, lambda shape, **case: run_case(shape, case["pass"], args), COMPARISON.line)
    print(COMPARISON.report(results))
    save(args.out, results)


if __name__ == "__main__":
    main()
