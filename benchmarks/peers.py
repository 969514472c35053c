"""tgl beside the fastest kernels that others publish, in one table.

    python benchmarks/peers.py [--parts fp8 ...] [--samples 30] [--clean-l2] [--out FILE]

Each part is a script of this folder, in a process in which all of its arms run:

==========  =================================================================================================
``bf16``    ``grouped_gemm.py``: DeepGEMM, quack and torch._grouped_mm
``fp8``     ``grouped_gemm_scaled.py``, in blocks of 128: DeepGEMM, and torch._scaled_grouped_mm, a scale per row
``packed``  ``packed_gpu.py``: OpenAI's triton_kernels, MXFP4 weights of gpt-oss-120b, by tokens
``block``   ``moe_block.py``: SonicMoE, forward and step, replayed as graphs
==========  =================================================================================================

A row is a peer's time over tgl's (above 1: tgl is faster): the geometric mean over cases, the worst case, and their
number. A peer that is not installed has no row. ``--out FILE`` is a file as ``benchmarks/results`` holds them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from harness.command import choice, gpu_parser, needs_device
from harness.report import Table, mean_of, quotient, save

HERE = Path(__file__).parent
OPS = {"fprop": "forward", "dgrad": "input gradient", "wgrad": "weight gradient", "accumulate": "added to float32"}
MODULES = {"DeepGEMM": "deep_gemm", "quack": "quack", "SonicMoE": "sonicmoe", "triton": "triton"}
BLOCKS = ("qwen3-30b", "mixtral", "sonic-7b")
Times = dict[str, dict[str, float]]


class Timed(NamedTuple):
    """The times of all arms in one case, and the row that they belong to."""

    row: str
    case: str
    times: Times


class Part(NamedTuple):
    """A script and its options, the arm of tgl, those of the peers by their names, and how a result is read."""

    script: str
    options: Sequence[str]
    ours: str
    peers: dict[str, str]
    read: Callable[[dict[str, Any]], list[Timed]]


def of_gemms(kind: str) -> Callable[[dict[str, Any]], list[Timed]]:
    """Return how a result of GEMMs is read: a row is an op."""
    return lambda r: [Timed(f"{kind}, {OPS[r['op']]}", f"{r['shape']} {r['routing']}", r.get("times", {}))]


def of_block(r: dict[str, Any]) -> list[Timed]:
    return [Timed(f"block, {part}", f"{r['shape']} {r['routing']}", r.get(part, {})) for part in ("forward", "step")]


PARTS = {
    "bf16": Part(
        "grouped_gemm.py",
        ["--quick", "--ops", *OPS, "--arms", "deepgemm", "quack", "torch"],
        "tgl",
        {"DeepGEMM": "deepgemm", "quack": "quack", "torch": "torch"},
        of_gemms("bfloat16"),
    ),
    "fp8": Part(
        "grouped_gemm_scaled.py",
        ["--quick", "--arms", "fp8_block", "deepgemm", "torch"],
        "fp8_block",
        {"DeepGEMM": "deepgemm", "torch, a scale per row": "torch"},
        of_gemms("FP8 in blocks"),
    ),
    "packed": Part(
        "packed_gpu.py",
        ["--formats", "mxfp4", "--ops", "forward", "--tokens", "1", "16", "64", "256", "1024", "4096"],
        "tgl",
        {"triton_kernels": "triton_kernels"},
        lambda r: [Timed(f"MXFP4 experts, tokens {r['tokens']}", r["weight"], r.get("times", {}))],
    ),
    "block": Part(
        "moe_block.py",
        [
            "--routings",
            "balanced",
            "--shapes",
            "qwen3-30b",
            "mixtral",
            "sonic-7b",
            "--arms",
            "captured",
            "sonic captured",
        ],
        "captured",
        {"SonicMoE": "sonic captured"},
        of_block,
    ),
}
TABLE = Table({"what": "<32", "peer": "<24", "ratio": ">7.3f", "worst": ">7.3f", "worst case": "<28", "cases": ">5"})


def measured(part: Part, options: Sequence[str]) -> list[dict[str, Any]]:
    """Run a script, and return its results."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.json"
        command = [sys.executable, str(HERE / part.script), *part.options, *options, "--out", str(path)]
        if subprocess.run(command).returncode or not path.exists():
            raise SystemExit(f"{part.script} failed")
        return json.loads(path.read_text())["results"]


def rows(part: Part, results: Sequence[dict[str, Any]]) -> Iterator[list[Any]]:
    """The rows of a part, of peers that were timed."""
    by_row: dict[str, list[Timed]] = defaultdict(list)
    for timed in (timed for result in results for timed in part.read(result)):
        by_row[timed.row].append(timed)
    for row, own in by_row.items():
        for peer, arm in part.peers.items():
            if mean := mean_of((timed.case, quotient(timed.times, arm, part.ours)) for timed in own):
                yield [row, peer, round(mean.mean, 3), round(mean.worst, 3), mean.where, mean.of]


def versions() -> dict[str, str]:
    """The versions of torch and of the peers that are installed."""
    found = {"torch": torch.__version__.partition("+")[0]}
    packages = packages_distributions()  # DeepGEMM comes from packages of several names
    for name, module in MODULES.items():
        for package in packages.get(module, [])[:1]:
            found[name] = version(package).partition("+")[0]
    return found


def result_file(device: str, found: list[list[Any]], options: Sequence[str]) -> dict[str, Any]:
    """The file of ``benchmarks/results``."""
    git = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, cwd=HERE)
    about = "Time of the peer over that of tgl, geometric mean over the cases and the worst one: above 1 tgl is faster."
    return {
        "title": "Beside other libraries",
        "command": " ".join(["python benchmarks/peers.py", *options]),
        "machine": f"one {device}",
        "versions": versions(),
        "recorded_in": git.stdout.strip(),
        "tables": {
            "peers": {
                "about": about,
                "columns": ["what", "peer", "ratio", "ratio_worst", "worst case", "cases"],
                "rows": found,
            }
        },
    }


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = gpu_parser(__doc__, busy=False)
    choice(parser, "--parts", PARTS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    device = needs_device()
    options = ["--samples", str(args.samples), *["--clean-l2"] * args.clean_l2]
    found: list[list[Any]] = []
    for i, name in enumerate(args.parts):
        found += rows(PARTS[name], measured(PARTS[name], options))
        finished = ["--parts", *args.parts[: i + 1]] if i + 1 < len(PARTS) else []
        save(args.out, result_file(device, found, [*finished, *options]))  # a run that is cut off leaves a file
    print("\n" + TABLE.header())
    for row in found:
        print(TABLE.line(row))


if __name__ == "__main__":
    main()
