"""``GroupedMLP`` with a recipe is one node of autograd, which computes what its two layers would and no more."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tgl
from tgl.recipes import Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling

G, K, T = 3, 32, 9
SPLITS = torch.tensor([4, 0, 3])
OFFS = torch.tensor([4, 4, 7], dtype=torch.int32)
RECIPES = [MXFP8BlockScaling(), Float8CurrentScaling()]
NEAREST = NVFP4BlockScaling(disable_stochastic_rounding=True)


def make(recipe=RECIPES[0], **options):
    torch.manual_seed(0)
    return tgl.GroupedMLP(G, K, K, bias=True, recipe=recipe, **options)


def inputs():
    torch.manual_seed(1)
    return torch.randn(T, K, requires_grad=True), torch.rand(T, requires_grad=True)


class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "tgl":
            self.calls.append(op.name().removeprefix("tgl::"))
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_node(recipe):
    x, probs = inputs()
    y = make(recipe)(x, SPLITS, probs)
    assert type(y.grad_fn).__name__ == "ExpertFunctionBackward"
    assert len([node for node, _ in y.grad_fn.next_functions if node is not None]) == 6


# The requested gradients, and the GEMMs they take: dgrad of fc2, dgrad of fc1, wgrad of each.
ASKED = {
    "x": (2, 0),
    "probs": (1, 0),
    "fc1.weight": (1, 1),
    "fc1.bias": (1, 0),
    "fc2.weight": (0, 1),
    "fc2.bias": (0, 0),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("what", ASKED)
def test_only_requested_gradients_are_formed(what, recipe):
    mlp, (x, probs) = make(recipe), inputs()
    named = {"x": x, "probs": probs, **dict(mlp.named_parameters())}
    y = mlp(x, SPLITS, probs)
    everything = torch.autograd.grad(y.sum(), list(named.values()), retain_graph=True)
    with Counting() as counting:
        (grad,) = torch.autograd.grad(y.sum(), named[what])
    assert torch.equal(grad, dict(zip(named, everything))[what])
    assert counting.calls.count("grouped_gemm_scaled") == ASKED[what][0]
    assert counting.calls.count("grouped_gemm_scaled_wgrad") == ASKED[what][1]


@pytest.mark.parametrize("frozen", ["x", "fc1", "fc2", "probs"])
def test_frozen_parameters_cost_nothing(frozen):
    mlp, (x, probs) = make(), inputs()
    if frozen in ("x", "probs"):
        {"x": x, "probs": probs}[frozen].requires_grad_(False)
    else:
        getattr(mlp, frozen).requires_grad_(False)
    with Counting() as counting:
        mlp(x, SPLITS, probs).sum().backward()
    assert counting.calls.count("grouped_gemm_scaled_wgrad") == (1 if frozen.startswith("fc") else 2)
    assert counting.calls.count("grouped_gemm_scaled") == (2 if frozen == "x" else 3)  # the second GEMM forward too


@pytest.mark.parametrize(
    "first, second", [(NEAREST, RECIPES[0]), (RECIPES[0], NEAREST), (None, RECIPES[0]), (RECIPES[0], None)]
)
def test_layers_of_different_recipes(first, second):
    """An op that spans both layers reads what both of them have quantised: not where the formats differ."""
    mlp = make(second)
    mlp.fc1 = tgl.GroupedLinear(G, K, 2 * K, recipe=first)
    assert_as_apart(mlp)


@pytest.mark.parametrize("name, features", [("fc1", 2 * K), ("fc2", K)])
def test_one_layer_with_a_weight_per_expert(name, features):
    """The layers have different numbers of parameters."""
    mlp = make()
    setattr(mlp, name, tgl.GroupedLinear(G, K, features, recipe=RECIPES[0], single_grouped_weight=False))
    assert_as_apart(mlp)
    x, probs = inputs()
    y, parameters = mlp(x, SPLITS, probs).sum(), list(mlp.parameters())
    together = torch.autograd.grad(y, parameters, retain_graph=True)
    alone = (torch.autograd.grad(y, parameter, retain_graph=True)[0] for parameter in parameters)
    assert all(torch.equal(a, b) for a, b in zip(together, alone))


def assert_as_apart(mlp):
    """Compare the output and all gradients with those of the two layers and the activation in sequence."""
    found = []
    for apart in (False, True):
        x, probs = inputs()
        if apart:
            hidden = mlp.fc1.forward_offsets(x, OFFS)
            y = mlp.fc2.forward_offsets(tgl.grouped_activation(hidden, OFFS, probs), OFFS, probs)
        else:
            y = mlp(x, SPLITS, probs)
        mlp.zero_grad()
        y.square().sum().backward()
        found.append((y, x.grad, probs.grad, *(p.grad for p in mlp.parameters())))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("options", [{}, {"recompute_activation": True}, {"save_original_input": True}])
@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_rows_of_more_dimensions(recipe, options):
    mlp, (x, _) = make(recipe, **options), inputs()
    flat = mlp(x, SPLITS)
    out, dgrad_out = torch.empty(3, 3, K), torch.empty(3, 3, K)
    cube = x.detach().view(3, 3, K).requires_grad_()
    y = mlp(cube, SPLITS, out=out, dgrad_out=dgrad_out)
    assert y.shape == cube.shape
    assert torch.equal(y.view(T, K)[:7], flat[:7])
    flat[:7].sum().backward()
    y.view(T, K)[:7].sum().backward()
    assert torch.equal(cube.grad.view(T, K)[:7], x.grad[:7])


def test_a_missing_main_grad_is_found_before_anything_is_quantised():
    mlp, (x, _) = make(fuse_wgrad_accumulation=True), inputs()
    mlp.fc1.weight.main_grad = torch.zeros_like(mlp.fc1.weight)
    with Counting() as counting, pytest.raises(ValueError, match=r"`weight\.main_grad` must be a tensor"):
        mlp(x, OFFS.diff(prepend=torch.zeros(1, dtype=torch.int32)))
    assert counting.calls == ["splits_to_offsets"]
    mlp.fc2.weight.main_grad = torch.zeros_like(mlp.fc2.weight)
    y = mlp(x, SPLITS)
    mlp.fc1.weight.main_grad = None
    with pytest.raises(ValueError, match=r"`weight\.main_grad` must be a tensor"):
        y.sum().backward()
    assert not mlp.fc2.weight.main_grad.any(), "that of the second layer is not written either"
