"""FP8 grouped GEMMs on a GPU, tensor-wise and in blocks, against bf16 and what torch offers.

    python benchmarks/grouped_gemm_scaled.py [--quick] [--shapes mixtral-fc1 ...] [--routings zipf ...] [--ops ...]
    python benchmarks/grouped_gemm_scaled.py --sweep [--shapes ...]     which tiling is fastest where

Arms: ``fp8_tensor`` and ``fp8_block`` are tgl's, ``bf16`` is tgl's dense op on the same sizes, ``torch`` is
torch._scaled_grouped_mm (a scale per row; fast accumulation for rows; weight gradients only where every group is a
multiple of 16 rows), ``dense`` one torch._scaled_mm of the same FLOPs. Operands are quantised beforehand, in no arm's
time. Shapes, routings and the way of timing are those of ``grouped_gemm``: captured graphs, 256 MB written before each
replay, arms in turns, medians.

Nothing is timed before tgl's arms have passed their gates: an error against float32 products of the same operands of
at most twice that of rounding the result to bf16, no poison left in the output, the same bits again, and all of this
for another routing in the same graph. Results: ratios of times (above 1: tgl is faster), their geometric mean and worst
case, ``--out FILE`` as JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from grouped_gemm import QUICK, ROUTINGS, SHAPES, Shape, captured, measure, relative_error, split, summary
from torch import Tensor

import tgl
from tgl.cutlass_kernels import tilings
from tgl.cutlass_kernels.config import VARLEN_K, VARLEN_M, GemmConfig
from tgl.cutlass_kernels.gemm import scaling
from tgl.cutlass_kernels.runtime import launcher
from tgl.meta import formats, placement

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
FORMATS = ("fp8_tensor", "fp8_block")
OTHERS = ("bf16", "torch", "dense")
OPS = ("fprop", "dgrad", "wgrad", "accumulate")
BLOCK = 128
UNIT = 32  # columnwise data: groups begin on multiples of it
SCALE = 64.0  # tensor-wise


def power_of_two(amax: Tensor) -> Tensor:
    """Scale inverses of blocks: powers of two."""
    return torch.exp2(torch.ceil(torch.log2(amax.float().clamp_min(1e-20) / 448)))


def cast(values: Tensor) -> Tensor:
    return values.clamp(-448, 448).to(FP8)


class Operand:
    """A matrix quantised along its last dimension; ``values`` is what it stands for, ``data`` and ``scale`` are given.

    Tokens may be quantised along their first dimension instead (``columns``), in which case ``fill`` is called again
    when the routing changes.
    """

    def __init__(self, format: str, source: Tensor, offs: Tensor, columns: bool = False, square: bool = False):
        self.format, self.source, self.columns, self.square = format, source, columns, square
        self.data = self.scale = None
        self.fill(offs)

    def fill(self, offs: Tensor) -> None:
        data, scale = (self._columnwise if self.columns else self._rowwise)(offs)
        if self.data is None:
            self.data, self.scale = data, scale
        else:
            self.data.view(torch.uint8).copy_(data.view(torch.uint8))
            self.scale.copy_(scale)

    def _rowwise(self, offs: Tensor) -> tuple[Tensor, Tensor]:
        x = self.source
        if not formats.FORMATS[self.format].block:
            data = cast(x.float() * SCALE)
            self.values = data.float() / SCALE
            return data, torch.full((offs.shape[0],), 1 / SCALE, device=x.device)
        high = BLOCK if self.square else 1
        amax = x.abs().unflatten(-1, (-1, BLOCK)).amax(-1)
        scale = power_of_two(amax.unflatten(-2, (-1, high)).amax(-2) if self.square else amax)
        spread = scale.repeat_interleave(BLOCK, -1)
        spread = spread.repeat_interleave(high, -2) if self.square else spread
        data = cast(x.float() / spread)
        self.values = data.float() * spread
        return data, scale if self.square else scale.t().contiguous().t()  # by columns, as ``group_quantize`` makes it

    def _columnwise(self, offs: Tensor) -> tuple[Tensor, Tensor]:
        x, (rows, features), groups = self.source, self.source.shape, offs.shape[0]
        if not formats.FORMATS[self.format].block:
            spread: Tensor | float = 1 / SCALE
            scale = torch.full((groups,), 1 / SCALE, device=x.device)
        else:
            block = placement.coordinate(offs, rows, BLOCK) // BLOCK
            amax = torch.zeros(placement.units(rows, groups, BLOCK), features, device=x.device)
            scale = power_of_two(amax.index_reduce_(0, block, x.abs().float(), "amax"))
            spread = scale[block]
        data = cast(x.float() / spread)
        self.values = data.float() * spread
        placed = torch.zeros(features, placement.padded_rows(rows, groups, UNIT), dtype=torch.uint8, device=x.device)
        placed[:, placement.coordinate(offs, rows, UNIT)] = data.view(torch.uint8).t()
        return placed.view(FP8), scale


class Problem:
    """Operands of one op in every arm."""

    def __init__(self, op: str, shape: Shape, sizes: list[int]):
        self.op, self.shape, self.sizes = op, shape, sizes
        device = "cuda"
        self.offs = torch.tensor(sizes, device=device).cumsum(0).int()
        x = torch.randn(shape.rows, shape.depth, device=device, dtype=BF16)
        dy = torch.randn(shape.rows, shape.columns, device=device, dtype=BF16)
        w = torch.randn(shape.groups, shape.columns, shape.depth, device=device, dtype=BF16)
        self.rowwise = op in ("fprop", "dgrad")
        self.a = x if op == "fprop" else dy
        self.b = {"fprop": w, "dgrad": w.transpose(1, 2).contiguous()}.get(op, x)  # of weights, [G, N, K]
        kind = torch.float32 if op == "accumulate" else BF16
        out = (shape.rows, self.b.shape[1]) if self.rowwise else (shape.groups, shape.columns, shape.depth)
        self.out = torch.zeros(out, device=device, dtype=kind)
        self.operands: dict[str, tuple[Operand, Operand]] = {}

    @property
    def flops(self) -> float:
        return 2.0 * self.shape.rows * self.shape.depth * self.shape.columns

    def quantize(self, format: str) -> None:
        """Make the operands of an arm."""
        self.operands[format] = (
            Operand(format, self.a, self.offs, columns=not self.rowwise),
            Operand(format, self.b, self.offs, columns=not self.rowwise, square=self.rowwise),
        )

    def route(self, sizes: list[int]) -> None:
        self.sizes = sizes
        self.offs.copy_(torch.tensor(sizes).cumsum(0))
        if not self.rowwise:
            for pair in self.operands.values():
                for operand in pair:
                    operand.fill(self.offs)

    def scaled(self, format: str) -> None:
        a, b = self.operands[format]
        operands = (a.data, a.scale, b.data, b.scale, self.offs)
        if self.rowwise:
            tgl.grouped_gemm_scaled(*operands, format=format, out=self.out)
        elif self.op == "wgrad":
            tgl.grouped_gemm_scaled_wgrad(*operands, format=format, out=self.out)
        else:
            tgl.grouped_gemm_scaled_wgrad_accumulate_(*operands, self.out, format=format)

    def bf16(self) -> None:
        if self.rowwise:
            tgl.grouped_gemm(self.a, self.b.transpose(1, 2), self.offs, out=self.out)
        elif self.op == "wgrad":
            tgl.grouped_gemm_wgrad(self.a, self.b, self.offs, out=self.out)
        else:
            tgl.grouped_gemm_wgrad_accumulate_(self.a, self.b, self.offs, self.out)

    def rivals(self) -> dict[str, Callable[[], None]]:
        """The arms of others, on operands of their own."""
        a, b = cast(self.a.float()), cast(self.b.float())
        if not self.rowwise:
            a, b = (t.view(torch.uint8).t().contiguous().view(FP8) for t in (a, b))
        one, groups = torch.ones(1, 1, device="cuda"), self.shape.groups
        shapes = ((len(a),), b.shape[:2]) if self.rowwise else ((len(a) * groups,), (len(b) * groups,))
        scales = [torch.ones(shape, device="cuda") for shape in shapes]

        def grouped() -> None:
            torch._scaled_grouped_mm(
                a, b.transpose(-1, -2), *scales, offs=self.offs, out_dtype=BF16, use_fast_accum=self.rowwise
            )

        def dense() -> None:
            matrix = b[0] if self.rowwise else b
            torch._scaled_mm(a, matrix.t(), one[0], one[0], out_dtype=BF16, use_fast_accum=False)

        if not self.rowwise and any(size % 16 for size in self.sizes):  # it would stop the device
            return {"dense": dense}
        return {"torch": grouped, "dense": dense}

    def oracle(self, format: str) -> Tensor:
        """The result in float32."""
        a, b = (operand.values for operand in self.operands[format])
        out = torch.zeros_like(self.out, dtype=torch.float32)
        start = 0
        for g, size in enumerate(self.sizes):
            rows = slice(start, start + size)
            if self.rowwise:
                out[rows] = a[rows] @ b[g].t()
            else:
                out[g] = a[rows].t() @ b[rows]
            start += size
        return out


def gate(problem: Problem, format: str, graph: torch.cuda.CUDAGraph) -> str | None:
    """What is wrong with the graph of one of tgl's arms, or None."""
    poison = 0.0 if problem.op == "accumulate" else float("nan")

    def run() -> Tensor:
        problem.out.fill_(poison)
        graph.replay()
        return problem.out.clone()

    sizes = problem.sizes
    for attempt in (sizes, sizes[1:] + sizes[:1], sizes):
        problem.route(attempt)
        wanted, got = problem.oracle(format), run()
        if got.isnan().any():
            return "poison is left in the output"
        if not torch.equal(got, run()):
            return "not the same bits again"
        ours, rounding = relative_error(got, wanted), relative_error(wanted.to(BF16), wanted)
        if not ours <= 2 * rounding + 1e-5:
            return f"error {ours:.2e}, rounding to bf16 has {rounding:.2e}"
    return None


