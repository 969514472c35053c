"""Peak memory of the expert layer's forward and backward: tgl against transformers' ``grouped_mm``, eager.

    python benchmarks/memory.py [--quick]

Every allocation and release that PyTorch's CPU allocator makes during one step is recorded, and the peak of their
running sum is printed in MiB: activations, temporaries and gradients, without what is there before: the weights, the
inputs, oneDNN's primitives, and the buffers of up to 8 MiB (here 4) that a thread of ours keeps between calls.
``ratio`` is ours divided by theirs: at most 1 means not more memory.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence

import torch
from expert_layer import CASES, QUICK, Layer
from harness.command import parser

from tests.peak_memory import peak_memory
from tgl.integrations import transformers as integration

MIB = 1 << 20


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    return parser(__doc__, quick="three balanced cases instead of all").parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(argv)
    torch.set_num_threads(1)
    integration.register()
    worst = 0.0
    print(f"{'dtype':9} {'case':42} {'grp_mm':>9} {'tgl':>9}  ratio")
    for dtype in (torch.float32, torch.bfloat16):
        for case in QUICK if options.quick else CASES:
            layer = Layer(case, dtype)
            theirs, ours = (peak_memory(functools.partial(layer.step, arm)) for arm in ("grouped_mm", "tgl"))
            worst = max(worst, ours / theirs)
            name = str(dtype).removeprefix("torch.")
            print(f"{name:9} {case!s:42} {theirs / MIB:9.2f} {ours / MIB:9.2f} {ours / theirs:6.2f}", flush=True)
    print(f"worst ratio {worst:.2f}")


if __name__ == "__main__":
    main()
