"""Layers with a recipe whose weights lie in reverse order in one buffer: read there, without a copy, to equal bits."""

import copy

import pytest
import torch

import tgl
from tests.reversed_weights import Readers, reverse_weights
from tgl import recipes

RECIPES = {
    "mxfp8": recipes.MXFP8BlockScaling(),
    "nvfp4": recipes.NVFP4BlockScaling(),
    "fp8 current": recipes.Float8CurrentScaling(),
    "fp8 delayed": recipes.DelayedScaling(amax_history_len=3),
    "fp8 blocks": recipes.Float8BlockScaling(),
}
NETWORKS = {
    "linear": lambda recipe: tgl.GroupedLinear(4, 64, 96, False, params_dtype=torch.bfloat16, recipe=recipe),
    "MLP": lambda recipe: tgl.GroupedMLP(4, 64, 96, bias=False, params_dtype=torch.bfloat16, recipe=recipe),
}
every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
every_network = pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS)
SIZES = torch.tensor([20, 0, 33, 7])


def pair(make, recipe):
    """A layer, and its copy with the weights in reverse order; the buffers of these."""
    torch.manual_seed(0)
    layer = make(recipe)
    other = copy.deepcopy(layer)
    return layer, other, reverse_weights(other)


def step(network, call, **how):
    """The output and the gradients of a training step, in the order of the groups."""
    torch.manual_seed(1)
    x = torch.randn(64, 64).bfloat16().requires_grad_()
    y = call(x, SIZES, **how)
    y.float().square().sum().backward()
    weights = list(network.parameters())
    found = [y.detach(), x.grad, *(w.grad for w in weights)]
    for w in weights:
        w.grad = None
    return found


@every_recipe
@every_network
def test_no_copy_of_the_weights(recipe, make):
    layer, other, buffers = pair(make, recipe)
    for _ in range(3):
        wanted = step(layer, layer)
        with Readers(buffers) as readers:
            got = step(other, other)
        assert all(map(torch.equal, got, wanted))
        assert readers.found == ["tgl.group_quantize.default"] * len(buffers)


@every_recipe
@every_network
def test_weights_that_are_kept(recipe, make):
    layer, other, buffers = pair(make, recipe)
    for first in (True, False, True):
        wanted = step(layer, layer, is_first_microbatch=first)
        with Readers(buffers) as readers:
            got = step(other, other, is_first_microbatch=first)
        assert all(map(torch.equal, got, wanted))
        assert {name.removesuffix(".default") for name in readers.found} <= {
            "tgl.group_quantize",
            "tgl.group_quantize.out",
        }
        assert len(readers.found) == (len(buffers) if first else 0)


@every_recipe
def test_inference(recipe):
    layer, other, buffers = pair(NETWORKS["MLP"], recipe)
    x = torch.randn(64, 64).bfloat16()
    with torch.no_grad(), Readers(buffers) as readers:
        assert torch.equal(other(x, SIZES), layer(x, SIZES))
    assert readers.found == ["tgl.group_quantize.default"] * 2
