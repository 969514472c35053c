"""Every op compiled with Inductor over combinations of its optional arguments: the bits of eager, gradients too.

An op is opaque to the compiler, so nothing it computes may change. All calls of one op share one compilation. In the
quick run, which leaves out some ops that are similar, these hold every value and every choice of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from _compiling import assert_same, ends, graph_breaks
from torch import Tensor
from torch.utils._pytree import tree_map

import tgl
from tests.covers import covering
from tgl.meta.activations import TABLE

Call = tuple[list[Any], dict[str, Any]]

T, G, K, N = 9, 3, 8, 16
OFFS = ends(4, 0, 3)  # an empty group, and a tail of two rows
DTYPES = (torch.float32, torch.bfloat16)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def with_tail(*shape: int, dtype: torch.dtype) -> Tensor:
    """Random rows, NaN in those past the last group."""
    t = torch.randn(*shape).to(dtype)
    t[int(OFFS[-1]) :] = torch.nan
    return t


def optional(
    shape: tuple[int, ...], dtype: torch.dtype, make: Callable[..., Tensor] = torch.randn
) -> list[Tensor | None]:
    """Return the variants of an optional tensor: absent, in the operands' dtype, in the accumulator's."""
    return [None, *(make(*shape).to(d) for d in dict.fromkeys((dtype, accumulator(dtype))))]


def out_dtypes(dtype: torch.dtype) -> list[dict[str, Any]]:
    """Return the keywords without ``out_dtype``, and with another dtype."""
    return [{}, {"out_dtype": torch.bfloat16 if dtype == torch.float32 else torch.float32}]


def gemm_tensors(dtype: torch.dtype) -> Iterator[list[Any]]:
    """Operands of ``grouped_gemm`` with every combination of bias and scale, trailing Nones given or left out."""
    a, b = with_tail(T, K, dtype=dtype), torch.randn(G, K, N).to(dtype)
    yield [a, b, OFFS]
    for bias, scale in product(optional((G, N), dtype), optional((T,), dtype)):
        if bias is not None or scale is None:
            yield [a, b, OFFS, bias, scale]


def gemm() -> Iterator[Call]:
    for dtype in DTYPES:
        yield from product(gemm_tensors(dtype), out_dtypes(dtype))
    for dtype in (torch.float64, torch.float16):
        yield [with_tail(T, K, dtype=dtype), torch.randn(G, K, N).to(dtype), OFFS, torch.randn(G, N).to(dtype)], {}


def gemm_low_rank() -> Iterator[Call]:
    for dtype in DTYPES:
        for (a, b, offs, *rest), options in product(gemm_tensors(dtype), out_dtypes(dtype)):
            yield [a, b, with_tail(T, 4, dtype=dtype), torch.randn(G, 4, N).to(dtype), offs, *rest], options


def gemm_layouts() -> Iterator[Call]:
    """Row-major, column-major, padded and expanded operands; ``b`` in either major."""
    wide = torch.randn(T, K + 3)
    for a in (wide[:, :K], torch.randn(K, T).t(), torch.randn(1, K).expand(T, K), torch.randn(T, 1).expand(T, K)):
        for b in (torch.randn(G, K, N), torch.randn(G, N, K).transpose(1, 2), torch.randn(1, K, N).expand(G, K, N)):
            yield [a, b, OFFS], {}


def wgrad() -> Iterator[Call]:
    for dtype in DTYPES:
        for options in out_dtypes(dtype):
            yield [with_tail(T, K, dtype=dtype), with_tail(T, N, dtype=dtype), OFFS], options
    for dtype in (torch.float64, torch.float16):
        yield [with_tail(T, K, dtype=dtype), with_tail(T, N, dtype=dtype), OFFS], {}


def dbias() -> Iterator[Call]:
    for dtype in DTYPES:
        yield [with_tail(T, N, dtype=dtype), OFFS], {}


def dbias_dscales() -> Iterator[Call]:
    for dtype in DTYPES:
        for bias, scale in product(optional((G, N), dtype)[1:], optional((T,), dtype)[1:]):
            yield [with_tail(T, N, dtype=dtype), bias, scale, OFFS], {}


def activation_options() -> Iterator[dict[str, Any]]:
    yield {}
    constants = [{}, {"limit": 1.5}, {"alpha": 0.5}, {"offset": 0.25}, {"limit": 1.5, "alpha": 0.5, "offset": 0.25}]
    for kind, found in TABLE.items():
        for interleaved in (False, True) if found.gated else (False,):
            for given in constants if found.constants else [{}]:
                yield {"kind": kind, "interleaved": interleaved, **given}


def activation() -> Iterator[Call]:
    for dtype in DTYPES:
        for probs, options in product(optional((T,), dtype, torch.rand), activation_options()):
            yield [with_tail(T, 2 * N, dtype=dtype), OFFS, *([] if probs is None else [probs])], options


def activation_backward() -> Iterator[Call]:
    for (x, *rest), options in activation():
        width = N if TABLE[options.get("kind", "swiglu")].gated else 2 * N
        yield [with_tail(T, width, dtype=x.dtype), x, *rest], options


def gemm_activation() -> Iterator[Call]:
    for dtype in DTYPES:
        for probs, options in product(optional((T,), dtype, torch.rand), activation_options()):
            operands = [with_tail(T, K, dtype=dtype), torch.randn(G, K, 2 * N).to(dtype), OFFS]
            yield [*operands, *([] if probs is None else [torch.randn(G, 2 * N).to(dtype), probs])], options
        yield [with_tail(T, K, dtype=dtype), torch.randn(G, 2 * N, K).to(dtype).transpose(1, 2), OFFS], {}


def gemm_low_rank_activation() -> Iterator[Call]:
    for (a, b, offs, *rest), options in gemm_activation():
        dtype, (groups, _, columns) = a.dtype, b.shape
        yield [a, b, with_tail(T, 4, dtype=dtype), torch.randn(groups, 4, columns).to(dtype), offs, *rest], options


def dactivation() -> Iterator[Call]:
    for (x, *rest), options in activation():
        width = N if TABLE[options.get("kind", "swiglu")].gated else 2 * N
        yield [with_tail(T, K, dtype=x.dtype), torch.randn(G, K, width).to(x.dtype), x, *rest], options


def mlp() -> Iterator[Call]:
    for dtype in DTYPES:
        x, w1, w2 = with_tail(T, K, dtype=dtype), torch.randn(G, K, 2 * N).to(dtype), torch.randn(G, N, K).to(dtype)
        for probs, *biases in product(*(optional(s, dtype, torch.rand) for s in ((T,), (G, 2 * N), (G, K)))):
            yield [x, w1, w2, OFFS, probs, *biases], {"recompute": probs is None}


def moe() -> Iterator[Call]:
    for dtype in DTYPES:
        x, w1, w2 = torch.randn(6, K).to(dtype), torch.randn(G, K, 2 * N).to(dtype), torch.randn(G, N, K).to(dtype)
        source, position, token, offs = torch.ops.tgl.route(torch.arange(12).view(6, 2) % (G + 1), G)
        for weights, *biases in product(*(optional(s, dtype, torch.rand) for s in ((6, 2), (G, 2 * N), (G, K)))):
            yield [x, w1, w2, source, position, token, offs, weights, *biases], {"top_k": 2}


def splits() -> Iterator[Call]:
    for dtype in (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8):
        yield [torch.tensor([4, 0, 3], dtype=dtype)], {}


def choices() -> Iterator[Call]:
    for dtype in (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8):
        yield [torch.tensor([[4, 0, 3], [0, 1, 7]], dtype=dtype), 5], {}


OPS: dict[str, tuple[Callable, Callable[[], Iterator[Call]]]] = {
    "route": (torch.ops.tgl.route, choices),
    "splits_to_offsets": (torch.ops.tgl.splits_to_offsets, splits),
    "grouped_gemm": (torch.ops.tgl.grouped_gemm, gemm),
    "grouped_gemm, layouts": (torch.ops.tgl.grouped_gemm, gemm_layouts),
    "grouped_gemm_low_rank": (torch.ops.tgl.grouped_gemm_low_rank, gemm_low_rank),
    "grouped_gemm_activation": (torch.ops.tgl.grouped_gemm_activation, gemm_activation),
    "grouped_gemm_low_rank_activation": (torch.ops.tgl.grouped_gemm_low_rank_activation, gemm_low_rank_activation),
    "grouped_gemm_wgrad": (torch.ops.tgl.grouped_gemm_wgrad, wgrad),
    "grouped_dbias": (torch.ops.tgl.grouped_dbias, dbias),
    "grouped_dbias_dscales": (torch.ops.tgl.grouped_dbias_dscales, dbias_dscales),
    "grouped_activation": (torch.ops.tgl.grouped_activation, activation),
    "grouped_activation_backward": (torch.ops.tgl.grouped_activation_backward, activation_backward),
    "grouped_gemm_dactivation": (torch.ops.tgl.grouped_gemm_dactivation, dactivation),
    "grouped_mlp": (lambda *args, **options: torch.ops.tgl.grouped_mlp(*args, **options)[0], mlp),
    "moe": (lambda *args, **options: torch.ops.tgl.moe(*args, **options)[0], moe),
}
# One of several forms of a product, an activation or a sum, whose other forms the quick run has. Opcheck compiles the
# graphs of all of them, without Inductor's code.
SIMILAR = {
    *("grouped_gemm_low_rank", "grouped_gemm_low_rank_activation", "grouped_gemm_wgrad"),
    *("grouped_dbias", "grouped_activation", "grouped_mlp"),
}
FUSED_GRADIENTS = ("grouped_activation_backward", "grouped_gemm_dactivation")  # made of aten ops, which Inductor fuses


def leaves(calls: list[Call]) -> list[Call]:
    """The calls with every floating tensor a leaf of its own, strides kept, so that no gradients add up."""

    def own(t: Any) -> Any:
        floating = isinstance(t, Tensor) and t.is_floating_point()
        return t.detach().requires_grad_() if floating else t

    return tree_map(own, calls)


def gradients(outputs: list[Any], calls: list[Call]) -> list[Tensor | None]:
    """Gradients of every floating tensor of ``calls`` for cotangents that depend on the outputs' shapes alone."""
    generator = torch.Generator().manual_seed(1)
    results = [t for y in outputs for t in (y if isinstance(y, (tuple, list)) else [y]) if t.requires_grad]
    cotangents = [torch.randn(t.shape, generator=generator).to(t.dtype) for t in results]
    inputs = [t for args, _ in calls for t in args if isinstance(t, Tensor) and t.requires_grad]
    return list(torch.autograd.grad(results, inputs, cotangents, allow_unused=True)) if results else []


