"""Ops around the GEMMs of an expert layer on a GPU: activations, routers, tokens to rows of experts and back.

    python benchmarks/ops_gpu.py [--ops activation ...] [--case qwen3] [--samples N] [--out FILE]

===========================  =========================================================================================
``activation``, its          SwiGLU; ``torch`` and ``compiled`` are torch's operators on the same rows without groups
``_backward``
``activation_quantize``      with its quantisation, FP8 by given scales; ``apart`` is tgl's activation and quantisation
``gemm_activation``          FC1 and its activation; ``apart`` is tgl's GEMM and activation, ``compiled``
                             ``torch._grouped_mm`` and a compiled SwiGLU, ``gemm`` tgl's GEMM alone
``dactivation``              FC2's input gradient and the activation's backward, with the same arms
``dispatch``, ``combine``,   about 131,072 rows, each a top-k slot at random; ``torch`` is ``index_select`` and
``combine_backward``         ``embedding_bag``
``route``                    choices grouped by expert; ``torch`` and ``compiled`` are a stable sort and what follows
``topk_router``              logits to experts and weights, also with the gradient, and with the losses; ``torch`` and
                             ``compiled`` are the operations that models spell out
===========================  =========================================================================================

``copy`` is torch's kernel for a change of sign that moves as many bytes as the op must. Every arm is a captured graph,
256 MB are written before each replay, arms take turns in rotating order, and medians are compared. ``rate`` counts
bytes that must move, or FLOPs.

Nothing is timed before tgl's result has passed: against float64, the CPU, or the bits of ``apart``. Results: a table of
ratios of times (above 1: tgl is faster; for ``copy`` the fraction of its bandwidth), and ``--out FILE`` as JSON.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from harness import routers, swiglu
from harness.command import choice, gpu_parser, needs_device, run_all
from harness.compared import Comparison, Result, compared, of_result
from harness.gates import relative_error
from harness.memory import copying
from harness.report import save, with_machine
from harness.shapes import MODELS, SMALL, Expert, growing
from harness.timing import Arms
from torch import Tensor

import tgl
from tgl.meta.formats import FORMATS

DTYPE = torch.bfloat16
OPS = torch.ops.tgl
EXPERTS = {
    "mixtral": MODELS["mixtral"],
    "qwen3-g128": MODELS["qwen3-g128"],
    "qwen3-g16": MODELS["qwen3-g16"],
    "deepseek": MODELS["deepseek-g32"],
    "deepseek-32768": MODELS["deepseek-g32"]._replace(rows=32768),
    "small": SMALL,
}
QUANTIZED = {"mxfp8": {"scale_layout": "blocked"}, "fp8_block": {}, "fp8_tensor": {}}
ROWS = 131072
SHOWN = 64  # tokens whose rows are compared with float64
PASSES = ("forward", "both", "losses")
compiled = functools.partial(torch.compile, fullgraph=True, dynamic=False)
COMPARISON = Comparison(
    names={"op": ">20", "case": ">22"},
    ms=">9.4f",
    rate=("rate", ">12"),
    rivals=(("copy", "torch", "compiled", "apart", "gemm"), ">9.3f"),
    speed=lambda result: rate(result),
)


class Case(NamedTuple):
    """Arms of an op, the check of tgl's result, and its work.

    Attributes:
        bytes: what the op must move; 0 where FLOPs count.
    """

    arms: Arms
    wrong: Callable[[Any], str | None]
    bytes: int = 0
    flops: float = 0.0


def rate(result: Result) -> str:
    if result["flops"]:
        return f"{result['flops'] / result['ms']['tgl'] / 1e9:.0f} TFLOP/s"
    return f"{result['bytes'] / result['ms']['tgl'] / 1e9:.2f} TB/s"


def far(got: Tensor, wanted: Tensor) -> str | None:
    """Return what is wrong with the first rows of a result, or None."""
    error = relative_error(got[: len(wanted)], wanted)
    return None if error < 2**-8 else f"error {error:.2e}"


def other_bits(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> str | None:
    same = all(torch.equal(a.float(), b.float()) for a, b in zip(got, wanted, strict=True))
    return None if same else "not the bits of two ops"


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=DTYPE)


# --- activations ------------------------------------------------------------------------------------------------------


def activation(layer: Expert) -> Case:
    x, offs = normal(layer.rows, 2 * layer.inner), growing(layer.groups, layer.rows, least=1).to("cuda")
    moved = 3 * x.nbytes // 2
    arms = {
        "tgl": lambda: tgl.grouped_activation(x, offs),
        "copy": copying(moved, x.device),
        "torch": lambda: swiglu.forward(x),
        "compiled": lambda: swiglu.compiled(x),
    }
    return Case(arms, lambda got: far(got, swiglu.forward(x[:256].double())), moved)


def activation_backward(layer: Expert) -> Case:
    x, offs = normal(layer.rows, 2 * layer.inner), growing(layer.groups, layer.rows, least=1).to("cuda")
    dy = normal(layer.rows, layer.inner)
    moved = 2 * x.nbytes + dy.nbytes
    arms = {
        "tgl": lambda: OPS.grouped_activation_backward(dy, x, offs, None),
        "copy": copying(moved, x.device),
        "torch": lambda: swiglu.backward(dy, x),
        "compiled": lambda: swiglu.compiled_backward(dy, x),
    }
    return Case(arms, lambda got: far(got[0], swiglu.backward(dy[:256].double(), x[:256].double())), moved)


def activation_quantize(layer: Expert, format: str) -> Case:
    x, offs = normal(layer.rows, 2 * layer.inner), growing(layer.groups, layer.rows, least=1).to("cuda")
    options = {"format": format, **QUANTIZED[format]}
    scale = None if FORMATS[format].block else torch.full((layer.groups,), 16.0, device="cuda")

    def one() -> Sequence[Tensor]:
        return tgl.grouped_activation_quantize(x, offs, None, scale, **options)

    def apart() -> Sequence[Tensor]:
        return tgl.group_quantize(tgl.grouped_activation(x, offs), offs, scale, **options)

    moved = x.nbytes + sum(t.nbytes for t in one())
    arms = {"tgl": one, "copy": copying(moved, x.device), "apart": apart}
    return Case(arms, lambda got: other_bits(got, apart()), moved)


def gemm_activation(layer: Expert) -> Case:
    groups, rows, depth, columns = layer
    a, b = normal(rows, depth), (normal(groups, 2 * columns, depth) * depth**-0.5).transpose(1, 2)
    probs, offs = torch.rand(rows, device="cuda"), growing(groups, rows, least=groups).to("cuda")

    def gemm() -> Tensor:
        return tgl.grouped_gemm(a, b, offs)

    def apart() -> tuple[Tensor, Tensor]:
        h = gemm()
        return tgl.grouped_activation(h, offs, probs), h

    arms = {
        "tgl": lambda: tgl.grouped_gemm_activation(a, b, offs, None, probs),
        "apart": apart,
        "compiled": lambda: swiglu.compiled(torch._grouped_mm(a, b, offs=offs)),
        "gemm": gemm,
    }
    return Case(arms, lambda got: other_bits(got, apart()), flops=4.0 * rows * depth * columns)


def dactivation(layer: Expert) -> Case:
    groups, rows, depth, columns = layer
    # The layer's weight is [G, depth, I], of which the transpose would be the forward's operand.
    dy, b, h = normal(rows, depth), normal(groups, depth, columns) / depth**0.5, normal(rows, 2 * columns)
    probs, offs = torch.rand(rows, device="cuda"), growing(groups, rows, least=groups).to("cuda")

    def gemm() -> Tensor:
        return tgl.grouped_gemm(dy, b, offs)

    def apart() -> tuple[Tensor, Tensor]:
        return OPS.grouped_activation_backward(gemm(), h, offs, probs)

    def by_torch() -> tuple[Tensor, Tensor]:
        return swiglu.compiled_backward_with_probs(torch._grouped_mm(dy, b, offs=offs), h, probs)

    def wrong(got: tuple[Tensor, Tensor]) -> str | None:
        wanted = apart()
        if reason := other_bits(got[:1], wanted[:1]):
            return reason
        error = relative_error(got[1], wanted[1])
        return None if error < 1e-5 else f"error of dprobs {error:.2e}"

    arms = {
        "tgl": lambda: tgl.grouped_gemm_dactivation(dy, b, h, offs, probs),
        "apart": apart,
        "compiled": by_torch,
        "gemm": gemm,
    }
    return Case(arms, wrong, flops=2.0 * rows * depth * columns)


# --- tokens to rows and back ------------------------------------------------------------------------------------------


class Rows:
    """Tokens, rows in a random order, and the rows of the top-k slots."""

    def __init__(self, top_k: int, width: int):
        tokens = ROWS // top_k
        self.x, self.y, self.weights = normal(tokens, width), normal(tokens * top_k, width), torch.rand(tokens, top_k)
        self.weights = self.weights.to("cuda")
        order = torch.randperm(tokens * top_k, device="cuda")
        position, token = order.int(), torch.empty_like(order, dtype=torch.int32)
        token[order] = torch.arange(tokens, device="cuda", dtype=torch.int32).repeat_interleave(top_k)
        self.token, self.position, self.places = token, position, (token, position, top_k)
        self.shown = order[: SHOWN * top_k].view(-1, top_k)  # the rows of the first tokens
        self.moved = self.x.nbytes + self.y.nbytes

    def case(self, call: Callable[[], Any], wrong: Callable[[Any], str | None], by_torch: Arms, more: int = 0) -> Case:
        moved = self.moved + more
        return Case({"tgl": call, "copy": copying(moved, self.x.device), **by_torch}, wrong, moved)


def dispatch(top_k: int, width: int) -> Case:
    r = Rows(top_k, width)

    def wrong(got: Tensor) -> str | None:
        return far(got[r.shown], r.x[: len(r.shown), None].double().expand(-1, top_k, -1))

    return r.case(lambda: OPS.dispatch(r.x, *r.places), wrong, {"torch": lambda: r.x.index_select(0, r.token)})


def combine(top_k: int, width: int) -> Case:
    r = Rows(top_k, width)
    starts = torch.arange(0, len(r.y), top_k, device="cuda", dtype=torch.int32)
    bag = {"torch": lambda: torch.embedding_bag(r.y, r.position, starts, mode=0)[0]}
    return r.case(lambda: OPS.combine(r.y, *r.places), lambda got: far(got, r.y[r.shown].double().sum(1)), bag)


def combine_backward(top_k: int, width: int) -> Case:
    r = Rows(top_k, width)

    def wrong(got: Sequence[Tensor]) -> str | None:
        grad, weights = r.x[: len(r.shown), None].double(), r.weights[: len(r.shown), :, None].double()
        dots = (grad * r.y[r.shown].double()).sum(2)
        return far(got[0][r.shown], grad * weights) or far(got[1], dots)

    return r.case(lambda: OPS.combine_backward(r.x, r.y, *r.places, r.weights), wrong, {}, r.y.nbytes)


# --- routers ----------------------------------------------------------------------------------------------------------


def by_sort(index: Tensor, experts: int) -> tuple[Tensor, ...]:
    """Return ``source``, ``position``, ``token`` and ``offs`` of choices that are all in range."""
    chosen, source = torch.sort(index.reshape(-1), stable=True)
    rows = torch.arange(source.shape[0], device=index.device)
    position = torch.empty_like(source).scatter_(0, source, rows)
    offs = torch.searchsorted(chosen, torch.arange(experts, device=index.device), right=True, out_int32=True)
    return source, position, source // index.shape[1], offs


def route(shape: routers.Routed) -> Case:
    index = torch.rand(shape.tokens, shape.experts, device="cuda").topk(shape.top_k).indices
    wanted, sort = OPS.route(index.cpu(), shape.experts), compiled(by_sort)
    arms = {
        "tgl": lambda: OPS.route(index, shape.experts),
        "torch": lambda: by_sort(index, shape.experts),
        "compiled": lambda: sort(index, shape.experts),
    }
    moved = index.nbytes + sum(t.nbytes for t in wanted)
    return Case(arms, lambda got: other_bits([t.cpu() for t in got], wanted), moved)


def topk_router(shape: routers.Routed, name: str) -> Case:
    logits = normal(shape.tokens, shape.experts).to(shape.dtype)
    bias = 0.1 * torch.randn(shape.experts, device="cuda") if shape.bias else None
    grad = torch.randn(shape.tokens, shape.top_k, device="cuda")
    losses, backward = name == "losses", name != "forward"
    plain = routers.by_torch(shape, losses)
    calls = {"tgl": routers.by_tgl(shape, losses), "torch": plain, "compiled": plain}

    def call_of(arm: str) -> Callable[..., Any]:
        if backward:
            call = routers.with_gradient(calls[arm])
        else:
            call = torch.no_grad()(lambda logits, bias, grad: calls[arm](logits, bias))
        return compiled(call) if arm == "compiled" else call

    wide = [None if t is None else t.double().cpu() for t in (logits, bias, grad)]
    wanted = call_of("tgl")(*wide)

    def wrong(got: Sequence[Tensor]) -> str | None:
        same = (got[1].cpu() == wanted[1]).all(1)
        if (~same).sum() > shape.tokens // 1000:  # a bias may put two experts next to each other, beyond float32
            return "not the choices of the CPU"
        for place in (0, *range(2, len(wanted))):
            ours, theirs = got[place].double().cpu(), wanted[place].double()
            if theirs.dim() == 2:
                ours, theirs = ours[same], theirs[same]
            exact = 4 * torch.finfo(shape.dtype).eps if backward and place == len(wanted) - 1 else 0
            if (ours - theirs).abs().max() > max(1e-5, exact) * theirs.abs().max():
                return f"result {place} is not close to float64"
        return None

    moved = logits.nbytes * (3 if backward else 1) + grad.numel() * (20 if backward else 8)
    return Case({arm: functools.partial(call_of(arm), logits, bias, grad) for arm in calls}, wrong, moved)


def of_experts(make: Callable[..., Case], *more: str) -> dict[str, Callable[[], Case]]:
    """Return a case for each layer, and each of ``more`` as the last argument."""
    if not more:
        return {name: lambda name=name: make(EXPERTS[name]) for name in EXPERTS}
    return {f"{n} {m}": lambda n=n, m=m: make(EXPERTS[n], m) for n in EXPERTS for m in more}


def of_rows(make: Callable[..., Case]) -> dict[str, Callable[[], Case]]:
    shapes = [(top_k, width) for top_k in (1, 2, 4, 6, 8, 10) for width in (1536, 2048, 4096, 7168)]
    return {f"{k} of {width}": lambda k=k, width=width: make(k, width) for k, width in shapes}


CASES: dict[str, dict[str, Callable[[], Case]]] = {
    "activation": of_experts(activation),
    "activation_backward": of_experts(activation_backward),
    "activation_quantize": of_experts(activation_quantize, *QUANTIZED),
    "gemm_activation": of_experts(gemm_activation),
    "dactivation": of_experts(dactivation),
    "dispatch": of_rows(dispatch),
    "combine": of_rows(combine),
    "combine_backward": of_rows(combine_backward),
    "route": {name: lambda shape=shape: route(shape) for name, shape in routers.SHAPES.items()},
    "topk_router": {
        f"{name} {kind}": lambda name=name, kind=kind: topk_router(routers.SHAPES[name], kind)
        for name in routers.SHAPES
        for kind in PASSES
    },
}


def run_case(op: str, case: str, args: argparse.Namespace) -> Result:
    torch.manual_seed(0)
    torch._dynamo.reset()  # of ever new shapes, and with gradients and without
    made = CASES[op][case]()
    return {"bytes": made.bytes, "flops": made.flops, **compared(made.arms, of_result(made.wrong), args)}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = gpu_parser(__doc__)
    choice(parser, "--ops", CASES)
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    device = needs_device()
    print(f"{device}, torch {torch.__version__}, {DTYPE}\n{COMPARISON.header()}")
    every = [{"op": op, "case": case} for op in args.ops for case in CASES[op] if args.case in case]
    results = run_all(every, lambda **case: run_case(**case, args=args), COMPARISON.line)
    print(COMPARISON.report(results))
    save(args.out, with_machine(device, results))


if __name__ == "__main__":
    main()
