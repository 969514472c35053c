"""Layers whose GEMMs are emulated, as they are on a GPU without kernels of the recipe's format."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

import tgl
from tests.without_kernels import emulated_formats
from tgl import recipes
from tgl.nn import _emulation

RECIPES = {
    "mxfp8": recipes.MXFP8BlockScaling(),
    "nvfp4": recipes.NVFP4BlockScaling(),
    "current": recipes.Float8CurrentScaling(),
    "delayed": recipes.DelayedScaling(amax_history_len=4),
    "block": recipes.Float8BlockScaling(),
}
G, H, INNER = 3, 64, 96
SPLITS = torch.tensor([5, 0, 40])


@contextmanager
def without_kernels():
    """A CPU that has no kernel of any format."""
    _emulation._report.cache_clear()
    try:
        with emulated_formats():
            yield
    finally:
        _emulation._report.cache_clear()


def trained(recipe, compiled=False):
    """Output and gradients of a step, from fixed weights."""
    torch.manual_seed(0)
    mlp = tgl.GroupedMLP(G, H, INNER, recipe=recipe)
    x = torch.randn(int(SPLITS.sum()) + 4, H, requires_grad=True)
    call = torch.compile(mlp, fullgraph=True) if compiled else mlp
    y = call(x, SPLITS)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in mlp.parameters())]


@pytest.mark.parametrize("name, compiled", [*((name, False) for name in RECIPES), ("mxfp8", True), ("block", True)])
def test_an_emulated_step_has_the_values_of_a_cpu(name, compiled):
    """Both decode the same bytes; sums in another order move a gradient to its neighbour at most."""
    form = RECIPES[name].format
    with (
        without_kernels(),
        pytest.warns(UserWarning, match=f"cpu has no kernel for GEMMs on {form}, which are emulated"),
    ):
        got = trained(RECIPES[name], compiled)
    for ours, theirs in zip(got, trained(RECIPES[name]), strict=True):
        assert (ours - theirs).norm() <= 1e-2 * theirs.norm()


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_without_emulation_raises(name):
    """Before any work, in a graph too; where there is a kernel it changes nothing."""
    recipe = replace(RECIPES[name], emulate=False)
    for compiled in (False, True):
        with (
            without_kernels(),
            pytest.raises(Exception, match=f"a recipe with emulate=False needs a kernel of {recipe.format}"),
        ):
            trained(recipe, compiled)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_without_emulation_accepts_formats_with_a_kernel(name):
    for ours, theirs in zip(trained(replace(RECIPES[name], emulate=False)), trained(RECIPES[name]), strict=True):
        assert torch.equal(ours, theirs)


def test_emulate_is_true_or_false():
    with pytest.raises(ValueError, match="MXFP8BlockScaling: `emulate` must be True or False, but got 1"):
        recipes.MXFP8BlockScaling(emulate=1)
