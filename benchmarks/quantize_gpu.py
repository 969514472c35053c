"""Quantisation on a GPU, or dequantisation, against a copy, on the shapes and routings of real models.

    python benchmarks/quantize_gpu.py [--dequantize] [--formats mxfp8 ...] [--shapes mixtral-fc1 ...] [--samples 40]
                                      [--out FILE]

For every format: both directions, rowwise only, columnwise only; of dequantisation, which gives bfloat16, rowwise and
columnwise. Bandwidth counts the bytes that must move, x once and every component once, and is given as a fraction of
that of ``copy_`` of x. Formats with a scale per group read x twice to quantise it, the first time for maxima; the last
column counts that. Every arm is a captured graph; before each replay 256 MB are written, so L2 holds none of x; arms
take turns and medians are compared. Nothing is timed before its bytes are those of the CPU implementation on a smaller
problem.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tgl
from tgl.meta import formats
from tgl.meta.quantized import Components, Options, component_specs

SHAPES = {  # groups, rows, columns
    "mixtral-fc1": (8, 16384, 4096),
    "mixtral-fc2": (8, 16384, 14336),
    "qwen3-fc1": (128, 65536, 2048),
    "qwen3-fc2": (128, 65536, 768),
    "deepseek-fc1": (32, 65536, 7168),
}
ROUTINGS = ("balanced", "zipf")
FORMATS: dict[str, dict[str, Any]] = {
    "mxfp8": dict(format="mxfp8", scale_layout="blocked"),
    "fp8_block": dict(format="fp8_block"),
    "fp8_tensor": dict(format="fp8_tensor"),
    "nvfp4": dict(format="nvfp4", scale_layout="blocked"),
    "nvfp4_rht": dict(format="nvfp4", scale_layout="blocked", rht=True),
    "nvfp4_seeded": dict(format="nvfp4", scale_layout="blocked", rng=torch.tensor([1, 2])),
}
DIRECTIONS = {"both": {}, "rowwise": dict(columnwise=False), "columnwise": dict(rowwise=False)}
LINE = "{shape:14} {routing:9} {arm:22} {ms:8.4f} {tb_per_s:6.2f} {of_copy:8.2f} {read_twice:9.2f}"
DEQUANTIZED = ("mxfp8", "fp8_block", "fp8_tensor", "nvfp4")
FLUSH_BYTES = 256 << 20


def ends(groups: int, rows: int, routing: str) -> torch.Tensor:
    """Cumulative ends of ``groups`` groups that have ``rows`` rows together."""
    weights = torch.ones(groups) if routing == "balanced" else 1 / torch.arange(1, groups + 1)
    sizes = (weights / weights.sum() * rows).int()
    sizes[0] += rows - sizes.sum()
    return sizes.cumsum(0).int()


def directions(name: str) -> dict[str, dict[str, Any]]:
    """The directions of a format; a transform is of columnwise data."""
    return {d: given for d, given in DIRECTIONS.items() if d != "rowwise" or not FORMATS[name].get("rht")}


def placed(options: dict[str, Any]) -> dict[str, Any]:
    """The options with the seed, if there is one, on the GPU."""
    return {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in options.items()}


def check(options: dict[str, Any]) -> None:
    """Raise if the bytes are not those of the CPU implementation."""
    sizes = torch.tensor([5, 0, 130, 127, 128, 129, 1, 0, 40, 300])
    x = torch.randn(int(sizes.sum()) + 100, 1168) * torch.exp2(torch.randint(-20, 20, (1168,)).float())
    x, offs = x.bfloat16(), sizes.cumsum(0).int()
    expected = tgl.group_quantize(x, offs, **options)
    got = tgl.group_quantize(x.cuda(), offs.cuda(), **placed(options))
    for name, ours, theirs in zip(Components._fields, got, expected):
        if not torch.equal(ours.cpu().contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8)):
            raise AssertionError(f"{options}: {name} differs from that of the CPU")


def check_values(options: dict[str, Any], columnwise: bool) -> None:
    """Raise if the values are not those of the CPU implementation."""
    sizes = torch.tensor([5, 0, 130, 127, 128, 129, 1, 0, 40, 300])
    x = torch.randn(int(sizes.sum()) + 100, 1168) * torch.exp2(torch.randint(-20, 20, (1168,)).float())
    offs = sizes.cumsum(0).int()
    made = tgl.group_quantize(x, offs, rowwise=not columnwise, columnwise=columnwise, **options)
    data, scale, amax = made[3:6] if columnwise else made[:3]
    args = (data, scale, offs, amax if formats.FORMATS[options["format"]].decodes_with_amax else None)
    keywords = {**options, "columnwise": columnwise, "rows": len(x)}
    got = tgl.group_dequantize(*(None if t is None else t.cuda() for t in args), **keywords)
    if not torch.equal(got.cpu(), tgl.group_dequantize(*args, **keywords)):
        raise AssertionError(f"{options}: the values differ from those of the CPU")


def captured(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of ``work``, which has run before."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def medians(graphs: dict[str, torch.cuda.CUDAGraph], samples: int) -> dict[str, float]:
    """Milliseconds of each graph."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(samples):
        for name, graph in graphs.items():
            flush.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times[name].append(begin.elapsed_time(end))
    return {name: statistics.median(t) for name, t in times.items()}


