"""Overhead of a call of an op, against a bare ``Library.define`` op with the same signature.

The bare op allocates its result and returns it; its autograd formula, ``register_autograd``'s, saves the operands and
calls bare ops. "plain" is the same op without a formula, for calls that need no gradient. On the other side all of
tgl runs (argument checks, allocation, choice of an implementation, the autograd formula) except the arithmetic. In the
lines "nothing" an implementation that does nothing serves the op; in the lines "kernel" it is the path to the CUDA
kernels, plan look-up included, where a function that does nothing stands for the compiled kernel. (It runs on CPU
tensors, so that no GPU is needed; on a GPU, the question for the current device comes on top.)

The lines "other T" tell what a new number of rows in each of 10,000 calls costs, in that mode, against the number in
the middle of them all the time. (The operands are narrow, so that allocating them is no part of the question.) Nothing
that is remembered of calls may grow meanwhile.

The sides take turns in one process. A round is short, so that another process rarely falls into it; the figures are
medians over rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import tgl
from tgl import backends
from tgl.cutlass_kernels.runtime import device, launcher
from tgl.meta import remembered
from tgl.meta.placement import ROW_UNIT, blocked_size, padded_rows

T, G, K, N = 4, 2, 64, 64
FP8 = torch.float8_e4m3fn
MXFP8 = {"format": "mxfp8", "scale_layout": "blocked"}
B_SCALES = (G, blocked_size(2 * N, K // 32))  # of MXFP8


def _a_scales(rows: int) -> tuple[int]:
    """The shape of the scales of MXFP8 rows."""
    return (int(blocked_size(padded_rows(rows, G, ROW_UNIT), K // 32)),)


def _transposed(rows: int) -> tuple[int, int]:
    """The shape of transposed FP8 rows."""
    return K, int(padded_rows(rows, G, 32))


class Case(NamedTuple):
    """An op, and its bare counterpart.

    Attributes:
        shapes: of the operands before ``offs``; vectors are factors, in float32. A dtype may stand first.
        body: allocates the results.
        formula: the bare op's, of the gradients of its operands: ``formula(bare, saved, *gradients)``.
        options: keyword arguments.
        dtype: of the operands, where it is the op's own.
        after: shapes of the operands that follow ``offs``; None for one left out.
        arch: whose kernels stand for those of a GPU.
        by_rows: shapes for a number of rows, by the operand's place, where that is not the first size.
    """

    shapes: tuple[tuple[Any, ...], ...]
    body: Callable[..., Any]
    formula: Callable[..., tuple] | None = None
    options: Mapping[str, Any] = types.MappingProxyType({})
    dtype: torch.dtype | None = None
    after: tuple[tuple[Any, ...] | None, ...] = ()
    arch: str = "sm_90"
    by_rows: Mapping[int, Callable[[int], tuple[int, ...]]] = types.MappingProxyType({})

    def operands(self, dtype: torch.dtype) -> list[Any]:
        """Tensors of a call."""

        def make(shape: tuple[Any, ...] | None) -> Tensor | None:
            if shape is None:
                return None
            if isinstance(shape[0], torch.dtype):
                return torch.randn(shape[1:]).to(shape[0])
            return torch.randn(shape).to(torch.float32 if len(shape) == 1 else self.dtype or dtype)

        return [*map(make, self.shapes), torch.tensor([2, 4], dtype=torch.int32), *map(make, self.after)]


def _sides(x: Tensor, columns: int) -> list[Tensor]:
    """Return the MXFP8 components of as many columns."""
    data, scales = x.new_empty((x.shape[0], columns), dtype=FP8), x.new_empty(512 * G, dtype=torch.uint8)
    nothing = x.new_empty(0, dtype=torch.float32)
    other = (torch.empty_like(data), torch.empty_like(scales), torch.empty_like(nothing))
    return [data, scales, nothing, *other]


def _components(x: Tensor, *_: Any, **__: Any) -> list[Tensor]:
    return [*_sides(x, x.shape[1]), x.new_empty(0, dtype=torch.float32)]


def _quantized_activation(a: Tensor, a_scale: Tensor, b: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=torch.bfloat16), *_sides(a, b.shape[1] // 2)


def _gemm(bare: Any, saved: tuple, dy: Tensor) -> tuple:
    a, b, offs = saved
    return bare.grouped_gemm.default(dy, b.transpose(1, 2), offs), bare.grouped_gemm_wgrad.default(a, dy, offs)


def _wgrad(bare: Any, saved: tuple, dw: Tensor) -> tuple:
    a, b, offs = saved
    return bare.grouped_gemm.default(b, dw.transpose(1, 2), offs), bare.grouped_gemm.default(a, dw, offs)


def _dbias(bare: Any, saved: tuple, g: Tensor) -> tuple:
    dy, offs = saved
    return (bare.grouped_gemm.default(g.new_ones(dy.shape[0], 1), g[:, None, :], offs),)


def _activation(bare: Any, saved: tuple, dy: Tensor) -> tuple:
    x, offs = saved
    return (bare.grouped_activation_backward.default(dy, x, offs, dy[:, 0])[0],)


def _gemm_activation(bare: Any, saved: tuple, dy: Tensor, dh: Tensor) -> tuple:
    through = bare.grouped_activation_backward.default(dy, dh, saved[2], dy[:, 0])[0]
    return _gemm(bare, saved, through)


CASES: dict[str, Case] = {
    "grouped_gemm": Case(
        ((T, K), (G, K, N)), lambda a, b, offs, *_, **__: a.new_empty((a.shape[0], b.shape[2])), _gemm
    ),
    "grouped_gemm_wgrad": Case(
        ((T, K), (T, N)), lambda a, b, offs, **_: a.new_empty((offs.shape[0], a.shape[1], b.shape[1])), _wgrad
    ),
    "grouped_dbias": Case(((T, N),), lambda dy, offs: dy.new_empty((offs.shape[0], dy.shape[1])), _dbias),
    "grouped_activation": Case(
        ((T, 2 * N),), lambda x, *_, **__: x.new_empty((x.shape[0], x.shape[1] // 2)), _activation, after=((T,),)
    ),
    "grouped_activation_backward": Case(
        ((T, N), (T, 2 * N)),
        lambda dy, x, offs, probs, **_: (x.new_empty(x.shape), torch.empty_like(probs)),
        after=((T,),),
    ),
    "grouped_dbias_dscales": Case(
        ((T, N), (G, N), (T,)),
        lambda dy, bias, scale, offs: (
            dy.new_empty((offs.shape[0], dy.shape[1]), dtype=torch.float32),
            torch.empty_like(scale),
        ),
    ),
    "grouped_activation_quantize": Case(
        ((T, 2 * N),), lambda x, *_, **__: _sides(x, x.shape[1] // 2), options=MXFP8, after=((T,),)
    ),
    "splits_to_offsets": Case((), lambda m_splits: m_splits.new_empty((m_splits.shape[0],))),
    "grouped_gemm_activation": Case(
        ((T, K), (G, K, 2 * N)),
        lambda a, b, *_, **__: (a.new_empty((a.shape[0], b.shape[2] // 2)), a.new_empty((a.shape[0], b.shape[2]))),
        _gemm_activation,
        after=((G, 2 * N), (T,)),
    ),
    "grouped_gemm_dactivation": Case(
        ((T, K), (G, K, N), (T, 2 * N)),
        lambda dy, b, h, offs, probs, **_: (h.new_empty(h.shape), torch.empty_like(probs)),
        after=((T,),),
    ),
    "grouped_gemm_scaled": Case(
        ((T, K), (G,), (G, N, K), (G,)),
        lambda a, a_scale, b, *_, **__: a.new_empty((a.shape[0], b.shape[1]), dtype=torch.bfloat16),
        options={"format": "fp8_tensor"},
        dtype=FP8,
    ),
    "grouped_gemm_scaled_wgrad": Case(
        (_transposed(T), (G,), _transposed(T), (G,)),
        lambda a, a_scale, b, b_scale, offs, *_, **__: a.new_empty(
            (offs.shape[0], a.shape[0], b.shape[0]), dtype=torch.bfloat16
        ),
        options={"format": "fp8_tensor"},
        dtype=FP8,
        by_rows={0: _transposed, 2: _transposed},
    ),
    "grouped_gemm_scaled_activation_quantize": Case(
        ((T, K), (torch.uint8, *_a_scales(T)), (G, 2 * N, K), (torch.uint8, *B_SCALES)),
        _quantized_activation,
        options={**MXFP8, "interleaved": True},
        dtype=FP8,
        after=(None, None, (torch.bfloat16, G, 2 * N), (T,)),
        arch="sm_100",
        by_rows={1: _a_scales},
    ),
    "group_quantize": Case(((T, K),), _components, options=MXFP8),
    "group_dequantize": Case(
        ((T, K), (torch.uint8, *_a_scales(T))),
        lambda data, *_, **__: data.new_empty((data.shape[0], data.shape[1]), dtype=torch.bfloat16),
        options=MXFP8,
        dtype=FP8,
        by_rows={1: _a_scales},
    ),
    "group_requantize": Case(
        ((T, K), (torch.uint8, *_a_scales(T))),
        lambda data, *_, **__: _sides(data, data.shape[1])[:3],
        options=MXFP8,
        dtype=FP8,
        by_rows={1: _a_scales},
    ),
}


OTHER_T = (
    "grouped_gemm",
    "grouped_gemm_wgrad",
    "grouped_dbias",
    "grouped_activation",
    "grouped_activation_backward",
    "grouped_dbias_dscales",
    "grouped_gemm_activation",
    "grouped_gemm_dactivation",
    "grouped_gemm_scaled",
    "grouped_gemm_scaled_wgrad",
    "group_quantize",
    "grouped_activation_quantize",
    "grouped_gemm_scaled_activation_quantize",
    "group_dequantize",
    "group_requantize",
)
"""Ops that take rows."""


def define_plain_ops(namespace: str) -> torch.library.Library:
    """The ops once more in a namespace of their own: same signatures, nothing inside."""
    library = torch.library.Library(namespace, "DEF")
    for name, case in CASES.items():
        signature = str(getattr(torch.ops.tgl, name).default._schema).partition("(")[2]
        library.define(f"{name}({signature}")
        library.impl(name, case.body, "CPU")
    return library


def define_bare_ops(namespace: str) -> torch.library.Library:
    """Define the bare ops that have an autograd formula."""
    library = define_plain_ops(namespace)
    bare = getattr(torch.ops, namespace)

    def register(name: str, formula: Callable[..., tuple], tensors: int) -> None:
        def save(ctx: Any, inputs: tuple, output: Any, keyword_only_inputs: Any = None) -> None:
            ctx.save_for_backward(*inputs[:tensors])

        def backward(ctx: Any, *gradients: Tensor) -> tuple:
            found = formula(bare, ctx.saved_tensors, *gradients)
            return (*found, *[None] * (arguments - len(found)))

        schema = getattr(bare, name).default._schema
        arguments = sum(not a.kwarg_only for a in schema.arguments)
        torch.library.register_autograd(f"{namespace}::{name}", backward, setup_context=save, lib=library)

    for name, case in CASES.items():
        if case.formula is not None:
            register(name, case.formula, len(case.shapes) + 1)
    return library


@contextlib.contextmanager
def no_arithmetic(arch: str) -> Iterator[None]:
    """Serve every op with an implementation that does nothing, ahead of all others, whatever the architecture."""

    def nothing(*args: Any, **kwargs: Any) -> None:
        pass

    added = [tgl.register_implementation(op, "nothing", device="cpu", priority=1000)(nothing) for op in CASES]
    try:
        yield
    finally:
        for implementation in added:
            backends.remove(implementation)


@contextlib.contextmanager
def no_launch(arch: str) -> Iterator[None]:
    """Serve the ops with the kernels for ``arch``, compiled to a function that does nothing."""

    def nothing(*args: Any) -> None:
        pass

    originals = launcher.compiled, device.packages_reason
    launcher.compiled, device.packages_reason = lambda *_: nothing, lambda: None
    try:
        with backends.emulated_device(arch):
            yield
    finally:
        launcher.compiled, device.packages_reason = originals


def calls(case: Case, dtype: torch.dtype) -> dict[str, Callable[[Callable], Callable[[], Any]]]:
    """Title of each line, and what makes the timed function from an op."""
    tensors, options = case.operands(dtype), case.options

    def no_grad(op: Callable) -> Callable[[], Any]:
        return lambda: op(*tensors, **options)

    if case.formula is None:
        return {"no grad": no_grad}
    leaves = [t.requires_grad_() for t in case.operands(dtype)[: len(case.shapes)]]
    with_grad = [*leaves, *tensors[len(leaves) :]]

    def forward(op: Callable) -> Callable[[], Any]:
        return lambda: op(*with_grad, **options)

    def both(op: Callable) -> Callable[[], Any]:
        def results() -> tuple[Tensor, ...]:
            output = op(*with_grad, **options)
            return output if isinstance(output, tuple) else (output,)

        cotangents = [torch.ones_like(t) for t in results()]
        return lambda: torch.autograd.grad(results(), leaves, cotangents)

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
    """Measure and print the lines of one op."""
    namespaces = torch.ops.tgl_plain, torch.ops.tgl_bare, torch.ops.tgl
    plain, bare, ours = (getattr(ops, name).default for ops in namespaces)
    for title, make in calls(CASES[name], dtype).items():
        inference = title == "no grad"
        with torch.set_grad_enabled(not inference):
            *first, reference, own = measure(
                [make(op) for op in ((plain, bare, ours) if inference else (bare, ours))], options.rounds, options.calls
            )
        least, ratio = (f"{first[0]:6.1f}", f"{own / first[0]:9.2f}") if first else ("", "")
        times = f"{least:6} {reference:6.1f} {own:6.1f} {ratio:9} {own / reference:8.2f}"
        print(f"{name:39} {serves:8} {title:19} {times}", flush=True)


ROWS = 10_000  # numbers of rows that a changing T takes
SEEN = {*range(64, 2 * ROWS, 64), *(1 << n for n in range(6))}  # those of warm-up calls, of every tiling one


def kept() -> dict[str, int]:
    """Return the size of every cache of calls in the package, by name."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "tgl":
            for attribute, value in vars(module).items():
                if isinstance(value, dict):
                    found[f"{name}.{attribute}"] = len(value)
                elif hasattr(value, "cache_parameters"):
                    found[f"{name}.{attribute}"] = value.cache_info().currsize
    return found | {f"{n}: {check.__name__}": len(check.passed) for n, check in enumerate(remembered.MADE)}


