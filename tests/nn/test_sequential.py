"""``tgl.Sequential``: hooks of its modules fire, and nothing is written before everything has been checked."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

import tgl

G, K, T = 3, 32, 9
SPLITS = torch.tensor([4, 0, 3])
NAMES = ["linear", "activation", "other", "mlp", "nested", "last"]


def make(**options):
    torch.manual_seed(0)
    return tgl.Sequential(
        OrderedDict(
            zip(
                NAMES,
                [
                    tgl.GroupedLinear(G, K, 2 * K, **options),
                    tgl.GroupedActivation("swiglu"),
                    nn.Identity(),
                    tgl.GroupedMLP(G, K, K, **options),
                    tgl.Sequential(tgl.GroupedLinear(G, K, 2 * K, **options), tgl.GroupedActivation("swiglu")),
                    tgl.GroupedLinear(G, K, K, **options),
                ],
            )
        )
    )


def run(net, call=None):
    torch.manual_seed(1)
    x, probs = torch.randn(T, K, requires_grad=True), torch.rand(T, requires_grad=True)
    y = (net if call is None else call)(x, SPLITS, probs)
    net.zero_grad()
    y.square().sum().backward()
    return [y, x.grad, probs.grad, *(p.grad for p in net.parameters())]


def watch(net, events):
    watched = {name: getattr(net, name) for name in NAMES} | {"inner": net.nested[0], "inner activation": net.nested[1]}
    for name, module in watched.items():
        module.register_forward_pre_hook(lambda m, args, name=name: events.append((f"before {name}", args[0].shape)))
        module.register_forward_hook(lambda m, args, y, name=name: events.append((f"after {name}", y.shape)))


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("recipe", [None, tgl.recipes.MXFP8BlockScaling()])
def test_hooks_fire_in_order(recipe, backend, fresh_compiler):
    net, events = make(recipe=recipe), []
    watch(net, events)
    call = None if backend is None else torch.compile(net, backend=backend, fullgraph=True)
    results = run(net, call)
    row, wide = (T, K), (T, 2 * K)
    assert events[-16:] == [
        ("before linear", row),
        ("after linear", wide),
        ("before activation", wide),
        ("after activation", row),
        ("before other", row),
        ("after other", row),
        ("before mlp", row),
        ("after mlp", row),
        ("before nested", row),
        ("before inner", row),
        ("after inner", wide),
        ("before inner activation", wide),
        ("after inner activation", row),
        ("after nested", row),
        ("before last", row),
        ("after last", row),
    ]
    for a, b in zip(results, run(make(recipe=recipe)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("where", NAMES)
def test_a_hook_may_change_what_passes(where):
    net = make(bias=False)
    getattr(net, where).register_forward_hook(lambda m, args, y: y * 0)
    assert not net(torch.randn(T, K), SPLITS).any()


def test_weights_arrive_in_a_pre_hook():
    """Weights that a wrapper gathers: nothing of a layer is read before its hook, its ``main_grad`` neither."""
    net, full = make(fuse_wgrad_accumulation=True), make()
    for name in ("linear", "mlp", "nested", "last"):
        module, other = getattr(net, name), getattr(full, name)
        for p in module.parameters():
            nn.init.constant_(p, float("nan"))

        def gather(m, args, other=other):
            with torch.no_grad():
                for p, q in zip(m.parameters(), other.parameters()):
                    p.copy_(q)
                    p.main_grad = torch.zeros_like(p)

        module.register_forward_pre_hook(gather)
    x = torch.randn(T, K)
    out = torch.empty(T, K)
    net(x, SPLITS, op_kwargs={-1: {"output": out}}).sum().backward()
    torch.testing.assert_close(out[:7], full(x, SPLITS)[:7])
    assert net.last.weight.main_grad.any()


def test_backward_and_global_hooks():
    net, seen = make(), []
    net.activation.register_full_backward_hook(lambda m, gx, gy: seen.append("backward"))
    handle = nn.modules.module.register_module_forward_pre_hook(
        lambda m, args: seen.append(type(m).__name__) if isinstance(m, tgl.GroupedActivation) else None
    )
    try:
        run(net)
    finally:
        handle.remove()
    assert seen == ["GroupedActivation", "GroupedActivation", "backward"]


def test_a_forward_of_its_own():
    class Doubled(tgl.GroupedLinear):
        def forward(self, inp, m_splits):
            return 2 * super().forward(inp, m_splits)

    plain, doubled = tgl.GroupedLinear(G, K, K), Doubled(G, K, K)
    doubled.load_state_dict(plain.state_dict())
    x = torch.randn(T, K)
    torch.testing.assert_close(tgl.Sequential(doubled)(x, SPLITS), 2 * tgl.Sequential(plain)(x, SPLITS))
    with pytest.raises(TypeError, match=r"`module 1` must be a module whose forward takes .*is_first_microbatch"):
        tgl.Sequential(plain, doubled)(x, SPLITS, is_first_microbatch=True)


def test_the_activation_by_itself():
    layer, x, probs = tgl.GroupedActivation("swiglu"), torch.randn(T, 2 * K), torch.rand(T)
    want = tgl.grouped_activation(x, tgl.splits_to_offsets(SPLITS), probs)
    assert torch.equal(layer(x, SPLITS, probs), want)
    assert torch.equal(layer(x, SPLITS.tolist(), probs), want)
    for bad in (torch.tensor(3), 3):
        with pytest.raises(ValueError, match="`m_splits` must be"):
            layer(x, bad)


# --- nothing is written before everything is checked ------------------------------------------------------------------

SCALED = {"recipe": tgl.recipes.MXFP8BlockScaling()}


def second(**options):
    return tgl.GroupedLinear(G, K, K, **options)


def quantised_otherwise(_):
    layer = second(recipe=tgl.recipes.MXFP8BlockScaling(scale_layout="compact"))
    layer.quantize_weight()
    other = second(**SCALED)
    other.weight = layer.weight
    return other


def under_ddp(monkeypatch):
    layer = second(delay_wgrad_compute=True)
    monkeypatch.setattr(type(layer), "_takes_gradients_early", lambda self, this: "a wrapper")
    return layer


LATER = {
    "main_grad": (lambda _: second(fuse_wgrad_accumulation=True), {}, "main_grad` must be a tensor"),
    "main_grad of an mlp": (
        lambda _: tgl.GroupedMLP(G, K, K, fuse_wgrad_accumulation=True),
        {},
        "main_grad` must be a tensor",
    ),
    "main_grad of a nested one": (
        lambda _: tgl.Sequential(second(fuse_wgrad_accumulation=True)),
        {},
        "main_grad` must be a tensor",
    ),
    "microbatch": (lambda _: second(**SCALED), {"is_first_microbatch": False}, "must be True in the first call"),
    "weight": (quantised_otherwise, {}, "`weight` must be quantised with scale_layout='blocked'"),
    "delay": (under_ddp, {}, "`delay_wgrad_compute` must be False under a wrapper"),
    "width": (lambda _: tgl.GroupedLinear(G, 2 * K, K), {}, "`inp` of module 1 must be .* in_features = 64, but got"),
    "dtype": (lambda _: second().double(), {}, r"`inp` of module 1 must be torch\.float64 like the layer's weight"),
    "dtype of an mlp": (
        lambda _: tgl.GroupedMLP(G, K, K).bfloat16(),
        {},
        r"`inp` of module 1 must be torch\.bfloat16 like the layer's weight",
    ),
    "probs": (lambda _: tgl.GroupedActivation("srelu"), {"probs": torch.ones(4)}, r"`probs` must be of shape \[T\]"),
}


@pytest.mark.parametrize("what", LATER)
def test_a_later_module_refuses(what, monkeypatch):
    make_later, options, message = LATER[what]
    later = make_later(monkeypatch)
    first, out = second(), torch.full((T, K), 7.0)
    net = tgl.Sequential(first, later)
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
        net(torch.randn(T, K), SPLITS, op_kwargs={0: {"output": out}}, **options)
    assert (out == 7).all()


def test_a_later_module_refuses_before_the_state_of_an_earlier_one():
    first = second(recipe=tgl.recipes.DelayedScaling(amax_history_len=2))
    net = tgl.Sequential(first, second(fuse_wgrad_accumulation=True))
    with pytest.raises(ValueError, match="main_grad` must be a tensor"):
        net(torch.randn(T, K), SPLITS)
    assert not first.gemms.input_history.any()
    assert not first.gemms.weight_history.any()
