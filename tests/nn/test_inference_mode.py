"""Tensors that outlive a call under ``torch.inference_mode`` can be used in training."""

import pytest
import torch

import tgl

G, K, T = 3, 32, 9
SPLITS = torch.tensor([4, 0, 3])
RECIPES = {type(r).__name__: r for r in (
    tgl.recipes.MXFP8BlockScaling(),
    tgl.recipes.NVFP4BlockScaling(disable_stochastic_rounding=True),
    tgl.recipes.Float8CurrentScaling(),
    tgl.recipes.DelayedScaling(),
    tgl.recipes.Float8BlockScaling(),
)}  # fmt: skip


def make(recipe=None, **options):
    torch.manual_seed(0)
    return tgl.GroupedLinear(G, K, K, recipe=RECIPES.get(recipe), **options)


def train(layer, run=None, **options):
    torch.manual_seed(1)
    x = torch.randn(T, K, requires_grad=True)
    y = (layer if run is None else run)(x, SPLITS, **options)
    y.square().sum().backward()
    if layer.delay_wgrad_compute:
        layer.backward_dw()
    return y, x.grad, layer.weight.grad


CASES = [
    *((recipe, None, then) for recipe in RECIPES for then in (True, False)),
    pytest.param("MXFP8BlockScaling", "inductor", True, marks=pytest.mark.slow),
    ("Float8BlockScaling", "aot_eager", False),
    ("DelayedScaling", "aot_eager", True),
]


@pytest.mark.cover(1)
@pytest.mark.parametrize(("recipe", "backend", "then"), CASES)
def test_a_kept_weight(recipe, backend, then, fresh_compiler):
    layer, other = make(recipe), make(recipe)
    layer.eval()  # histories stay as they are
    run = layer if backend is None else torch.compile(layer, backend=backend, fullgraph=True)
    with torch.inference_mode():
        run(torch.randn(T, K), SPLITS, is_first_microbatch=True)
        run(torch.randn(T, K), SPLITS, is_first_microbatch=False)
        run(torch.randn(T, K), SPLITS, is_first_microbatch=True)
    layer.train()
    for mine, theirs in zip(train(layer, run, is_first_microbatch=then), train(other, is_first_microbatch=True)):
        assert torch.equal(mine, theirs)
    run(torch.randn(T, K), SPLITS, is_first_microbatch=True).sum().backward()


@pytest.mark.parametrize("made", [["weight0", "weight1", "weight2"], ["weight1"]], ids=["all", "one"])
def test_a_cast_of_weights_that_were_made_in_inference_mode(made):
    """Such weights have no versions, and a cast outside gives them data of ordinary tensors."""
    layer, other = (make(bias=False, single_grouped_weight=False) for _ in range(2))
    with torch.inference_mode():
        for name in made:
            setattr(layer, name, torch.nn.Parameter(getattr(layer, name).clone(), requires_grad=False))
    layer.double()
    x = torch.randn(T, K, dtype=torch.float64)
    with torch.inference_mode():
        assert torch.equal(layer(x, SPLITS), other.double()(x, SPLITS))


@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_delayed_gradients(recipe):
    layer, other = (make(recipe, delay_wgrad_compute=True) for _ in range(2))
    with torch.inference_mode():
        layer.reserve_delayed_wgrad(T)
    for a, b in zip(train(layer), train(other)):
        assert torch.equal(a, b)
    torch.manual_seed(2)
    layer(torch.randn(T, K), SPLITS).sum().backward()
    layer.weight.grad = None
    with torch.inference_mode():
        layer.backward_dw()
    layer.weight.grad.add_(1)
    torch.optim.SGD(layer.parameters(), lr=0.1).step()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_weight_quantised_for_good(recipe):
    layer = make(recipe)
    with torch.inference_mode():
        layer.quantize_weight()
    train(layer)
    with torch.no_grad():
        layer.weight.quantize_(torch.randn(G, K, K))


@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_resetting_and_loading(recipe):
    layer = make(recipe, single_grouped_weight=False)
    state = tgl.GroupedLinear(G, K, K).state_dict()
    with torch.inference_mode():
        layer.reset_parameters()
        layer.load_state_dict(state)
        layer(torch.randn(T, K), SPLITS)
    layer(torch.randn(T, K, requires_grad=True), SPLITS).sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
