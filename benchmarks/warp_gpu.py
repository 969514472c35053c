"""Grouped GEMMs with MMAs of warps (``mma.sync``) on a Hopper, against quack's, ours with ``wgmma``, and the ceiling.

    python benchmarks/warp_gpu.py [--quick] [--shapes mixtral-fc1 ...] [--routings zipf ...] [--ops fprop ...]
        [--loads tma] [--out FILE]

The kernels for Ampere, Ada and consumer Blackwell are compiled for sm_90 here, so that their speed can be measured
where those chips are not. Arms: ``tgl``, these kernels, whose operands are loaded by lanes (``cp.async``) as on Ampere
and Ada, or with ``--loads tma`` by TMA as on consumer Blackwell; ``other``, the other of the two; ``ceiling``, a loop
of ``mma.sync`` on registers alone with as many FLOPs; ``dense``, the kernels of ``tgl`` on one group that has all the
rows; ``quack``, its kernels for sm_120 compiled for sm_90, which multiply by ``mma.sync`` as well, load by TMA and get
a tile of 128 x 128 (its class for sm_80 has no kernel in 0.6.5); ``wide``, our own kernels of a Hopper. Every arm is a
captured graph, 256 MB are written before each replay, arms take turns in rotating order, and medians are compared.
FLOPs are those of the routed rows, ``2 R N K``.

Nothing is timed before tgl has passed the gates of ``grouped_gemm.py``. Results: a table of ratios of times (above 1:
tgl is faster), and ``--out FILE`` as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from harness import gates
from harness.command import cases, choice, gpu_parser, needs_device, run_all
from harness.compared import Comparison, Result, compared
from harness.dense import DTYPE, OPS, Problem
from harness.report import save
from harness.shapes import QUICK, QUICK_ROUTINGS, ROUTINGS, SHAPES, split

from tests import kernels_of_warps
from tgl.cutlass_kernels.config import VARLEN_M
from tgl.cutlass_kernels.runtime import device

RIVALS = ("other", "ceiling", "dense", "quack", "wide")
LOADS = tuple(kernels_of_warps.TILINGS)
TILE = (128, 128)
GEMMS = ("fprop", "dgrad", "wgrad")
COMPARISON = Comparison(
    names={"shape": ">20", "op": ">6", "routing": ">13"},
    ms=">9.3f",
    rate=("rate", ">11"),
    rivals=(RIVALS, ">8.3f"),
    speed=lambda result: result["rate"],
)


def ceiling(flops: float, place: torch.device) -> Callable[[], None]:
    """A call that multiplies on registers alone, with at least as many FLOPs."""
    from harness.warp_ceiling import THREADS, TURN, build

    blocks = device.multiprocessors(place)
    out = torch.empty(blocks * THREADS, device=place)
    turns = -int(-flops // (TURN * blocks))
    return functools.partial(build(kernels_of_warps.PLACE), out, turns, blocks)


def quack() -> Callable[..., Any] | None:
    """Its GEMM where it is installed, with the class of sm_120, whatever the device."""
    os.environ["QUACK_ARCH"] = "120"
    with contextlib.suppress(Exception):  # it may also fail to import beside another version of the DSL
        from quack.gemm import gemm

        return gemm
    return None


def by_quack(p: Problem) -> dict[str, Callable[[], object]]:
    """Its arm, whose offsets begin with 0."""
    gemm = quack()
    if gemm is None:
        return {}
    rows = p.varlen == VARLEN_M
    a, b, side = (p.a, p.b.transpose(1, 2), "m") if rows else (p.a.t(), p.b.t(), "k")

    def run() -> None:
        starts = {f"cu_seqlens_{side}": torch.nn.functional.pad(p.offs, (1, 0))}
        gemm(a, b, p.theirs, None, None, *TILE, 1, 1, **starts)

    return {"quack": run}


def by_warps(p: Problem, loads: str) -> Callable[[], None]:
    """tgl on the kernels of warps."""

    def run() -> None:
        with kernels_of_warps.in_place(loads):
            p.tgl()

    return run


def run_case(shape: str, op: str, routing: str, args: argparse.Namespace) -> Result:
    torch.manual_seed(0)
    sizes = SHAPES[shape]
    problem = OPS[op](sizes, split(routing, sizes.groups, sizes.rows))
    whole = OPS[op](sizes._replace(groups=1), (sizes.rows,))
    (other,) = set(LOADS) - {args.loads}
    arms = {"tgl": by_warps(problem, args.loads), "other": by_warps(problem, other)}
    arms |= {"ceiling": ceiling(problem.flops, problem.x.device), "dense": by_warps(whole, args.loads)}
    arms |= {**by_quack(problem), "wide": problem.tgl}
    gate = functools.partial(gates.wrong, problem, oracle=problem.oracle, rival=problem.per_group_mm)
    found = compared(arms, gate, args)
    if "times" in found:
        found["rate"] = problem.rate(found["ms"]["tgl"])
    return {**sizes._asdict(), "flops": problem.flops, "loads": args.loads, **found}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    made = gpu_parser(__doc__, quick="fewer shapes and routings")
    choice(made, "--shapes", SHAPES, default=False)
    choice(made, "--routings", ROUTINGS, default=False)
    choice(made, "--ops", GEMMS)
    made.add_argument("--loads", choices=LOADS, default=LOADS[0], help="what loads operands of the arm tgl")
    args = made.parse_args(argv)
    args.shapes = args.shapes or list(QUICK if args.quick else SHAPES)
    args.routings = args.routings or list(QUICK_ROUTINGS if args.quick else ROUTINGS)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    print(f"{needs_device()}, torch {torch.__version__}, {DTYPE}\n{COMPARISON.header()}")
    every = cases(shape=args.shapes, op=args.ops, routing=args.routings)
    results = run_all(every, lambda **case: run_case(**case, args=args), COMPARISON.line)
    print(COMPARISON.report(results))
    save(args.out, results)


if __name__ == "__main__":
    main()
