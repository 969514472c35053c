"""The activation of routed rows on a GPU, its gradients and its quantised form, against what torch offers.

    python benchmarks/activation.py [--quick] [--shapes qwen3 ...] [--samples N] [--out FILE]

Arms: ``tgl``; ``eager`` and ``compiled``, SwiGLU written with torch operators, as it is and through torch.compile, on
the same tensors without groups or tail; ``copy``, torch's kernel for a change of sign, of as many bytes as the op must
move. Quantised forms (``fp8_tensor`` by given scales) have ``apart`` (tgl's activation, then tgl's quantisation) for
their rivals. Every arm is a captured graph, 256 MB are written before each replay, arms take turns in rotating order,
and medians are compared.

Nothing is timed before tgl's result agrees with float64. Results: a table of ratios of times (above 1: tgl is faster;
for ``copy`` the fraction of its bandwidth that tgl reaches), and ``--out FILE`` as JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import tgl
from tgl.meta import formats

L2_BYTES = 256 << 20
DTYPE = torch.bfloat16
GROUPS = 16
SHAPES = {"mixtral": (16384, 14336), "qwen3": (65536, 768), "deepseek": (65536, 2048), "small": (4096, 2048)}
QUICK = ("qwen3", "deepseek", "small")
QUANTIZED: dict[str, dict[str, str]] = {
    "mxfp8": {"format": "mxfp8", "scale_layout": "blocked"},
    "fp8_block": {"format": "fp8_block"},
    "fp8_tensor": {"format": "fp8_tensor"},
}
OPS = ("forward", "forward interleaved", "backward", "backward probs", *QUANTIZED)
ARMS = ("copy", "eager", "compiled", "apart")


def swiglu(x: Tensor) -> Tensor:
    """As models write it."""
    gate, linear = x.chunk(2, 1)
    return torch.nn.functional.silu(gate) * linear


def swiglu_backward(dy: Tensor, x: Tensor) -> Tensor:
    """As autograd computes it, in the dtype of the rows."""
    gate, linear = x.chunk(2, 1)
    s = torch.sigmoid(gate)
    return torch.cat([dy * linear * s * (1 + gate * (1 - s)), dy * gate * s], 1)


class Problem:
    """Operands of one op and its arms; ragged groups, no tail."""

    def __init__(self, op: str, rows: int, columns: int):
        torch.manual_seed(0)
        self.op = op
        self.x = torch.randn(rows, 2 * columns, device="cuda", dtype=DTYPE)
        self.dy = torch.randn(rows, columns, device="cuda", dtype=DTYPE)
        self.probs = torch.rand(rows, device="cuda") if op.endswith("probs") else None
        weights = torch.arange(GROUPS, dtype=torch.float64).add(1).cumsum(0)
        self.offs = (weights / weights[-1] * rows).to("cuda", torch.int32)
        per_group = op in QUANTIZED and not formats.FORMATS[op].block
        self.scale = torch.full((GROUPS,), 16.0, device="cuda") if per_group else None
        if op in QUANTIZED:
            self.bytes = self.x.nbytes + sum(t.nbytes for t in self.tgl())  # type: ignore[attr-defined]
        elif op.startswith("backward"):
            self.bytes = 2 * self.x.nbytes + self.dy.nbytes
        else:
            self.bytes = self.x.nbytes + self.dy.nbytes
        self.source = torch.zeros(self.bytes // 8, device="cuda")
        self.target = torch.empty_like(self.source)

    def tgl(self) -> object:
        if self.op in QUANTIZED:
            return tgl.grouped_activation_quantize(self.x, self.offs, None, self.scale, **QUANTIZED[self.op])
        if self.op.startswith("backward"):
            return torch.ops.tgl.grouped_activation_backward(self.dy, self.x, self.offs, self.probs)
        return tgl.grouped_activation(self.x, self.offs, interleaved=self.op.endswith("interleaved"))

    def arms(self) -> dict[str, Callable[[], object]]:
        arms: dict[str, Callable[[], object]] = {
            "tgl": self.tgl,
            "copy": lambda: torch.neg(self.source, out=self.target),
        }
        if self.op == "forward":
            arms["eager"] = lambda: swiglu(self.x)
            arms["compiled"] = lambda: compiled(self.x)
        elif self.op == "backward":
            arms["eager"] = lambda: swiglu_backward(self.dy, self.x)
            arms["compiled"] = lambda: compiled_backward(self.dy, self.x)
        elif self.op in QUANTIZED:
            arms["apart"] = self.apart
        return arms

    def apart(self) -> object:
        y = tgl.grouped_activation(self.x, self.offs)
        return tgl.group_quantize(y, self.offs, self.scale, **QUANTIZED[self.op])

    def wrong(self, got: object) -> str | None:
        """What is wrong with tgl's result on the first rows, or None."""
        if self.op in QUANTIZED:
            pairs = zip(got, self.apart())  # type: ignore[call-overload]
            same = all(torch.equal(a.float(), b.float()) for a, b in pairs)
            return None if same else "not the bytes of the two ops"
        x = self.x[:256].double()
        if self.op.endswith("interleaved"):
            x = torch.cat([x[:, 0::2], x[:, 1::2]], 1)
        if self.op.startswith("backward"):
            dy, first = self.dy[:256].double(), got[0][:256].double()  # type: ignore[index]
            wanted = swiglu_backward(dy if self.probs is None else dy * self.probs[:256, None].double(), x)
        else:
            wanted, first = swiglu(x), got[:256].double()  # type: ignore[index]
        error = ((first - wanted).norm() / wanted.norm()).item()
        return None if error < 2**-8 else f"error {error:.2e}"