def existing(format: str, kind: str) -> list[GemmConfig]:
    """What a kernel exists for on sm_90."""
    every = [
        GemmConfig(tile_m, tile_n, tile_k=128, cluster_n=cluster_n)
        for tile_m, tile_n, cluster_n in itertools.product((64, 128, 256), (64, 128, 192), (1, 2))
    ]
    return [t for t in every if tilings.reason("sm_90", kind, t, scaling.OPERANDS[format]) is None]


def named(chosen: GemmConfig) -> str:
    return f"{chosen.tile_m}x{chosen.tile_n}" + "x2" * (chosen.ctas == 2)


def run_case(name: str, op: str, routing: str, args: argparse.Namespace) -> dict:
    shape = SHAPES[name]
    torch.manual_seed(0)
    problem = Problem(op, shape, split(routing, shape.groups, shape.rows))
    result = {"shape": name, "op": op, "routing": routing, "flops": problem.flops}
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    wrong: dict[str, str] = {}
    keep = []

    def attempt(arm: str, call: Callable[[], None]) -> None:
        try:
            graphs[arm] = captured(call)
        except Exception as error:
            torch.cuda.synchronize()
            wrong[arm] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"

    def check(arm: str, format: str) -> None:
        if arm in graphs and (reason := gate(problem, format, graphs[arm])):
            wrong[arm] = reason
            del graphs[arm]

    choose = tilings.choose_scaled
    for format in (f for f in FORMATS if f in args.arms):
        problem.quantize(format)
        if not args.sweep:
            attempt(format, lambda f=format: problem.scaled(f))
            check(format, format)
        kind = VARLEN_M if problem.rowwise else VARLEN_K
        for chosen in existing(format, kind) if args.sweep else ():
            arm = f"{format} {named(chosen)}"
            tilings.choose_scaled = lambda *_, chosen=chosen: chosen
            launcher.forget()
            attempt(arm, lambda f=format: problem.scaled(f))
            check(arm, format)
        tilings.choose_scaled = choose
        launcher.forget()
        for operand in problem.operands[format]:
            operand.values = None
    if not args.sweep:
        if "bf16" in args.arms:
            attempt("bf16", problem.bf16)
        for arm, call in problem.rivals().items():
            if arm in args.arms:
                attempt(arm, call)
                keep.append(call)
    times = {arm: summary(t) for arm, t in measure(graphs, args.samples).items()}
    return {**result, "times": times, "wrong": wrong}


