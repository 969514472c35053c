"""What one call of an op costs, against a bare ``Library.define`` op with the same signature.

The bare op allocates its result and returns it; its autograd formula, ``register_autograd``'s, saves the operands and
calls bare ops. "plain" is the same op without a formula, for calls that need no gradient. On the other side all of
tgl runs (argument checks, allocation, choice of an implementation, the autograd formula) except the arithmetic. In the
lines "nothing" an implementation that does nothing serves the op; in the lines "kernel" it is the path to the CUDA
kernels, plan look-up included, where a function that does nothing stands for the compiled kernel. (It runs on CPU
tensors, so that no GPU is needed; on a GPU, the question for the current device comes on top.)

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
from tgl import backends
from tgl.cutlass_kernels import host

_TGL = torch.ops.tgl
T, G, K, N = 4, 2, 8, 8
OPS = ("grouped_gemm", "grouped_gemm_wgrad", "grouped_dbias", "grouped_activation")
KERNELS = ("grouped_gemm", "grouped_gemm_wgrad")
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
            backends.remove(implementation)


@contextlib.contextmanager
def no_launch() -> Iterator[None]:
    """Serve the GEMMs with the kernels for Hopper, compiled to a function that does nothing."""

    def nothing(*args: Any) -> None:
        pass

    originals = host.compiled, host.packages_reason
    host.compiled, host.packages_reason = lambda *_: nothing, lambda: None
    try:
        with backends.emulated_device("sm_90"):
            yield
    finally:
        host.compiled, host.packages_reason = originals


def operands(name: str, dtype: torch.dtype) -> tuple[list[Tensor], int]:
    """The tensors of one call, and how many of them are differentiable (they come first)."""
    offs = torch.tensor([2, 4], dtype=torch.int32)
    shapes = {
        "grouped_gemm": ((T, K), (G, K, N)),
        "grouped_gemm_wgrad": ((T, K), (T, N)),
        "grouped_dbias": ((T, N),),
        "grouped_activation": ((T, 2 * N),),
    }[name]
    return [*(torch.randn(shape).to(dtype) for shape in shapes), offs], len(shapes)


def cases(name: str, dtype: torch.dtype) -> dict[str, Callable[[Callable], Callable[[], Any]]]:
    """Title of each column, and what makes the timed function from an op."""
    tensors, count = operands(name, dtype)
    leaves = [t.requires_grad_() for t in operands(name, dtype)[0][:count]]
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


def measure_op(name: str, serves: str, dtype: torch.dtype, options: argparse.Namespace) -> None:
    """Measure and print the three lines of one op."""
    plain, bare, ours = (getattr(ops, name).default for ops in (torch.ops.tgl_plain, torch.ops.tgl_bare, _TGL))
    for title, make in cases(name, dtype).items():
        inference = title == "no grad"
        with torch.set_grad_enabled(not inference):
            contenders = [make(op) for op in ((plain, bare, ours) if inference else (bare, ours))]
            *first, reference, own = measure(contenders, options.rounds, options.calls)
        least, ratio = (f"{first[0]:6.1f}", f"{own / first[0]:9.2f}") if first else ("", "")
        times = f"{least:6} {reference:6.1f} {own:6.1f} {ratio:9} {own / reference:8.2f}"
        print(f"{name:19} {serves:8} {title:19} {times}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2500, help="rounds of each cell")
    parser.add_argument("--calls", type=int, default=4, help="calls of each round")
    options = parser.parse_args()
    torch.set_num_threads(1)
    libraries = define_plain_ops("tgl_plain"), define_bare_ops("tgl_bare")
    print(f"{options.rounds * options.calls} calls per figure, microseconds per call")
    print(f"{'op':19} {'serves':8} {'':19} {'plain':>6} {'bare':>6} {'tgl':>6} {'tgl/plain':>9} {'tgl/bare':>8}")
    for serves, context, names, dtype in (
        ("nothing", no_arithmetic, OPS, torch.float32),
        ("kernel", no_launch, KERNELS, torch.bfloat16),
    ):
        with context():
            for name in names:
                measure_op(name, serves, dtype, options)
    for library in libraries:
        library._destroy()


if __name__ == "__main__":
    main()
