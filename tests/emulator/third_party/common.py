"""What the drivers of third-party kernels share: run cases over several schedules and report as JSON."""

import argparse
import json
import re
import time
import traceback

import torch

from tgl.testing.emulator import emulate

_CONFIG = ("ab", "a_fmt", "b_fmt", "acc", "out", "tile", "cluster", "two_cta", "vec")
_SHAPE = ("m", "n", "k", "batch", "sizes")


def error(got, want):
    """Largest absolute difference; NaN counts as infinite."""
    d = (got.double() - want.double()).abs()
    return float(torch.nan_to_num(d, nan=float("inf")).max())


def poison(t):
    """Fill an output with a pattern that no kernel computes."""
    t.view(torch.uint8).fill_(0xFF)


def run(case, seeds):
    """Compile a case and run it once per seed, outputs poisoned before every run; returns a JSON-able record."""
    case = dict(case)
    build, kind = case.pop("build"), case.pop("kind")
    with emulate(case["arch"]):
        call, out, want = build(**case)
    worst, seconds, launches = 0.0, 0.0, []
    for seed in seeds:
        poison(out)
        with emulate(case["arch"], seed=seed, timing="adversarial") as session:
            started = time.process_time()
            call()
            seconds += time.process_time() - started
        worst = max(worst, error(out, want))
        launches = session.launches
    return {
        "arch": case["arch"],
        "kind": kind,
        "kernel": re.search(r"[A-Z]\w*?(?=_object_at|$)", launches[-1].kernel.removeprefix("kernel_cutlass_"))[0],
        "shape": {k: case[k] for k in _SHAPE if k in case},
        "config": {k: case[k] for k in _CONFIG if k in case},
        "seeds": list(seeds),
        "error": worst,
        "instructions": sum(x.warp_instructions for x in launches),
        "mma": sum(x.mma_count for x in launches),
        "warnings": sorted({re.sub(r"\d+", "#", w)[:120] for x in launches for w in x.warnings}),
        "seconds": round(seconds / len(seeds), 2),
    }


def main(package, cases):
    """Command line of a driver: ``[--arch ARCH] [--seeds 0,1] [CASE ...]``, one JSON line per case."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--arch")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("case", nargs="*", choices=[*cases, []])
    args = parser.parse_args()
    names = args.case or [n for n, c in cases.items() if args.arch in (None, c["arch"])]
    for name in names:
        try:
            record = run(cases[name], [int(s) for s in args.seeds.split(",")])
        except Exception as e:
            record = {"failure": f"{type(e).__name__}: {e}", "trace": traceback.format_exc()}
        print(json.dumps({"package": package, "case": name, **record}), flush=True)
