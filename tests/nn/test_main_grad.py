"""``main_grad``: the tensor that takes the gradient, its requirements, and the view of autograd and frameworks."""

import copy

import pytest
import torch
from torch.profiler import profile
from torch.utils.flop_counter import FlopCounterMode

import tgl

G, K, N, T = 3, 4, 8, 6
SPLITS = torch.tensor([2, 0, 3])
FORMS = pytest.mark.parametrize("single", [True, False], ids=["packed", "discrete"])
OPTIONS = {"single_grouped_weight": True, "fuse_wgrad_accumulation": True}


def make(single=True, **options):
    torch.manual_seed(0)
    return tgl.GroupedLinear(G, K, N, single_grouped_weight=single, fuse_wgrad_accumulation=True, **options)


def give(layer, value=1.0, dtype=torch.float32):
    """``main_grad`` in tensors of their own."""
    for weight in layer.group_parameters("weight"):
        weight.main_grad = torch.full(weight.shape, value, dtype=dtype)


def taken(layer):
    """Return the content of ``main_grad``, packed."""
    parts = [w.main_grad for w in layer.group_parameters("weight")]
    return parts[0] if layer.single_grouped_weight else torch.stack(parts)


def expected(layer, x):
    """The gradient of ``sum(y)`` of a plain layer."""
    plain = tgl.GroupedLinear(G, K, N)
    with torch.no_grad():
        plain.weight.copy_(layer.packed("weight"))
    plain(x, SPLITS).sum().backward()
    return plain.weight.grad


def finish(layer):
    layer.backward_dw()


@FORMS
@pytest.mark.parametrize("delay", [False, True], ids=["now", "delayed"])
def test_main_grad_of_the_backward_counts(single, delay):
    """A ``main_grad`` assigned after the forward takes the gradient; the earlier one does not."""
    layer, x = make(single, delay_wgrad_compute=delay), torch.randn(T, K)
    give(layer)
    old = taken(layer).clone()
    before = [w.main_grad for w in layer.group_parameters("weight")]
    y = layer(x, SPLITS)
    give(layer, 5.0)
    y.sum().backward()
    finish(layer)
    torch.testing.assert_close(taken(layer), expected(layer, x) + 5)
    assert torch.equal(torch.stack([*before]).view_as(old), old)


@FORMS
def test_main_grad_made_in_the_backward(single):
    """Megatron-FSDP makes it by a method of its parameters, which the forward must not call."""
    layer, x = make(single), torch.randn(T, K)
    made = []

    def getter(weight):
        def get_main_grad():
            made.append(weight)
            return torch.full(weight.shape, 2.0)

        return get_main_grad

    for weight in layer.group_parameters("weight"):
        weight.__fsdp_param__, weight.get_main_grad = True, getter(weight)
    y = layer(x, SPLITS)
    assert not made
    y.sum().backward()
    assert len(made) == len(layer.group_parameters("weight"))
    torch.testing.assert_close(taken(layer), expected(layer, x) + 2)


@pytest.mark.parametrize("delay", [False, True], ids=["now", "delayed"])
@pytest.mark.parametrize("overwrite", [False, True], ids=["add", "overwrite"])
def test_a_frozen_expert_keeps_its_main_grad(delay, overwrite):
    layer, x = make(False, delay_wgrad_compute=delay), torch.randn(T, K)
    for weight, slot in zip(layer.group_parameters("weight"), torch.ones(G, N, K)):
        weight.main_grad = slot
    layer.weight2.requires_grad_(False)
    layer.weight0.overwrite_main_grad = overwrite
    layer(x, SPLITS).sum().backward()
    finish(layer)
    want = expected(layer, x) + (0 if overwrite else 1)
    want[2] = 1
    torch.testing.assert_close(taken(layer), want)


def test_a_frozen_expert_needs_no_main_grad():
    layer, x = make(False), torch.randn(T, K)
    layer.weight1.requires_grad_(False)
    layer.weight0.main_grad, layer.weight2.main_grad = torch.zeros(N, K), torch.zeros(N, K)
    layer(x, SPLITS).sum().backward()
    torch.testing.assert_close(layer.weight2.main_grad, expected(layer, x)[2])


