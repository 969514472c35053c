"""compute-sanitizer over a small problem in every tiling, and over the reductions, one process per core at a time.

    python -m tests.gpu.sanitize [--tool racecheck] [--seconds 200]

Each runs in a process of its own. Operands are made and results compared on the host, so that the sanitizer has no
kernels to watch but ours, and these were compiled before. Exits with the number of those that were not found clean.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import glob
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable

import torch

import tgl
from tests.cutlass_kernels.matrix import TILINGS
from tgl import backends
from tgl.cutlass_kernels import config, plans
from tgl.cutlass_kernels.config import GemmConfig

SIZES = (130, 0, 3, 65)
MANY = (3000, 0, 3, 1330)  # rows enough for a ring, and for a group in several tiles of a reduction
TAIL, DEPTH, COLUMNS = 5, 136, 264
BF16, F32 = torch.bfloat16, torch.float32


def integers(*shape: int) -> torch.Tensor:
    return torch.randint(-1, 2, shape).to(BF16)


def groups(t: torch.Tensor, sizes: tuple[int, ...] = SIZES) -> tuple[torch.Tensor, ...]:
    return t[: sum(sizes)].double().split(sizes)


def gemms(tiling: GemmConfig) -> None:
    """The three GEMMs in one tiling."""
    config.choose = lambda *_: tiling  # type: ignore[assignment]
    plans.by_shape.clear()
    rows = sum(SIZES) + TAIL
    a, b, dy = integers(rows, DEPTH), integers(len(SIZES), DEPTH, COLUMNS), integers(rows, COLUMNS)
    offs = torch.tensor(SIZES).cumsum(0).int().cuda()
    y = torch.zeros(rows, COLUMNS, dtype=BF16)
    y[: sum(SIZES)] = torch.cat([part @ b[g].double() for g, part in enumerate(groups(a))])
    dw = torch.stack([left.t() @ right for left, right in zip(groups(a), groups(dy))])
    ours = [torch.zeros_like(y).cuda(), torch.zeros(dw.shape, dtype=BF16).cuda(), torch.ones(dw.shape).cuda()]
    left, right = a.cuda(), dy.cuda()
    tgl.grouped_gemm(left, b.cuda(), offs, out=ours[0])
    tgl.grouped_gemm_wgrad(left, right, offs, out=ours[1])
    tgl.grouped_gemm_wgrad_accumulate_(left, right, offs, ours[2])
    for got, wanted in zip(ours, (y, dw.to(BF16), dw.float() + 1)):
        assert torch.equal(got.cpu(), wanted)


def reductions() -> None:
    """Offsets and sums of rows, of few columns and of many."""
    sizes = torch.tensor(MANY)
    offs = tgl.splits_to_offsets(sizes.cuda())
    assert torch.equal(offs.cpu(), sizes.cumsum(0).int())
    for columns in (136, 768):
        dy = integers(sum(MANY) + TAIL, columns)
        wanted = torch.stack([part.sum(0) for part in groups(dy, MANY)])
        assert torch.equal(tgl.grouped_dbias(dy.cuda(), offs).cpu().double(), wanted)


def cases() -> dict[str, Callable[[], None]]:
    arch = backends.device_arch(torch.device("cuda", 0))
    found: dict[str, Callable[[], None]] = {"reductions": reductions}
    for kind, tiling in TILINGS:
        if kind == arch:
            name = f"{tiling.tile_m}x{tiling.tile_n}" + "x2" * (tiling.ctas == 2) + "pp" * tiling.pingpong
            found[name] = functools.partial(gemms, tiling)
    return found


def one(name: str) -> None:
    cases()[name]()


def sanitizer() -> str:
    """Path of compute-sanitizer."""
    path = shutil.which("compute-sanitizer")
    for place in () if path else sorted(glob.glob("/usr/local/cuda*/bin/compute-sanitizer")):
        path = place
    if path is None:
        raise SystemExit("needs compute-sanitizer, of the CUDA toolkit")
    return path


def watched(path: str, tool: str, name: str, seconds: float) -> str:
    """What the sanitizer says about a case."""
    start = time.monotonic()
    command = [path, "--tool", tool, sys.executable, "-m", __spec__.name, "--only", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"not finished in {seconds:.0f} s"
    lines = done.stdout.splitlines()
    said = [line.strip("= ") for line in lines if "SUMMARY" in line] or [(done.stdout + done.stderr)[-300:]]
    if done.returncode == 0 and all(" 0 " in line for line in said):
        return f"clean, {time.monotonic() - start:.0f} s"
    details = [line for line in lines if line.startswith("========= ") and "SUMMARY" not in line]
    return "\n    ".join([*said, *details[:12]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", default="racecheck", choices=["racecheck", "memcheck", "synccheck", "initcheck"])
    parser.add_argument("--seconds", type=float, default=180, help="for the sanitizer, each case")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--only", help="run this case, without the sanitizer")
    args = parser.parse_args()
    if args.only:
        one(args.only)
        return
    path, names = sanitizer(), list(cases())
    with concurrent.futures.ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(one, names))  # compiles, into the cache on disk
    bad = 0
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as threads:
        found = {threads.submit(watched, path, args.tool, name, args.seconds): name for name in names}
        for future in concurrent.futures.as_completed(found):
            bad += not future.result().startswith("clean")
            print(f"{args.tool} {found[future]:>12}: {future.result()}", flush=True)
    sys.exit(bad)


if __name__ == "__main__":
    main()
