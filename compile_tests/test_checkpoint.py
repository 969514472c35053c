"""Selective activation checkpointing: the ops in ``tgl.SAC_SAVE_LIST`` run once, the rest is recomputed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from _compiling import Captured, ends, graph_breaks, leaf
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import tgl

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


WITHOUT = {
    "grouped_gemm": 2 + 2 + 2,  # forward, recomputation, input gradients
    "grouped_activation": 2,
    "grouped_gemm_wgrad": 2,
    "grouped_dbias": 1,
    "grouped_dbias_dscales": 1,
    "grouped_activation_backward": 1,
}
WITH = {**WITHOUT, "grouped_gemm": 2 + 2}


@pytest.mark.parametrize("save", [False, True], ids=["nothing saved", "save list"])
def test_calls_in_eager(mlp: tgl.GroupedMLP, x: Tensor, save: bool) -> None:
    with CountCalls() as counter:
        checkpointed(mlp, save)(x, torch.rand(9, requires_grad=True)).sum().backward()
    assert counter.calls == (WITH if save else WITHOUT)


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
    for save in (False, True):
        for t in (x, *mlp.parameters()):
            t.grad = None
        torch.compile(checkpointed(mlp, save), backend=backend, fullgraph=True)(x, probs).sum().backward()
        for t, grad in zip((x, *mlp.parameters()), expected):
            torch.testing.assert_close(t.grad, grad)
