"""A layer writes ``main_grad``, or keeps a microbatch, once and if requested: expert parallel, and in wrappers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

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
        both = p.grad, getattr(p, "main_grad", None)
        found[name] = [t.clone() for t in both if t is not None and t.any()]  # DDP gives zeros where there is no grad
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
    ranks(check, form, option)


# --- wrappers ---------------------------------------------------------------------------------------------------------

SPLITS = torch.tensor([4, 1])


class Block(nn.Module):
    """A layer whose gradients a wrapper reduces, before experts whose weight gradients autograd does not see."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(8, 8)
        self.experts = tgl.GroupedLinear(2, 8, 8, bias=False, **options)
        if self.experts.delay_wgrad_compute:
            self.experts.reserve_delayed_wgrad(6, microbatches=2)
        give(self)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.experts(self.first(x), SPLITS)
        return y


def fsdp(block: Block, **options: Any) -> Block:
    fully_shard(block, mesh=init_device_mesh("cpu", (2,)), **options)
    return block


WRAPPERS: dict[str, Callable[[Block], nn.Module]] = {
    "ddp": nn.parallel.DistributedDataParallel,
    "fully_shard": lambda block: fsdp(block, ignored_params=set(block.experts.parameters())),
}


def check_wrapper(wrapper: str, compiled: bool, option: str, packed: bool) -> None:
    block, alone = (Block(single_grouped_weight=packed, **OPTIONS[option]) for _ in range(2))
    if compiled:
        block.experts.compile(backend="aot_eager", fullgraph=True)
    module = WRAPPERS[wrapper](block)
    for _ in range(3):
        x = torch.randn(6, 8, requires_grad=True)
        torch.autograd.grad(block.experts(x, SPLITS).sum(), x)
        for one in (module, alone):
            one(x).square().sum().backward()
        found = gradients(block.experts)
        assert all(found.values())
        assert_same(found, gradients(alone.experts))


# Delayed gradients without main_grad are DDP's, which cannot wait.
OF_WRAPPERS = [
    ("ddp", "main_grad", True),
    ("ddp", "delayed into main_grad", False),
    ("fully_shard", "main_grad", False),
    ("fully_shard", "delayed", True),
]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("wrapper, option, packed", OF_WRAPPERS)
def test_wrappers(ranks, wrapper, option, packed, compiled):
    ranks(check_wrapper, wrapper, compiled, option, packed)


def check_gathered(option: str, message: str) -> None:
    """Parameters that ``fully_shard`` replaces: the same error as in an eager call, at the first one."""
    block = Block(**OPTIONS[option])
    block.experts.compile(backend="aot_eager")
    module = fsdp(block)
    with pytest.raises((ValueError, RuntimeError), match=message):
        module(torch.randn(6, 8))


GATHERED = {
    "main_grad": r"`weight.main_grad` must be a tensor .* \(nor can there be one under fully_shard",
    "delayed": "`delay_wgrad_compute` must be False under fully_shard",
}


@pytest.mark.parametrize("option", GATHERED)
def test_gathered_parameters_of_a_compiled_layer(ranks, option):
    ranks(check_gathered, option, GATHERED[option])
