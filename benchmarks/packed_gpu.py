"""GEMMs of dense rows and matrices that stay packed on a GPU, against those of matrices that are decoded.

    python benchmarks/packed_gpu.py [--quick] [--tokens 64 16384 ...] [--weights gate_up ...] [--formats mxfp4 ...]
        [--ops forward ...] [--out FILE]

The experts are gpt-oss-120b's: 128, 2880 wide, 4 of them for every token, chosen at random. Arms: ``tgl``, the op;
``kernel`` and ``pieces``, what may serve it, whatever the rule says; ``decoded``, ``grouped_gemm`` of all matrices in
bfloat16, decoded before; ``dequantised``, ``group_dequantize`` of all and then ``grouped_gemm``; and, for a forward in
MXFP4, ``triton_kernels``, where it is installed. Every arm is a captured graph, 256 MB are written before each replay,
arms take turns in rotating order, and medians are compared.

Nothing is timed before tgl's result is as near to that of ``decoded`` as two roundings to bfloat16 leave it. Results: a
table of ratios of times (above 1: tgl is faster) beside the rate at which packed bytes of the experts with rows, rows
and results are read and written, and ``--out FILE`` as JSON.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch
from harness import triton_kernels
from harness.command import cases, choice, gpu_parser, needs_device, run_all
from harness.compared import Comparison, Result, compared, of_result
from harness.gates import relative_error
from harness.report import save, with_machine
from torch import Tensor

import tgl
from tgl import backends
from tgl.meta.formats import FORMATS

DTYPE = torch.bfloat16
EXPERTS, CHOICES = 128, 4
WEIGHTS = {"gate_up": (5760, 2880), "down": (2880, 2880)}
OPS = {"forward": False, "gradient": True}
TOKENS = ("1", "16", "64", "256", "1024", "4096", "16384", "131072")  # the last are 4096 rows a group
FORCED = {"kernel": "tgl kernel", "pieces": "decoded in pieces, dense GEMM"}
TWO_ROUNDINGS = 2**-8  # half a unit of bfloat16 each, relative to the number


COMPARISON = Comparison(
    names={"op": ">9", "weight": ">8", "format": ">11", "tokens": ">7"},
    ms=">9.4f",
    rate=("GB/s", ">8.0f"),
    rivals=((*FORCED, "decoded", "dequantised", "triton_kernels"), ">14.3f"),
    speed=lambda result: result["bytes"] / result["ms"]["tgl"] / 1e6,
)


class Problem:
    """Rows of tokens in groups, and packed matrices."""

    def __init__(self, shape: tuple[int, int], format: str, over_rows: bool, tokens: int, device: str = "cuda"):
        torch.manual_seed(0)
        form, (height, width) = FORMATS[format], shape
        picked = torch.rand(tokens, EXPERTS, device=device).topk(CHOICES, 1).indices.flatten()
        counts = picked.bincount(minlength=EXPERTS)
        self.offs, rows = counts.cumsum(0).int(), tokens * CHOICES
        self.options = {"format": format, "over_rows": over_rows}
        self.counts, self.tokens = counts.int(), tokens
        self.square, amax = form.square_scales, form.decodes_with_amax
        weights = torch.randn(EXPERTS, height, width, device=device, dtype=DTYPE)
        made = tgl.group_quantize(weights, None, format=format, columnwise=False, block_2d=self.square)
        self.components = made.data, made.scale, made.amax if amax else None
        self.a = torch.randn(rows, height if over_rows else width, device=device, dtype=DTYPE)
        self.out = torch.empty(rows, width if over_rows else height, device=device, dtype=DTYPE)
        self.weights = self.decode()
        with_rows = int((counts > 0).sum()) / EXPERTS
        packed = sum(t.numel() * t.element_size() for t in self.components if t is not None)
        self.bytes = packed * with_rows + 2 * (self.a.numel() + self.out.numel())

    def decode(self) -> Tensor:
        """All matrices."""
        data, scale, amax = self.components
        form = self.options["format"]
        return tgl.group_dequantize(data, scale, None, amax, format=form, out_dtype=DTYPE, block_2d=self.square)

    def dense(self, weights: Tensor) -> Tensor:
        """The product with decoded matrices."""
        return tgl.grouped_gemm(self.a, weights if self.options["over_rows"] else weights.transpose(1, 2), self.offs)

    def tgl(self) -> Tensor:
        data, scale, amax = self.components
        return tgl.grouped_gemm_packed(self.a, data, scale, self.offs, amax, **self.options)

    def forced(self, implementation: backends.Implementation) -> Callable[[], Tensor]:
        """The op by one implementation."""
        data, scale, amax = self.components

        def call() -> Tensor:
            implementation.run(self.a, data, scale, self.offs, amax, None, None, **self.options, out=self.out)
            return self.out

        return call

    def arms(self) -> dict[str, Callable[[], object]]:
        there = {i.name: i for i in backends.in_order("grouped_gemm_packed", self.a.device)}
        return {
            "tgl": self.tgl,
            **{arm: self.forced(there[name]) for arm, name in FORCED.items() if name in there},
            "decoded": lambda: self.dense(self.weights),
            "dequantised": lambda: self.dense(self.decode()),
            **self.triton_kernels(),
        }

    def triton_kernels(self) -> dict[str, Callable[[], object]]:
        """The arm of triton_kernels, where there is one."""
        if self.options != {"format": "mxfp4", "over_rows": False} or not triton_kernels.installed():
            return {}
        codes, scales = (t.view(torch.uint8) for t in self.components[:2])
        arm = triton_kernels.forward(self.a, codes, scales, self.counts, self.tokens, lambda: self.dense(self.weights))
        return {"triton_kernels": arm}

    def wrong(self, got: Tensor) -> str | None:
        error = relative_error(got, self.dense(self.weights).float())
        return None if error <= TWO_ROUNDINGS else f"error {error:.1e} against decoded matrices"


def run_case(op: str, weight: str, format: str, tokens: str, args: argparse.Namespace) -> Result:
    problem = Problem(WEIGHTS[weight], format, OPS[op], int(tokens))
    return {"bytes": problem.bytes, **compared(problem.arms(), of_result(problem.wrong), args)}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = gpu_parser(__doc__, quick="one weight, of MXFP4, at three numbers of tokens")
    choice(parser, "--ops", OPS)
    choice(parser, "--weights", WEIGHTS, default=False)
    choice(parser, "--formats", FORMATS, default=False)
    choice(parser, "--tokens", TOKENS, default=False)
    args = parser.parse_args(argv)
    args.weights = args.weights or (["gate_up"] if args.quick else list(WEIGHTS))
    args.formats = args.formats or (["mxfp4"] if args.quick else list(FORMATS))
    args.tokens = args.tokens or (["16", "256", "4096"] if args.quick else list(TOKENS))
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    device = needs_device()
    print(f"{device}, torch {torch.__version__}, {DTYPE}\n{COMPARISON.header()}")
    with torch.no_grad():
        every = cases(op=args.ops, weight=args.weights, format=args.formats, tokens=args.tokens)
        results = run_all(every, lambda **case: run_case(**case, args=args), COMPARISON.line)
    print(COMPARISON.report(results))
    save(args.out, with_machine(device, results))


if __name__ == "__main__":
    main()