def values(call: Call) -> dict[str, Any]:
    """Return what a call passes by position and name: of tensors, their dtypes and strides."""
    args, options = call
    given = tuple(isinstance(argument, Tensor) for argument in args)
    passed = {"given": given, **dict(enumerate(args)), **options}
    return {str(k): (v.dtype, v.stride()) if isinstance(v, Tensor) else v for k, v in passed.items()}


@pytest.mark.parametrize("every_combination", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["few", "all"])
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SIMILAR)) for name in OPS])
def test_options_as_in_eager(name: str, every_combination: bool) -> None:
    op, make = OPS[name]
    calls = list(make())
    if not every_combination:
        calls = covering(calls, values, 1)

    def every(calls: list[Call]) -> list[Any]:
        return [op(*args, **options) for args, options in calls]

    compiled = torch.compile(every, fullgraph=True, dynamic=False)
    with_gradients = name not in FUSED_GRADIENTS
    mine, eager = (leaves(calls), leaves(calls)) if with_gradients else (calls, calls)
    expected, actual = every(eager), compiled(mine)
    for i, (args, options) in enumerate(calls):
        described = [a.dtype if isinstance(a, Tensor) else a for a in args]
        assert_same(actual[i], expected[i], f"{name}({described}, {options})")
    if with_gradients:
        assert_same(gradients(actual, mine), gradients(expected, eager), f"gradients of {name}")
    assert graph_breaks() == 0


