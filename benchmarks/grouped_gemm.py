"""Grouped GEMMs and bias sums on a GPU, against what torch offers, on the shapes and routings of real models.

    python benchmarks/grouped_gemm.py [--quick] [--shapes mixtral-fc1 ...] [--routings zipf ...] [--ops fprop ...]
    python benchmarks/grouped_gemm.py --sweep-configs [--shapes ...]     which tiling is fastest where

Arms: ``tgl``, ``torch`` (torch._grouped_mm), ``loop`` (torch.mm per group), ``dense`` (one torch.mm of the same FLOPs:
the ceiling) and ``quack`` where that is installed; for bias sums ``copy``, which moves as many bytes as the op, half of
them read. Every arm is a captured graph. Before each replay 256 MB are written, so L2 holds nothing of use, and with
``--clean-l2`` another 256 MB are read, so that it holds nothing that has to be written back at the cost of the op (a
copy leaves half of its bytes behind itself; an op that only reads does not). Events enclose the replay alone. Arms take
turns in rotating order, and medians are compared. FLOPs are those of the routed rows, ``2 R N K``.

Nothing is timed before tgl has passed its gates: an error as small as per-group torch.mm's against float32, no poison
left in the output, the same bits again, and new offsets in the same graph giving new results. Results: a table of
ratios of times (above 1: tgl is faster), ``--out FILE`` as JSON, and beside it a plot as PNG.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

import tgl
from tgl import backends
from tgl.cutlass_kernels import tilings
from tgl.cutlass_kernels.config import VARLEN_K, VARLEN_M, GemmConfig
from tgl.cutlass_kernels.runtime import launcher

L2_BYTES = 256 << 20
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Shape:
    """Experts, routed rows, and one linear layer ``depth -> columns``."""

    groups: int
    rows: int
    depth: int
    columns: int


def _model(name: str, groups: int, rows: int, hidden: int, inner: int) -> dict[str, Shape]:
    return {f"{name}-fc1": Shape(groups, rows, hidden, inner), f"{name}-fc2": Shape(groups, rows, inner, hidden)}


SHAPES = {
    **_model("mixtral", 8, 16384, 4096, 14336),
    **_model("qwen3-g128", 128, 65536, 2048, 768),
    **_model("qwen3-g16", 16, 65536, 2048, 768),
    **_model("qwen3-g16-long", 16, 262144, 2048, 768),
    **_model("deepseek-g32", 32, 65536, 7168, 2048),
    **_model("deepseek-g8", 8, 65536, 7168, 2048),
    **_model("deepseek-g8-long", 8, 262144, 7168, 2048),
    "glm": Shape(256, 256 * 2048, 6144, 4096),
    "four": Shape(4, 4 * 8192, 7168, 4096),  # DeepGEMM publishes 1346 TFLOP/s for it, FP8 in blocks on an H800
}
QUICK = ("mixtral-fc1", "qwen3-g128-fc1", "qwen3-g16-fc2", "deepseek-g32-fc1", "deepseek-g32-fc2")
ROUTINGS = ("balanced", "multinomial", "zipf", "half on one", "quarter empty", "all on one")
OPS = ("fprop", "dgrad", "wgrad", "accumulate", "dbias")


def split(routing: str, groups: int, rows: int) -> list[int]:
    """Rows per group; the seed is fixed and the sum always ``rows``."""
    generator = torch.Generator().manual_seed(7)
    weights = torch.ones(groups, dtype=torch.float64)
    if routing == "zipf":
        weights = 1 / torch.arange(1, groups + 1, dtype=torch.float64)
        weights = weights[torch.randperm(groups, generator=generator)]
    elif routing == "half on one":
        weights[groups // 2] = max(groups - 1, 1)
    elif routing == "quarter empty":
        weights[torch.randperm(groups, generator=generator)[: groups // 4]] = 0
    elif routing == "all on one":
        weights = torch.zeros(groups, dtype=torch.float64)
        weights[groups // 2] = 1
    if routing == "multinomial":
        drawn = torch.multinomial(weights, rows, replacement=True, generator=generator)
        return torch.bincount(drawn, minlength=groups).tolist()
    sizes = (weights / weights.sum() * rows).long()
    sizes[int(weights.argmax())] += rows - int(sizes.sum())
    return sizes.tolist()


class Problem:
    """Operands of one op, its arms, and the float32 oracle. Weights are ``[G, columns, depth]``."""

    def __init__(self, op: str, shape: Shape, sizes: list[int]):
        self.op, self.shape, self.sizes = op, shape, sizes
        rows, device = shape.rows, "cuda"
        self.x = torch.randn(rows, shape.depth, device=device, dtype=DTYPE)
        self.dy = torch.randn(rows, shape.columns, device=device, dtype=DTYPE)
        self.w = torch.randn(shape.groups, shape.columns, shape.depth, device=device, dtype=DTYPE) / 16
        self.offs = torch.tensor(sizes, device=device).cumsum(0).int()
        if op == "fprop":
            self.a, self.b = self.x, self.w.transpose(1, 2)
        elif op == "dgrad":
            self.a, self.b = self.dy, self.w
        else:
            self.a, self.b = self.dy, self.x
        if op in ("fprop", "dgrad"):
            self.out = torch.empty(rows, self.b.shape[2], device=device, dtype=DTYPE)
        elif op == "dbias":
            self.out = torch.empty(shape.groups, shape.columns, device=device)
        else:
            kind = torch.float32 if op == "accumulate" else DTYPE
            self.out = torch.zeros(shape.groups, shape.columns, shape.depth, device=device, dtype=kind)
        self.loop_out = torch.zeros_like(self.out)

    @property
    def flops(self) -> float:
        return 0.0 if self.op == "dbias" else 2.0 * self.shape.rows * self.shape.depth * self.shape.columns

    @property
    def bytes(self) -> int:
        """What must be moved at least once."""
        if self.op == "dbias":
            return self.dy.nbytes + self.out.nbytes
        return self.a.nbytes + self.b.nbytes + self.out.nbytes * (2 if self.op == "accumulate" else 1)

    def parts(self) -> Iterator[tuple[int, slice]]:
        start = 0
        for g, size in enumerate(self.sizes):
            yield g, slice(start, start + size)
            start += size

    def tgl(self) -> None:
        if self.op in ("fprop", "dgrad"):
            tgl.grouped_gemm(self.a, self.b, self.offs, out=self.out)
        elif self.op == "wgrad":
            tgl.grouped_gemm_wgrad(self.a, self.b, self.offs, out=self.out)
        elif self.op == "accumulate":
            tgl.grouped_gemm_wgrad_accumulate_(self.a, self.b, self.offs, self.out)
        else:
            self.out = tgl.grouped_dbias(self.dy, self.offs)

    def torch(self) -> None:
        if self.op in ("fprop", "dgrad"):
            torch._grouped_mm(self.a, self.b, offs=self.offs)
        elif self.op == "wgrad":
            torch._grouped_mm(self.a.t(), self.b, offs=self.offs)
        elif self.op == "accumulate":
            self.loop_out.add_(torch._grouped_mm(self.a.t(), self.b, offs=self.offs))

    def loop(self) -> None:
        for g, rows in self.parts():
            if self.op == "dbias":
                torch.sum(self.dy[rows], 0, dtype=torch.float32, out=self.loop_out[g])
            elif self.op in ("fprop", "dgrad"):
                torch.mm(self.a[rows], self.b[g], out=self.loop_out[rows])
            elif self.op == "wgrad":
                torch.mm(self.a[rows].t(), self.b[rows], out=self.loop_out[g])
            elif rows.stop > rows.start:
                self.loop_out[g].add_(torch.mm(self.a[rows].t(), self.b[rows]))

    def dense(self) -> None:
        if self.op == "dbias":
            self.x.copy_(self.x_copy)
        elif self.op in ("fprop", "dgrad"):
            torch.mm(self.a, self.b[0])
        else:
            torch.mm(self.a.t(), self.b)

    def quack(self) -> None:
        from quack.gemm_interface import gemm

        ends = torch.nn.functional.pad(self.offs, (1, 0))
        if self.op in ("fprop", "dgrad"):
            gemm(self.a, self.b, out=self.loop_out, cu_seqlens_m=ends, dynamic_scheduler=False, tuned=False)
        else:
            gemm(self.a.t(), self.b, out=self.loop_out, cu_seqlens_k=ends, dynamic_scheduler=False, tuned=False)

    def oracle(self) -> Tensor:
        """The result in float32, from operands widened to it."""
        out = torch.zeros_like(self.out, dtype=torch.float32)
        for g, rows in self.parts():
            if self.op == "dbias":
                out[g] = self.dy[rows].float().sum(0)
            elif self.op in ("fprop", "dgrad"):
                out[rows] = self.a[rows].float() @ self.b[g].float()
            else:
                out[g] = self.a[rows].float().t() @ self.b[rows].float()
        return out


# --- gates ------------------------------------------------------------------------------------------------------------


def captured(call: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """``call`` as a graph, after three runs to warm up."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def relative_error(got: Tensor, wanted: Tensor) -> float:
    return ((got.float() - wanted).norm() / wanted.norm().clamp_min(1e-30)).item()


