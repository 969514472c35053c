"""``ExpertParallelMLP`` in a training loop: one graph, the options of ``GroupedMLP``, errors of a call."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.decorators import mark_unbacked
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh

import tgl
from tests.memory import new_memory_is_nan
from tgl.distributed import ExpertParallelMLP

from .test_expert_parallel_mlp import MOST, TOP_K, E, H, I, Problem, chosen
from .test_expert_parallel_overflow import all_nan

# --- one graph --------------------------------------------------------------------------------------------------------


def check_graph(backend: str, invariant: bool) -> None:
    """One graph, made by the first call, serves every routing and number of tokens, also none; it finds overflow."""
    problem = Problem("full", torch.float64)
    layer = problem.layer(invariant=invariant, capacity_factor=1.5)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    cases = [
        ("even", MOST),
        ("sentinels", MOST),
        ("empty experts", 4),
        ("nothing is routed", 5),
        ("even", 1),
        ("even", 0),
    ]
    for case, count in cases:
        index = chosen(case, MOST)[:count]
        x, weights = torch.randn(MOST, H)[:count].double(), torch.rand(MOST, TOP_K)[:count].double()
        grads = []
        for model in (compiled, layer):
            leaves = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
            if model is compiled:
                for t in (*leaves, index):
                    mark_unbacked(t, 0)
            y = model(leaves[0], index, leaves[1])
            grads.append((y, *torch.autograd.grad(y.sin().sum(), [*leaves, *layer.parameters()])))
        for ours, theirs in zip(*grads, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
        layer.check()
    assert counter.frame_count == 1
    leaves = [torch.randn(MOST, H).double().requires_grad_(), torch.rand(MOST, TOP_K).double().requires_grad_()]
    y = compiled(leaves[0], chosen("one expert takes all", MOST), leaves[1])
    assert y.isnan().all()
    assert all(bool(g.isnan().all()) for g in torch.autograd.grad(y.sum(), [*leaves, *layer.parameters()]))
    assert counter.frame_count == 1
    with pytest.raises(RuntimeError, match="36 rows of experts were needed, but there are 27"):
        layer.check()


@pytest.mark.parametrize("invariant", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_one_graph_for_all_routings(ranks, invariant):
    ranks(check_graph, "aot_eager", invariant)


@pytest.mark.slow
def test_one_graph_of_inductor(ranks):
    ranks(check_graph, "inductor", False, limit=300.0)


RECIPES = (
    tgl.recipes.MXFP8BlockScaling,
    tgl.recipes.NVFP4BlockScaling,
    tgl.recipes.Float8CurrentScaling,
    tgl.recipes.DelayedScaling,
    tgl.recipes.Float8BlockScaling,
)

# --- options ----------------------------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "activation recomputed": {"recompute_activation": True},
    "interleaved": {"interleaved": True},
    "no bias": {"bias": False},
    "main_grad": {"fuse_wgrad_accumulation": True},
    "delayed": {"delay_wgrad_compute": True},
}


def gradients(model: Any, problem: Problem, rows: slice) -> list[Tensor]:
    """Return the gradients of one step; for layers that add to ``main_grad``, the sums."""
    for p in model.parameters():
        p.grad, p.main_grad = None, torch.zeros_like(p)
    y = model(problem.x[rows], problem.index[rows], problem.weights[rows])
    (y * problem.grad[rows]).sum().backward()
    if model.need_backward_dw():
        model.backward_dw()
    added = model.fc1.fuse_wgrad_accumulation
    return [p.main_grad if added and "weight" in name else p.grad for name, p in model.named_parameters()]


def check_option(option: str) -> None:
    problem = Problem("uneven", torch.float64, **OPTIONS[option])
    layer = problem.layer()
    actual = gradients(layer, problem, problem.tokens)
    expected = gradients(problem.whole, problem, slice(None))
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs[problem.experts], rtol=0, atol=1e-12)


@pytest.mark.parametrize("option", OPTIONS)
def test_options(ranks, option):
    ranks(check_option, option)


def check_weights_per_expert() -> None:
    """Their values come from a packed layer, as parameters of all experts have other names."""
    problem = Problem("uneven", torch.float64)
    packed = problem.layer()
    problem.options["single_grouped_weight"] = False
    room = {"max_tokens": MOST, "capacity_factor": float(problem.ranks)}
    split = ExpertParallelMLP(E, H, I, group=dist.group.WORLD, top_k=TOP_K, **room, **problem.options)
    for number in range(packed.num_gemms):
        for ours, theirs in ((split.fc1, packed.fc1), (split.fc2, packed.fc2)):
            getattr(ours, f"weight{number}").data.copy_(theirs.weight[number])
            getattr(ours, f"bias{number}").data.copy_(theirs.bias[number])
    expected, actual = problem.results(packed, problem.tokens), problem.results(split, problem.tokens)
    for name in ("y", "x", "weights"):
        assert torch.equal(actual[name], expected[name])
    for number in range(packed.num_gemms):
        assert torch.equal(actual[f"fc2.weight{number}"], expected["fc2.weight"][number])


def test_weights_per_expert(ranks):
    ranks(check_weights_per_expert)


def check_recipe() -> None:
    """Rows of a token have the same codes wherever they are: in blocks of a row, the result is that of one rank."""
    problem = Problem("uneven", torch.bfloat16, recipe=tgl.recipes.MXFP8BlockScaling(), bias=False)
    results = problem.results(problem.layer(invariant=True), problem.tokens)
    assert torch.equal(results["y"], problem.expected["y"])


def check_overflow_of_recipes() -> None:
    """NaN gets through every format, those that have none too."""
    for recipe in RECIPES:
        problem = Problem("uneven", torch.bfloat16, recipe=recipe(), bias=False)
        problem.index = torch.zeros_like(problem.index)
        assert all_nan(problem.results(problem.layer(capacity_factor=0.5), problem.tokens)), recipe.__name__


def test_recipes(ranks):
    ranks(check_recipe)
    ranks(check_overflow_of_recipes)


def check_autocast() -> None:
    problem = Problem("even", torch.float32)
    layer, rows = problem.layer(), problem.tokens
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(problem.x[rows], problem.index[rows], problem.weights[rows])
        expected = problem.whole(problem.x, problem.index, problem.weights)[rows]
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, expected, rtol=3 * torch.finfo(torch.bfloat16).eps, atol=3e-3)


def check_mesh() -> None:
    """A dimension of a mesh, with tokens of any leading shape and no grad, in inference mode too."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "ep"))
    problem = Problem("even", torch.float64)
    layer, rows = problem.layer(group=mesh["ep"]), problem.tokens
    x = problem.x[rows].view(1, 5, H)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y = layer(x, problem.index[rows], problem.weights[rows])
        assert y.shape == x.shape
        torch.testing.assert_close(y[0], problem.expected["y"], rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="`group` must be a DeviceMesh of one dimension, but got 2"):
        problem.layer(group=mesh)


