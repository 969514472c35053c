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
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from activation import DTYPE, captured, measure
from torch import Tensor

import tgl

# rows, hidden size, I, groups
SHAPES = {
    "mixtral": (16384, 4096, 14336, 8),
    "qwen3": (65536, 2048, 768, 128),
    "qwen3-g16": (65536, 2048, 768, 16),
    "deepseek": (32768, 7168, 2048, 32),
    "small": (4096, 2048, 2048, 16),
}
ARMS = ("apart", "torch", "gemm")


def swiglu_backward(da: Tensor, h: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    """Of ``silu(gate) * linear * probs``."""
    gate, linear = h.float().chunk(2, 1)
    s = torch.sigmoid(gate)
    a = gate * s
    da = da.float()
    dprobs = (da * a * linear).sum(1)
    da = da * probs[:, None]
    return torch.cat([da * linear * s * (1 + gate * (1 - s)), da * a], 1).to(h.dtype), dprobs


compiled = torch.compile(swiglu_backward, dynamic=False)


class Problem:
    """Operands and arms; ragged groups, no tail."""

    def __init__(self, rows: int, depth: int, columns: int, groups: int):
        torch.manual_seed(0)
        self.dy = torch.randn(rows, depth, device="cuda", dtype=DTYPE)
        # The layer's weight is [G, depth, I], of which the transpose would be the forward's operand.
        self.b = torch.randn(groups, depth, columns, device="cuda", dtype=DTYPE) / depth**0.5
        self.h = torch.randn(rows, 2 * columns, device="cuda", dtype=DTYPE)
        self.probs = torch.rand(rows, device="cuda")
        weights = torch.arange(groups, dtype=torch.float64).add(groups).cumsum(0)
        self.offs = (weights / weights[-1] * rows).to("cuda", torch.int32)

    def tgl(self) -> tuple[Tensor, Tensor]:
        return tgl.grouped_gemm_dactivation(self.dy, self.b, self.h, self.offs, self.probs)

    def apart(self) -> tuple[Tensor, Tensor]:
        da = tgl.grouped_gemm(self.dy, self.b, self.offs)
        return torch.ops.tgl.grouped_activation_backward(da, self.h, self.offs, self.probs)

    def by_torch(self) -> tuple[Tensor, Tensor]:
        return compiled(torch._grouped_mm(self.dy, self.b, offs=self.offs), self.h, self.probs)

    def arms(self) -> dict[str, Callable[[], object]]:
        return {
            "tgl": self.tgl,
            "apart": self.apart,
            "torch": self.by_torch,
            "gemm": lambda: tgl.grouped_gemm(self.dy, self.b, self.offs),
        }

    def wrong(self) -> str | None:
        """What is wrong with tgl's result, or None."""
        (dh, dprobs), (wanted, wanted_probs) = self.tgl(), self.apart()
        if not torch.equal(dh, wanted):
            return f"{(dh != wanted).sum().item()} elements differ from those of two launches"
        error = ((dprobs - wanted_probs).norm() / wanted_probs.norm()).item()
        return None if error < 1e-5 else f"error of dprobs {error:.2e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=SHAPES)
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {DTYPE}, SwiGLU with probabilities")
    print(f"{'shape':>10} {'tgl ms':>9} {'TF/s':>6}" + "".join(f"{arm:>9}" for arm in ARMS))
    results = []
    with torch.no_grad():
        for shape in args.shapes:
            rows, depth, columns, groups = SHAPES[shape]
            problem, kept = Problem(rows, depth, columns, groups), []  # type: tuple[Problem, list[object]]
            result = {"shape": shape, "rows": rows, "depth": depth, "columns": columns, "groups": groups}
            if wrong := problem.wrong():
                print(f"{shape:>10}  WRONG: {wrong}", flush=True)
                results.append({**result, "wrong": wrong})
                continue
            ms = measure({name: captured(call, kept) for name, call in problem.arms().items()}, args.samples)
            results.append({**result, "ms": ms})
            cells = "".join(f"{ms[arm] / ms['tgl']:9.3f}" for arm in ARMS)
            print(
                f"{shape:>10} {ms['tgl']:9.4f} {2 * rows * depth * columns / ms['tgl'] / 1e9:6.0f}{cells}", flush=True
            )
    for arm in ARMS:
        ratios = [r["ms"][arm] / r["ms"]["tgl"] for r in results if "ms" in r]
        if ratios:
            mean = math.exp(statistics.fmean(map(math.log, ratios)))
            print(f"{arm}: geometric mean {mean:.3f}, worst {min(ratios):.3f}")
    if args.out:
        args.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
