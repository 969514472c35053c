"""``ExpertParallelMLP`` with tokens, weights and gradients of any strides: the bits that contiguous ones give."""

import pytest
import torch

from tests.odd_strides import MATRICES, laid_out, plain

from .test_expert_parallel_mlp import Problem


def check(options: dict) -> None:
    problem = Problem("uneven", torch.float32, activation="swiglu", **options)
    layer, rows = problem.layer(), problem.tokens

    def step(layout) -> dict[str, torch.Tensor]:
        x, weights = (layout(t[rows]).detach().requires_grad_() for t in (problem.x, problem.weights))
        y = layer(x, problem.index[rows], weights)
        leaves = {"x": x, "weights": weights, **dict(layer.named_parameters())}
        return {"y": y, **dict(zip(leaves, torch.autograd.grad(y, leaves.values(), layout(problem.grad[rows]))))}

    for where in MATRICES:
        found, expected = (step(lambda t, where=where, of=of: of(laid_out(t, where))) for of in (torch.positive, plain))
        for name, t in expected.items():
            assert torch.equal(found[name], t), f"{where}: {name}"


@pytest.mark.parametrize("recipe", [None, "mxfp8"])
def test_any_strides(ranks, recipe):
    ranks(check, {"recipe": recipe})
