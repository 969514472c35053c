"""Layers that are pickled, copied, quantised and initialised anew, in whatever state they are."""

import copy
import pickle

import pytest
import torch

import tgl
from examples.train_moe.recipes import RECIPES

G, K, N, T = 2, 64, 64, 64
QUANTISED = [name for name in RECIPES if name != "none"]
WAYS = {"pickle": lambda t: pickle.loads(pickle.dumps(t)), "deepcopy": copy.deepcopy}
SPLITS = torch.tensor([30, 34])


@pytest.mark.parametrize("recipe", QUANTISED)
@pytest.mark.parametrize("way", WAYS)
def test_a_kept_weight_is_copied(recipe, way):
    layer, x = tgl.GroupedLinear(G, K, N, recipe=RECIPES[recipe]), torch.randn(T, K)
    layer(x, SPLITS, is_first_microbatch=True)
    layer.eval()  # delayed scaling moves on in training
    twin = WAYS[way](layer)
    with torch.no_grad():
        twin.weight.zero_()  # what was kept is used
        assert torch.equal(twin(x, SPLITS, is_first_microbatch=False), layer(x, SPLITS, is_first_microbatch=False))
        twin.gemms.kept_data.view(torch.uint8).zero_()
        assert layer.gemms.kept_data.view(torch.uint8).any()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reserved", [False, True])
def test_a_copy_has_nothing_pending(recipe, way, reserved):
    layer, x = tgl.GroupedLinear(G, K, N, delay_wgrad_compute=True, recipe=RECIPES[recipe]), torch.randn(T, K)
    if reserved:
        layer.reserve_delayed_wgrad(T, microbatches=2)
    layer(x, SPLITS).sum().backward()
    twin = WAYS[way](layer)
    twin.backward_dw()
    assert twin.weight.grad is None or not twin.weight.grad.any()
    layer.backward_dw()
    assert layer.weight.grad.any()
    twin.zero_grad()
    twin(x, SPLITS).sum().backward()
    twin.backward_dw()
    assert twin.weight.grad.any()


@pytest.mark.parametrize("recipe", QUANTISED)
def test_a_quantised_weight_is_initialised_anew(recipe):
    layer, x = (
        tgl.GroupedLinear(G, K, N, recipe=RECIPES[recipe], params_dtype=torch.bfloat16),
        torch.randn(T, K).bfloat16(),
    )
    layer.weight.main_grad = main_grad = torch.zeros(G, N, K)
    layer.quantize_weight()
    assert layer.weight.main_grad is main_grad
    weight, old = layer.weight, layer.weight.dequantize().clone()
    layer.reset_parameters()
    assert layer.weight is weight
    new = weight.dequantize()
    assert not torch.equal(new, old)
    assert 0.5 / K**0.5 < new.abs().max() <= 1.1 / K**0.5
    layer(x, SPLITS).sum().backward()


def test_both_weights_of_an_mlp_are_quantised():
    mlp = tgl.GroupedMLP(G, K, N, recipe=RECIPES["mxfp8"])
    mlp.quantize_weight()
    assert all(isinstance(layer.weight, tgl.GroupedTensor) for layer in (mlp.fc1, mlp.fc2))
    mlp.reset_parameters()
    mlp(torch.randn(T, K), SPLITS).sum().backward()