def ratio(result: dict, arm: str, ours: str) -> float | None:
    times = result["times"]
    return times[arm]["median"] / times[ours]["median"] if arm in times and ours in times else None


def line(result: dict) -> str:
    head = f"{result['shape']:>18} {result['op']:>10} {result['routing']:>13}"
    rates = {arm: result["flops"] / t["median"] / 1e9 for arm, t in result["times"].items()}
    cells = "  ".join(f"{arm} {rate:.0f}" for arm, rate in sorted(rates.items(), key=lambda item: -item[1]))
    wrong = "".join(f"\n{'':>20}{arm}: {why}" for arm, why in result["wrong"].items())
    return f"{head}  TF/s: {cells}{wrong}"


def report(results: list[dict]) -> None:
    print("\ntime of the arm / time of tgl: geometric mean (worst, where)")
    for op, ours, arm in itertools.product(OPS, FORMATS, OTHERS):
        found = [(x, r) for r in results if r["op"] == op and (x := ratio(r, arm, ours))]
        if found:
            mean = math.exp(statistics.fmean(math.log(x) for x, _ in found))
            low, worst = min(found, key=lambda pair: pair[0])
            where = f"{low:.3f}, {worst['shape']} {worst['routing']}, of {len(found)}"
            print(f"{op:>10} {arm:>6} / {ours:<10} {mean:6.3f}  ({where})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few shapes, two routings")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=None)
    parser.add_argument("--routings", nargs="+", choices=ROUTINGS, default=None)
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS))
    parser.add_argument("--arms", nargs="+", choices=FORMATS + OTHERS, default=FORMATS + OTHERS)
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument("--sweep", action="store_true", help="time tgl in every tiling there is on sm_90")
    parser.add_argument("--out", type=Path, default=None, help="JSON file")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("needs a CUDA device")
    args.shapes = args.shapes or (QUICK if args.quick or args.sweep else [n for n in SHAPES if n != "glm"])
    args.routings = args.routings or (
        ["balanced"] if args.sweep else ["balanced", "zipf"] if args.quick else list(ROUTINGS)
    )
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}, {args.samples} samples")
    results = []
    for name, op, routing in itertools.product(args.shapes, args.ops, args.routings):
        try:
            results.append(run_case(name, op, routing, args))
            print(line(results[-1]), flush=True)
        except torch.OutOfMemoryError:
            print(f"{name:>18} {op:>10} {routing:>13}  out of memory", flush=True)
        torch.cuda.empty_cache()
    report(results)
    if args.out:
        args.out.write_text(
            json.dumps({"device": device, "torch": torch.__version__, "results": results}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
