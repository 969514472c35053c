"""An input of another dtype than the weight: the layer's own error, which names both, unless autocast casts them."""

import pytest
import torch

import tgl

G, K, N, T = 3, 32, 64, 6
SPLITS = torch.tensor([2, 0, 3])
LAYERS = pytest.mark.parametrize("kind", [tgl.GroupedLinear, tgl.GroupedMLP])
FORMS = pytest.mark.parametrize("single", [True, False], ids=["packed", "discrete"])


@LAYERS
@FORMS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int32])
def test_another_dtype_than_the_weight(kind, single, dtype):
    layer = kind(G, K, N, single_grouped_weight=single)
    with pytest.raises(TypeError, match=rf"`inp` must be torch\.float32 like the layer's weight, but got {dtype}"):
        layer(torch.ones(T, K, dtype=dtype), SPLITS)


@LAYERS
@FORMS
@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
def test_dtypes_that_autocast_does_not_cast(kind, single, dtype):
    layer = kind(G, K, N, single_grouped_weight=single)
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(TypeError, match=rf"`inp` must be torch\.float32 like the layer's weight, but got {dtype}"):
            layer(torch.ones(T, K, dtype=dtype), SPLITS)
        assert layer(torch.ones(T, K, dtype=torch.bfloat16), SPLITS).dtype == torch.bfloat16


@pytest.mark.parametrize("single", [True, False], ids=["packed", "discrete"])
def test_in_a_graph(single, fresh_compiler):
    layer = tgl.GroupedLinear(G, K, N, single_grouped_weight=single)
    with pytest.raises(Exception, match=r"`inp` must be torch\.float32 like the layer's weight"):
        torch.compile(layer, backend="aot_eager", fullgraph=True)(torch.ones(T, K, dtype=torch.bfloat16), SPLITS)


RECIPES = [
    tgl.recipes.MXFP8BlockScaling(),
    tgl.recipes.NVFP4BlockScaling(),
    tgl.recipes.Float8CurrentScaling(),
    tgl.recipes.DelayedScaling(amax_history_len=2),
    tgl.recipes.Float8BlockScaling(),
]


@LAYERS
@FORMS
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
def test_dtypes_that_a_recipe_does_not_quantise(kind, single, recipe, dtype):
    layer = kind(G, K, N, recipe=recipe, single_grouped_weight=single)
    title = type(recipe).__name__
    with pytest.raises(TypeError, match=rf"`inp` must be float32, .* for {title}\(.*, but got {dtype}"):
        layer(torch.ones(T, K, dtype=dtype), SPLITS)
    if dtype.is_floating_point:
        with pytest.raises(
            TypeError, match=rf"the layer's weight must be float32, .* for {title}\(.*, but got {dtype}"
        ):
            layer.to(dtype)(torch.ones(T, K), SPLITS)


@LAYERS
@pytest.mark.parametrize("recipe", [None, *RECIPES], ids=lambda recipe: type(recipe).__name__)
def test_another_width(kind, recipe):
    layer = kind(G, K, N, recipe=recipe, single_grouped_weight=False)
    before = {name: t.clone() for name, t in layer.state_dict().items()}
    with pytest.raises(ValueError, match=rf"`inp` must be \[\.\.\., K\] with K = in_features = {K}, but got K = 48"):
        layer(torch.ones(T, 48), SPLITS)
    assert all(torch.equal(t, before[name]) for name, t in layer.state_dict().items()), "histories, scales"
