"""Hooks of ``fc1`` and ``fc2`` fire on every path of ``GroupedMLP``, and other modules may replace them."""

import pytest
import torch
from torch import nn

import tgl

G, K, T = 3, 32, 9
SPLITS = torch.tensor([4, 0, 3])
ROUTES = {
    "one op": {},
    "bias": {"bias": True},
    "mxfp8": {"recipe": tgl.recipes.MXFP8BlockScaling()},
    "fp8": {"recipe": tgl.recipes.Float8CurrentScaling()},
    "recompute": {"recompute_activation": True},
    "discrete": {"single_grouped_weight": False, "bias": True},
}


def make(route, **more):
    torch.manual_seed(0)
    return tgl.GroupedMLP(G, K, K, **ROUTES[route], **more)


def run(mlp, call=None, probs=True, **options):
    torch.manual_seed(1)
    x, p = torch.randn(T, K, requires_grad=True), torch.rand(T, requires_grad=True)
    y = (mlp if call is None else call)(x, SPLITS, p if probs else None, **options)
    mlp.zero_grad()
    y.square().sum().backward()
    return [y, x.grad, *([p.grad] if probs else []), *(w.grad for w in mlp.parameters())]


def same(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("route", ROUTES)
def test_hooks_fire_in_order(route, backend, fresh_compiler):
    mlp, events = make(route), []
    for name in ("fc1", "fc2"):
        layer = getattr(mlp, name)
        layer.register_forward_pre_hook(lambda m, args, name=name: events.append((f"before {name}", args[0].shape)))
        layer.register_forward_hook(lambda m, args, y, name=name: events.append((f"after {name}", y.shape)))
    compiled = None if backend is None else torch.compile(mlp, backend=backend, fullgraph=True)
    results = run(mlp, compiled)
    hidden, result = (T, 2 * K), (T, K)
    assert events[-4:] == [("before fc1", (T, K)), ("after fc1", hidden), ("before fc2", (T, K)), ("after fc2", result)]
    same(results, run(make(route)))


def test_weights_arrive_in_a_pre_hook():
    """Weights that a wrapper gathers: nothing of a layer is read before its hook."""
    for route in ROUTES:
        mlp, full = make(route), make(route)
        for layer, other in ((mlp.fc1, full.fc1), (mlp.fc2, full.fc2)):
            for p in layer.parameters():
                nn.init.constant_(p, float("nan"))

            def gather(m, args, other=other):
                with torch.no_grad():
                    for p, q in zip(m.parameters(), other.parameters()):
                        p.copy_(q)

            layer.register_forward_pre_hook(gather)
        same(run(mlp), run(full))


@pytest.mark.parametrize("where", ["fc1", "fc2"])
def test_a_hook_may_change_what_passes(where):
    mlp = make("one op")
    getattr(mlp, where).register_forward_hook(lambda m, args, y: y * 0)
    assert not mlp(torch.randn(T, K), SPLITS).any()


def test_global_and_backward_hooks():
    mlp, seen = make("one op"), []
    mlp.fc2.register_full_backward_hook(lambda m, gx, gy: seen.append("backward"))
    handle = nn.modules.module.register_module_forward_pre_hook(
        lambda m, args: seen.append(type(m).__name__) if isinstance(m, tgl.GroupedLinear) else None
    )
    try:
        mlp(torch.randn(T, K, requires_grad=True), SPLITS).sum().backward()
    finally:
        handle.remove()
    assert seen == ["GroupedLinear", "GroupedLinear", "backward"]


class LoRA(nn.Module):
    """An adapter around a layer."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base
        self.down = tgl.GroupedLinear(G, base.in_features, rank, bias=False)
        self.up = tgl.GroupedLinear(G, rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, inp, m_splits, **options):
        return self.base(inp, m_splits, **options) + self.up(self.down(inp, m_splits), m_splits)


@pytest.mark.cover(2)
@pytest.mark.parametrize("probs", [False, True])
@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("route", ROUTES)
def test_adapters(route, backend, probs, fresh_compiler):
    mlp, plain = make(route), make(route)
    mlp.fc1, mlp.fc2 = LoRA(mlp.fc1), LoRA(mlp.fc2)
    compiled = None if backend is None else torch.compile(mlp, backend=backend, fullgraph=True)
    y = run(mlp, compiled, probs)[0]
    expected = run(plain, None, probs)[0]
    error = (y - expected).norm() / expected.norm()
    assert error < (0.1 if "fp8" in route else 1e-5)  # probs come after the second quantisation
    assert mlp.fc1.up.weight.grad.any()


def test_a_subclass_and_a_patched_forward():
    class Doubled(tgl.GroupedLinear):
        def forward(self, inp, m_splits):
            return 2 * super().forward(inp, m_splits)

    mlp, plain = make("one op"), make("one op")
    doubled = Doubled(G, K, K, bias=False)
    doubled.load_state_dict(plain.fc2.state_dict())
    mlp.fc2 = doubled
    x = torch.randn(T, K)
    torch.testing.assert_close(mlp(x, SPLITS), 2 * plain(x, SPLITS))
    old = plain.fc2.forward
    plain.fc2.forward = lambda *args, **kwargs: 2 * old(*args, **kwargs)
    torch.testing.assert_close(plain(x, SPLITS), mlp(x, SPLITS))


def test_arguments_that_a_replacement_must_take():
    mlp = make("one op")
    mlp.fc1 = nn.Linear(K, 2 * K)
    with pytest.raises(
        TypeError, match=r"`fc1` must be a module whose forward takes \(inp, m_splits\) and .* a Linear"
    ):
        mlp(torch.randn(T, K), SPLITS)
    mlp = make("one op")
    mlp.fc2 = LoRA(mlp.fc2)
    with pytest.raises(ValueError, match="`out` must be None when `probs` is given and `fc2` is another module"):
        mlp(torch.randn(T, K), SPLITS, torch.rand(T), out=torch.empty(T, K))


def test_delayed_gradients_of_wrapped_layers():
    mlp = make("one op", delay_wgrad_compute=True)
    mlp.fc1 = LoRA(mlp.fc1)
    run(mlp)
    mlp.backward_dw()
    assert mlp.fc1.base.weight.grad.any()
    mlp.reset_parameters()
