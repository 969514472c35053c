"""Gradients of gradients of ``ExpertParallelMLP`` on two ranks, against ``tgl.MoE`` with all experts and all tokens.

The loss of a rank is ``sum(y) + 10 * sum(g^2)`` with ``g`` the gradient of an inner loss by the tokens; the sum over
the ranks is differentiated. In float64, where rounding cannot hide a missing term; or there is an error on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import tgl
from tgl.distributed import ExpertParallelMLP

from .test_expert_parallel_mlp import MOST, TOP_K, E, H, I, Problem

INNER: dict[str, Callable[[Tensor], Tensor]] = {"square": lambda y: y.square().sum(), "linear": lambda y: y.sum()}
BY: dict[str, Callable[[str], bool]] = {
    "all": lambda name: True,
    "parameters": lambda name: name.startswith("fc"),
    "what made the tokens": lambda name: name == "x",
    "routing weights": lambda name: name == "weights",
}
FIRST_ORDER = "gradients of a layer of this kind have no derivative"


def second_order(problem: Problem, layer: Any, rows: slice, inner: str, by: str) -> dict[str, Tensor]:
    source, weights = problem.x[rows].requires_grad_(), problem.weights[rows].requires_grad_()
    x = source * 1.5  # not a leaf
    y = layer(x, problem.index[rows], weights)
    (g,) = torch.autograd.grad(INNER[inner](y), x, create_graph=True)
    leaves = {"x": source, "weights": weights, **dict(layer.named_parameters())}
    wanted = {name: t for name, t in leaves.items() if BY[by](name)}
    loss = y.sum() + 10 * g.square().sum()
    found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    return {name: torch.zeros_like(wanted[name]) if t is None else t for name, t in zip(wanted, found)}


def discrete(problem: Problem) -> ExpertParallelMLP:
    sizes = {"group": dist.group.WORLD, "top_k": TOP_K, "max_tokens": MOST, "capacity_factor": float(problem.ranks)}
    layer = ExpertParallelMLP(E, H, I, **sizes, **problem.options, single_grouped_weight=False)
    layer.load_state_dict(problem.layer().state_dict())
    return layer


def packed(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of discrete parameters, stacked."""
    stacks: dict[str, list[Tensor]] = {}
    for name, t in gradients.items():
        stacks.setdefault(name.rstrip("0123456789") if "." in name else name, []).append(t)
    return {name: torch.stack(parts) if len(parts) > 1 else parts[0] for name, parts in stacks.items()}


def check_values(form: str) -> None:
    problem = Problem("uneven", torch.float64, activation="swiglu")
    layer = discrete(problem) if form == "discrete" else problem.layer(invariant=form == "invariant")
    for inner in INNER:
        for by in BY:
            wanted = problem.share(second_order(problem, problem.whole, slice(None), inner, by))
            found = packed(second_order(problem, layer, problem.tokens, inner, by))
            assert found.keys() == wanted.keys()
            for name, t in found.items():
                torch.testing.assert_close(t, wanted[name], rtol=1e-10, atol=1e-10, msg=f"{inner}, {by}: {name}")


@pytest.mark.parametrize("form", ["packed", "invariant", "discrete"])
def test_values(ranks, form):
    ranks(check_values, form)


def check_errors(dtype: torch.dtype, options: dict[str, Any], of_layer: dict[str, Any]) -> None:
    problem = Problem("uneven", dtype, **options)
    layer = problem.layer(**of_layer)
    for inner in INNER:
        for by in BY:
            with pytest.raises(RuntimeError, match=FIRST_ORDER):
                second_order(problem, layer, problem.tokens, inner, by)
            dist.barrier()


MXFP8 = tgl.recipes.MXFP8BlockScaling()
ERRORS: dict[str, tuple[torch.dtype, dict[str, Any], dict[str, Any]]] = {
    "a recipe": (torch.bfloat16, {"recipe": MXFP8}, {}),
    "delayed": (torch.float64, {"delay_wgrad_compute": True}, {}),
    "quantised": (torch.bfloat16, {"recipe": MXFP8}, {"wire": "quantized"}),
    "float32 sums": (torch.bfloat16, {}, {"wire_dtype": torch.float32}),
    "tokens sent again": (torch.float64, {}, {"recompute_dispatch": True}),
}


@pytest.mark.parametrize("form", ERRORS)
def test_errors(ranks, form):
    """Before the backward of the backward has exchanged anything."""
    ranks(check_errors, *ERRORS[form])
