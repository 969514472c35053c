"""A compiled layer writes ``main_grad``, or keeps a microbatch, once, and only if weights' gradients were requested."""

import copy
import functools

import pytest
import torch
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

import tgl

G, H, I, S, T = 3, 16, 16, 12, 12
SPLITS, PROBS = torch.tensor([5, 0, 6]), torch.linspace(0.1, 1, T)
TOP, WEIGHTS = torch.tensor([[0, 2], [1, 0], [2, 1]] * 4), torch.linspace(0.1, 1, 2 * S).view(S, 2)

LAYERS = {
    "linear": (lambda **o: tgl.GroupedLinear(G, H, I, **o), (SPLITS,)),
    "mlp": (lambda **o: tgl.GroupedMLP(G, H, I, bias=True, **o), (SPLITS, PROBS)),
    "moe": (lambda **o: tgl.MoE(G, H, I, **o), (TOP, WEIGHTS)),
}
OPTIONS = {
    "main_grad": {"fuse_wgrad_accumulation": True},
    "delayed": {"delay_wgrad_compute": True},
    "delayed into main_grad": {"delay_wgrad_compute": True, "fuse_wgrad_accumulation": True},
}
CASES = [
    ("linear", "main_grad", {}),
    ("linear", "main_grad", {"single_grouped_weight": False}),
    ("linear", "delayed", {"recipe": tgl.recipes.Float8CurrentScaling()}),
    ("mlp", "delayed", {}),
    ("mlp", "main_grad", {"recompute_activation": True}),
    ("mlp", "main_grad", {"recipe": tgl.recipes.MXFP8BlockScaling()}),
    ("moe", "main_grad", {"single_grouped_weight": False}),
    ("moe", "delayed into main_grad", {"recipe": tgl.recipes.Float8BlockScaling()}),
]
QUICK = (1, 2, 4, 7)  # every kind, option and one recipe of each sort


def linears(layer):
    return [m for m in layer.modules() if isinstance(m, tgl.GroupedLinear)]


def give(layer):
    for linear in linears(layer):
        if linear.fuse_wgrad_accumulation:
            for weight in linear.group_parameters("weight"):
                if not hasattr(weight, "main_grad"):
                    weight.main_grad = torch.empty(weight.shape)
                weight.main_grad.fill_(0.5)


def make(kind, option, more):
    torch.manual_seed(0)
    layer = LAYERS[kind][0](params_dtype=torch.bfloat16, **OPTIONS[option], **more)
    give(layer)
    for linear in linears(layer):
        if linear.delay_wgrad_compute:
            linear.reserve_delayed_wgrad(2 * S if kind == "moe" else T, microbatches=2)
    return layer, torch.randn(T, H).bfloat16().requires_grad_(), LAYERS[kind][1]


def gradients(layer):
    """Formed, and taken away."""
    layer.backward_dw()
    found = {}
    for name, p in layer.named_parameters():
        found[name] = [t.clone() for t in (p.grad, getattr(p, "main_grad", None)) if t is not None]
        p.grad = None
    give(layer)
    return found


def assert_same(got, wanted):
    assert got.keys() == wanted.keys()
    for name, tensors in wanted.items():
        assert len(got[name]) == len(tensors), name
        for a, b in zip(got[name], tensors):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-3, msg=name)


PARTIAL = {
    "autograd.grad": lambda y, x: torch.autograd.grad(y, x),
    "backward(inputs)": lambda y, x: y.backward(inputs=[x]),
}


@pytest.mark.parametrize(
    "kind, option, more",
    [pytest.param(*case, marks=() if i in QUICK else pytest.mark.slow) for i, case in enumerate(CASES)],
)
def test_an_input_gradient_alone_writes_nothing(kind, option, more, fresh_compiler):
    layer, x, rest = make(kind, option, more)
    plain = copy.deepcopy(layer)
    give(plain)
    forward = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for partial in PARTIAL.values():
        partial(forward(x, *rest).sum(), x)
        assert_same(gradients(layer), gradients(plain))
    for _ in range(2):
        torch.autograd.grad(forward(x, *rest).sum(), x)
        forward(x, *rest).sum().backward()
        plain(x, *rest).sum().backward()
    wanted = gradients(plain)
    assert all(tensors for tensors in wanted.values())
    assert_same(gradients(layer), wanted)


