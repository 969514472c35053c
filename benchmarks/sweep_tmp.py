"""One-off comparison of variants; not kept."""

import argparse
import functools
import itertools
import json
import os
import time

import torch

from benchmarks import grouped_gemm as bench
from tgl.cutlass_kernels import cache, launch
from tgl.cutlass_kernels.config import GemmConfig
from tgl.cutlass_kernels.gemm.sm90 import store
from tgl.cutlass_kernels.reduce import calls, dbias

ARGS = argparse.Namespace(samples=25, arms=["copy", "dense"])
REPORT, KEPT = [], []
start = time.time()
cache.fetch = lambda key, build: build()


def dbias_sweep():
    original = dbias.GroupedDbias
    variants = [
        (8, 16, 8, 8, 1), (8, 8, 8, 8, 2), (8, 16, 8, 8, 2), (8, 16, 8, 4, 2), (8, 8, 8, 4, 4), (8, 16, 8, 2, 4), (8, 16, 8, 4, 4),
        (8, 8, 8, 8, 4), (8, 32, 8, 4, 2), (16, 16, 8, 8, 2), (16, 16, 8, 4, 4), (16, 8, 8, 8, 2), (16, 8, 8, 4, 4),
        (8, 8, 8, 8, 1), (8, 8, 8, 4, 2), (8, 8, 8, 2, 4), (8, 16, 8, 2, 2), (8, 16, 8, 4, 1), (16, 16, 8, 4, 2), (16, 32, 8, 4, 1),
        (16, 16, 8, 2, 4), (8, 8, 8, 1, 8), (8, 16, 8, 1, 4), (8, 16, 8, 1, 8),
        (8, 8, 8, 2, 1), (8, 8, 8, 1, 2), (8, 8, 8, 1, 1), (8, 4, 8, 2, 1), (16, 8, 8, 2, 1), (16, 16, 8, 2, 1), (16, 16, 8, 1, 1),
        (16, 16, 8, 1, 2), (16, 8, 8, 1, 2),
    ]  # fmt: skip
    plans = {}
    for name in bench.QUICK:
        for routing in ("balanced", "zipf", "all on one"):
            shape = bench.SHAPES[name]
            torch.manual_seed(0)
            problem = bench.Problem("dbias", shape, bench.split(routing, shape.groups, shape.rows))
            problem.x, problem.x_copy = torch.empty_like(problem.dy), problem.dy.clone()
            graphs, wrong = {}, {}
            for across, warps, batch, cluster, parts in variants:
                label = f"{across}/{warps}/{batch}/{cluster}/{parts}"
                options = dict(warps=warps, batch=batch, cluster=cluster, pieces=parts)
                dbias.GroupedDbias = functools.partial(lambda v, a, **k: original(v, a, **k), **options)
                calls._across = lambda columns, vector, across=across: across
                calls._plans.clear()
                calls._plans.update(plans.get(label, {}))
                graphs[label] = bench.captured(problem.tgl)
                plans[label] = dict(calls._plans)
                wrong[label] = bench.gate(problem, graphs[label]) if routing == "zipf" else None
            graphs["copy"] = bench.captured(problem.dense)
            for clean in (False, True):
                times = {k: bench.summary(t)["median"] for k, t in bench.measure(graphs, ARGS.samples, clean).items()}
                share = problem.bytes / (2 * problem.dy.nbytes)
                ratios = {k: round(share * times["copy"] / t, 3) for k, t in times.items()}
                order = sorted(ratios, key=lambda k: -ratios[k])
                bad = {k: w for k, w in wrong.items() if w}
                print(name, routing, "clean" if clean else "dirty", {k: ratios[k] for k in order[:16]}, bad or "", flush=True)
                REPORT.append({"what": "dbias", "shape": name, "routing": routing, "clean": clean, "ratios": ratios})


def wgrad_sweep():
    every = {}
    for pair, longest, buffers in itertools.product((1, 2), (True, False), (2, 4)):
        label = "128x128" + "x2" * (pair == 2) + "pp" + ("" if longest else " as they come") + f" {buffers}"
        every[label] = (GemmConfig(128, 128, cluster_n=pair, pingpong=True, longest_first=longest), buffers)
    for name in bench.QUICK:
        for op in ("wgrad", "fprop"):
            for routing in ("balanced", "zipf"):
                shape = bench.SHAPES[name]
                torch.manual_seed(0)
                problem = bench.Problem(op, shape, bench.split(routing, shape.groups, shape.rows))
                graphs, wrong = {"dense": bench.captured(problem.dense)}, {}
                for label, (chosen, buffers) in every.items():
                    if op == "fprop" and not chosen.longest_first:
                        continue
                    store.BUFFERS = buffers
                    KEPT.append(dict(launch._plans))
                    launch._plans.clear()
                    launch._plans.update(PLANS.get((op, label), {}))
                    with bench.tiling(chosen):
                        graphs[label] = bench.captured(problem.tgl)
                    PLANS[op, label] = dict(launch._plans)
                    if routing == "zipf" and name in ("qwen3-g128-fc1", "qwen3-g16-fc2"):
                        wrong[label] = bench.gate(problem, graphs[label])
                times = {k: bench.summary(t)["median"] for k, t in bench.measure(graphs, 20).items()}
                order = sorted(times, key=times.get)
                bad = {k: w for k, w in wrong.items() if w}
                print(name, op, routing, {k: round(times["dense"] / times[k], 3) for k in order}, bad or "", flush=True)
                REPORT.append({"what": op, "shape": name, "routing": routing, "times": times})
                del problem, graphs
                torch.cuda.empty_cache()


PLANS: dict = {}
dbias_sweep()
print(f"{time.time() - start:.0f} s")
print(f"{time.time() - start:.0f} s")
if "OUT" in os.environ:
    with open(os.path.join(os.environ["OUT"], "sweep.json"), "w") as file:
        json.dump(REPORT, file, indent=1)
