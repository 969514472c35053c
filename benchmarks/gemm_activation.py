"""FC1 with SwiGLU in its epilogue on a GPU, against the product and the activation as two kernels.

    python benchmarks/gemm_activation.py [--quick] [--shapes qwen3-g16 ...] [--samples N] [--out FILE]

Arms: ``tgl``, one kernel that writes both the product, for the backward, and its activation; ``apart``, tgl's GEMM and
tgl's activation; ``torch``, torch._grouped_mm and SwiGLU through torch.compile; ``gemm``, tgl's GEMM alone, which is
what an activation that costs nothing would take. All with probabilities but ``torch``. Ragged groups, graphs, turns and
medians as in ``activation.py``.

Nothing is timed before tgl's results are the bytes of ``apart``. Results: milliseconds, and the time of each arm over
that of tgl (above 1: tgl is faster).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from harness import swiglu
from harness.command import cases, choice, gpu_parser, needs_device, run_all
from harness.compared import Comparison, Result, compared, of_result
from harness.report import save
from harness.shapes import MODELS, SMALL, Expert, growing
from harness.timing import Arms
from torch import Tensor

import tgl

DTYPE = torch.bfloat16
LAYERS = {name: MODELS[name] for name in ("mixtral", "qwen3-g128", "qwen3-g16", "deepseek-g32")} | {"small": SMALL}
QUICK = ("qwen3-g128", "qwen3-g16", "deepseek-g32", "small")
FORMS = {"halves": {"interleaved": False}, "interleaved": {"interleaved": True}}
COMPARISON = Comparison(
    names={"shape": ">14", "form": ">12"},
    ms=">9.4f",
    rate=("TFLOP/s", ">8.0f"),
    rivals=(("apart", "torch", "gemm"), ">8.3f"),
    speed=lambda result: result["flops"] / result["ms"]["tgl"] / 1e9,
)


class Problem:
    """Operands and arms; ragged groups, no tail."""

    def __init__(self, layer: Expert, form: str, device: str = "cuda"):
        groups, rows, depth, columns = layer
        torch.manual_seed(0)
        self.form, self.options = form, FORMS[form]
        self.a = torch.randn(rows, depth, device=device, dtype=DTYPE)
        weight = torch.randn(groups, 2 * columns, depth, device=device, dtype=DTYPE) * depth**-0.5
        self.b, self.probs = weight.transpose(1, 2), torch.rand(rows, device=device)
        self.offs = growing(groups, rows, least=groups).to(device)

    def tgl(self) -> tuple[Tensor, Tensor]:
        return tgl.grouped_gemm_activation(self.a, self.b, self.offs, None, self.probs, **self.options)

    def gemm(self) -> Tensor:
        return tgl.grouped_gemm(self.a, self.b, self.offs)

    def apart(self) -> tuple[Tensor, Tensor]:
        h = self.gemm()
        return tgl.grouped_activation(h, self.offs, self.probs, **self.options), h

    def torch(self) -> Tensor:
        return swiglu.compiled(torch._grouped_mm(self.a, self.b, offs=self.offs))

    def arms(self) -> Arms:
        arms = {"tgl": self.tgl, "apart": self.apart, "gemm": self.gemm}
        return {**arms, "torch": self.torch} if self.form == "halves" else arms

    def wrong(self, got: tuple[Tensor, Tensor]) -> str | None:
        """What is wrong with tgl's result, or None."""
        return None if all(map(torch.equal, got, self.apart())) else "not the bytes of the two ops"


def run_case(shape: str, form: str, args: argparse.Namespace) -> Result:
    groups, rows, depth, columns = LAYERS[shape]
    problem = Problem(LAYERS[shape], form)
    sizes = {"groups": groups, "rows": rows, "depth": depth, "columns": columns}
    return {**sizes, "flops": 4 * rows * depth * columns, **compared(problem.arms(), of_result(problem.wrong), args)}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = gpu_parser(__doc__, quick="without the largest shape")
    choice(parser, "--shapes", LAYERS, default=False)
    args = parser.parse_args(argv)
    args.shapes = args.shapes or list(QUICK if args.quick else LAYERS)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    print(f"{needs_device()}, torch {torch.__version__}, {DTYPE}, SwiGLU\n{COMPARISON.header()}")
    with torch.no_grad():
        every = cases(shape=args.shapes, form=FORMS)
        results = run_all(every, lambda **case: run_case(**case, args=args), COMPARISON.line)
    print(COMPARISON.report(results))
    save(args.out, results)


if __name__ == "__main__":
    main()
