"""What the drivers of third-party kernels share: run a case over several schedules and report as JSON."""

import json
import sys
import time

import torch

from tgl.testing.emulator import emulate


def error(got, want):
    """Largest absolute difference; NaN counts as infinite."""
    d = (got.double() - want.double()).abs()
    return float(torch.nan_to_num(d, nan=float("inf")).max())


def poison(t):
    """Fill an output with a pattern that no kernel computes."""
    t.view(torch.uint8).fill_(0xFF)


def run(case, seeds):
    """Compile a case and run it once per seed; returns a JSON-able record. Outputs are poisoned before every run."""
    case = dict(case)
    build = case.pop("build")
    record = {"arch": case["arch"], "kind": case.pop("kind"), "seeds": list(seeds), "error": 0.0}
    started = time.time()
    with emulate(case["arch"], seed=seeds[0]):
        call, out, want = build(**case)
    record["build_seconds"] = round(time.time() - started, 2)
    started = time.time()
    for seed in seeds:
        poison(out)
        with emulate(case["arch"], seed=seed, timing="adversarial") as session:
            call()
        record["error"] = max(record["error"], error(out, want))
        record["launches"] = len(session.launches)
        record["kernel"] = session.launches[-1].kernel
    record["seconds"] = round((time.time() - started) / len(seeds), 2)
    record["shape"] = {k: v for k, v in case.items() if k in ("m", "n", "k", "batch", "sizes")}
    record["config"] = {
        k: v for k, v in case.items() if k in ("tile", "cluster", "ab", "acc", "out", "a_fmt", "b_fmt", "vec")
    }
    return record


def main(package, cases):
    """Command line of a driver: CASE [SEED ...]; prints the record as one JSON line."""
    name, seeds = sys.argv[1], [int(s) for s in sys.argv[2:]] or [0]
    record = {"package": package, "case": name, **run(cases[name], seeds)}
    print(json.dumps(record))