def test_gradient_of_the_activation_gradient() -> None:
    op = torch.ops.tgl.grouped_activation_backward
    call = [torch.randn(T, N).double(), torch.randn(T, 2 * N).double(), OFFS, torch.rand(T).double()]
    mine, eager = leaves([(call, {})]), leaves([(call, {})])
    compiled = torch.compile(lambda args: op(*args), fullgraph=True, dynamic=False)
    actual, expected = compiled(mine[0][0]), op(*eager[0][0])
    torch.testing.assert_close(gradients([actual], mine), gradients([expected], eager))


def test_layouts_made_inside_the_graph_reach_the_kernel_unchanged() -> None:
    """Inductor may pick another memory order for what it computes; an op's operands keep the order that was written."""
    seen: list[tuple] = []

    def run(a: Tensor, b: Tensor, offs: Tensor, bias: Any, bias_scale: Any, *, out: Tensor, zero_tail: bool) -> None:
        seen.append((a.stride(), b.stride(), out.stride()))
        out.zero_()

    def layer(x: Tensor, w: Tensor) -> Tensor:
        x = (x * 2).relu()
        w = w + 1
        column_major = torch.ops.tgl.grouped_gemm((x.t() + 1).t(), w, OFFS)
        transposed = torch.ops.tgl.grouped_gemm(x, (w.transpose(1, 2) * 2).contiguous().transpose(1, 2), OFFS)
        return column_major + transposed

    implementation = tgl.register_implementation("grouped_gemm", "recorder", device="cpu")(run)
    try:
        x, w = torch.randn(T, K), torch.randn(G, K, N)
        layer(x, w)
        eager, seen[:] = list(seen), []
        torch.compile(layer, fullgraph=True)(x, w)
    finally:
        tgl.backends.remove(implementation)
    assert len(eager) == 2
    assert seen == eager
