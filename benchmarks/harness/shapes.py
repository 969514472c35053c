"""Shapes of layers of real models, and routings of tokens to experts. Every routing has a fixed seed."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Expert(NamedTuple):
    """An expert layer: experts, routed rows, width of the layer and of its activation."""

    groups: int
    rows: int
    hidden: int
    inner: int


class Shape(NamedTuple):
    """Experts, routed rows, and one linear layer ``depth -> columns``."""

    groups: int
    rows: int
    depth: int
    columns: int


MODELS = {
    "mixtral": Expert(8, 16384, 4096, 14336),
    "qwen3-g128": Expert(128, 65536, 2048, 768),
    "qwen3-g16": Expert(16, 65536, 2048, 768),
    "qwen3-g16-long": Expert(16, 262144, 2048, 768),
    "deepseek-g32": Expert(32, 65536, 7168, 2048),
    "deepseek-g8": Expert(8, 65536, 7168, 2048),
    "deepseek-g8-long": Expert(8, 262144, 7168, 2048),
}
SMALL = Expert(16, 4096, 2048, 2048)
SHAPES = {
    **{
        f"{name}-{part}": Shape(m.groups, m.rows, *widths)
        for name, m in MODELS.items()
        for part, widths in (("fc1", (m.hidden, m.inner)), ("fc2", (m.inner, m.hidden)))
    },
    "glm": Shape(256, 256 * 2048, 6144, 4096),
    "four": Shape(4, 4 * 8192, 7168, 4096),  # DeepGEMM publishes 1346 TFLOP/s for it, FP8 in blocks on an H800
}
QUICK = ("mixtral-fc1", "qwen3-g128-fc1", "qwen3-g16-fc2", "deepseek-g32-fc1", "deepseek-g32-fc2")
ROUTINGS = ("balanced", "multinomial", "zipf", "half on one", "quarter empty", "all on one")
QUICK_ROUTINGS = ("balanced", "zipf")


def split(routing: str, groups: int, rows: int) -> list[int]:
    """Rows per group; their sum is always ``rows``."""
    generator = torch.Generator().manual_seed(7)
    weights = torch.ones(groups, dtype=torch.float64)
    if routing == "zipf":
        weights = 1 / torch.arange(1, groups + 1, dtype=torch.float64)
        weights = weights[torch.randperm(groups, generator=generator)]
    elif routing == "half on one":
        weights[groups // 2] = max(groups - 1, 1)
    elif routing == "quarter empty":
        weights[torch.randperm(groups, generator=generator)[: groups // 4]] = 0
    elif routing == "all on one":
        weights = torch.zeros(groups, dtype=torch.float64)
        weights[groups // 2] = 1
    if routing == "multinomial":
        drawn = torch.multinomial(weights, rows, replacement=True, generator=generator)
        return torch.bincount(drawn, minlength=groups).tolist()
    sizes = (weights / weights.sum() * rows).long()
    sizes[int(weights.argmax())] += rows - int(sizes.sum())
    return sizes.tolist()


def growing(groups: int, rows: int, least: int) -> Tensor:
    """``offs`` of groups in the proportion ``least : least + 1 : ...``, which end on no multiple of a tile."""
    weights = torch.arange(least, least + groups, dtype=torch.float64).cumsum(0)
    offs = (weights / weights[-1].clamp_min(1) * rows).to(torch.int32)
    offs[-1] = rows
    return offs
