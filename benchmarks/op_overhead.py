"""What one call of an op costs, against a bare ``Library.define`` op with the same signature.

The bare op allocates its result and returns it; its autograd formula, ``register_autograd``'s, saves the operands and
calls bare ops. "plain" is the same op without a formula, for calls that need no gradient. On the other side all of
tgl runs (argument checks, allocation, choice of an implementation, the autograd formula) except the arithmetic: an
implementation that does nothing is registered for the time being.

The sides take turns in one process. A round is short, so that another process rarely falls into it; the figures are
medians over rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import tgl

_TGL = torch.ops.tgl
T, G, K, N = 4, 2, 8, 8
OPS = ("grouped_gemm", "grouped_gemm_wgrad", "grouped_dbias", "grouped_activation")
STUBBED = (*OPS, "grouped_activation_backward")

BODIES: dict[str, Callable] = {
    "grouped_gemm": lambda a, b, offs, *_, **__: a.new_empty((a.shape[0], b.shape[2])),
    "grouped_gemm_wgrad": lambda a, b, offs, **_: a.new_empty((offs.shape[0], a.shape[1], b.shape[1])),
    "grouped_dbias": lambda dy, offs: dy.new_empty((offs.shape[0], dy.shape[1])),
    "grouped_activation": lambda x, *_, **__: x.new_empty((x.shape[0], x.shape[1] // 2)),
    "grouped_activation_backward": lambda dy, x, *_, **__: (x.new_empty(x.shape), x.new_empty(0)),
}


def define_plain_ops(namespace: str) -> torch.library.Library:
    """The ops once more in a namespace of their own: same signatures, nothing inside."""
    library = torch.library.Library(namespace, "DEF")
    for name in STUBBED:
        signature = str(getattr(torch.ops.tgl, name).default._schema).partition("(")[2]
        library.define(f"{name}({signature}")
        library.impl(name, BODIES[name], "CPU")
    return library


def define_bare_ops(namespace: str) -> torch.library.Library:
    """Those with an autograd formula."""
    library = define_plain_ops(namespace)
    bare = getattr(torch.ops, namespace)

    def save(ctx: Any, inputs: tuple, output: Any, keyword_only_inputs: Any = None) -> None:
        ctx.save_for_backward(*inputs[:3])

    def gemm(ctx: Any, dy: Tensor) -> tuple:
        a, b, offs = ctx.saved_tensors
        da = bare.grouped_gemm.default(dy, b.transpose(1, 2), offs)
        return da, bare.grouped_gemm_wgrad.default(a, dy, offs), None, None, None

    def wgrad(ctx: Any, dw: Tensor) -> tuple:
        a, b, offs = ctx.saved_tensors
        da = bare.grouped_gemm.default(b, dw.transpose(1, 2), offs)
        return da, bare.grouped_gemm.default(a, dw, offs), None

    def dbias(ctx: Any, g: Tensor) -> tuple:
        dy, offs = ctx.saved_tensors
        return bare.grouped_gemm.default(g.new_ones(dy.shape[0], 1), g[:, None, :], offs), None

    def activation(ctx: Any, dy: Tensor) -> tuple:
        x, offs, _ = ctx.saved_tensors
        return bare.grouped_activation_backward.default(dy, x, offs)[0], None, None

    for name, formula in zip(OPS, (gemm, wgrad, dbias, activation)):
        torch.library.register_autograd(f"{namespace}::{name}", formula, setup_context=save, lib=library)
    return library


@contextlib.contextmanager
def no_arithmetic() -> Iterator[None]:
    """Serve every op with an implementation that does nothing, ahead of all others."""

    def nothing(*args: Any, **kwargs: Any) -> None:
        pass

    added = [tgl.register_implementation(op, "nothing", device="cpu", priority=1000)(nothing) for op in STUBBED]
    try:
        yield
    finally:
        for implementation in added:
            tgl.backends.remove(implementation)


def operands(name: str) -> tuple[list[Tensor], int]:
    """The tensors of one call, and how many of them are differentiable (they come first)."""
    offs = torch.tensor([2, 4], dtype=torch.int32)
    return {
        "grouped_gemm": ([torch.randn(T, K), torch.randn(G, K, N), offs], 2),
        "grouped_gemm_wgrad": ([torch.randn(T, K), torch.randn(T, N), offs], 2),
        "grouped_dbias": ([torch.randn(T, N), offs], 1),
        "grouped_activation": ([torch.randn(T, 2 * N), offs], 1),
    }[name]


def cases(name: str) -> dict[str, Callable[[Callable], Callable[[], Any]]]:
    """Title of each column, and what makes the timed function from an op."""
    tensors, count = operands(name)
    leaves = [t.requires_grad_() for t in operands(name)[0][:count]]
    with_grad = [*leaves, *tensors[count:]]

    def no_grad(op: Callable) -> Callable[[], Any]:
        return lambda: op(*tensors)

    def forward(op: Callable) -> Callable[[], Any]:
        return lambda: op(*with_grad)

    def both(op: Callable) -> Callable[[], Any]:
        cotangent = torch.ones_like(op(*with_grad))
        return lambda: torch.autograd.grad(op(*with_grad), leaves, cotangent)

    return {"no grad": no_grad, "forward with grad": forward, "forward + backward": both}


def microseconds(function: Callable[[], Any], calls: int) -> float:
    """Mean over ``calls`` calls."""
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - start) / calls * 1e6


def measure(functions: list[Callable[[], Any]], rounds: int, calls: int) -> list[float]:
    """Median over ``rounds`` of each function's time, the functions taking turns."""
    times: list[list[float]] = [[] for _ in functions]
    for function in functions:
        microseconds(function, 200)
    for _ in range(rounds):
        for function, own in zip(functions, times):
            own.append(microseconds(function, calls))
    return [statistics.median(own) for own in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2500, help="rounds of each cell")
    parser.add_argument("--calls", type=int, default=4, help="calls of each round")
    options = parser.parse_args()
    torch.set_num_threads(1)
    libraries = define_plain_ops("tgl_plain"), define_bare_ops("tgl_bare")
    print(f"{options.rounds * options.calls} calls per figure, microseconds per call")
    print(f"{'op':20} {'':20} {'plain':>8} {'bare':>8} {'tgl':>8} {'tgl/bare':>9}")
    with no_arithmetic():
        for name in OPS:
            plain, bare, ours = (getattr(ops, name).default for ops in (torch.ops.tgl_plain, torch.ops.tgl_bare, _TGL))
            for title, make in cases(name).items():
                inference = title == "no grad"
                with torch.set_grad_enabled(not inference):
                    contenders = [make(op) for op in ((plain, bare, ours) if inference else (bare, ours))]
                    *others, reference, own = measure(contenders, options.rounds, options.calls)
                first = f"{others[0]:8.1f}" if others else " " * 8
                print(f"{name:20} {title:20} {first} {reference:8.1f} {own:8.1f} {own / reference:9.2f}", flush=True)
    for library in libraries:
        library._destroy()


if __name__ == "__main__":
    main()
