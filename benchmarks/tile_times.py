"""Cycles of a tile of the dense sm_90 kernel in many tilings: measured on an H100, and by the emulator's model of time.

    python benchmarks/tile_times.py [--quick] [--depths 256 1024 4096] [--tiles 128x192pp ...] [--wgrad] [--out FILE]
    python benchmarks/tile_times.py --measured FILE ...

Problems of one group are cut into ``TILES`` tiles for each multiprocessor. With a CUDA device both are run, else only
the model; ``--measured`` takes the figures of an earlier run with a device. Operands are zeros where times are taken,
so that the clock does not fall, and a graph of one call is replayed; the clock is that of a kernel behind it that spins
for a number of cycles. Results are cycles of a kernel from its start to its end: those of the device are less
``LAUNCH``.

The model runs two multiprocessors (two CTAs, or a cluster of two) on few tiles, and adds the difference of two such
runs for each tile more. That takes a minute or two for a tiling and a depth of 4096.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from harness.command import parser
from harness.report import save
from harness.tiled import parsed
from torch import Tensor

from tgl.cutlass_kernels.config import VARLEN_K, VARLEN_M, GemmConfig
from tgl.cutlass_kernels.epilogue import EpilogueSpec
from tgl.cutlass_kernels.launchers import gemm

ARCH = "sm_90"
FORWARD = (
    "128x128pp", "128x192pp", "192x128pp", "128x256", "256x128", "128x128", "128x192", "128x128x2", "128x256x2",
    "256x128x2", "64x256", "64x128", "256x64", "128x64pp",
)  # fmt: skip
WGRAD = ("128x192pp", "128x256", "256x128", "2x128x256", "128x128pp")
DEPTHS = (256, 1024, 4096)
TILES = 12  # of a multiprocessor
ACROSS = 11  # tiles of a row, times two
LAUNCH = 10_600  # cycles between two events around a graph of an empty kernel
SPIN, SAMPLES, WARM = 2_000_000, 15, 0.6  # cycles; replays; seconds, in which memory gets up to its clock


def operands(kind: str, shape: tuple[int, int, int], device: str) -> tuple[Tensor, ...]:
    """A, B, ends of groups and the result of a problem of one group: rows, columns, depth."""
    rows, columns, depth = shape
    made = {"dtype": torch.bfloat16, "device": device}
    offs = torch.tensor([rows if kind == VARLEN_M else depth], dtype=torch.int32, device=device)
    if kind == VARLEN_M:
        b = torch.zeros(1, columns, depth, **made).transpose(1, 2)
        return torch.zeros(rows, depth, **made), b, offs, torch.empty(rows, columns, **made)
    out = torch.empty(1, rows, columns, **made)
    return torch.zeros(depth, rows, **made), torch.zeros(depth, columns, **made), offs, out


def built(kind: str, tiling: GemmConfig, emulated: bool) -> Any:
    return gemm.build(gemm.GemmKey(kind, ARCH, emulated, "bfloat16", 1, EpilogueSpec("bfloat16"), tiling))


def modelled(kind: str, tiling: GemmConfig, depth: int, tiles: int) -> float:
    """Cycles of so many tiles of each of two multiprocessors, which are neighbours in a column."""
    from tgl.testing import emulate

    clusters = 2 // tiling.ctas
    rows, columns = tiling.cluster_tile
    a, b, offs, out = operands(kind, (rows * clusters, columns * tiles, depth), "cpu")
    with emulate(ARCH, timing="clocked", detect_races=False) as machine:
        built(kind, tiling, True)(a, b, offs, out, None, None, None, None, clusters)
        found: float = machine.launches[-1].cycles.total
    return found


def model(kind: str, tiling: GemmConfig, depth: int) -> float:
    few, many = (2, 4) if depth > 1024 else (4, 8)
    first, last = (modelled(kind, tiling, depth, n) for n in (few, many))
    return last + (TILES - many) * (last - first) / (many - few)


def measure(kind: str, tiling: GemmConfig, depths: Sequence[int]) -> dict[int, float]:
    """Cycles on the device by depth, without ``LAUNCH``."""
    call, found = built(kind, tiling, False), {}
    clusters = torch.cuda.get_device_properties(0).multi_processor_count // tiling.ctas
    rows, columns = tiling.cluster_tile
    down = clusters // ACROSS * (TILES // 2)
    for depth in depths:
        given = operands(kind, (rows * down, columns * ACROSS * 2, depth), "cuda")
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            call(*given, None, None, None, None, clusters)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                call(*given, None, None, None, None, clusters)
            begun = time.monotonic()
            while time.monotonic() - begun < WARM:
                graph.replay()
                stream.synchronize()
            found[depth] = statistics.median(once(graph, stream) for _ in range(SAMPLES)) - LAUNCH
    return found


def once(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> float:
    """Cycles of one replay, by the clock of a kernel that spins behind it."""
    start, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    torch.cuda._sleep(SPIN // 10)  # so that the host is ahead
    start.record()
    graph.replay()
    middle.record()
    torch.cuda._sleep(SPIN)
    end.record()
    stream.synchronize()
    return start.elapsed_time(middle) / middle.elapsed_time(end) * SPIN


def ranks(values: Sequence[float]) -> list[int]:
    order = sorted(range(len(values)), key=values.__getitem__)
    return [order.index(i) for i in range(len(values))]


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    made = parser(__doc__, quick="one tiling and depth")
    made.add_argument("--depths", nargs="+", type=int, default=list(DEPTHS), help="of the contraction")
    made.add_argument("--tiles", nargs="+", help="tilings; else those of the op")
    made.add_argument("--wgrad", action="store_true", help="the weight gradient, not the forward")
    made.add_argument("--measured", type=Path, help="the --out of a run on a device")
    made.add_argument("--out", type=Path, help="JSON file")
    return made.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    kind = VARLEN_K if args.wgrad else VARLEN_M
    tiles = args.tiles or list(WGRAD if args.wgrad else FORWARD)
    depths, tiles = (args.depths[:1], tiles[:1]) if args.quick else (args.depths, tiles)
    before = json.loads(args.measured.read_text()) if args.measured else []
    known = {(r["op"], r["tile"], r["depth"]): r["measured"] for r in before}
    rows: list[dict[str, Any]] = []
    print(f"{'op':>8} {'tile':>10} {'depth':>5} {'MMA':>8} {'model':>8} {'measured':>8} {'ratio':>5}")
    for tile in tiles:
        tiling = parsed(tile, ARCH, band=8)
        on_device = measure(kind, tiling, depths) if torch.cuda.is_available() else {}
        for depth in depths:
            products = TILES * tiling.tile_m * tiling.tile_n * depth / 2048
            measured = on_device.get(depth, known.get((kind, tile, depth)))
            row = {"op": kind, "tile": tile, "depth": depth, "products": products, "measured": measured}
            row["model"] = model(kind, tiling, depth)
            rows.append(row)
            right = f"{measured:8.0f} {row['model'] / measured:5.2f}" if measured else f"{'-':>8} {'-':>5}"
            print(f"{kind:>8} {tile:>10} {depth:5} {products:8.0f} {row['model']:8.0f} {right}", flush=True)
            save(args.out, rows)
    for depth in depths:
        those = [r for r in rows if r["depth"] == depth and r["measured"]]
        if len(those) > 2:
            error = statistics.mean(abs(math.log(r["model"] / r["measured"])) for r in those)
            speeds = [[r["products"] / r[key] for r in those] for key in ("model", "measured")]
            rank = statistics.correlation(*map(ranks, speeds))
            print(f"depth {depth}: {len(those)} tilings, mean error {error:.1%}, rank correlation {rank:.2f}")


if __name__ == "__main__":
    main()
