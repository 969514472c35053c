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
import json
import math
import statistics
from pathlib import Path

import torch
from activation import DTYPE, captured, compiled, measure

import tgl

SHAPES = {  # groups, rows, K, I
    "mixtral": (8, 16384, 4096, 14336),
    "qwen3-g128": (128, 65536, 2048, 768),
    "qwen3-g16": (16, 65536, 2048, 768),
    "deepseek-g32": (32, 65536, 7168, 2048),
    "small": (16, 4096, 2048, 2048),
}
QUICK = ("qwen3-g128", "qwen3-g16", "deepseek-g32", "small")
FORMS = ("halves", "interleaved")
ARMS = ("apart", "torch", "gemm")


def run_case(shape: str, form: str, samples: int) -> dict:
    groups, rows, depth, columns = SHAPES[shape]
    torch.manual_seed(0)
    a = torch.randn(rows, depth, device="cuda", dtype=DTYPE)
    weight = torch.randn(groups, 2 * columns, depth, device="cuda", dtype=DTYPE) * depth**-0.5
    probs, b = torch.rand(rows, device="cuda"), weight.transpose(1, 2)
    shares = torch.arange(groups, dtype=torch.float64).add(groups).cumsum(0)
    offs = (shares / shares[-1] * rows).to("cuda", torch.int32)
    options = {"interleaved": form == "interleaved"}

    def apart() -> tuple[torch.Tensor, torch.Tensor]:
        h = tgl.grouped_gemm(a, b, offs)
        return tgl.grouped_activation(h, offs, probs, **options), h

    arms = {
        "tgl": lambda: tgl.grouped_gemm_activation(a, b, offs, None, probs, **options),
        "apart": apart,
        "gemm": lambda: tgl.grouped_gemm(a, b, offs),
    }
    if form == "halves":
        arms["torch"] = lambda: compiled(torch._grouped_mm(a, b, offs=offs))
    result = {"shape": shape, "form": form, "groups": groups, "rows": rows, "depth": depth, "columns": columns}
    if not all(torch.equal(x, y) for x, y in zip(arms["tgl"](), apart())):
        return {**result, "wrong": "not the bytes of the two ops"}
    kept: list[object] = []
    graphs = {name: captured(call, kept) for name, call in arms.items()}
    return {**result, "flops": 4 * rows * depth * columns, "ms": measure(graphs, samples)}


def line(result: dict) -> str:
    head = f"{result['shape']:>14} {result['form']:>12}"
    if "wrong" in result:
        return f"{head}  WRONG: {result['wrong']}"
    ms = result["ms"]
    cells = "".join(f"{ms[arm] / ms['tgl']:9.3f}" if arm in ms else f"{'-':>9}" for arm in ARMS)
    return f"{head} {ms['tgl']:9.4f} {result['flops'] / ms['tgl'] / 1e9:8.0f}{cells}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="without the largest shape")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES)
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {DTYPE}, SwiGLU")
    print(f"{'shape':>14} {'form':>12} {'tgl ms':>9} {'TFLOP/s':>8}" + "".join(f"{arm:>9}" for arm in ARMS))
    results = []
    with torch.no_grad():
        for shape in args.shapes or (QUICK if args.quick else SHAPES):
            for form in FORMS:
                results.append(run_case(shape, form, args.samples))
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
