"""``torch.func`` and ``torch.vmap`` through the layers: autograd's gradients, or one clear error."""

import pytest
import torch
from torch.func import functional_call, grad, jacrev, jvp, vjp

import tgl

G, K, N, T = 3, 32, 64, 6
SPLITS = torch.tensor([2, 0, 3])
RECIPES = {
    "mxfp8": tgl.recipes.MXFP8BlockScaling,
    "delayed": tgl.recipes.DelayedScaling,
    "nvfp4": tgl.recipes.NVFP4BlockScaling,
    "fp8_block": tgl.recipes.Float8BlockScaling,
}
FORMS = {
    "discrete": {"single_grouped_weight": False},
    "save_original_input": {"save_original_input": True},
    **{name: {"recipe": name} for name in RECIPES},
    "discrete mxfp8": {"recipe": "mxfp8", "single_grouped_weight": False},
}
ALL = pytest.mark.parametrize("form", FORMS)
FIRST_ORDER = pytest.mark.parametrize("form", [form for form in FORMS if form != "save_original_input"])


def options_of(form):
    options = dict(FORMS[form])
    if "recipe" in options:
        options["recipe"] = RECIPES[options["recipe"]]()
    return options


def make(kind, form, **more):
    torch.manual_seed(0)
    if kind == "linear":
        return tgl.GroupedLinear(G, K, N, **options_of(form), **more)
    return tgl.GroupedMLP(G, K, N, bias=True, **options_of(form), **more)


def run(layer, x, scale):
    if isinstance(layer, tgl.GroupedLinear):
        return layer(x, SPLITS, bias_scale=scale)
    return layer(x, SPLITS, scale)


def inputs():
    torch.manual_seed(1)
    return torch.randn(T, K), torch.rand(T)


def loss(y):
    return y.pow(2).sum()


def autograd_of(layer, x, scale):
    x, scale = x.clone().requires_grad_(), scale.clone().requires_grad_()
    loss(run(layer, x, scale)).backward()
    return x.grad, scale.grad, {name: p.grad for name, p in layer.named_parameters()}


@ALL
@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_gradients_of_inputs(kind, form):
    x, scale = inputs()
    want = autograd_of(make(kind, form), x, scale)
    layer = make(kind, form)
    found = grad(lambda x, s: loss(run(layer, x, s)), (0, 1))(x, scale)
    torch.testing.assert_close(found, want[:2], rtol=0, atol=0)
    assert all(p.grad is None for p in layer.parameters())


@ALL
@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_gradients_of_parameters(kind, form):
    x, scale = inputs()
    want = autograd_of(make(kind, form), x, scale)[2]
    layer = make(kind, form)

    def f(parameters, x, scale):
        bound = torch.nn.Module()
        bound.layer = layer
        bound.forward = lambda x, scale: run(layer, x, scale)
        return loss(functional_call(bound, {f"layer.{n}": p for n, p in parameters.items()}, (x, scale)))

    parameters = {name: p.detach() for name, p in layer.named_parameters()}
    torch.testing.assert_close(grad(f)(parameters, x, scale), want, rtol=0, atol=0)


@ALL
def test_the_gradient_of_one_parameter(form):
    """All others are frozen; of a discrete weight one expert's."""
    x, scale = inputs()
    want = autograd_of(make("linear", form), x, scale)[2]
    layer = make("linear", form).requires_grad_(False)
    name, weight = next((name, p.detach()) for name, p in layer.named_parameters() if "weight" in name)
    found = grad(lambda w: loss(functional_call(layer, {name: w}, (x, SPLITS), {"bias_scale": scale})))(weight)
    torch.testing.assert_close(found, want[name], rtol=0, atol=0)


def test_vjp_with_a_cotangent():
    x, scale = inputs()
    layer, dy = make("linear", "mxfp8"), torch.randn(T, N)
    y, pull = vjp(lambda x: run(layer, x, scale), x)
    leaf = x.clone().requires_grad_()
    expected = run(layer, leaf, scale)
    expected.backward(dy)
    assert torch.equal(y, expected)
    assert torch.equal(pull(dy)[0], leaf.grad)


def test_the_state_of_a_recipe_moves_on_as_by_any_call():
    x, scale = inputs()
    ordinary, transformed = make("linear", "delayed"), make("linear", "delayed")
    autograd_of(ordinary, x, scale)
    grad(lambda x: loss(run(transformed, x, scale)))(x)
    for name, buffer in ordinary.named_buffers():
        assert torch.equal(transformed.get_buffer(name), buffer), name


@pytest.mark.parametrize("single", [True, False], ids=["packed", "discrete"])
def test_main_grad_takes_no_part_in_the_gradient_of_an_input(single):
    """The gradient is that of ``torch.autograd.grad(y, x)``; a backward of the result still adds to ``main_grad``."""
    torch.manual_seed(0)
    layer = tgl.GroupedLinear(G, K, N, fuse_wgrad_accumulation=True, single_grouped_weight=single)
    x, _ = inputs()
    for weight in layer.group_parameters("weight"):
        weight.main_grad = torch.zeros(weight.shape)
    leaf = x.clone().requires_grad_()
    (want,) = torch.autograd.grad(loss(layer(leaf, SPLITS)), leaf)

    def f(x):
        y = layer(x, SPLITS)
        return loss(y), y

    found, y = grad(f, has_aux=True)(x)
    assert torch.equal(found, want)
    assert not any(w.main_grad.any() for w in layer.group_parameters("weight"))
    loss(y).backward()
    assert all(w.main_grad.any() for w, rows in zip(layer.group_parameters("weight"), SPLITS) if rows)


