"""Python frames of an eager call: what the host does before the kernels run.

    python benchmarks/frames.py [--functions]

A frame is one call of a Python function, as ``sys.setprofile`` sees it, from the call of the public function to its
return, on a CPU. What the CPU implementations do inside the ops (``tgl/backends/cpu``) is left out. ``--functions``
adds how often each function was called. Calls are warm, except for one: the first call of ``tgl.moe`` for a Hopper,
below autograd, with a function that does nothing instead of each compiled kernel.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from harness.command import parser
from op_overhead import no_launch

import tgl
from tgl.cutlass_kernels.runtime import launcher
from tgl.meta.remembered import MADE

G, K, N, T = 4, 64, 64, 256


def frames_of(call: Callable[[], Any], warm_up: int = 5) -> Counter[str]:
    """Return how often one more call of ``call`` enters each Python function, ``call`` itself aside."""
    for _ in range(warm_up):
        call()
    seen: Counter[str] = Counter()
    inside_cpu = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal inside_cpu
        if event not in ("call", "return"):
            return
        implementation = "/tgl/backends/cpu/" in frame.f_code.co_filename
        if event == "call" and not inside_cpu and not implementation:
            name = frame.f_code.co_filename.rpartition("site-packages/")[2].rpartition("/tgl/")[2]
            seen[f"{name} {getattr(frame.f_code, 'co_qualname', frame.f_code.co_name)}"] += 1
        inside_cpu += implementation * (1 if event == "call" else -1)

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    seen[next(iter(seen))] -= 1
    return +seen


def frames_of_first(call: Callable[[], Any], arch: str) -> Counter[str]:
    """Return those of a first call for ``arch``: nothing is remembered of earlier calls, but kernels are compiled."""
    known = [launcher.warm_plans, launcher.compiled_kernels, *(check.passed for check in MADE)]
    before = [dict(table) for table in known]
    for table in known:
        table.clear()
    try:
        with torch.no_grad(), no_launch(arch):
            seen = frames_of(call, warm_up=0)
    finally:
        for table, entries in zip(known, before):
            table.clear()
            table.update(entries)
    return Counter({name: calls for name, calls in seen.items() if "no_launch" not in name})


def frames_of_step(forward: Callable[[], torch.Tensor], dy: torch.Tensor, backward: bool) -> Counter[str]:
    """Return those of one more forward, or of the backward of its result."""
    if not backward:
        return frames_of(forward)
    made = [forward() for _ in range(6)]
    return frames_of(lambda: torch.autograd.backward(made.pop(), dy))


def cases() -> dict[str, Callable[[], Counter[str]]]:
    """Return the counted calls by name."""
    offs = torch.arange(1, G + 1, dtype=torch.int32) * (T // G)
    splits = torch.full((G,), T // G)
    x, w = torch.randn(T, K), torch.randn(G, K, N)

    def expert(backward: bool, **options: Any) -> Counter[str]:
        mlp = tgl.GroupedMLP(G, K, N, **options)
        rows = torch.randn(T, K, requires_grad=True)
        return frames_of_step(lambda: mlp(rows, splits), torch.randn(T, K), backward)

    tokens, chosen, weights = torch.randn(T // 2, K), torch.arange(T).view(-1, 2) % G, torch.rand(T // 2, 2)

    def block(backward: bool) -> Counter[str]:
        layer = tgl.MoE(G, K, N)
        x, shares = tokens.clone().requires_grad_(), weights.clone().requires_grad_()
        return frames_of_step(lambda: layer(x, chosen, shares), torch.randn(T // 2, K), backward)

    def call_of_block() -> Counter[str]:
        w1, w2 = torch.randn(G, K, 2 * N, requires_grad=True), torch.randn(G, N, K, requires_grad=True)
        return frames_of(lambda: tgl.moe(tokens, chosen, weights, w1, w2))

    def first_call_of_block() -> Counter[str]:
        w1, w2 = torch.randn(G, K, 2 * N).bfloat16(), torch.randn(G, N, K).bfloat16()
        x = tokens.bfloat16()
        return frames_of_first(lambda: tgl.moe(x, chosen, weights, w1, w2), "sm_90")

    growing = itertools.count(T + 1)

    def quantize_other_rows() -> tgl.Components:
        return tgl.group_quantize(torch.empty(next(growing), K), offs, format="mxfp8")

    recipe = tgl.recipes.MXFP8BlockScaling()
    return {
        "grouped_gemm": lambda: frames_of(lambda: tgl.grouped_gemm(x, w, offs)),
        "group_quantize": lambda: frames_of(lambda: tgl.group_quantize(x, offs, format="mxfp8")),
        "group_quantize, other T": lambda: frames_of(quantize_other_rows),
        "MLP, forward": lambda: expert(False),
        "MLP, backward": lambda: expert(True),
        "moe": call_of_block,
        "moe, first on sm_90": first_call_of_block,
        "MoE, forward": lambda: block(False),
        "MoE, backward": lambda: block(True),
        "MXFP8 MLP, forward": lambda: expert(False, recipe=recipe),
        "MXFP8 MLP, backward": lambda: expert(True, recipe=recipe),
    }


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--functions", action="store_true", help="how often each function was called")
    return made.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(argv)
    torch.manual_seed(0)
    for name, run in cases().items():
        seen = run()
        print(f"{name:22} {sum(seen.values()):5}")
        if options.functions:
            for function, calls in seen.most_common():
                print(f"    {calls:4}  {function}")


if __name__ == "__main__":
    main()