compiled = torch.compile(swiglu, dynamic=False)
compiled_backward = torch.compile(swiglu_backward, dynamic=False)


def captured(call: Callable[[], object], kept: list[object]) -> torch.cuda.CUDAGraph:
    """``call`` as a graph, after three runs to warm up; what it returns is kept."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept.append(call())
    return graph


def measure(graphs: dict[str, torch.cuda.CUDAGraph], samples: int) -> dict[str, float]:
    """Median milliseconds of replays, taken in turns."""
    flush = torch.empty(L2_BYTES, dtype=torch.uint8, device="cuda")
    names = list(graphs)
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in names}
    for sample in range(samples + 3):
        turn = sample % len(names)
        for name in names[turn:] + names[:turn]:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(500_000)  # the host gets ahead, so that no launch latency is timed
            flush.zero_()
            start.record()
            graphs[name].replay()
            end.record()
            if sample >= 3:
                events[name].append((start, end))
        torch.cuda.synchronize()
    return {name: statistics.median(s.elapsed_time(e) for s, e in pairs) for name, pairs in events.items()}


def run_case(shape: str, op: str, samples: int) -> dict:
    rows, columns = SHAPES[shape]
    problem, kept = Problem(op, rows, columns), []  # type: tuple[Problem, list[object]]
    result = {"shape": shape, "op": op, "rows": rows, "columns": columns, "bytes": problem.bytes}
    if wrong := problem.wrong(problem.tgl()):
        return {**result, "wrong": wrong}
    graphs = {name: captured(call, kept) for name, call in problem.arms().items()}
    return {**result, "ms": measure(graphs, samples)}


def line(result: dict) -> str:
    head = f"{result['shape']:>10} {result['op']:>20}"
    if "wrong" in result:
        return f"{head}  WRONG: {result['wrong']}"
    ms = result["ms"]
    cells = "".join(f"{ms[arm] / ms['tgl']:9.3f}" if arm in ms else f"{'-':>9}" for arm in ARMS)
    return f"{head} {ms['tgl']:9.4f} {result['bytes'] / ms['tgl'] / 1e9:7.2f}{cells}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three shapes")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES)
    parser.add_argument("--ops", nargs="+", choices=OPS, default=OPS)
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {DTYPE}, SwiGLU")
    print(f"{'shape':>10} {'op':>20} {'tgl ms':>9} {'TB/s':>7}" + "".join(f"{arm:>9}" for arm in ARMS))
    results = []
    with torch.no_grad():
        for shape in args.shapes or (QUICK if args.quick else SHAPES):
            for op in args.ops:
                results.append(run_case(shape, op, args.samples))
                print(line(results[-1]), flush=True)
    for arm in ARMS:
        ratios = [r["ms"][arm] / r["ms"]["tgl"] for r in results if arm in r.get("ms", {})]
        if ratios:
            mean = math.exp(statistics.fmean(map(math.log, ratios)))
            print(f"{arm}: geometric mean {mean:.3f}, worst {min(ratios):.3f}")
    if args.out:
        args.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
