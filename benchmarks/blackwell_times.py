"""Cycles of a tile on Blackwell by the emulator's model of time, beside the kernels of others with the same tile.

    python benchmarks/blackwell_times.py [--quick] [--formats bf16 mxfp8 nvfp4] [--depth K] [--json FILE]

One CTA, or a pair, forms three and seven tiles of groups of one tile each: ``tile`` is the difference for one tile,
in cycles, ``start`` what three take more than three times that, and ``MMA`` the cycles of a tile's products at the
published rate. bfloat16 beside nvidia-cutlass-operators, formats with scales of blocks beside quack; without these
packages only ours is shown. Both results are checked to be exact. No Blackwell has run any of it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import blackwell_economy as dense
import blackwell_economy_scaled as scaled
import torch
from harness.command import choice, parser
from harness.report import save
from torch import Tensor

from cute_emulator.clocked import costs_of
from tests.kernel_cases import ends, integers, product
from tgl.cutlass_kernels.config import GemmConfig
from tgl.testing import emulate

KINDS = {"bf16": "f16", "mxfp8": "mxf8f6f4", "nvfp4": "mxf4nvf4"}
TILES = ((128, 128), (256, 128), (256, 256))  # of an MMA; 256 rows by two CTAs
FEW, MANY = 3, 7


def cycles(run: Any, out: Tensor, expected: Tensor) -> float:
    with emulate("sm_100a", timing="clocked", detect_races=False) as machine:
        run()
        found: float = machine.launches[-1].cycles.total
    if not torch.equal(out, expected):
        raise SystemExit("wrong result")
    return found


def of_dense(ours: bool, tile: tuple[int, int], depth: int, tiles: int) -> float:
    """Cycles in bfloat16."""
    config = GemmConfig(*tile, two_cta=tile[0] == 256)
    sizes = (tile[0],) * tiles
    a, b, offs = integers(sum(sizes), depth), integers(tiles, tile[1], depth).transpose(1, 2), ends(sizes)
    out = torch.empty(sum(sizes), tile[1], dtype=torch.bfloat16)
    problem = config, a, b, offs, out
    wanted = product(a, b, sizes).bfloat16()
    if ours:
        return cycles(lambda: dense.run_ours(*problem), out, wanted)
    kernel = dense.their_kernel()
    if kernel is None:
        raise ImportError("nvidia-cutlass-operators")
    return cycles(lambda: dense.run_theirs(kernel, *problem), out, wanted)


def of_scaled(ours: bool, format: str, tile: tuple[int, int], depth: int, tiles: int) -> float:
    """Cycles with scales of blocks."""
    made = scaled.problem(format, (tile[0],) * tiles, depth, tile[1])
    out = torch.empty(made.expected.shape, dtype=torch.bfloat16)
    run = scaled.run_ours if ours else scaled.run_theirs
    return cycles(lambda: run(made, tile, out), out, made.expected)


def measure(ours: bool, format: str, tile: tuple[int, int], depth: int) -> dict[str, float]:
    dense.CTAS = scaled.CTAS = 2 if tile[0] == 256 else 1  # a cluster
    few, many = (
        of_dense(ours, tile, depth, n) if format == "bf16" else of_scaled(ours, format, tile, depth, n)
        for n in (FEW, MANY)
    )
    one = (many - few) / (MANY - FEW)
    return {"tile": one, "start": few - FEW * one}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    made = parser(__doc__, quick="one tile, an eighth of the depth")
    choice(made, "--formats", KINDS)
    made.add_argument("--depth", type=int, default=2048, help="of the contraction")
    made.add_argument("--json", type=Path, help="write the cycles to this file")
    return made.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    tiles, depth = (TILES[:1], args.depth // 8) if args.quick else (TILES, args.depth)
    cases = [(format, tile) for format in args.formats for tile in tiles]
    found: dict[tuple, dict[str, float]] = {}
    # quack changes the DSL when it is imported, so all of ours are run before.
    for ours in (True, False):
        for format, tile in cases:
            try:
                found[ours, format, tile] = measure(ours, format, tile, depth)
            except ImportError as error:
                print(f"without another kernel for {format}: {error}")
    rows: list[dict[str, Any]] = []
    print(f"{'format':>6} {'tile':>8} {'MMA':>6} {'tgl':>6} {'other':>6} {'ratio':>5} {'start':>6} {'other':>6}")
    for format, tile in cases:
        products = 2 * 128 * tile[1] * depth / costs_of("sm_100").tensor[KINDS[format]]
        mine, theirs = found[True, format, tile], found.get((False, format, tile))
        rows.append({"format": format, "tile": tile, "depth": depth, "MMA": products, "tgl": mine, "other": theirs})
        right = ("-", "-", "-")
        if theirs is not None:
            ratio = mine["tile"] / theirs["tile"]
            right = (f"{theirs['tile']:.0f}", f"{ratio:.2f}", f"{theirs['start']:.0f}")
        name = f"{tile[0]}x{tile[1]}"
        line = f"{format:>6} {name:>8} {products:6.0f} {mine['tile']:6.0f} {right[0]:>6} {right[1]:>5}"
        print(f"{line} {mine['start']:6.0f} {right[2]:>6}")
    save(args.json, rows)


if __name__ == "__main__":
    main()
