"""A step of Muon on a stack of experts' matrices on one CPU thread: as a stack, and one matrix after the other.

    python benchmarks/muon.py [--quick] [--seconds N]

``loop`` is ``torch.optim.Muon`` on a parameter per matrix, ``stack`` is ``tgl.optim.Muon`` on one of three dimensions.
Figures are medians of CPU milliseconds, of arms that take turns in one process; ``loop / stack`` above 1 is what the
stack saves. Nothing is timed before both have the same bits after a step.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from harness.command import parser
from harness.report import medians
from harness.timing import HostClock, for_seconds, interleaved
from torch import nn

from tgl import optim

SHAPES = ((64, 32, 32), (64, 64, 128), (32, 128, 256), (8, 512, 256))


def line(shape: tuple[int, int, int], seconds: float) -> str:
    """The measurement of one shape, ``(matrices, rows, columns)``."""
    torch.manual_seed(0)
    stack = nn.Parameter(torch.randn(shape))
    matrices = [nn.Parameter(matrix.clone()) for matrix in stack.detach()]
    stack.grad = torch.randn(shape)
    for matrix, grad in zip(matrices, stack.grad):
        matrix.grad = grad.clone()
    arms = {"loop": torch.optim.Muon(matrices).step, "stack": optim.Muon([stack]).step}
    for step in arms.values():
        step()
    if not torch.equal(stack, torch.stack(matrices)):
        raise AssertionError(f"{shape}: a step has other bits")
    found = medians(interleaved(arms, HostClock(), for_seconds(seconds, 5), warm_up=1))
    loop, whole = (found[arm] * 1e3 for arm in arms)
    return f"{'x'.join(map(str, shape)):>12} {loop:9.2f} {whole:9.2f} {loop / whole:9.2f}"


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    made = parser(__doc__, quick="two shapes")
    made.add_argument("--seconds", type=float, default=2.0, help="for each line")
    return made.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(argv)
    torch.set_num_threads(1)
    print(f"{'matrices':>12} {'loop':>9} {'stack':>9} {'loop / stack':>9}")
    for shape in SHAPES[:2] if options.quick else SHAPES:
        print(line(shape, options.seconds))


if __name__ == "__main__":
    main()