ANOTHER = {
    "cast and back": lambda layer: layer.to(torch.float32).to(torch.bfloat16),
    "loaded": lambda layer: layer.load_state_dict({k: v.clone() for k, v in layer.state_dict().items()}, assign=True),
}


@pytest.mark.cover(1)
@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("change", ANOTHER)
def test_parameters_with_other_nodes(change, single, fresh_compiler):
    """Autograd accumulates in a node of every parameter, and a cast or another parameter brings a new one."""
    layer, x, rest = make("linear", "main_grad", {"single_grouped_weight": single})
    forward = torch.compile(layer, backend="aot_eager", fullgraph=True)
    forward(x, *rest).sum().backward()
    wanted = gradients(layer)
    ANOTHER[change](layer)
    give(layer)
    torch.autograd.grad(forward(x, *rest).sum(), x)
    forward(x, *rest).sum().backward(inputs=list(layer.parameters()))
    assert_same(gradients(layer), wanted)


def test_data_of_another_dtype(fresh_compiler):
    """A graph is not compiled anew for it, so that it must not take the weight's gradient for one not requested."""
    layer, x, rest = make("linear", "main_grad", {})
    forward = torch.compile(layer, backend="aot_eager", fullgraph=True)
    forward(x, *rest).sum().backward()
    wanted = gradients(layer)
    for dtype in (torch.float32, torch.bfloat16):
        layer.weight.data = layer.weight.data.to(dtype)
    torch.autograd.grad(forward(x, *rest).sum(), x)
    with pytest.raises(RuntimeError, match="the weights must keep their dtype and device"):
        forward(x, *rest).sum().backward(inputs=[layer.weight])
    forward(x, *rest).sum().backward()
    assert_same(gradients(layer), wanted)


def test_zero_bubble_of_an_autograd_function():
    """torch's helpers serve nodes that are written in Python, as those of the layers are."""
    assert _serves_python_nodes() or torch.__version__ < "2.13"


@functools.cache
def _serves_python_nodes():
    """torch 2.11 frees such a node between its two helpers."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        def backward(ctx, grad):
            x, w = ctx.saved_tensors
            return grad @ w.t(), x.t() @ grad

    w, x = torch.nn.Parameter(torch.randn(4, 4)), torch.randn(3, 4, requires_grad=True)
    y = Product.apply(x, w)
    _, groups = stage_backward_input([y], [torch.ones_like(y)], [x], iter([w]))
    try:
        stage_backward_weight(iter([w]), groups)
    except RuntimeError as error:
        return "_input_metadata" not in str(error)
    return True


@pytest.mark.skipif(not _serves_python_nodes(), reason="this torch's helpers free nodes written in Python")
@pytest.mark.parametrize(
    "kind, option, more, compiled", [(*case, False) for case in CASES] + [(*CASES[i], True) for i in (1, 7)]
)
def test_zero_bubble(kind, option, more, compiled, fresh_compiler):
    """torch's pipeline schedules form the gradients of inputs first, those of weights later."""
    layer, x, rest = make(kind, option, more)
    plain = copy.deepcopy(layer)
    give(plain)
    with torch._functorch.config.patch(donated_buffer=False):  # as every compiled stage of a schedule needs it
        forward = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
        for scale in (1.0, 2.0):
            leaf, other = ((x.detach() * scale).requires_grad_() for _ in range(2))
            y = forward(leaf, *rest)
            (dx,), groups = stage_backward_input([y], [torch.ones_like(y)], [leaf], iter(layer.parameters()))
            plain(other, *rest).sum().backward()
            torch.testing.assert_close(dx, other.grad)
            stage_backward_weight(iter(layer.parameters()), groups)
    for p in layer.parameters():
        if hasattr(p, "main_grad"):
            assert not p.grad.any()  # zeros without memory, for what has to get a tensor
            p.grad = None
    assert_same(gradients(layer), gradients(plain))
