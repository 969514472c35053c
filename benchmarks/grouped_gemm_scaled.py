"""FP8 grouped GEMMs on a GPU, tensor-wise and in blocks, against bf16 and what torch offers.

    python benchmarks/grouped_gemm_scaled.py [--quick] [--shapes mixtral-fc1 ...] [--routings zipf ...] [--ops ...]

Arms: ``fp8_tensor`` and ``fp8_block`` are tgl's, ``bf16`` is tgl's dense op on the same sizes, ``torch`` is
torch._scaled_grouped_mm (a scale per row; fast accumulation for rows; weight gradients only where every group is a
multiple of 16 rows), ``dense`` one torch._scaled_mm of the same FLOPs, and ``deepgemm``, where it is installed, has the
operands of ``fp8_block`` in its own layout; it adds weight gradients to float32 alone. Operands are quantised
beforehand, in no arm's time. Shapes, routings and the way of timing are those of ``grouped_gemm``: captured graphs,
256 MB written before each replay, interleaved arms, medians.

Nothing is timed before tgl's arms have passed their gates: an error against float32 products of the same operands of
at most twice that of rounding the result to bf16, no poison left in the output, the same bits again, and all of this
for another routing in the same graph. Results: ratios of times (above 1: tgl is faster), their geometric mean and worst
case, ``--out FILE`` as JSON.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from functools import partial

import torch
from harness import deep_gemm, gates
from harness.command import cases, choice, gpu_parser, needs_device, run_all
from harness.compared import Agreeing, Result
from harness.report import mean_of, quotient, save, summaries, with_machine
from harness.shapes import QUICK, QUICK_ROUTINGS, ROUTINGS, SHAPES, Shape, split
from harness.timing import Arms, Replay, captured, replays
from torch import Tensor

import tgl
from tests.kernel_cases import ends, gradient, product
from tgl.meta import formats, placement

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
FORMATS = ("fp8_tensor", "fp8_block")
OTHERS = ("bf16", "torch", "dense", "deepgemm")
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

    def __init__(self, op: str, shape: Shape, sizes: Sequence[int], device: str = "cuda"):
        self.op, self.shape, self.sizes = op, shape, sizes
        self.offs = ends(sizes, device)
        x = torch.randn(shape.rows, shape.depth, device=device, dtype=BF16)
        dy = torch.randn(shape.rows, shape.columns, device=device, dtype=BF16)
        w = torch.randn(shape.groups, shape.columns, shape.depth, device=device, dtype=BF16)
        self.rowwise = op in ("fprop", "dgrad")
        self.per_group = not self.rowwise
        self.fill = 0.0 if op == "accumulate" else float("nan")
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

    def forget(self, format: str) -> None:
        """Let go of what only the oracle needs."""
        for operand in self.operands[format]:
            operand.values = None

    def route(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self.offs.copy_(ends(sizes))
        if not self.rowwise:
            for operand in (o for pair in self.operands.values() for o in pair if o.values is not None):
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

    def others(self) -> Arms:
        """The arms beside tgl's own on quantised operands, those of torch on operands of their own."""
        a, b = cast(self.a.float()), cast(self.b.float())
        if not self.rowwise:
            a, b = (t.view(torch.uint8).t().contiguous().view(FP8) for t in (a, b))
        one, groups = torch.ones(1, 1, device=a.device), self.shape.groups
        shapes = ((len(a),), b.shape[:2]) if self.rowwise else ((len(a) * groups,), (len(b) * groups,))
        scales = [torch.ones(shape, device=a.device) for shape in shapes]

        def grouped() -> None:
            torch._scaled_grouped_mm(
                a, b.transpose(-1, -2), *scales, offs=self.offs, out_dtype=BF16, use_fast_accum=self.rowwise
            )

        def dense() -> None:
            matrix = b[0] if self.rowwise else b
            torch._scaled_mm(a, matrix.t(), one[0], one[0], out_dtype=BF16, use_fast_accum=False)

        arms: dict[str, Callable[[], None]] = {"bf16": self.bf16, "torch": grouped, "dense": dense}
        if not self.rowwise and any(size % 16 for size in self.sizes):
            del arms["torch"]  # it would stop the device
        in_blocks = [own for format, own in self.operands.items() if formats.FORMATS[format].block]
        if deep_gemm.installed() and in_blocks and self.op != "wgrad":
            arms["deepgemm"] = self.deepgemm(*in_blocks[0])
        return arms

    def deepgemm(self, *operands: Operand) -> Agreeing:
        """The arm of DeepGEMM; its first result must be what tgl has left in ``out``."""
        ours = self.out.clone()
        a, b = ((operand.data, operand.scale) for operand in operands)
        if self.rowwise:
            return deep_gemm.scaled_forward(self.sizes, a, b, lambda: ours)
        columns, blocks = placement.starts(self.offs, UNIT), placement.starts(self.offs, BLOCK) // BLOCK
        starts = columns.tolist(), blocks.tolist()
        return deep_gemm.scaled_accumulate(self.sizes, starts, a, b, lambda: ours)

    def oracle(self, format: str) -> Tensor:
        """The result in float32."""
        a, b = (operand.values for operand in self.operands[format])
        if self.rowwise:
            return product(a, b.transpose(1, 2), self.sizes, dtype=torch.float32)
        return gradient(a, b, self.sizes, dtype=torch.float32)


