"""Layers on the meta device: shapes, dtypes and gradients without memory."""

import pytest
import torch

import tgl

G, K, T = 3, 32, 9
RECIPES = [
    None,
    tgl.recipes.MXFP8BlockScaling(),
    tgl.recipes.NVFP4BlockScaling(),
    tgl.recipes.Float8CurrentScaling(),
    tgl.recipes.DelayedScaling(),
    tgl.recipes.Float8BlockScaling(),
]
OPTIONS = {
    "packed": {},
    "discrete": {"single_grouped_weight": False},
    "main_grad": {"fuse_wgrad_accumulation": True},
    "delayed": {"delay_wgrad_compute": True},
}


@pytest.mark.cover(2)
@pytest.mark.parametrize("out", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)
@pytest.mark.parametrize("module", [tgl.GroupedLinear, tgl.GroupedMLP])
def test_forward_and_backward(module, recipe, options, out):
    layer = module(G, K, K, recipe=recipe, device="meta", **OPTIONS[options])
    for name, parameter in layer.named_parameters():
        if options == "main_grad" and "weight" in name:
            parameter.main_grad = torch.empty_like(parameter, requires_grad=False)
    x = torch.empty(T, K, device="meta", requires_grad=True)
    buffer = torch.empty(T, K, device="meta") if out else None
    y = layer(x, torch.empty(G, dtype=torch.int64, device="meta"), out=buffer)
    y.sum().backward()
    if options == "delayed":
        layer.backward_dw()
    assert y.is_meta
    assert y.shape == x.shape == x.grad.shape
    for parameter in layer.parameters():
        assert options == "main_grad" or parameter.grad.shape == parameter.shape
