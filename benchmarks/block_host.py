"""Issue times of an eager block's launches: the host's time from the call on, in microseconds.

    python benchmarks/block_host.py [--warm] [--layer] [--rounds N]

``tgl.moe`` gets expert indices, not a routing, and its backward runs by ``backward``: in bfloat16, with functions that
do nothing instead of the kernels for a Hopper. All code in front of them runs: checks, allocations, the choice of an
implementation, look-ups of kernels, autograd. (On CPU tensors, so that no GPU is needed; a GPU adds the arguments'
conversion, the driver's launch, and in the backward autograd's own thread.) Until FC1's launch nothing hides the host
from a device that waits for it.

A call is made with cold caches, by a pass over more memory than they hold: between two steps a processor has done other
work. ``--warm`` leaves that out. Figures are lower quartiles over rounds, printed with the launch that they belong to.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from harness.command import parser
from torch import Tensor

import tgl
from tgl import backends
from tgl.cutlass_kernels.runtime import device, launcher

BF16 = torch.bfloat16
ARCH = "sm_90"
TOKENS, TOP_K, HIDDEN, INNER, EXPERTS = 32, 8, 64, 32, 8  # small, so that no allocation goes to the system
CACHES = 24 << 20  # bytes, to be read and written
END = "end"

Launches = list[tuple[str, float]]


@contextlib.contextmanager
def launches_alone() -> Iterator[Launches]:
    """Record the name and the time of every launch of the ops, instead of running a kernel."""
    made: Launches = []

    def compiled(op: str, *_: Any) -> Callable[..., None]:
        return lambda *arguments: made.append((op, time.perf_counter()))

    replaced = {(launcher, "compiled"): compiled, (device, "packages_reason"): lambda: None}
    replaced |= {(launcher, table): {} for table in ("compiled_kernels", "warm_plans")}  # of this block alone
    before = {place: getattr(*place) for place in replaced}
    try:
        for place, new in replaced.items():
            setattr(*place, new)
        with backends.emulated_device(ARCH):
            yield made
    finally:
        for place, old in before.items():
            setattr(*place, old)


def block(layer: bool) -> tuple[Callable[[], Tensor], Callable[[Tensor], None]]:
    """A forward, as ``tgl.moe`` or ``tgl.MoE``, and the backward of its result."""
    module = tgl.MoE(EXPERTS, HIDDEN, INNER, params_dtype=BF16)
    x, dy = torch.randn(TOKENS, HIDDEN, dtype=BF16).requires_grad_(), torch.randn(TOKENS, HIDDEN, dtype=BF16)
    weights = torch.rand(TOKENS, TOP_K).requires_grad_()
    chosen = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(TOKENS)])
    w1, w2 = module.fc1.weight, module.fc2.weight

    def forward() -> Tensor:
        if layer:
            return module(x, chosen, weights)
        return tgl.moe(x, chosen, weights, w1.transpose(1, 2), w2.transpose(1, 2))

    def backward(y: Tensor) -> None:
        for leaf in (x, weights, w1, w2):
            leaf.grad = None
        y.backward(dy)

    return forward, backward


def timed(made: Launches, call: Callable[[], Any], memory: Tensor | None) -> tuple[Any, Launches]:
    """The result of a call, and its launches by seconds from its begin."""
    if memory is not None:
        memory.add_(1)
    made.clear()
    start = time.perf_counter()
    result = call()
    end = time.perf_counter()
    return result, [(op, at - start) for op, at in (*made, (END, end))]


def measure(layer: bool, warm: bool, rounds: int, before: int = 30) -> dict[str, Launches]:
    """Return for each part of a step its launches, with the microseconds until each."""
    forward, backward = block(layer)
    memory = None if warm else torch.zeros(CACHES, dtype=torch.uint8)
    found: dict[str, list[Launches]] = {"forward": [], "backward": []}
    with launches_alone() as made:
        for turn in range(before + rounds):
            y, forwards = timed(made, forward, memory)
            _, backwards = timed(made, lambda y=y: backward(y), memory)
            del y
            if turn >= before:
                found["forward"].append(forwards)
                found["backward"].append(backwards)
    return {part: [quartile(launches) for launches in zip(*every, strict=True)] for part, every in found.items()}


def quartile(launches: Sequence[tuple[str, float]]) -> tuple[str, float]:
    """Return the name of a launch, and the first quartile of its times over all rounds."""
    return launches[0][0], statistics.quantiles([at * 1e6 for _, at in launches], n=4)[0]


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--warm", action="store_true", help="leave the processor's caches as they are")
    made.add_argument("--layer", action="store_true", help="call tgl.MoE")
    made.add_argument("--rounds", type=int, default=500, help="calls that are timed")
    return made.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(argv)
    torch.set_num_threads(1)
    for part, launches in measure(options.layer, options.warm, options.rounds).items():
        print(f"{part:9}" + "  ".join(f"{op.removeprefix('grouped_')} {at:.0f}" for op, at in launches))


if __name__ == "__main__":
    main()
