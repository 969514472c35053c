"""What reading rows by an index costs on Blackwell, counted on the emulator, beside a copy in order and the GEMM.

    python benchmarks/blackwell_gather.py [--quick] [--json FILE]

Every call runs twice: by a kernel that gathers rows, and by a copy in order and the kernel that reads these rows, as
where no kernel gathers. Both results are checked to be equal. ``gathering`` and ``copying`` are sums over the launches
of the call, ``in order`` is the GEMM behind the copy alone. ``instructions`` are those a warp issues, without the
register moves and parameter loads of PTX.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from blackwell_economy import VIRTUAL
from harness.command import parser
from harness.report import save
from torch import Tensor

import tgl
from cute_emulator import LaunchRecord
from tests.kernel_cases import ends, integers
from tgl.cutlass_kernels.archs import ARCHS, arch_of
from tgl.cutlass_kernels.runtime import launcher
from tgl.testing import emulate

ARCH = arch_of("sm_100")
SIZES = (512, 300, 0, 77, 640, 519)
TOKENS, DEPTH, COLUMNS = 512, 512, 512


def counts(call: Callable[[], Tensor]) -> tuple[Tensor, list[dict[str, int]]]:
    """The result of a call, and what each of its launches took."""

    def issued(record: LaunchRecord, prefix: str | tuple[str, ...]) -> int:
        return sum(n for name, n in record.instructions.items() if name.startswith(prefix))

    launcher.forget()
    with emulate(ARCH.target, detect_races=False) as machine:
        result = call()
        return result, [
            {
                "instructions": record.warp_instructions - issued(record, VIRTUAL),
                "TMA copies": issued(record, "cp.async.bulk.tensor"),
            }
            for record in machine.launches
        ]


def calls(depth: int, columns: int) -> dict[str, Callable[[], Tensor]]:
    """By name: the product, and the gradient of its weights."""
    torch.manual_seed(0)
    offs, rows = ends(SIZES), sum(SIZES)
    index = torch.randint(0, TOKENS, (rows,), dtype=torch.int32)
    tokens, dy = integers(TOKENS, depth).bfloat16(), integers(rows, columns).bfloat16()
    b = integers(len(SIZES), depth, columns).bfloat16()
    return {
        "grouped_gemm": lambda: tgl.grouped_gemm(tokens, b, offs, rows=index),
        "grouped_gemm_wgrad": lambda: tgl.grouped_gemm_wgrad(tokens, dy, offs, a_rows=index),
    }


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    made = parser(__doc__, quick="a quarter of the depth and of the columns")
    made.add_argument("--json", type=Path, help="write the counts to this file")
    return made.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    share = 4 if args.quick else 1
    rows: list[dict[str, Any]] = []
    print(f"{'op':>20} {'per call':>14} {'gathering':>10} {'copying':>10} {'in order':>10} {'ratio':>6}")
    try:
        for op, call in calls(DEPTH // share, COLUMNS // share).items():
            found, (ours,) = counts(call)
            ARCHS[ARCH.name] = replace(ARCH, kernels=ARCH.kernels - {"GatheredGroupedGemm"})
            wanted, theirs = counts(call)
            ARCHS[ARCH.name] = ARCH
            if not torch.equal(found, wanted):
                raise SystemExit(f"wrong result: {op}")
            for name, count in ours.items():
                copying, alone = sum(launch[name] for launch in theirs), theirs[-1][name]
                rows.append({"op": op, "measure": name, "gathering": count, "copying": copying, "in order": alone})
                ratio = count / copying
                print(f"{op:>20} {name:>14} {count:10d} {copying:10d} {alone:10d} {ratio:6.2f}", flush=True)
    finally:
        ARCHS[ARCH.name] = ARCH
        launcher.forget()
    save(args.json, rows)


if __name__ == "__main__":
    main()