@pytest.mark.parametrize("where", ["before the forward", "after it"])
def test_a_main_grad_that_does_not_fit(where):
    """Found before anything is written."""
    layer, x = make(), torch.randn(T, K, requires_grad=True)
    give(layer)
    y = layer(x, SPLITS, dgrad_out=(buffer := torch.zeros(T, K)))
    layer.weight.main_grad = torch.zeros(G * N * K + 1)[1:].view(G, N, K)
    with pytest.raises(
        ValueError, match=r"`weight\.main_grad` must be aligned to 16 bytes, but got an address off by 4"
    ):
        y.sum().backward() if where == "after it" else layer(x, SPLITS)
    assert not buffer.any()


def test_a_main_grad_off_its_alignment_in_a_sequential():
    layer = make()
    layer.weight.main_grad = torch.zeros(G * N * K + 1)[1:].view(G, N, K)
    with pytest.raises(ValueError, match=r"`weight\.main_grad` must be aligned to 16 bytes, but got"):
        tgl.Sequential(layer)(torch.randn(T, K), SPLITS)


def test_discrete_main_grad_off_its_alignment_is_added_to():
    """The sum goes through a temporary, as for parameters that are not adjacent."""
    layer, x = make(False), torch.randn(T, K)
    for weight, slot in zip(layer.group_parameters("weight"), torch.zeros(G * N * K + 1)[1:].view(G, N, K)):
        weight.main_grad = slot
    layer(x, SPLITS).sum().backward()
    torch.testing.assert_close(taken(layer), expected(layer, x))


def test_the_dtype_of_main_grad_is_that_of_sums_or_of_the_weight():
    layer = make(params_dtype=torch.float64)
    give(layer)
    with pytest.raises(TypeError, match=r"`weight.main_grad` must be torch.float64, but got torch.float32"):
        layer(torch.randn(T, K, dtype=torch.float64), SPLITS)


def test_main_grad_is_written_only_if_the_gradient_is_requested():
    for single in (True, False):
        layer, x = make(single), torch.randn(T, K, requires_grad=True)
        give(layer)
        for weight in layer.group_parameters("weight"):
            weight.grad_added_to_main_grad = False
        y = layer(x, SPLITS)
        torch.autograd.grad(y.sum(), x, retain_graph=True)
        y.sum().backward(inputs=[x], retain_graph=True)
        assert (taken(layer) == 1).all()
        assert not any(w.grad_added_to_main_grad for w in layer.group_parameters("weight"))
        y.sum().backward()
        torch.testing.assert_close(taken(layer), expected(layer, x) + 1)


def test_main_grad_of_the_requested_experts():
    layer, x = make(False), torch.randn(T, K)
    give(layer)
    layer(x, SPLITS).sum().backward(inputs=[layer.weight2])
    assert (layer.weight0.main_grad == 1).all()
    torch.testing.assert_close(layer.weight2.main_grad, expected(layer, x)[2] + 1)


# --- what autograd and a framework see --------------------------------------------------------------------------------


@FORMS
@pytest.mark.parametrize("delay", [False, True], ids=["now", "delayed"])
def test_dummy_gradients_are_zero_if_a_framework_wants_them(single, delay):
    layer, x = make(single, delay_wgrad_compute=delay), torch.randn(T, K)
    give(layer)
    weights = layer.group_parameters("weight")
    weights[0].grad_added_to_main_grad = False
    seen = []
    for weight in weights:
        weight.register_post_accumulate_grad_hook(lambda p: seen.append((p, p.grad)))
    for _ in range(2):
        layer(x, SPLITS).sum().backward()
        finish(layer)
    assert [p is weights[0] for p, _ in seen].count(True) == 2
    assert len(seen) == 2 * len(weights)
    assert all((grad is not None) == (p is weights[0]) for p, grad in seen)
    assert weights[0].grad_added_to_main_grad is True
    assert weights[0].grad.shape == weights[0].shape
    assert not weights[0].grad.any()
    assert all(w.grad is None and not hasattr(w, "grad_added_to_main_grad") for w in weights[1:])
    torch.testing.assert_close(taken(layer), 2 * expected(layer, x) + 1)


@FORMS
@pytest.mark.parametrize("delay", [False, True], ids=["now", "delayed"])
@pytest.mark.parametrize("framework", [False, True])
def test_tensor_hooks_are_given_the_gradient(single, delay, framework):
    """Once, whatever autograd has in the gradient's place, and what they return is what is added."""
    layer, x = make(single, delay_wgrad_compute=delay), torch.randn(T, K)
    give(layer)
    seen = []
    for weight in layer.group_parameters("weight"):
        if framework:
            weight.grad_added_to_main_grad = False
        weight.register_hook(lambda g: g * 2)
        handle = weight.register_hook(seen.append)
    want, count = expected(layer, x), len(layer.group_parameters("weight"))
    for times in (1, 2):
        layer(x, SPLITS).sum().backward()
        finish(layer)
        torch.testing.assert_close(taken(layer), 2 * times * want + 1)
        assert len(seen) == times * (1 if single else 3) == times * count
    handle.remove()
    layer(x, SPLITS).sum().backward()
    finish(layer)
    assert len(seen) == 3 * count - 1