def rounding(wanted: Tensor) -> tuple[str, float]:
    return "rounding to bf16", gates.relative_error(wanted.to(BF16), wanted)


def run_case(shape: str, op: str, routing: str, args: argparse.Namespace) -> Result:
    torch.manual_seed(0)
    problem = Problem(op, SHAPES[shape], split(routing, SHAPES[shape].groups, SHAPES[shape].rows))
    graphs: dict[str, Replay] = {}
    wrong: dict[str, str] = {}
    for format in (f for f in FORMATS if f in args.arms):
        problem.quantize(format)
        found, failed = captured({format: partial(problem.scaled, format)})
        wrong |= failed
        for graph in found.values():
            if reason := gates.wrong(problem, graph, partial(problem.oracle, format), rounding):
                wrong[format] = reason
            else:
                graphs[format] = graph
        problem.forget(format)
    made, failed = captured({arm: call for arm, call in problem.others().items() if arm in args.arms})
    times = summaries(replays(graphs | made, args.samples, args.clean_l2, args.busy))
    return {"flops": problem.flops, "times": times, "wrong": wrong | failed}


def line(result: Result) -> str:
    head = f"{result['shape']:>18} {result['op']:>10} {result['routing']:>13}"
    rates = {arm: result["flops"] / t["median"] / 1e9 for arm, t in result["times"].items()}
    cells = "  ".join(f"{arm} {rate:.0f}" for arm, rate in sorted(rates.items(), key=lambda item: -item[1]))
    wrong = "".join(f"\n{'':>20}{arm}: {why}" for arm, why in result["wrong"].items())
    return f"{head}  TF/s: {cells}{wrong}"


def report(results: list[Result]) -> str:
    lines = ["", "time of the arm / time of tgl: geometric mean (worst, where)"]
    for op, ours, arm in itertools.product(OPS, FORMATS, OTHERS):
        own = [r for r in results if r["op"] == op]
        if mean := mean_of((f"{r['shape']} {r['routing']}", quotient(r["times"], arm, ours)) for r in own):
            lines.append(f"{op:>10} {arm:>8} / {ours:<10} {mean}")
    return "\n".join(lines)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = gpu_parser(__doc__, quick="a few shapes, two routings")
    choice(parser, "--shapes", SHAPES, default=False)
    choice(parser, "--routings", ROUTINGS, default=False)
    choice(parser, "--ops", OPS)
    choice(parser, "--arms", FORMATS + OTHERS)
    args = parser.parse_args(argv)
    args.shapes = args.shapes or [n for n in (QUICK if args.quick else SHAPES) if n != "glm"]
    args.routings = args.routings or list(QUICK_ROUTINGS if args.quick else ROUTINGS)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    device = needs_device()
    print(f"{device}, torch {torch.__version__}, {args.samples} samples")
    every = cases(shape=args.shapes, op=args.ops, routing=args.routings)
    results = run_all(every, lambda **case: run_case(**case, args=args), line)
    print(report(results))
    save(args.out, with_machine(device, results))


if __name__ == "__main__":
    main()
