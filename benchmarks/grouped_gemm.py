"""Grouped GEMMs and bias sums on a GPU, against what torch offers, on the shapes and routings of real models.

    python benchmarks/grouped_gemm.py [--quick] [--shapes mixtral-fc1 ...] [--routings zipf ...] [--ops fprop ...]

Arms: ``tgl``, ``torch`` (torch._grouped_mm), ``loop`` (torch.mm per group), ``dense`` (one torch.mm of the same FLOPs:
the ceiling), ``quack`` and ``deepgemm`` where they are installed; for bias sums ``copy``, which moves as many bytes as
the op, half of them read. Every arm is a captured graph. Before each replay 256 MB are written, so L2 holds nothing of
use, and with ``--clean-l2`` another 256 MB are read, so that it holds nothing that has to be written back at the cost
of the op (a copy leaves half of its bytes behind itself; an op that only reads does not). Events enclose the replay
alone. Arms take turns in rotating order, and medians are compared. FLOPs are those of the routed rows, ``2 R N K``.

Nothing is timed before tgl has passed its gates: an error as small as per-group torch.mm's against float32, no poison
left in the output, the same bits again, and new offsets in the same graph giving new results. Results: a table of
ratios of times (above 1: tgl is faster), and ``--out FILE`` as JSON.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from functools import partial

import torch
from harness import gates
from harness.command import cases, choice, gpu_parser, needs_device, run_all
from harness.compared import Comparison, Result, compared
from harness.dense import DTYPE, OPS
from harness.report import save, with_machine
from harness.shapes import QUICK, QUICK_ROUTINGS, ROUTINGS, SHAPES, split
from harness.timing import HostClock

import tgl
from tests.kernel_cases import ends

RIVALS = ("torch", "loop", "dense", "quack", "deepgemm", "copy")
COMPARISON = Comparison(
    names={"shape": ">20", "op": ">10", "routing": ">13"},
    ms=">9.3f",
    rate=("rate", ">11"),
    rivals=(RIVALS, ">8.3f"),
    speed=lambda result: result["rate"],
)


def run_case(shape: str, op: str, routing: str, args: argparse.Namespace) -> Result:
    torch.manual_seed(0)
    problem = OPS[op](SHAPES[shape], split(routing, SHAPES[shape].groups, SHAPES[shape].rows))
    rivals = {name: call for name, call in problem.rivals().items() if name in args.arms}
    gate = partial(gates.wrong, problem, oracle=problem.oracle, rival=problem.per_group_mm)
    found = compared({"tgl": problem.tgl, **rivals}, gate, args)
    if "times" in found:
        found["rate"] = problem.rate(found["ms"]["tgl"])
    return {**SHAPES[shape]._asdict(), "flops": problem.flops, "bytes": problem.bytes, **found}


def report(results: list[Result]) -> str:
    """Geometric means and worst cases, per op."""
    lines = ["", "time of the arm / time of tgl: geometric mean (worst, where)"]
    for op in dict.fromkeys(r["op"] for r in results):
        means = COMPARISON.means([r for r in results if r["op"] == op])
        lines += [f"{op:>10} / {arm:<6} {mean}" for arm, mean in means]
    return "\n".join(lines)


def host_time() -> float:
    """Microseconds a warm call takes on the host, over 10,000 calls of a tiny problem."""
    a, w = torch.randn(64, 64, device="cuda", dtype=DTYPE), torch.randn(2, 64, 64, device="cuda", dtype=DTYPE)
    offs, out = ends((30, 34), "cuda"), torch.empty_like(a)
    clock = HostClock(time.perf_counter, calls=100)
    taken = []
    for _ in range(101):
        torch.cuda.synchronize()
        taken.append(clock.take(lambda: tgl.grouped_gemm(a, w, offs, out=out)))
    return sum(taken[1:]) / len(taken[1:]) * 1e6


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = gpu_parser(__doc__, quick="a few shapes, two routings")
    choice(parser, "--shapes", SHAPES, default=False)
    choice(parser, "--routings", ROUTINGS, default=False)
    choice(parser, "--ops", OPS)
    parser.add_argument("--arms", nargs="+", default=list(RIVALS))
    args = parser.parse_args(argv)
    args.shapes = args.shapes or list(QUICK if args.quick else SHAPES)
    args.routings = args.routings or list(QUICK_ROUTINGS if args.quick else ROUTINGS)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    device = needs_device()
    print(f"{device}, torch {torch.__version__}, {args.samples} samples")
    every = cases(shape=args.shapes, op=args.ops, routing=args.routings)
    print(f"host time of a warm call: {host_time():.1f} us\n{COMPARISON.header()}")
    results = run_all(every, lambda **case: run_case(**case, args=args), COMPARISON.line)
    print(report(results))
    save(args.out, with_machine(device, results))


if __name__ == "__main__":
    main()