def gate(problem: Problem, graph: torch.cuda.CUDAGraph) -> str | None:
    """What is wrong with tgl's graph, or None."""
    poison = 0.0 if problem.op == "accumulate" else float("nan")

    def run() -> Tensor:
        problem.out.fill_(poison)
        graph.replay()
        return problem.out.clone()

    sizes = problem.sizes
    for attempt in (sizes, sizes[1:] + sizes[:1], sizes):
        problem.sizes = attempt
        problem.offs.copy_(torch.tensor(attempt).cumsum(0))
        wanted = problem.oracle()
        got = run()
        if got.isnan().any():
            return "poison is left in the output"
        if not torch.equal(got, run()):
            return "not the same bits again"
        problem.loop_out.zero_()
        problem.loop()
        ours, theirs = relative_error(got, wanted), relative_error(problem.loop_out, wanted)
        if not ours <= 2 * theirs + 1e-5:
            return f"error {ours:.2e}, torch.mm has {theirs:.2e}"
        empty = [g for g, size in enumerate(attempt) if not size]
        if problem.op not in ("fprop", "dgrad") and got[empty].any():
            return "an empty group's gradient is not zero"
    return None


# --- timing -----------------------------------------------------------------------------------------------------------


def measure(graphs: dict[str, torch.cuda.CUDAGraph], samples: int, clean: bool = False) -> dict[str, list[float]]:
    """Milliseconds of ``samples`` replays of each graph, taken in turns; ``clean`` as ``--clean-l2``."""
    flush = torch.empty(L2_BYTES, dtype=torch.uint8, device="cuda")
    other = torch.zeros(L2_BYTES // 4, dtype=torch.float32, device="cuda") if clean else None
    names = list(graphs)
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in names}
    for sample in range(samples + 3):
        turn = sample % len(names)
        for name in names[turn:] + names[:turn]:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(500_000)  # the host gets ahead, so that no launch latency is timed
            flush.zero_()
            if other is not None:
                other.sum()
            start.record()
            graphs[name].replay()
            end.record()
            if sample >= 3:
                events[name].append((start, end))
        torch.cuda.synchronize()
    return {name: [start.elapsed_time(end) for start, end in pairs] for name, pairs in events.items()}


