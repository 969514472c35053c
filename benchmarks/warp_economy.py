"""What an output tile costs on consumer Blackwell (sm_120), counted on the emulator, beside quack's grouped GEMM.

    python benchmarks/warp_economy.py [--quick] [--json FILE]

Both kernels multiply with ``mma.sync`` and run the same problems in bfloat16 (forward with B contiguous along K, weight
gradient with both operands contiguous along their features) with the same tile and as many CTAs, and both results are
checked to be exact. Counts are per output tile, and ``ratio`` is ours divided by theirs: below 1 we need less.
``instructions`` are those that a warp issues, without the register moves and parameter loads of PTX, which machine code
does not have; ``loaded`` and ``stored`` are bytes between global memory and a CTA, by any way; ``barriers`` are those
of warps and of CTAs, per warp. Theirs loads and stores by TMA, with a warp of its own for the loads; ours loads by TMA,
too, and is counted beside what it is with loads by lanes (``cp.async``), as on 8.x. Without the package (``pip install
quack-kernels``) only our counts are shown.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from blackwell_economy import ROUTINGS, VIRTUAL
from harness.command import parser
from harness.report import save
from torch import Tensor

from cute_emulator import LaunchRecord
from tests.kernel_cases import ends, gradient, integers, product
from tgl.cutlass_kernels.archs import ARCHS
from tgl.cutlass_kernels.config import VARLEN_K, VARLEN_M
from tgl.cutlass_kernels.epilogue import EpilogueSpec
from tgl.cutlass_kernels.launchers import gemm
from tgl.testing import emulate

CTAS = 4
ARCH = "sm_120"
TILE = (128, 128)
DEPTH = COLUMNS = 256
OPS = ("forward", "weight gradient")
# Without an empty group, of which theirs reads what nothing has written.
BUSY = {name: tuple(size for size in sizes if size) for name, sizes in ROUTINGS.items()}
MEASURES = ("instructions", "MMAs", "loaded", "stored", "barriers", "mbarrier operations")


class Problem(NamedTuple):
    """Operands as ``grouped_gemm`` or ``grouped_gemm_wgrad`` takes them, and the result."""

    op: str
    sizes: tuple[int, ...]
    a: Tensor
    b: Tensor
    wanted: Tensor

    @property
    def tiles(self) -> int:
        """How many tiles the result has."""
        return tiles_of(self.op, self.sizes, self.wanted)

    @property
    def name(self) -> str:
        return f"{self.op}, {self.sizes}"


def tiles_of(op: str, sizes: Sequence[int], result: Tensor) -> int:
    """How many tiles a result ``[T, N]`` or ``[G, M, N]`` has."""
    tile_m, tile_n = TILE
    heights = sizes if op == "forward" else (result.shape[1],) * len(sizes)
    return sum(-(-height // tile_m) for height in heights) * -(-result.shape[-1] // tile_n)


def problem(op: str, sizes: tuple[int, ...]) -> Problem:
    torch.manual_seed(0)
    a = integers(sum(sizes), DEPTH)
    if op == "forward":
        b = integers(len(sizes), COLUMNS, DEPTH).transpose(1, 2)
        return Problem(op, sizes, a, b, product(a, b, sizes).bfloat16())
    b = integers(sum(sizes), COLUMNS)
    return Problem(op, sizes, a, b, gradient(a, b, sizes).bfloat16())


def run_ours(p: Problem, out: Tensor, tma: bool = True) -> None:
    kind = VARLEN_M if p.op == "forward" else VARLEN_K
    config = replace(ARCHS[ARCH].tilings.deepest(*TILE), tma=tma)
    key = gemm.GemmKey(kind, ARCH, True, "bfloat16", 1, EpilogueSpec("bfloat16"), config)
    gemm.build(key)(p.a, p.b, ends(p.sizes), out, None, None, None, None, CTAS)


def run_by_lanes(p: Problem, out: Tensor) -> None:
    run_ours(p, out, tma=False)


def run_theirs(p: Problem, out: Tensor) -> None:
    from emulator.tests.third_party import quack_gemm

    multiply, ends_from_0 = quack_gemm.load("sm_120a"), quack_gemm.ends(p.sizes)
    if p.op == "forward":
        multiply(p.a, p.b.transpose(1, 2), out, None, None, *TILE, 1, 1, cu_seqlens_m=ends_from_0)
    else:
        multiply(p.a.T, p.b.T, out, None, None, *TILE, 1, 1, cu_seqlens_k=ends_from_0)


def counts(record: LaunchRecord, tiles: int) -> dict[str, float]:
    """The measures of one launch, per tile."""

    def total(*prefixes: str) -> int:
        return sum(n for name, n in record.instructions.items() if name.startswith(prefixes))

    values = (
        record.warp_instructions - total(*VIRTUAL),
        record.mma_count,
        record.tma_bytes["load"] + record.global_bytes["load"] + record.copied_bytes,
        record.tma_bytes["store"] + record.global_bytes["store"],
        total("bar.", "barrier."),
        total("mbarrier."),
    )
    return {name: value / tiles for name, value in zip(MEASURES, values)}


def measure(run: Any, p: Any) -> dict[str, float]:
    """Run a kernel on one problem, check its result, count."""
    out = torch.full(p.wanted.shape, 7.0).bfloat16()
    with emulate("sm_120a", detect_races=False) as machine:
        run(p, out)
        record = machine.launches[-1]
    if not torch.equal(out, p.wanted):
        raise SystemExit(f"wrong result: {p.name}")
    return counts(record, p.tiles)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    made = parser(__doc__, quick="one routing")
    made.add_argument("--json", type=Path, help="write the counts to this file")
    return made.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    routings = ("ragged",) if args.quick else tuple(BUSY)
    cases = list(itertools.product(OPS, routings))
    found: dict[tuple[str, str, str], dict[str, float]] = {}
    # quack changes the DSL when it is imported, so all of ours are counted before.
    for who, run in (("tgl", run_ours), ("lanes", run_by_lanes), ("quack", run_theirs)):
        try:
            for op, routing in cases:
                found[who, op, routing] = measure(run, problem(op, BUSY[routing]))
        except ImportError as error:
            print(f"without {who}: {error}")
    rows: list[dict[str, Any]] = []
    print(f"{'op':>15} {'routing':>8} {'per tile':>20} {'tgl':>10} {'by lanes':>10} {'quack':>10} {'ratio':>6}")
    for op, routing in cases:
        ours, lanes, theirs = (found.get((who, op, routing)) for who in ("tgl", "lanes", "quack"))
        for name in MEASURES:
            other = theirs[name] if theirs else None
            rows.append({"op": op, "routing": routing, "measure": name, "tgl": ours[name],
                         "lanes": lanes[name], "quack": other})  # fmt: skip
            right = f"{other:10.1f} {ours[name] / other:6.2f}" if other else f"{'-':>10} {'-':>6}"
            print(f"{op:>15} {routing:>8} {name:>20} {ours[name]:10.1f} {lanes[name]:10.1f} {right}", flush=True)
    save(args.json, rows)


if __name__ == "__main__":
    main()
