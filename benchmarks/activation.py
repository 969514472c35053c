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
from collections.abc import Callable, Sequence

import torch
from harness import swiglu
from harness.command import cases, choice, gpu_parser, needs_device, run_all
from harness.compared import Comparison, Result, compared, of_result
from harness.memory import copying
from harness.report import save
from harness.shapes import MODELS, SMALL, Expert, growing

import tgl
from tgl.meta import formats

DTYPE = torch.bfloat16
GROUPS = 16
LAYERS = {
    "mixtral": MODELS["mixtral"],
    "qwen3": MODELS["qwen3-g16"],
    "deepseek": MODELS["deepseek-g32"],
    "small": SMALL,
}
QUICK = ("qwen3", "deepseek", "small")
QUANTIZED: dict[str, dict[str, str]] = {
    "mxfp8": {"format": "mxfp8", "scale_layout": "blocked"},
    "fp8_block": {"format": "fp8_block"},
    "fp8_tensor": {"format": "fp8_tensor"},
}
COMPARISON = Comparison(
    names={"shape": ">10", "op": ">20"},
    ms=">9.4f",
    rate=("TB/s", ">7.2f"),
    rivals=(("copy", "eager", "compiled", "apart"), ">8.3f"),
    speed=lambda result: result["bytes"] / result["ms"]["tgl"] / 1e9,
)


class Problem:
    """Operands of one op and its arms; ragged groups, no tail.

    Attributes:
        bytes: what the op must move.
    """

    bytes: int

    def __init__(self, layer: Expert, device: str = "cuda"):
        torch.manual_seed(0)
        self.x = torch.randn(layer.rows, 2 * layer.inner, device=device, dtype=DTYPE)
        self.dy = torch.randn(layer.rows, layer.inner, device=device, dtype=DTYPE)
        self.offs = growing(GROUPS, layer.rows, least=1).to(device)

    def copy(self) -> Callable[[], object]:
        return copying(self.bytes, self.x.device)


class Forward(Problem):
    """``grouped_activation``; in turns or halves side by side."""

    def __init__(self, layer: Expert, device: str = "cuda", interleaved: bool = False):
        super().__init__(layer, device)
        self.interleaved = interleaved
        self.bytes = self.x.nbytes + self.dy.nbytes

    def tgl(self) -> torch.Tensor:
        return tgl.grouped_activation(self.x, self.offs, interleaved=self.interleaved)

    def rivals(self) -> dict[str, Callable[[], object]]:
        if self.interleaved:
            return {}
        return {"eager": lambda: swiglu.forward(self.x), "compiled": lambda: swiglu.compiled(self.x)}

    def wrong(self, got: torch.Tensor) -> str | None:
        x = self.x[:256].double()
        return far(got, swiglu.forward(torch.cat([x[:, 0::2], x[:, 1::2]], 1) if self.interleaved else x))


class Backward(Problem):
    """``grouped_activation_backward``, with probabilities or without."""

    def __init__(self, layer: Expert, device: str = "cuda", probs: bool = False):
        super().__init__(layer, device)
        self.probs = torch.rand(layer.rows, device=device) if probs else None
        self.bytes = 2 * self.x.nbytes + self.dy.nbytes

    def tgl(self) -> Sequence[torch.Tensor]:
        return torch.ops.tgl.grouped_activation_backward(self.dy, self.x, self.offs, self.probs)

    def rivals(self) -> dict[str, Callable[[], object]]:
        if self.probs is not None:
            return {}
        return {
            "eager": lambda: swiglu.backward(self.dy, self.x),
            "compiled": lambda: swiglu.compiled_backward(self.dy, self.x),
        }

    def wrong(self, got: Sequence[torch.Tensor]) -> str | None:
        dy = self.dy[:256].double()
        dy = dy if self.probs is None else dy * self.probs[:256, None].double()
        return far(got[0], swiglu.backward(dy, self.x[:256].double()))


class Quantized(Problem):
    """``grouped_activation_quantize``, by given scales where a scale belongs to a group."""

    def __init__(self, layer: Expert, device: str = "cuda", format: str = "mxfp8"):
        super().__init__(layer, device)
        self.options = QUANTIZED[format]
        per_group = not formats.FORMATS[format].block
        self.scale = torch.full((GROUPS,), 16.0, device=device) if per_group else None
        self.bytes = self.x.nbytes + sum(t.nbytes for t in self.tgl())

    def tgl(self) -> Sequence[torch.Tensor]:
        return tgl.grouped_activation_quantize(self.x, self.offs, None, self.scale, **self.options)

    def apart(self) -> Sequence[torch.Tensor]:
        y = tgl.grouped_activation(self.x, self.offs)
        return tgl.group_quantize(y, self.offs, self.scale, **self.options)

    def rivals(self) -> dict[str, Callable[[], object]]:
        return {"apart": self.apart}

    def wrong(self, got: Sequence[torch.Tensor]) -> str | None:
        same = all(torch.equal(a.float(), b.float()) for a, b in zip(got, self.apart()))
        return None if same else "not the bytes of the two ops"


OPS: dict[str, Callable[..., Forward | Backward | Quantized]] = {
    "forward": Forward,
    "forward interleaved": lambda *args: Forward(*args, interleaved=True),
    "backward": Backward,
    "backward probs": lambda *args: Backward(*args, probs=True),
    **{format: lambda *args, format=format: Quantized(*args, format=format) for format in QUANTIZED},
}


def far(got: torch.Tensor, wanted: torch.Tensor) -> str | None:
    """What is wrong with the first rows of a result, or None."""
    error = ((got[: len(wanted)].double() - wanted).norm() / wanted.norm()).item()
    return None if error < 2**-8 else f"error {error:.2e}"


def run_case(shape: str, op: str, args: argparse.Namespace) -> Result:
    layer = LAYERS[shape]
    problem = OPS[op](layer)
    found = compared({"tgl": problem.tgl, "copy": problem.copy(), **problem.rivals()}, of_result(problem.wrong), args)
    return {"rows": layer.rows, "columns": layer.inner, "bytes": problem.bytes, **found}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = gpu_parser(__doc__, quick="three shapes")
    choice(parser, "--shapes", LAYERS, default=False)
    choice(parser, "--ops", OPS)
    args = parser.parse_args(argv)
    args.shapes = args.shapes or list(QUICK if args.quick else LAYERS)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    print(f"{needs_device()}, torch {torch.__version__}, {DTYPE}, SwiGLU\n{COMPARISON.header()}")
    with torch.no_grad():
        every = cases(shape=args.shapes, op=args.ops)
        results = run_all(every, lambda **case: run_case(**case, args=args), COMPARISON.line)
    print(COMPARISON.report(results))
    save(args.out, results)


if __name__ == "__main__":
    main()