@FORMS
def test_tensor_hooks_of_delayed_gradients(single):
    torch.manual_seed(0)
    layer = tgl.GroupedLinear(G, K, N, single_grouped_weight=single, delay_wgrad_compute=True)
    for parameter in layer.parameters():
        parameter.register_hook(lambda g: g * 2)
    x, called = torch.randn(T, K), []
    for name, parameter in layer.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: called.append(name))
    layer(x, SPLITS).sum().backward()
    assert all(p.grad is None for p in layer.parameters())
    assert not called
    layer.backward_dw()
    assert called == [name for name, _ in layer.named_parameters()]
    grads = [p.grad for p in layer.group_parameters("weight")]
    torch.testing.assert_close(grads[0] if single else torch.stack(grads), 2 * expected(layer, x))


def test_a_hook_of_a_parameter_used_elsewhere_too():
    """The hook sees the ordinary part of the gradient as before."""
    layer, x, seen = make(), torch.randn(T, K), []
    give(layer)
    layer.weight.register_hook(lambda g: seen.append(g.clone()))
    (layer(x, SPLITS).sum() + layer.weight.sum()).backward()
    assert len(seen) == 2
    torch.testing.assert_close(seen[0], expected(layer, x))
    assert (seen[1] == 1).all()
    assert (layer.weight.grad == 1).all()


def test_a_hook_that_raises_leaves_nothing_behind():
    layer, x = make(False, delay_wgrad_compute=True), torch.randn(T, K)
    give(layer)
    handle = layer.weight2.register_hook(lambda g: 1 / 0)
    layer(x, SPLITS).sum().backward()
    with pytest.raises(ZeroDivisionError):
        layer.backward_dw()
    assert (taken(layer) == 1).all()
    handle.remove()
    layer(x, SPLITS).sum().backward()
    layer.backward_dw()
    torch.testing.assert_close(taken(layer), expected(layer, x) + 1)


def test_tensor_hooks_in_a_graph(fresh_compiler):
    layer = make()
    give(layer)
    layer.weight.register_hook(lambda g: g * 2)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"`weight\.register_hook` must not have been called"):
        torch.compile(layer, backend="eager", fullgraph=True)(torch.randn(T, K), SPLITS)


@pytest.mark.parametrize("delay", [False, True])
def test_modules_report_that_they_need_backward_dw(delay):
    """Megatron looks there for the module that gets its hooks: one for every parameter."""
    mlp = tgl.GroupedMLP(G, K, N, bias=True, delay_wgrad_compute=delay)
    modules = {"linear": mlp.fc1, "mlp": mlp, "sequential": tgl.Sequential(mlp)}
    assert all(module.need_backward_dw() == delay for module in modules.values())
    assert not any(getattr(p, "skip_backward_post_hook", False) != delay for p in mlp.parameters())
    owners = [m for m in modules["sequential"].modules() if hasattr(m, "register_wgrad_accumulation_and_reduce_hooks")]
    assert owners == [mlp.fc1, mlp.fc2]


def test_hooks_of_backward_dw():
    layer, called = tgl.GroupedLinear(G, K, N, delay_wgrad_compute=True), []
    layer.register_wgrad_accumulation_and_reduce_hooks(lambda: called.append(layer.weight.grad.clone()))
    x = torch.randn(T, K)
    other = copy.deepcopy(layer.double().float())
    layer(x, SPLITS).sum().backward()
    assert not called
    layer.backward_dw()
    layer.backward_dw()  # nothing is pending
    assert len(called) == 1
    torch.testing.assert_close(called[0], expected(layer, x))
    other(x, SPLITS).sum().backward()
    other.backward_dw()
    assert len(called) == 1, "a copy has its own parameters"
    assert other.weight.skip_backward_post_hook


# --- the first microbatch ---------------------------------------------------------------------------------------------


