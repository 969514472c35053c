"""One-off comparison of variants; not kept."""

import argparse
import functools
import json
import os
import time

import torch

from benchmarks import grouped_gemm as bench
from tgl.cutlass_kernels import cache
from tgl.cutlass_kernels.config import GemmConfig
from tgl.cutlass_kernels.reduce import calls, dbias

ARGS = argparse.Namespace(samples=25, arms=["copy", "dense"])
REPORT = []
start = time.time()


def dbias_sweep():
    original, across_rule = dbias.GroupedDbias, calls._across
    calls.cache.fetch, kept = lambda key, build: build(), cache.fetch
    variants = [
        (8, 8, 8),
        (4, 8, 8),
        (16, 8, 8),
        (8, 16, 8),
        (4, 16, 8),
        (8, 8, 16),
        (4, 8, 16),
        (8, 16, 4),
        (8, 4, 8),
        (4, 16, 4),
    ]
    plans = {}
    for name in bench.QUICK:
        for routing in ("balanced", "zipf"):
            shape = bench.SHAPES[name]
            torch.manual_seed(0)
            problem = bench.Problem("dbias", shape, bench.split(routing, shape.groups, shape.rows))
            problem.x, problem.x_copy = torch.empty_like(problem.dy), problem.dy.clone()
            graphs, wrong = {}, {}
            for across, warps, batch in variants:
                label = f"{across}/{warps}/{batch}"
                dbias.GroupedDbias = functools.partial(lambda v, a, **k: original(v, a, **k), warps=warps, batch=batch)
                calls._across = lambda columns, vector, across=across: across
                calls._plans.clear()
                calls._plans.update(plans.get(label, {}))
                graphs[label] = bench.captured(problem.tgl)
                plans[label] = dict(calls._plans)
                wrong[label] = bench.gate(problem, graphs[label])
            graphs["copy"] = bench.captured(problem.dense)
            for clean in (False, True):
                times = {k: bench.summary(t)["median"] for k, t in bench.measure(graphs, ARGS.samples, clean).items()}
                share = problem.bytes / (2 * problem.dy.nbytes)
                ratios = {k: round(share * times["copy"] / t, 3) for k, t in times.items()}
                order = sorted(ratios, key=lambda k: -ratios[k])
                print(
                    name,
                    routing,
                    "clean" if clean else "dirty",
                    f"copy {2 * problem.dy.nbytes / times['copy'] / 1e9:.2f} TB/s",
                    {k: ratios[k] for k in order},
                    {k: w for k, w in wrong.items() if w} or "",
                    flush=True,
                )
                REPORT.append(
                    {
                        "what": "dbias",
                        "shape": name,
                        "routing": routing,
                        "clean": clean,
                        "times": times,
                        "ratios": ratios,
                    }
                )
    dbias.GroupedDbias, calls._across, calls.cache.fetch = original, across_rule, kept
    calls._plans.clear()


def wgrad_sweep():
    every = {}
    for tile in ((128, 128, 1, True), (128, 256, 1, False), (128, 128, 2, True), (128, 256, 2, False)):
        m, n, c, p = tile
        for longest in (True, False):
            every[f"{m}x{n}" + "x2" * (c == 2) + "pp" * p + ("" if longest else " as they come")] = GemmConfig(
                m, n, cluster_n=c, pingpong=p, longest_first=longest
            )
    every["128x128pp band4"] = GemmConfig(128, 128, pingpong=True, band=4)
    every["128x128pp band16"] = GemmConfig(128, 128, pingpong=True, band=16)
    for name in bench.QUICK:
        for routing in ("balanced", "zipf"):
            shape = bench.SHAPES[name]
            torch.manual_seed(0)
            problem = bench.Problem("wgrad", shape, bench.split(routing, shape.groups, shape.rows))
            graphs, wrong = {"dense": bench.captured(problem.dense)}, {}
            for label, chosen in every.items():
                with bench.tiling(chosen):
                    graphs[label] = bench.captured(problem.tgl)
                if routing == "zipf" and name in ("qwen3-g128-fc1", "qwen3-g16-fc2"):
                    wrong[label] = bench.gate(problem, graphs[label])
            times = {k: bench.summary(t)["median"] for k, t in bench.measure(graphs, 20).items()}
            order = sorted(times, key=times.get)
            print(
                name,
                routing,
                {k: round(times["dense"] / times[k], 3) for k in order},
                {k: w for k, w in wrong.items() if w} or "",
                flush=True,
            )
            REPORT.append({"what": "wgrad", "shape": name, "routing": routing, "times": times})
            del problem, graphs
            torch.cuda.empty_cache()


dbias_sweep()
print(f"{time.time() - start:.0f} s")
wgrad_sweep()
print(f"{time.time() - start:.0f} s")
if "OUT" in os.environ:
    with open(os.path.join(os.environ["OUT"], "sweep.json"), "w") as file:
        json.dump(REPORT, file, indent=1)
