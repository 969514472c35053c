"""Draw docs/profiling.svg: the stages of a training step of ``tgl.MoELayer``, from a profile on this machine's CPU.

python -m tools.profile_picture [docs/profiling.svg]
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import matplotlib.pyplot as plt
import torch
from torch.profiler import ProfilerActivity, profile

import tgl

ROWS = {"forward": 1, "backward": 0}
NAMES = {"FC1 + activation": "FC1 +\nactivation", "FC2 dgrad + dactivation": "FC2 dgrad +\ndactivation"}


class Span(NamedTuple):
    """A stage of the step: its row in the picture, name, start and length in milliseconds."""

    row: str
    name: str
    start: float
    length: float


def measure() -> list[Span]:
    """Return the stages of the fastest of ten steps."""
    layer = tgl.MoELayer(hidden_size=256, intermediate_size=256, num_experts=8, top_k=2)
    x = torch.randn(2048, 256, requires_grad=True)
    dy = torch.randn(2048, 256)
    steps = []
    for _ in range(10):
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            layer(x).backward(dy)
        steps.append(stages(profiler))
    return min(steps, key=lambda spans: spans[-1].start + spans[-1].length)


def stages(profiler: profile) -> list[Span]:
    """Return the stages of a step: router and route by the names of their ops, those of the block by their ranges."""
    spans: list[Span] = []
    backward, begin = False, None
    for event in sorted(profiler.events(), key=lambda event: event.time_range.start):
        backward = backward or event.name.startswith("autograd::engine")
        name = event.name.removeprefix("tgl: ")
        if name == event.name and name not in ("tgl::topk_router", "tgl::topk_router_backward", "tgl::route"):
            continue
        if name in ("activation", "dactivation"):  # part of a GEMM's stage
            continue
        begin = event.time_range.start if begin is None else begin
        start, length = (event.time_range.start - begin) / 1e3, event.time_range.elapsed_us() / 1e3
        spans.append(Span("backward" if backward else "forward", name.removeprefix("tgl::"), start, length))
    return spans


def draw(spans: list[Span], path: str) -> None:
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "tgl", "font.size": 8})
    figure, axes = plt.subplots(figsize=(8, 2.2), layout="constrained")
    names = list(dict.fromkeys(span.name for span in spans))
    whole = max(span.start + span.length for span in spans)
    for span in spans:
        color = f"C{names.index(span.name) % 10}"
        axes.barh(ROWS[span.row], span.length, left=span.start, height=0.8, color=color, edgecolor="white")
        if span.length > whole / 30:
            middle = span.start + span.length / 2
            small = span.length < whole / 9
            axes.text(
                middle, ROWS[span.row], NAMES.get(span.name, span.name), ha="center", va="center", rotation=90 * small
            )
    axes.set_yticks(list(ROWS.values()), list(ROWS))
    axes.set_xlabel("milliseconds")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    draw(measure(), sys.argv[1] if len(sys.argv) > 1 else "docs/profiling.svg")
