"""Recomputation in the backward: all, all but the ops in ``tgl.SAC_SAVE_LIST``, or the activation alone.

What runs is counted, and so are the bytes that wait for the backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from _compiling import Captured, ends, graph_breaks, leaf
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import tgl
from tgl.meta.activations import TABLE

G, K, N = 3, 8, 16
OFFS = ends(4, 0, 3)


class CountCalls(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the ops that really run, by name without the namespace."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.namespace == "tgl":
            self.calls[func._schema.name.removeprefix("tgl::")] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def mlp() -> tgl.GroupedMLP:
    return tgl.GroupedMLP(G, K, N, bias=True)


@pytest.fixture
def x() -> Iterator[Tensor]:
    return leaf(torch.randn(9, K))


def checkpointed(mlp: tgl.GroupedMLP, save: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """The experts under checkpointing, with the save list or with nothing saved."""
    options: dict[str, Any] = {"use_reentrant": False}
    if save:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, tgl.SAC_SAVE_LIST)
    return lambda x, probs: checkpoint(lambda x, p: mlp.forward_offsets(x, OFFS, p).sin(), x, probs, **options)


# In a graph for a CPU, where the activation is expressions of aten.
WITHOUT = {
    "grouped_gemm": 2 + 2 + 2,  # forward, recomputation, input gradients
    "grouped_gemm_wgrad": 2,
    "grouped_dbias": 1,
    "grouped_dbias_dscales": 1,
}
WITH = {**WITHOUT, "grouped_gemm": 2 + 2}


@pytest.mark.parametrize("save", [False, True], ids=["nothing saved", "save list"])
def test_calls_in_eager(mlp: tgl.GroupedMLP, x: Tensor, save: bool) -> None:
    with CountCalls() as counter:
        checkpointed(mlp, save)(x, torch.rand(9, requires_grad=True)).sum().backward()
    assert counter.calls == {"grouped_mlp": 1 if save else 2, "grouped_mlp_backward": 1}


@pytest.mark.parametrize("save", [False, True], ids=["nothing saved", "save list"])
def test_calls_in_the_compiled_graphs(mlp: tgl.GroupedMLP, x: Tensor, save: bool) -> None:
    captured = Captured()
    step = torch.compile(checkpointed(mlp, save), backend=captured, fullgraph=True)
    step(x, torch.rand(9, requires_grad=True)).sum().backward()
    assert captured.tgl_calls() == (WITH if save else WITHOUT)
    assert graph_breaks() == 0


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_gradients_are_those_without_checkpointing(mlp: tgl.GroupedMLP, x: Tensor, backend: str) -> None:
    probs = torch.rand(9)
    mlp.forward_offsets(x, OFFS, probs).sin().sum().backward()
    expected = [t.grad.clone() for t in (x, *mlp.parameters())]
    for save in (False, True) if backend == "aot_eager" else (True,):
        for t in (x, *mlp.parameters()):
            t.grad = None
        torch.compile(checkpointed(mlp, save), backend=backend, fullgraph=True)(x, probs).sum().backward()
        for t, grad in zip((x, *mlp.parameters()), expected):
            torch.testing.assert_close(t.grad, grad)


# --- bytes ------------------------------------------------------------------------------------------------------------


def bytes_saved(mlp: nn.Module, function: Callable, *args: Any) -> int:
    """Bytes that a call of ``function`` keeps for the backward, eager or compiled; parameters and ``OFFS`` aside."""
    storages = {t.untyped_storage().data_ptr(): 0 for t in (OFFS, *mlp.parameters())}

    def pack(t: Tensor) -> Tensor:
        storages.setdefault(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = function(*args)
    y.sum().backward()
    return sum(storages.values())


@pytest.mark.parametrize("backend", [None, "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_bytes_saved(backend: str | None) -> None:
    """Per row of the experts: the input, FC1's result, the activation, and what follows the experts (here a sine)."""
    x = torch.randn(9, K)

    def saved(mlp: nn.Module, function: Callable) -> int:
        torch._dynamo.reset()
        compiled = torch.compile(function, backend=backend, fullgraph=True) if backend else function
        return bytes_saved(mlp, compiled, x)

    def experts(mlp: tgl.GroupedMLP) -> Callable:
        return lambda x: mlp.forward_offsets(x, OFFS).sin()

    whole, thrifty = tgl.GroupedMLP(G, K, N), tgl.GroupedMLP(G, K, N, recompute_activation=True)
    assert saved(whole, experts(whole)) == 4 * 9 * (K + 2 * N + N + K)
    assert saved(thrifty, experts(thrifty)) == 4 * 9 * (K + 2 * N + K)
    region = experts(whole)
    assert saved(whole, lambda x: checkpoint(region, x, use_reentrant=False)) == 4 * 9 * K


# --- the activation alone ---------------------------------------------------------------------------------------------


@pytest.mark.cover(1)
@pytest.mark.parametrize("activation", TABLE)
@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
def test_recomputing_the_activation_changes_no_bit(activation: str, backend: str | None) -> None:
    whole = tgl.GroupedMLP(G, K, N, activation=activation, bias=True)
    thrifty = tgl.GroupedMLP(G, K, N, activation=activation, bias=True, recompute_activation=True)
    thrifty.load_state_dict(whole.state_dict())
    x, probs = leaf(torch.randn(9, K)), leaf(torch.rand(9))
    results = []
    for mlp in (whole, thrifty):
        function = mlp.forward_offsets
        if backend is not None and mlp is thrifty:
            function = torch.compile(function, backend=backend, fullgraph=True)
        y = function(x, OFFS, probs)
        results.append((y, *torch.autograd.grad(y.sin().sum(), [x, probs, *mlp.parameters()])))
    assert graph_breaks() == 0
    for mine, theirs in zip(*results):
        assert torch.equal(mine, theirs)


def test_recomputing_the_activation_runs_it_twice_and_no_gemm() -> None:
    mlp, captured = tgl.GroupedMLP(G, K, N, recompute_activation=True), Captured()
    torch.compile(mlp.forward_offsets, backend=captured, fullgraph=True)(leaf(torch.randn(9, K)), OFFS).sum().backward()
    assert captured.tgl_calls("forward") == {"grouped_gemm": 2, "grouped_activation": 1}
    assert captured.tgl_calls("backward") == {
        "grouped_gemm": 2,
        "grouped_gemm_wgrad": 2,
        "after": 1,
        "grouped_activation": 1,
        "grouped_activation_backward": 1,
    }