def check_meta() -> None:
    """A layer made on the meta device and given memory later counts from none, whatever the memory holds."""
    problem = Problem("even", torch.float64)
    layer, rows = problem.layer(), problem.tokens
    with torch.device("meta"):
        late = problem.layer()
    with new_memory_is_nan():
        late.to_empty(device="cpu")
    late.load_state_dict(layer.state_dict())
    results = problem.results(late, rows)
    for name, t in problem.results(layer, rows).items():
        assert torch.equal(results[name], t)
    late.check()


def test_autocast_mesh_and_meta(ranks):
    ranks(check_autocast)
    ranks(check_mesh)
    ranks(check_meta)


# --- frozen parts and unused rows ------------------------------------------------------------------------------------

FROZEN = {
    "fc1": ("fc1",),
    "fc2": ("fc2",),
    "all experts": ("fc1", "fc2"),
    "tokens": ("x",),
    "tokens and FC1": ("x", "fc1"),
    "all but tokens": ("fc1", "fc2", "weights"),
    "all but routing weights": ("fc1", "fc2", "x"),
}
FORMS: dict[str, dict[str, Any]] = {
    "by rank": {},
    "by choice": {"invariant": True},
    "float32 sums": {"params_dtype": torch.bfloat16, "wire_dtype": torch.float32},
    "quantized": {"params_dtype": torch.bfloat16, "wire": "quantized", "recipe": tgl.recipes.MXFP8BlockScaling()},
    "quantized blocks of 128": {
        "params_dtype": torch.bfloat16,
        "wire": "quantized",
        "recipe": tgl.recipes.Float8BlockScaling(),
    },
    "tokens sent again": {"recompute_dispatch": True},
}


