"""Routers of models: sizes and options of ``topk_router``, and choices by a loop."""

import math
from typing import NamedTuple

import torch


class Case(NamedTuple):
    """Experts, top-k slots per token, options of the op, and whether there is a bias."""

    experts: int
    top_k: int
    options: dict
    bias: bool = False


SUMS = {"sums": True}
DEEPSEEK_V3 = {
    "score_function": "sigmoid",
    "renormalize": True,
    "scale": 2.5,
    "num_groups": 8,
    "topk_groups": 4,
    "group_score": "top2_sum",
}
CASES = {
    "mixtral": Case(8, 2, {"renormalize": True}),
    "qwen3": Case(128, 8, {"renormalize": True, **SUMS}),
    "olmoe": Case(64, 8, SUMS),
    "qwen3-next": Case(512, 10, {"renormalize": True}),
    "deepseek-v2": Case(160, 6, {"scale": 16.0, "num_groups": 8, "topk_groups": 3, **SUMS}),
    "deepseek-v3": Case(256, 8, DEEPSEEK_V3, True),
    "deepseek-v3, sums": Case(64, 4, {**DEEPSEEK_V3, **SUMS}, True),
    "deepseek-v4": Case(40, 6, {"score_function": "sqrtsoftplus", "renormalize": True, **SUMS}, True),
    "longcat": Case(100, 12, {"scale": 6.0}, True),
    "llama4": Case(16, 1, {"score_function": "sigmoid"}),
    "groups without a bias": Case(30, 3, {"num_groups": 5, "topk_groups": 2, "group_score": "top2_sum"}),
    "all experts": Case(13, 13, {"score_function": "sigmoid", **SUMS}),
    "all experts of a warp and more": Case(33, 32, {"renormalize": True}),
    "one expert": Case(1, 1, SUMS),
    "1024": Case(1024, 16, {}),
}


def _softmax(row):
    top = max(row)
    powers = [math.exp(v - top) for v in row]
    total = sum(powers)
    return [power / total for power in powers]


SCALARS = {
    "softmax": _softmax,
    "sigmoid": lambda row: [1 / (1 + math.exp(-v)) for v in row],
    "sqrtsoftplus": lambda row: [math.sqrt(math.log1p(math.exp(v))) for v in row],
}
OF_GROUP = {"max": max, "top2_sum": lambda scores: sum(sorted(scores)[-2:])}


def operands(case, tokens, dtype=torch.float64, seed=0):
    """Logits and bias."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(tokens, case.experts, generator=generator, dtype=torch.float64)
    bias = torch.rand(case.experts, generator=generator, dtype=torch.float64) if case.bias else None
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return logits.to(dtype), None if bias is None else bias.to(wide)


def cotangents(case, tokens, dtype=torch.float64, seed=0):
    """Gradients of the weights, of the sum of shares and of that of squares; the last two None without sums."""
    generator = torch.Generator().manual_seed(seed)
    made = [
        torch.randn(size, generator=generator, dtype=torch.float64) for size in ((tokens, case.top_k), case.experts, 1)
    ]
    made = [t.to(dtype) for t in made]
    return made if case.options.get("sums") else [made[0], None, None]


def weighing(case):
    """The options of the backward."""
    return {name: case.options[name] for name in ("score_function", "renormalize", "scale") if name in case.options}


def by_loop(case, row, bias):
    """Choices and weights of one token, a list of finite logits."""
    options = {"score_function": "softmax", "num_groups": 1, "topk_groups": 1, "group_score": "max", **case.options}
    scores = SCALARS[options["score_function"]](row)
    ranks = [s + b for s, b in zip(scores, bias or [0.0] * case.experts)]
    size = case.experts // options["num_groups"]
    of_groups = [OF_GROUP[options["group_score"]](ranks[g : g + size]) for g in range(0, case.experts, size)]
    kept = sorted(range(len(of_groups)), key=lambda g: (-of_groups[g], g))[: options["topk_groups"]]
    able = [e for e in range(case.experts) if e // size in kept]
    chosen = sorted(able, key=lambda e: (-ranks[e], e))[: case.top_k]
    divisor = sum(scores[e] for e in chosen) if options.get("renormalize") else 1.0
    return chosen, [scores[e] / divisor * options.get("scale", 1.0) for e in chosen]