def measure(shape: str, routing: str, formats: list[str], samples: int) -> list[dict[str, Any]]:
    """One row per format and direction."""
    groups, rows, columns = SHAPES[shape]
    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    offs, copy = ends(groups, rows, routing).cuda(), torch.empty_like(x)
    kept = []  # graphs do not keep what they write to
    graphs, moved, again = {"copy": captured(lambda: copy.copy_(x))}, {"copy": 2 * x.nbytes}, {"copy": 0}
    for name in formats:
        for direction, given in directions(name).items():
            options = placed(FORMATS[name] | given)
            out = tgl.group_quantize(x, offs, **options)
            kept.append(out)
            arm = f"{name} {direction}"
            graphs[arm] = captured(lambda o=options, b=out: tgl.group_quantize(x, offs, **o, out=b))
            moved[arm] = x.nbytes + sum(t.nbytes for t in out)
            again[arm] = x.nbytes if out.amax.numel() or out.columnwise_amax.numel() else 0
    times = medians(graphs, samples)
    speeds = {name: moved[name] / times[name] / 1e9 for name in times}
    return [
        dict(
            shape=shape,
            routing=routing,
            arm=a,
            ms=times[a],
            tb_per_s=speeds[a],
            of_copy=speeds[a] / speeds["copy"],
            read_twice=(moved[a] + again[a]) / moved[a] * speeds[a] / speeds["copy"],
        )
        for a in times
    ]


def measure_values(shape: str, routing: str, formats: list[str], samples: int) -> list[dict[str, Any]]:
    """One row per format and direction, of dequantisation of any bytes."""
    groups, rows, columns = SHAPES[shape]
    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    offs, copy = ends(groups, rows, routing).cuda(), torch.empty_like(x)
    kept = []
    graphs, moved = {"copy": captured(lambda: copy.copy_(x))}, {"copy": 2 * x.nbytes}
    for name in formats:
        for columnwise in (False, True):
            given = dict(rowwise=not columnwise, columnwise=columnwise)
            options = Options(**FORMATS[name], **given).resolved("group_quantize")
            specs = component_specs(options, (rows, columns), groups, x.device, grouped=True)
            data, scale, amax = (spec.empty() for spec in (specs[3:6] if columnwise else specs[:3]))
            data.view(torch.uint8).random_()
            scale.fill_(1)
            amax.fill_(1)
            args = (data, scale, offs, amax if options.description.decodes_with_amax else None)
            keywords = {**FORMATS[name], "columnwise": columnwise, "rows": rows}
            kept.append(args)
            arm = f"{name} {'columnwise' if columnwise else 'rowwise'}"
            graphs[arm] = captured(lambda a=args, k=keywords: tgl.group_dequantize(*a, **k))
            moved[arm] = x.nbytes + data.nbytes + scale.nbytes
    times = medians(graphs, samples)
    speeds = {name: moved[name] / times[name] / 1e9 for name in times}
    return [
        dict(
            shape=shape,
            routing=routing,
            arm=a,
            ms=times[a],
            tb_per_s=speeds[a],
            of_copy=speeds[a] / speeds["copy"],
            read_twice=speeds[a] / speeds["copy"],
        )
        for a in times
    ]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dequantize", action="store_true")
    parser.add_argument("--formats", nargs="*", choices=FORMATS)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--samples", type=int, default=40)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    formats = args.formats or list(DEQUANTIZED if args.dequantize else FORMATS)
    for name in formats:
        if args.dequantize:
            for columnwise in (False, True):
                check_values(FORMATS[name], columnwise)
        else:
            for given in directions(name).values():
                check(FORMATS[name] | given)
    results = []
    head = f"{'shape':14} {'routing':9} {'arm':22} {'ms':>8} {'TB/s':>6} {'of copy':>8} {'all reads':>9}"
    print(f"{torch.cuda.get_device_name()}\n{head}")
    for shape in args.shapes:
        for routing in ROUTINGS:
            for row in (measure_values if args.dequantize else measure)(shape, routing, formats, args.samples):
                results.append(row)
                print(LINE.format(**row))
            torch.cuda.empty_cache()
    if args.out:
        args.out.write_text(json.dumps(dict(device=torch.cuda.get_device_name(), results=results), indent=1))


if __name__ == "__main__":
    main()
