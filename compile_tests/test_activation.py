"""Between two layers of a graph for a CPU the activation is expressions of aten: the values and gradients of the op."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from _compiling import Captured, ends, leaf

import tgl
from tgl.meta.activations import TABLE
from tgl.nn._activation import activate, constants
from tgl.ops.grouped_activation import Params

T, I = 11, 6
OFFS = ends(2, 0, 6)  # three rows of tail
END = 8
CONSTANTS = {"limit": 1.0, "alpha": 1.5, "offset": 0.5}
KINDS: dict[str, dict[str, Any]] = {
    name: {"kind": name, **{k: v for k, v in CONSTANTS.items() if k in found.constants}}
    for name, found in TABLE.items()
}
KINDS["interleaved"] = {"kind": "swiglu", "interleaved": True}


def arguments(kind: str, dtype: torch.dtype, probs_dtype: torch.dtype | None) -> tuple[torch.Tensor, Any, torch.Tensor]:
    """Rows, probabilities and the gradient of the result: tails as products leave them, but NaN in that of probs."""
    width = TABLE[KINDS[kind]["kind"]].width(I)
    x, dy = torch.randn(T, width, dtype=dtype), torch.randn(T, I, dtype=dtype)
    probs = torch.rand(T, dtype=probs_dtype) if probs_dtype else None
    x[END:], dy[END:] = 0, 0
    if probs is not None:
        probs[END:] = torch.nan
    return leaf(x), leaf(probs) if probs is not None else None, dy


@pytest.mark.cover(1)
@pytest.mark.parametrize("dtype, probs_dtype", [(torch.float32, None), (torch.float32, torch.float32)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients(kind: str, dtype: torch.dtype, probs_dtype: torch.dtype | None) -> None:
    check(kind, dtype, probs_dtype, "aot_eager")


@pytest.mark.parametrize("probs_dtype", [pytest.param(torch.bfloat16, marks=pytest.mark.slow), torch.float32], ids=str)
def test_values_and_gradients_by_inductor(probs_dtype: torch.dtype) -> None:
    check("swiglu", torch.bfloat16, probs_dtype, "inductor")


def check(kind: str, dtype: torch.dtype, probs_dtype: torch.dtype | None, backend: str) -> None:
    x, probs, dy = arguments(kind, dtype, probs_dtype)
    inputs = [t for t in (x, probs) if t is not None]
    results = []
    for function in (tgl.grouped_activation, torch.compile(activate, backend=backend, fullgraph=True)):
        y = function(x, OFFS, probs, **KINDS[kind])
        results.append((y, *torch.autograd.grad(y, inputs, dy)))
    for theirs, mine in zip(*results):
        torch.testing.assert_close(mine[:END], theirs[:END])
        assert mine.dtype == theirs.dtype
    if probs is not None:
        assert (results[1][-1][END:] == 0).all()  # their gradient is for all to read


def test_nan_in_the_tail_goes_nowhere() -> None:
    mlp = tgl.GroupedMLP(len(OFFS), 4, I)
    results = []
    for call in (mlp.forward_offsets, torch.compile(mlp.forward_offsets, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(0)
        x, probs = torch.randn(T, 4), torch.rand(T)
        x[END:], probs[END:] = torch.nan, torch.nan
        x, probs = leaf(x), leaf(probs)
        y = call(x, OFFS, probs)
        results.append((y, *torch.autograd.grad(y.sum(), [x, probs, *mlp.parameters()])))
    for theirs, mine in zip(*results):
        torch.testing.assert_close(mine, theirs)
    y, dx, dprobs, *_ = results[1]
    for t in (y, dx, dprobs):
        assert (t[END:] == 0).all()


def test_only_what_needs_a_gradient_gets_one() -> None:
    x, probs, dy = arguments("swiglu", torch.float32, torch.float32)
    step = torch.compile(activate, backend="aot_eager", fullgraph=True)
    step(x.detach(), OFFS, probs, kind="swiglu").backward(dy)
    assert x.grad is None
    assert probs.grad is not None
    step(x, OFFS, probs.detach(), kind="swiglu").backward(dy)
    assert x.grad is not None


def test_the_op_stays_in_eager_and_in_an_export() -> None:
    """An exported graph may run elsewhere."""
    x, _, _ = arguments("swiglu", torch.float32, None)

    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
            return activate(x, offs, None, kind="swiglu")

    exported = torch.export.export(Layer(), (x, OFFS), strict=True)
    assert torch.ops.tgl.grouped_activation.default in [node.target for node in exported.graph.nodes]
    captured = Captured()
    torch.compile(Layer(), backend=captured, fullgraph=True)(x, OFFS).sum().backward()
    assert captured.tgl_calls() == {}
    assert torch.equal(activate(x, OFFS, None, kind="swiglu"), tgl.grouped_activation(x, OFFS))


def test_constants_are_those_of_the_op() -> None:
    assert constants("srelu") == Params("srelu")
