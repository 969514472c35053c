"""LoRA on experts that stay packed in MXFP4: a training step of one layer of gpt-oss-120b, and its memory.

    python benchmarks/qlora.py [--quick] [--device cpu] [--shapes small ...] [--ranks 16 ...] [--busy SECONDS]
        [--out FILE]

A step is an expert MLP (SwiGLU, a probability per row) forward, and backward to the gradient of the rows and of the
updates. Both arms have the same values and run in one process:

===============  ======================================================================================================
``packed``       ``GroupedLoRALinear`` on ``GroupedPackedLinear``: nothing decodes a whole weight
``dequantised``  ``group_dequantize`` of a whole weight to bfloat16 and ``F.grouped_mm`` of it, both again in
                 the backward, and ``grouped_mm`` of the updates; the activation is tgl's
===============  ======================================================================================================

On a GPU steps are replayed as CUDA graphs with L2 flushed before each; on a CPU they are called. Nothing is timed
before results have passed against a loop over the experts in float32: at most eight roundings of error. The ratio is
the time of ``dequantised`` over that of ``packed``. ``MiB`` is the highest point of a step above what was there before
it. Below the table stands what the weights of a layer take, and by arithmetic those of all 36 of the model.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from harness.command import cases, choice, gpu_parser, run_all
from harness.report import Table, medians, quotient, save, summaries, with_machine
from harness.shapes import Expert, split
from harness.timing import why
from lora import Step, measured, peak, wrong
from torch import Tensor, nn
from torch.nn.functional import grouped_mm

import tgl
from tests.kernel_cases import ends, spans

FORMAT, DTYPE, LAYERS, GIB = "mxfp4", torch.bfloat16, 36, 1 << 30
ARMS = ("packed", "dequantised")
SHAPES = {
    "small": Expert(4, 256, 128, 128),
    "gpt-oss-4096": Expert(128, 4 * 4096, 2880, 2880),  # rows of 4096 tokens
    "gpt-oss-16384": Expert(128, 4 * 16384, 2880, 2880),
}
DEFAULT = {"cpu": ("small",), "cuda": ("gpt-oss-4096", "gpt-oss-16384")}


class Decoded(torch.autograd.Function):
    """Rows times a frozen packed weight that is decoded as a whole, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: tgl.GroupedPackedLinear, offs: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(offs)
        return grouped_mm(x, decoded(layer).transpose(1, 2), offs=offs)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return grouped_mm(dy, decoded(ctx.layer), offs=ctx.saved_tensors[0]), None, None


def decoded(layer: tgl.GroupedPackedLinear) -> Tensor:
    data, scale, *_ = layer.weight.components()
    return tgl.group_dequantize(data, scale, None, format=FORMAT, out_dtype=DTYPE)


class Problem:
    """The values that both arms share."""

    def __init__(self, shape: Expert, rank: int, device: str):
        self.sizes = split("balanced", shape.groups, shape.rows)
        options: dict[str, Any] = {"device": device, "dtype": DTYPE}
        self.offs = ends(self.sizes, device)
        self.x = torch.randn(shape.rows, shape.hidden, **options).requires_grad_()
        self.dy = torch.randn(shape.rows, shape.hidden, **options)
        self.probs = torch.rand(shape.rows, device=device)
        self.mlp = tgl.GroupedMLP(
            shape.groups, shape.hidden, shape.inner, bias=False, params_dtype=DTYPE, device="meta"
        )
        self.adapters = []
        for name in ("fc1", "fc2"):
            meta = getattr(self.mlp, name)
            base = tgl.GroupedPackedLinear(
                shape.groups, meta.in_features, meta.out_features, bias=False, format=FORMAT, device=device
            )
            adapter = tgl.GroupedLoRALinear(base, rank)
            nn.init.normal_(adapter.lora_B, std=rank**-0.5)
            setattr(self.mlp, name, adapter)
            self.adapters.append(adapter)
        self.trained = [p for adapter in self.adapters for p in (adapter.lora_A, adapter.lora_B)]

    @property
    def weights(self) -> int:
        """Bytes of the packed weights."""
        parts = (part for a in self.adapters for part in a.base.weight.components() if part is not None)
        return sum(part.numel() * part.element_size() for part in parts)

    @property
    def dense(self) -> int:
        """Bytes that the weights take in bfloat16."""
        return sum(a.base.weight.numel() * DTYPE.itemsize for a in self.adapters)

    def dequantised(self, x: Tensor, offs: Tensor, probs: Tensor) -> Tensor:
        def layer(rows: Tensor, adapter: tgl.GroupedLoRALinear) -> Tensor:
            low = grouped_mm(rows, adapter.lora_A.transpose(1, 2), offs=offs)
            update = grouped_mm(low, adapter.lora_B.transpose(1, 2), offs=offs)
            return Decoded.apply(rows, adapter.base, offs) + adapter.scaling * update

        first, second = self.adapters
        return layer(tgl.grouped_activation(layer(x, first), offs, probs), second)

    def step(self, arm: str) -> Step:
        forward = self.mlp.forward_offsets if arm == "packed" else self.dequantised
        leaves = [self.x, *self.trained]

        def run() -> list[Tensor]:
            y = forward(self.x, self.offs, self.probs)
            return [y.detach(), *torch.autograd.grad(y, leaves, self.dy)]

        return run

    def oracle(self) -> list[Tensor]:
        """A step, expert by expert, in float32."""
        found = [torch.zeros_like(t, dtype=torch.float32) for t in (self.x, self.x, *self.trained)]
        weights = [decoded(a.base) for a in self.adapters]
        for g, rows in spans(self.sizes):
            leaves = [t.detach().float().requires_grad_() for t in (self.x[rows], *(t[g] for t in self.trained))]
            x, *factors = leaves
            w1, w2 = (
                weights[i][g].float() + a.scaling * factors[2 * i + 1] @ factors[2 * i]
                for i, a in enumerate(self.adapters)
            )
            gate, linear = (x @ w1.t()).chunk(2, -1)
            y = nn.functional.silu(gate) * linear * self.probs[rows, None] @ w2.t()
            dx, *gradients = torch.autograd.grad(y, leaves, self.dy[rows].float())
            found[0][rows], found[1][rows] = y.detach(), dx
            for whole, part in zip(found[2:], gradients):
                whole[g] = part
        return found


