"""A compiled ``ExpertParallelMLP`` writes ``main_grad``, or keeps a microbatch, once, and only if it was requested."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tgl

from .test_expert_parallel_mlp import Problem

Gradients = dict[str, list[Tensor]]
MXFP8 = tgl.recipes.MXFP8BlockScaling()
OPTIONS: dict[str, dict[str, Any]] = {
    "main_grad": {"fuse_wgrad_accumulation": True},
    "delayed": {"delay_wgrad_compute": True},
    "delayed into main_grad": {"delay_wgrad_compute": True, "fuse_wgrad_accumulation": True},
}
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as they are": ({}, {}),
    "a recipe": ({"recipe": MXFP8}, {}),
    "quantised": ({"recipe": MXFP8}, {"wire": "quantized"}),
    "sent again": ({}, {"recompute_dispatch": True}),
}
CASES = [
    ("as they are", "main_grad"),
    ("as they are", "delayed into main_grad"),
    ("a recipe", "delayed"),
    ("quantised", "main_grad"),
    ("sent again", "delayed"),
]


def linears(layer: nn.Module) -> list[tgl.GroupedLinear]:
    return [m for m in layer.modules() if isinstance(m, tgl.GroupedLinear)]


def give(layer: nn.Module) -> None:
    for linear in linears(layer):
        if linear.fuse_wgrad_accumulation:
            for weight in linear.group_parameters("weight"):
                if not hasattr(weight, "main_grad"):
                    weight.main_grad = torch.empty(weight.shape)
                weight.main_grad.fill_(0.5)


def gradients(layer: Any) -> Gradients:
    """Formed, and taken away."""
    layer.backward_dw()
    found = {}
    for name, p in layer.named_parameters():
        found[name] = [t.clone() for t in (p.grad, getattr(p, "main_grad", None)) if t is not None]
        p.grad = None
    give(layer)
    return found


def assert_same(got: Gradients, wanted: Gradients) -> None:
    assert got.keys() == wanted.keys()
    for name, tensors in wanted.items():
        assert len(got[name]) == len(tensors), name
        for a, b in zip(got[name], tensors):
            torch.testing.assert_close(a, b, msg=name)


def check(form: str, option: str) -> None:
    options, of_layer = FORMS[form]
    problem = Problem("full", torch.float32, **options, **OPTIONS[option])
    layer = problem.layer(**of_layer)
    eager = problem.layer(**of_layer)
    for one in (layer, eager):
        give(one)
        for linear in linears(one):
            if linear.delay_wgrad_compute:
                linear.reserve_delayed_wgrad(one.expert_rows, microbatches=3)
    run = torch.compile(layer, backend="aot_eager", fullgraph=True)
    rest = problem.index[problem.tokens], problem.weights[problem.tokens]

    def x() -> Tensor:
        return problem.x[problem.tokens].clone().requires_grad_()

    nothing = gradients(eager)
    leaf, other = x(), x()
    (dx,) = torch.autograd.grad(run(leaf, *rest).square().sum(), leaf)
    assert_same(gradients(layer), nothing)
    run(leaf, *rest).square().sum().backward(inputs=[leaf])
    assert_same(gradients(layer), nothing)
    eager(other, *rest).square().sum().backward()
    torch.testing.assert_close(dx, other.grad)
    wanted = gradients(eager)
    assert all(wanted.values())
    for _ in range(2):
        torch.autograd.grad(run(leaf, *rest).square().sum(), leaf)
        run(leaf, *rest).square().sum().backward()
        assert_same(gradients(layer), wanted)
    layer.check()


FAST = CASES[1], CASES[3]


@pytest.mark.parametrize("form, option", [c if c in FAST else pytest.param(*c, marks=pytest.mark.slow) for c in CASES])
def test_a_gradient_is_written_once(ranks, form, option):
    ranks(check, form, option, limit=180)
