"""Shared code of the drivers for third-party kernels: run cases over several schedules and report as JSON."""

import argparse
import json
import re
import time
import traceback

import torch

from cute_emulator import EmulatorError, emulate

_CONFIG = ("ab", "a_fmt", "b_fmt", "acc", "out", "tile", "cluster", "two_cta", "vec")
_SHAPE = ("m", "n", "k", "batch", "sizes")


def error(got, want):
    """Largest absolute difference; NaN counts as infinite."""
    d = (got.double() - want.double()).abs()
    return float(torch.nan_to_num(d, nan=float("inf")).max())


def poison(t):
    """Fill an output with a pattern that no kernel computes."""
    t.view(torch.uint8).fill_(0xFF)


def check_finding(arch, call, message):
    """The kernel as it is must be reported with this message."""
    try:
        with emulate(arch):
            call()
    except EmulatorError as e:
        if message in str(e):
            return
        raise
    raise AssertionError(f"nothing was reported, expected: {message}")


def run(case, seeds):
    """Compile a case and run it once per seed, outputs poisoned before every run; returns a JSON-able record.

    A case with a ``finding`` is a kernel with a known defect: the emulator must report its ``message``, and with the
    PTX edited by ``repair`` the kernel must run like the others.
    """
    case = dict(case)
    build, kind, finding = case.pop("build"), case.pop("kind"), case.pop("finding", None)
    with emulate(case["arch"]):
        call, out, want = build(**case)
    if finding:
        check_finding(case["arch"], call, finding["message"])
    worst, seconds, launches = 0.0, 0.0, []
    for seed in seeds:
        poison(out)
        with emulate(case["arch"], seed=seed, timing="adversarial") as session:
            if finding:
                session.edit_ptx = finding["repair"]
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
        "finding": finding["message"] if finding else None,
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