def in_form(form: str) -> tuple[Problem, ExpertParallelMLP, dict[str, Tensor]]:
    """A problem with places to spare, its layer in one of ``FORMS``, and its results."""
    options = {"params_dtype": torch.float64, **FORMS[form]}
    problem = Problem("uneven", options["params_dtype"])
    layer = problem.layer(**options)
    return problem, layer, problem.results(layer, problem.tokens)


def check_frozen(form: str) -> None:
    """Gradients of the parameters that still train have the bits of a run in which all do."""
    problem, layer, expected = in_form(form)
    for what, frozen in FROZEN.items():
        x, weights = problem.x[problem.tokens].clone(), problem.weights[problem.tokens].clone()
        leaves = {"x": x, "weights": weights, **dict(layer.named_parameters())}
        for name, t in leaves.items():
            t.requires_grad_(name.split(".")[0] not in frozen)
        left = {name: t for name, t in leaves.items() if t.requires_grad}
        y = layer(x, problem.index[problem.tokens], weights)
        assert torch.equal(y, expected["y"]), what
        for name, grad in zip(left, torch.autograd.grad(y, left.values(), problem.grad[problem.tokens]), strict=True):
            assert torch.equal(grad, expected[name]), (what, name)


def check_unused(form: str) -> None:
    """NaN in unused places, for every wire format, and in all memory before it is written."""
    problem, layer, expected = in_form(form)
    spoilt, exchange = [], dist.all_to_all_single

    def spoiling(out: Tensor, t: Tensor, group: dist.ProcessGroup) -> None:
        rows = t.clone().view(torch.uint8)
        unused = (rows == 0).all(1)
        rows[unused] = 0xFF  # NaN in every format of elements and of scales
        spoilt.append(int(unused.sum()))
        exchange(out, rows.view(t.dtype), group=group)

    with new_memory_is_nan(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", spoiling)
        results = problem.results(layer, problem.tokens)
    for name, t in expected.items():
        assert torch.equal(results[name], t), name
    # Counts and choices of a forward have no such places, the other exchanges of a call and its backward have.
    assert [number > 0 for number in spoilt] == [False, False] + [True] * (len(spoilt) - 2)
    assert len(spoilt) == 2 + 6 + layer.form.again


def test_frozen_parts_and_unused_rows(ranks):
    for form in FORMS:
        ranks(check_frozen, form)
        ranks(check_unused, form)


# --- errors -----------------------------------------------------------------------------------------------------------


def check_errors() -> None:
    problem = Problem("full", torch.float64)
    made: list[tuple[dict[str, Any], str]] = [
        ({"top_k": 0}, "`top_k` must be at least 1, but got 0"),
        ({"top_k": E + 1}, f"`top_k` must be at most the {E} experts, but got {E + 1}"),
        ({"max_tokens": 0}, "`max_tokens` must be at least 1, but got 0"),
        ({"capacity_factor": 0.0}, "`capacity_factor` must be above 0 or None, but got 0.0"),
        ({"pair_capacity_factor": -1.0}, "`pair_capacity_factor` must be above 0 or None, but got -1.0"),
    ]
    for options, message in made:
        with pytest.raises(ValueError, match=message):
            problem.layer(**options)
    with pytest.raises(ValueError, match="`num_experts` must be a multiple of the 2 ranks of `group`, but got 5"):
        ExpertParallelMLP(5, H, I, group=dist.group.WORLD, top_k=1, max_tokens=1)
    with pytest.raises(ValueError, match=r"`max_tokens` must be equal on all ranks of `group`, but got \[3, 4\]"):
        problem.layer(max_tokens=3 + problem.me)

    layer = problem.layer()
    x, index, weights = problem.x[:MOST], problem.index[:MOST], problem.weights[:MOST]
    called = [
        (
            (problem.x, problem.index),
            rf"`x` must have at most max_tokens = {MOST} tokens, but got shape \({2 * MOST}, {H}\)",
        ),
        ((x[:, 1:], index), rf"`x` must be \[S, H\] with H = {H}, but got shape \({MOST}, {H - 1}\)"),
        ((x, index[1:]), r"`top_k_index` must be \[S, k\] with S like `x` and k = 3, but got shape \(5, 3\)"),
        ((x, index[:, 1:]), r"`top_k_index` must be \[S, k\] with S like `x` and k = 3, but got shape \(6, 2\)"),
        ((x, index, weights[0]), r"`weights` must be \[S, k\] with S like `x` and k = 3, but got shape \(3,\)"),
    ]
    for arguments, message in called:
        with pytest.raises(ValueError, match=f"ExpertParallelMLP: {message}"):
            layer(*arguments)


def test_errors(ranks):
    ranks(check_errors)


def check_time_out(where: str) -> None:
    """The others time out if a rank raises an error in its forward, or has no backward."""
    group = dist.new_group(timeout=timedelta(seconds=2), backend="gloo")
    problem = Problem("full", torch.float64)
    layer, rows = problem.layer(group=group), problem.tokens
    given = problem.x[rows], problem.index[rows], problem.weights[rows]
    said = "tgl::{}: the exchange among ranks \\[0, 1\\] failed on rank 0"
    if where == "forward" and problem.me == 0:
        with pytest.raises(RuntimeError, match=said.format("ep_route")):
            layer(*given)
    elif where == "forward":
        with pytest.raises(ValueError, match="`top_k_index` must be"):
            layer(given[0], given[1][1:], given[2])
    else:
        y = layer(*given)
        if problem.me == 0:
            with pytest.raises(RuntimeError, match=said.format("ep_dispatch")):
                y.sum().backward()
    dist.barrier()


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_rank_that_is_missed_does_not_hang_the_others(ranks, where):
    ranks(check_time_out, where)


# --- the page ---------------------------------------------------------------------------------------------------------


def page_examples() -> list[str]:
    """The first example of the layer, and that which holds the tokens alone, in the words of the page."""
    page = (Path(__file__).parents[2] / "docs" / "expert_parallel.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    return [next(block for block in blocks if word in block) for word in ("ExpertParallelMLP", "recompute_dispatch")]


def check_examples_of_the_documentation() -> None:
    first, again = page_examples()
    names: dict[str, Any] = {}
    for example in (first, again):
        assert '"cpu", (1,)' in example
    exec(first.replace('"cpu", (1,)', '"cpu", (2,)'), names)
    assert names["x"].grad.shape == (11, 64)
    exec(again.replace('"cpu", (1,)', '"cpu", (2,)'), names)
    x, layer = names["x"], names["layer"]
    assert layer.form.again
    held = ExpertParallelMLP(8, 64, 128, group=dist.group.WORLD, top_k=2, max_tokens=16)
    held.load_state_dict(layer.state_dict())
    y = held(x, names["index"], names["weights"])
    assert torch.equal(names["y"], y)
    for ours, theirs in zip(names["gradients"], torch.autograd.grad(y.sum(), [x, *held.parameters()]), strict=True):
        assert torch.equal(ours, theirs)


def test_examples_of_the_documentation(ranks):
    ranks(check_examples_of_the_documentation)
