"""Peak memory of the expert layer's forward and backward: tgl against transformers' ``grouped_mm``, eager.

    python benchmarks/memory.py [--quick]

Every allocation and release that PyTorch's CPU allocator makes during one step is recorded, and the peak of their
running sum is printed in MiB: activations, temporaries and gradients, without what is there before: the weights, the
inputs, oneDNN's primitives, and the buffers of up to 8 MiB (here 4) that a thread of ours keeps between calls.
``ratio`` is ours divided by theirs: at most 1 means not more memory.
"""

from __future__ import annotations

import argparse

import torch
from expert_layer import CASES, QUICK, Layer
from torch.profiler import ProfilerActivity, profile

from tgl.integrations import transformers as integration

MIB = 1 << 20


def peak(layer: Layer, arm: str) -> int:
    """Bytes at the highest point of one step, over those at its start."""
    layer.step(arm)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        layer.step(arm)
    current = highest = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            current += event.nbytes()
            highest = max(highest, current)
    return highest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three balanced cases instead of all")
    options = parser.parse_args()
    torch.set_num_threads(1)
    integration.register()
    worst = 0.0
    print(f"{'dtype':9} {'case':42} {'grp_mm':>9} {'tgl':>9}  ratio")
    for dtype in (torch.float32, torch.bfloat16):
        for case in QUICK if options.quick else CASES:
            layer = Layer(case, dtype)
            theirs, ours = peak(layer, "grouped_mm"), peak(layer, "tgl")
            worst = max(worst, ours / theirs)
            name = str(dtype).removeprefix("torch.")
            print(f"{name:9} {case!s:42} {theirs / MIB:9.2f} {ours / MIB:9.2f} {ours / theirs:6.2f}", flush=True)
    print(f"worst ratio {worst:.2f}")


if __name__ == "__main__":
    main()