def run_case(shape: str, rank: str, args: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    problem = Problem(SHAPES[shape], int(rank), args.device)
    wanted, steps = problem.oracle(), {}
    memory: dict[str, float] = {}
    reasons: dict[str, str] = {}
    for arm in ARMS:
        step = problem.step(arm)
        try:
            reason = wrong(step(), wanted)
            memory[arm] = peak(step, args.device)
        except Exception as error:  # of an arm; the other goes on
            reason = why(error)
        if reason is None:
            steps[arm] = step
        else:
            reasons[arm] = reason
    del wanted
    times, failed = measured(steps, args)
    sizes = {"packed bytes": problem.weights, "bfloat16 bytes": problem.dense}
    return {"ms": medians(times), "times": summaries(times), "MiB": memory, **sizes, "left out": reasons | failed}


TABLE = Table(
    {"shape": "<14", "rank": ">4", "packed ms": "9.3f", "x dequantised": "13.3f"}
    | {f"MiB {arm}": f"{len(arm) + 4}.0f" for arm in ARMS}
)


def line(result: dict[str, Any]) -> str:
    packed = result.get("ms", {}).get("packed")
    memory = result.get("MiB", {})
    ratio = quotient(result["times"], "dequantised", "packed")
    left_out = "".join(f"\n  {arm} left out: {reason}" for arm, reason in result.get("left out", {}).items())
    cells = [result["shape"], result["rank"], packed, ratio, *(memory.get(arm) for arm in ARMS)]
    return TABLE.line(cells) + left_out


def weights_of(result: dict[str, Any]) -> str:
    """What the weights of a layer and of a model take."""
    packed, dense = (result[f"{name} bytes"] / GIB for name in ("packed", "bfloat16"))
    return (
        f"{result['shape']}: weights of a layer {packed:.2f} GiB packed, {dense:.2f} GiB in bfloat16; "
        f"of {LAYERS} layers {LAYERS * packed:.1f} and {LAYERS * dense:.1f} GiB"
    )


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    made = gpu_parser(__doc__, quick="one shape")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    made.add_argument("--device", choices=("cpu", "cuda"), default=device, help=f"default here: {device}")
    choice(made, "--shapes", SHAPES, default=False)
    made.add_argument("--ranks", nargs="+", type=int, default=[16], help="of the updates; default: 16")
    return made.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    if args.device == "cpu":
        torch.set_num_threads(1)
    shapes = args.shapes or DEFAULT[args.device][: 1 if args.quick else None]
    print(TABLE.header())
    every = cases(shape=shapes, rank=[str(rank) for rank in args.ranks])
    results = run_all(every, lambda **case: run_case(**case, args=args), line)
    for result in results:
        if "packed bytes" in result:
            print(weights_of(result))
    name = "cpu" if args.device == "cpu" else torch.cuda.get_device_name()
    save(args.out, with_machine(name, results))


if __name__ == "__main__":
    main()