def summary(times: list[float]) -> dict[str, float]:
    tenths = statistics.quantiles(times, n=10)
    return {"median": statistics.median(times), "p10": tenths[0], "p90": tenths[-1]}


@contextlib.contextmanager
def tiling(chosen: GemmConfig | None) -> Iterator[None]:
    """Make tgl use one tiling."""
    before = tilings.choose
    if chosen is not None:
        tilings.choose = lambda *_: chosen  # type: ignore[assignment]
    launcher.forget()
    try:
        yield
    finally:
        tilings.choose = before
        launcher.forget()


def arms_of(problem: Problem, wanted: list[str]) -> dict[str, Callable[[], None]]:
    arms = {"tgl": problem.tgl, "torch": problem.torch, "loop": problem.loop, "dense": problem.dense}
    if problem.op == "dbias":
        problem.x_copy = torch.empty(problem.bytes // 2, dtype=torch.uint8, device="cuda").random_()
        problem.x = torch.empty_like(problem.x_copy)
        arms = {"tgl": problem.tgl, "loop": problem.loop, "copy": problem.dense}
    elif problem.op != "accumulate":
        with contextlib.suppress(Exception):  # it may also fail to import beside another version of the DSL
            import quack.gemm_interface  # noqa: F401

            arms["quack"] = problem.quack
    return {name: call for name, call in arms.items() if name in wanted or name == "tgl"}


def run_case(name: str, op: str, routing: str, args: argparse.Namespace) -> dict:
    shape = SHAPES[name]
    torch.manual_seed(0)
    problem = Problem(op, shape, split(routing, shape.groups, shape.rows))
    result = {
        "shape": name,
        "op": op,
        "routing": routing,
        **asdict(shape),
        "flops": problem.flops,
        "bytes": problem.bytes,
    }
    graphs, failed = {}, {}
    for arm, call in arms_of(problem, args.arms).items():
        try:
            graphs[arm] = captured(call)
        except Exception as error:
            torch.cuda.synchronize()
            failed[arm] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
    wrong = failed.get("tgl") or gate(problem, graphs["tgl"])
    if wrong:
        return {**result, "wrong": wrong, "failed": failed}
    times = {arm: summary(t) for arm, t in measure(graphs, args.samples, args.clean_l2).items()}
    return {**result, "times": times, "failed": failed}


# --- reports ----------------------------------------------------------------------------------------------------------


def rate(result: dict) -> str:
    seconds = result["times"]["tgl"]["median"] / 1e3
    if result["op"] == "dbias":
        return f"{result['bytes'] / seconds / 1e12:6.2f} TB/s"
    return f"{result['flops'] / seconds / 1e12:5.0f} TF/s"


def ratio(result: dict, arm: str) -> float | None:
    times = result.get("times", {})
    if arm not in times:
        return None
    return times[arm]["median"] / times["tgl"]["median"]


def line(result: dict) -> str:
    head = f"{result['shape']:>20} {result['op']:>10} {result['routing']:>13}"
    if "wrong" in result:
        return f"{head}  WRONG: {result['wrong']}"
    cells = [f"{r:8.3f}" if (r := ratio(result, arm)) else f"{'-':>8}" for arm in COLUMNS]
    return f"{head} {result['times']['tgl']['median']:9.3f} {rate(result)} {''.join(cells)}"


COLUMNS = ("torch", "loop", "dense", "quack", "copy")


def report(results: list[dict]) -> None:
    """Geometric means and worst cases, per op."""
    print("\ntime of the arm / time of tgl: geometric mean (worst, where)")
    for op in dict.fromkeys(r["op"] for r in results):
        for arm in COLUMNS:
            found = [(r, x) for r in results if r["op"] == op and (x := ratio(r, arm))]
            if found:
                mean = math.exp(statistics.fmean(math.log(x) for _, x in found))
                worst, low = min(found, key=lambda pair: pair[1])
                where = f"{low:.3f}, {worst['shape']} {worst['routing']}, of {len(found)}"
                print(f"{op:>10} / {arm:<6} {mean:6.3f}  ({where})")


def plot(results: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [r for r in results if "times" in r]
    if not shown:
        return
    figure, axes = plt.subplots(figsize=(9, 1.5 + 0.22 * len(shown)))
    for arm, marker in zip(COLUMNS, "osD^v"):
        points = [(x, i) for i, r in enumerate(shown) if (x := ratio(r, arm))]
        if points:
            axes.plot(*zip(*points), marker, label=arm, markersize=4)
    axes.axvline(1.0, color="gray", linewidth=1)
    axes.set_xscale("log")  # a ratio and its inverse are equally far from 1
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.tick_params(axis="x", which="minor", labelsize=6)
    axes.set_yticks(range(len(shown)), [f"{r['shape']} {r['op']} {r['routing']}" for r in shown], fontsize=6)
    axes.invert_yaxis()
    axes.set_xlabel("time of the arm / time of tgl")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=140)


def named(chosen: GemmConfig) -> str:
    """A tiling as ``--config`` takes it."""
    return f"{chosen.tile_m}x{chosen.tile_n}" + "x2" * (chosen.ctas == 2) + "pp" * chosen.pingpong


def sweep(args: argparse.Namespace) -> list[dict]:
    """Time tgl alone in every tiling."""
    arch = backends.device_arch(torch.device("cuda", 0))
    sizes = [(m, n) for m in (64, 128, 256) for n in (64, 128, 192, 256)]
    every = [
        GemmConfig(m, n, cluster_n=c, pingpong=p, band=args.band)
        for m, n in sizes
        for c in (1, 2)
        for p in (False, True)
    ]
    every += [GemmConfig(256, n, two_cta=True, band=args.band) for n in (64, 128, 256)]
    results = []
    for name in args.shapes:
        for op in (op for op in args.ops if op != "dbias"):
            for routing in args.routings:
                kind = VARLEN_M if op in ("fprop", "dgrad") else VARLEN_K
                shape = SHAPES[name]
                torch.manual_seed(0)
                problem = Problem(op, shape, split(routing, shape.groups, shape.rows))
                graphs, labels = {}, {}
                for chosen in every:
                    if tilings.reason(arch, kind, chosen) is None and (
                        args.tiles is None or named(chosen) in args.tiles
                    ):
                        label = named(chosen)
                        with tiling(chosen):
                            graphs[label] = captured(problem.tgl)
                            labels[label] = gate(problem, graphs[label])
                times = {label: summary(t) for label, t in measure(graphs, args.samples, args.clean_l2).items()}
                best = sorted(times, key=lambda label: times[label]["median"])
                results.append({"shape": name, "op": op, "routing": routing, "times": times, "wrong": labels})
                text = "  ".join(f"{label} {problem.flops / times[label]['median'] / 1e9:.0f}" for label in best)
                bad = {label: why for label, why in labels.items() if why}
                print(f"{name:>20} {op:>10} {routing:>13}  TF/s: {text} {bad or ''}", flush=True)
    return results


def host_time() -> float:
    """Microseconds a warm call takes on the host, over 10,000 calls of a tiny problem."""
    a, w = torch.randn(64, 64, device="cuda", dtype=DTYPE), torch.randn(2, 64, 64, device="cuda", dtype=DTYPE)
    offs = torch.tensor([30, 64], device="cuda", dtype=torch.int32)
    out = torch.empty_like(a)
    for _ in range(100):
        tgl.grouped_gemm(a, w, offs, out=out)
    took = 0.0
    for _ in range(100):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(100):
            tgl.grouped_gemm(a, w, offs, out=out)
        took += time.perf_counter() - start
    return took / 10_000 * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few shapes, two routings")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=None)
    parser.add_argument("--routings", nargs="+", choices=ROUTINGS, default=None)
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS))
    parser.add_argument("--arms", nargs="+", default=["torch", "loop", "dense", "copy", "quack"])
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument("--clean-l2", action="store_true", help="leave nothing in L2 that is to be written back")
    parser.add_argument("--config", help="tile_m x tile_n, x2 for a cluster of two, pp for ping-pong: 128x128x2pp")
    parser.add_argument("--band", type=int, default=8, help="with --config or --sweep-configs: tile rows per band")
    parser.add_argument("--sweep-configs", action="store_true")
    parser.add_argument("--tiles", nargs="+", default=None, help="with --sweep-configs: only these, written as above")
    parser.add_argument("--out", type=Path, default=None, help="JSON file; the plot goes beside it")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("needs a CUDA device")
    args.shapes = args.shapes or (QUICK if args.quick or args.sweep_configs else list(SHAPES))
    args.routings = args.routings or (
        ["balanced"] if args.sweep_configs else ["balanced", "zipf"] if args.quick else list(ROUTINGS)
    )
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}, {args.samples} samples")
    if args.sweep_configs:
        results = sweep(args)
    else:
        print(f"host time of a warm call: {host_time():.1f} us")
        chosen = None
        if args.config:
            tile_m, tile_n, *two = map(int, args.config.removesuffix("pp").split("x"))
            pair = backends.device_arch(torch.device("cuda", 0)) != "sm_90"
            extra: dict = ({"two_cta": True} if pair else {"cluster_n": 2}) if two else {}
            extra["pingpong"] = args.config.endswith("pp")
            chosen = GemmConfig(tile_m, tile_n, band=args.band, **extra)
        results = []
        print(
            f"{'shape':>20} {'op':>10} {'routing':>13} {'tgl ms':>9} {'rate':>10} "
            + "".join(f"{c:>8}" for c in COLUMNS)
        )
        with tiling(chosen):
            for name in args.shapes:
                for op in args.ops:
                    for routing in args.routings:
                        try:
                            results.append(run_case(name, op, routing, args))
                        except torch.OutOfMemoryError:
                            results.append({"shape": name, "op": op, "routing": routing, "wrong": "out of memory"})
                        print(line(results[-1]), flush=True)
                        torch.cuda.empty_cache()
        report(results)
    if args.out:
        args.out.write_text(
            json.dumps({"device": device, "torch": torch.__version__, "results": results}, indent=1) + "\n"
        )
        if not args.sweep_configs:
            plot(results, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
