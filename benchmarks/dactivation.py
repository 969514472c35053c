"""From the gradient of an expert's output to that of its hidden rows, on a GPU: in one launch, in two, and by torch.

    python benchmarks/dactivation.py [--shapes qwen3 ...] [--samples N] [--out FILE]

Arms: ``tgl``, ``grouped_gemm_dactivation``; ``apart``, tgl's grouped GEMM and its kernel for the activation's backward;
``torch``, ``torch._grouped_mm`` and SwiGLU's backward through torch.compile; ``gemm``, tgl's grouped GEMM alone, which
is what the activation is added to. Graphs, turns and medians as in ``activation.py``.

Nothing is timed before tgl's result has the bits of ``apart``. Results: a table of ratios of times (above 1: tgl is
faster), and ``--out FILE`` as JSON.
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
LAYERS = {
    "mixtral": MODELS["mixtral"],
    "qwen3": MODELS["qwen3-g128"],
    "qwen3-g16": MODELS["qwen3-g16"],
    "deepseek": MODELS["deepseek-g32"]._replace(rows=32768),
    "small": SMALL,
}
COMPARISON = Comparison(
    names={"shape": ">10"},
    ms=">9.4f",
    rate=("TF/s", ">6.0f"),
    rivals=(("apart", "torch", "gemm"), ">8.3f"),
    speed=lambda r: 2 * r["rows"] * r["depth"] * r["columns"] / r["ms"]["tgl"] / 1e9,
)


class Problem:
    """Operands and arms; ragged groups, no tail."""

    def __init__(self, layer: Expert, device: str = "cuda"):
        groups, rows, depth, columns = layer
        torch.manual_seed(0)
        self.dy = torch.randn(rows, depth, device=device, dtype=DTYPE)
        # The layer's weight is [G, depth, I], of which the transpose would be the forward's operand.
        self.b = torch.randn(groups, depth, columns, device=device, dtype=DTYPE) / depth**0.5
        self.h = torch.randn(rows, 2 * columns, device=device, dtype=DTYPE)
        self.probs = torch.rand(rows, device=device)
        self.offs = growing(groups, rows, least=groups).to(device)

    def tgl(self) -> tuple[Tensor, Tensor]:
        return tgl.grouped_gemm_dactivation(self.dy, self.b, self.h, self.offs, self.probs)

    def gemm(self) -> Tensor:
        return tgl.grouped_gemm(self.dy, self.b, self.offs)

    def apart(self) -> tuple[Tensor, Tensor]:
        return torch.ops.tgl.grouped_activation_backward(self.gemm(), self.h, self.offs, self.probs)

    def torch(self) -> tuple[Tensor, Tensor]:
        da = torch._grouped_mm(self.dy, self.b, offs=self.offs)
        return swiglu.compiled_backward_with_probs(da, self.h, self.probs)

    def arms(self) -> Arms:
        return {"tgl": self.tgl, "apart": self.apart, "torch": self.torch, "gemm": self.gemm}

    def wrong(self, got: tuple[Tensor, Tensor]) -> str | None:
        """What is wrong with tgl's result, or None."""
        (dh, dprobs), (wanted, wanted_probs) = got, self.apart()
        if not torch.equal(dh, wanted):
            return f"{(dh != wanted).sum().item()} elements differ from those of two launches"
        error = ((dprobs - wanted_probs).norm() / wanted_probs.norm()).item()
        return None if error < 1e-5 else f"error of dprobs {error:.2e}"


def run_case(shape: str, args: argparse.Namespace) -> Result:
    groups, rows, depth, columns = LAYERS[shape]
    problem = Problem(LAYERS[shape])
    found = compared(problem.arms(), of_result(problem.wrong), args)
    return {"rows": rows, "depth": depth, "columns": columns, "groups": groups, **found}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = gpu_parser(__doc__)
    choice(parser, "--shapes", LAYERS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    print(f"{needs_device()}, torch {torch.__version__}, {DTYPE}, SwiGLU with probabilities\n{COMPARISON.header()}")
    with torch.no_grad():
        every = cases(shape=args.shapes)
        results = run_all(every, lambda **case: run_case(**case, args=args), COMPARISON.line)
    print(COMPARISON.report(results))
    save(args.out, results)


if __name__ == "__main__":
    main()