@pytest.mark.cover(2)
@FORMS
@pytest.mark.parametrize("delay", ["now", "delayed", "reserved"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_the_first_microbatch_replaces(single, delay, compiled, fresh_compiler):
    """As in TransformerEngine, ``is_first_microbatch=True`` does not add to the sums of the last step."""
    if compiled and delay == "delayed":
        delay = "reserved"
    layer, xs = make(single, delay_wgrad_compute=delay != "now"), torch.randn(3, T, K)
    give(layer, float("nan"))
    if delay == "reserved":
        layer.reserve_delayed_wgrad(T, 3)
    call = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    for first in (True, False, None):
        call(xs[0], SPLITS, is_first_microbatch=first).sum().backward()
    finish(layer)
    torch.testing.assert_close(taken(layer), 3 * expected(layer, xs[0]))
    call(xs[1], SPLITS, is_first_microbatch=False).sum().backward()
    finish(layer)
    finish(layer)
    torch.testing.assert_close(taken(layer), 3 * expected(layer, xs[0]) + expected(layer, xs[1]))
    call(xs[2], SPLITS, is_first_microbatch=True).sum().backward()
    finish(layer)
    torch.testing.assert_close(taken(layer), expected(layer, xs[2]))


def test_is_first_microbatch_as_a_tensor_adds():
    layer, x = make(), torch.randn(T, K)
    give(layer)
    layer(x, SPLITS, is_first_microbatch=torch.tensor(True)).sum().backward()
    torch.testing.assert_close(taken(layer), expected(layer, x) + 1)


# --- requested gradients ----------------------------------------------------------------------------------------------

KINDS = {
    "linear": lambda: tgl.GroupedLinear(G, K, K, single_grouped_weight=False),
    "mlp": lambda: tgl.GroupedMLP(G, K, K, activation="srelu", single_grouped_weight=False),
    "recompute": lambda: tgl.GroupedMLP(G, K, K, activation="srelu", recompute_activation=True, bias=True),
    "delayed": lambda: tgl.GroupedLinear(G, K, K, delay_wgrad_compute=True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_products_of_the_requested_gradients(kind):
    """Splitting the backward in two runs each product once."""
    torch.manual_seed(0)
    layer = KINDS[kind]()
    width = layer.in_features
    x = torch.randn(T, width, requires_grad=True)
    y = layer(x, SPLITS)
    dy, one = torch.randn_like(y), 2 * T * width * width
    linears = 2 if hasattr(layer, "fc1") else 1
    weights = [p for name, p in layer.named_parameters() if "weight" in name]

    def products(call):
        with FlopCounterMode(display=False) as counter:
            found = call()
        return found, counter.get_total_flops() / one

    (dx,), count = products(lambda: torch.autograd.grad(y, x, dy, retain_graph=True))
    assert count == linears
    if kind == "delayed":
        assert not layer._delayed.in_use()
    else:
        dw, count = products(lambda: torch.autograd.grad(y, weights, dy, retain_graph=True))
        assert count == 2 * linears - 1
        assert all(part.any() for g, part in enumerate(dw) if g % G != 1 or len(dw) < G)
    _, count = products(lambda: y.backward(dy))
    assert count == 2 * linears - (kind == "delayed")
    torch.testing.assert_close(x.grad, dx)
    _, count = products(layer.backward_dw)
    assert count == (kind == "delayed")
    if kind != "delayed":
        for parameter, part in zip(weights, dw):
            torch.testing.assert_close(parameter.grad, part)


def test_an_input_gradient_of_a_recipe_quantises_nothing_for_the_weight():
    layer = tgl.GroupedLinear(G, 32, 32, recipe=tgl.recipes.Float8BlockScaling())
    x = torch.randn(T, 32, requires_grad=True)
    y = layer(x, SPLITS)
    with profile() as profiler:
        torch.autograd.grad(y.sum(), x)
    names = [event.name for event in profiler.events() if event.name.startswith("tgl::")]
    assert "tgl::grouped_gemm_scaled" in names
    assert not any("wgrad" in name for name in names)


def test_a_bias_gradient_that_is_not_requested_is_not_kept():
    layer, x = tgl.GroupedLinear(G, K, N, delay_wgrad_compute=True), torch.randn(T, K, requires_grad=True)
    layer.reserve_delayed_wgrad(T)
    layer(x, SPLITS).sum().backward(inputs=[layer.weight])
    layer.backward_dw()
    torch.testing.assert_close(layer.weight.grad, expected(layer, x.detach()))
    assert layer.bias.grad is None or not layer.bias.grad.any()