def measure_rows(name: str, serves: str, dtype: torch.dtype) -> None:
    """Measure and print the line of one op whose T changes.

    Raises:
        RuntimeError: something that is remembered of calls has grown.
    """
    case, op = CASES[name], getattr(torch.ops.tgl, name).default
    given = case.operands(dtype)
    shapes = dict(case.by_rows)
    for place, t in enumerate(given):
        if t is not None and t.dtype != torch.int32 and t.shape[0] == T:
            shapes[place] = functools.partial(lambda t, rows: (rows, *t.shape[1:]), t)
    most = {p: torch.zeros(math.prod(shape(2 * ROWS)), dtype=given[p].dtype) for p, shape in shapes.items()}

    def operands(rows: int) -> list[Any]:
        sizes = {place: shape(rows) for place, shape in shapes.items()}
        new = {place: most[place][: math.prod(size)].view(size) for place, size in sizes.items()}
        return [new.get(place, t) for place, t in enumerate(given)]

    def timed(calls: list[list[Any]]) -> float:
        start = time.perf_counter()
        for tensors in calls:
            op(*tensors, **case.options)
        return (time.perf_counter() - start) / len(calls) * 1e6

    with torch.no_grad():
        timed([operands(rows) for rows in SEEN])
        before, fixed, changing = kept(), [], []
        numbers = [rows for rows in range(1, 2 * ROWS) if rows not in SEEN][:ROWS]
        for start in range(0, ROWS, 20):
            fixed.append(timed([operands(ROWS // 2) for _ in range(20)]))
            changing.append(timed([operands(rows) for rows in numbers[start : start + 20]]))
    grown = [what for what, entries in kept().items() if entries > before.get(what, 0)]
    if grown:
        raise RuntimeError(f"{name}: with {ROWS} numbers of rows there grew {', '.join(grown)}")
    one, other = statistics.median(fixed), statistics.median(changing)
    print(f"{name:39} {serves:8} {'other T':19} {one:6.1f} {'':6} {other:6.1f} {other / one:9.2f}", flush=True)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2500, help="rounds of each cell")
    parser.add_argument("--calls", type=int, default=4, help="calls of each round")
    parser.add_argument("--ops", nargs="*", default=list(CASES), choices=list(CASES), help="those to measure")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(argv)
    torch.set_num_threads(1)
    libraries = define_plain_ops("tgl_plain"), define_bare_ops("tgl_bare")
    print(f"{options.rounds * options.calls} calls per figure, microseconds per call")
    print(f"{'op':39} {'serves':8} {'':19} {'plain':>6} {'bare':>6} {'tgl':>6} {'tgl/plain':>9} {'tgl/bare':>8}")
    for serves, context, dtype in (("nothing", no_arithmetic, torch.float32), ("kernel", no_launch, torch.bfloat16)):
        for name in options.ops:
            with context(CASES[name].arch):
                measure_op(name, serves, dtype, options)
                if name in OTHER_T:
                    measure_rows(name, serves, dtype)
    for library in libraries:
        library._destroy()


if __name__ == "__main__":
    main()