@pytest.mark.parametrize("option", ["fuse_wgrad_accumulation", "delay_wgrad_compute"])
def test_weight_gradients_outside_autograd_are_refused(option):
    layer = tgl.GroupedLinear(G, K, N, **{option: True})
    x, _ = inputs()
    parameters = {name: p.detach() for name, p in layer.named_parameters()}
    with pytest.raises(RuntimeError, match=f"`{option}` must be False where torch.func differentiates by the weight"):
        grad(lambda p: loss(functional_call(layer, p, (x, SPLITS))))(parameters)


@pytest.mark.parametrize("name", ["out", "dgrad_out"])
@pytest.mark.parametrize("kind", [tgl.GroupedLinear, tgl.GroupedMLP])
@pytest.mark.parametrize("form", ["packed", "discrete"])
def test_buffers(name, kind, form):
    layer = kind(G, K, K, single_grouped_weight=form == "packed")
    x, buffer = torch.randn(2, T, K), torch.zeros(2, T, K)
    match = f"`{name}` must be None under torch.vmap and torch.func"
    with pytest.raises(ValueError, match=match):
        torch.vmap(lambda x, b: layer(x, SPLITS, **{name: b}))(x, buffer)
    with pytest.raises(ValueError, match=match):
        torch.vmap(lambda x: layer(x, SPLITS, **{name: buffer[0]}))(x)
    with pytest.raises(ValueError, match=match):
        grad(lambda x: loss(layer(x, SPLITS, **{name: buffer[0]})))(x[0])
    assert not buffer.any()


@FIRST_ORDER
@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_unsupported_transforms_raise(kind, form):
    x, scale = inputs()
    layer = make(kind, form)
    vmap = r"cannot run under torch\.vmap, which jacrev and jacfwd use too: call it once on all rows"
    with pytest.raises(RuntimeError, match=vmap):
        torch.vmap(lambda x: run(layer, x, scale))(torch.stack([x, x]))
    with pytest.raises(RuntimeError, match=vmap):
        torch.vmap(grad(lambda x: loss(run(layer, x, scale))))(torch.stack([x, x]))
    with pytest.raises(RuntimeError, match=vmap):
        jacrev(lambda x: run(layer, x, scale).sum(0)[:2])(x)
    with pytest.raises(RuntimeError, match=r"cannot run under torch\.func\.jvp"):
        jvp(lambda x: run(layer, x, scale), (x,), (x,))


ONCE = "gradients of a layer of this kind have no derivative"


@FIRST_ORDER
def test_second_order_raises(form):
    """Rather than be a part of the derivative."""
    x, scale = inputs()
    layer = make("linear", form)
    first = grad(lambda x: loss(run(layer, x, scale)))
    with pytest.raises(RuntimeError, match=ONCE):
        grad(lambda x: first(x).pow(2).sum())(x)
    with pytest.raises(RuntimeError, match=ONCE):
        first(x).sum().backward()  # by the layer's parameters
    leaf = x.clone().requires_grad_()
    (dx,) = torch.autograd.grad(loss(run(layer, leaf, scale)), leaf, create_graph=True)
    if form == "discrete":  # outside of the transforms its gradients are made of ops that have a derivative
        dx.sum().backward()
        assert leaf.grad.any()
        return
    with pytest.raises(RuntimeError, match=ONCE):
        dx.sum().backward()


def test_plain_layers_go_through_all_of_them():
    torch.manual_seed(0)
    layer = tgl.GroupedLinear(G, K, N)
    x, scale = inputs()
    batch = torch.stack([x, 2 * x])
    found = torch.vmap(grad(lambda x: loss(run(layer, x, scale))))(batch)
    want = [autograd_of(layer, x, scale)[0] for x in batch]
    torch.testing.assert_close(found, torch.stack(want))


@pytest.mark.parametrize("form", ["discrete", "mxfp8"])
def test_a_transform_in_a_compiled_function(form, fresh_compiler):
    """Dynamo drops the backward of an ``autograd.Function`` there, and would return another result."""
    x, scale = inputs()
    layer = make("linear", form)
    compiled = torch.compile(
        lambda x: grad(lambda x: loss(run(layer, x, scale)))(x), backend="aot_eager", fullgraph=True
    )
    with pytest.raises(Exception, match=r"cannot be compiled with a transform of torch\.func around it"):
        compiled(x)


def test_a_plain_mlp_under_a_transform_in_a_compiled_function(fresh_compiler):
    x, scale = inputs()
    torch.manual_seed(0)
    mlp = tgl.GroupedMLP(G, K, N)
    gradient = grad(lambda x: loss(run(mlp, x, scale)))
    torch.testing.assert_close(torch.compile(gradient, backend="aot_eager", fullgraph=True)(x), gradient(x))
