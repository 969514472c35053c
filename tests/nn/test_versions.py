"""Tensors that a backward reads may not be written between it and the forward: an error, never a wrong gradient."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import tgl

G, K, N, T = 3, 32, 16, 9
SPLITS = torch.tensor([4, 0, 3])
CHANGED = "modified by an inplace operation"


def discrete(**options):
    torch.manual_seed(0)
    return tgl.GroupedLinear(G, K, N, single_grouped_weight=False, **options)


def saved(layer):
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return file


def with_own_parameters(layer):
    """Parameters that somebody else has made, one by one."""
    for i in range(G):
        setattr(layer, f"weight{i}", nn.Parameter(torch.randn(N, K)))
    return layer


ORIGINS = {
    "made": lambda layer: layer,
    "cast": lambda layer: layer.double().float(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "torch.load": lambda layer: torch.load(saved(layer), weights_only=False),
    "assign": lambda layer: (layer.load_state_dict(discrete().state_dict(), assign=True), layer)[1],
    "assign packed": lambda layer: (
        layer.load_state_dict(tgl.GroupedLinear(G, K, N).state_dict(), assign=True),
        layer,
    )[1],
    "assign parameters": lambda layer: (
        layer.load_state_dict(discrete().state_dict(keep_vars=True), assign=True),
        layer,
    )[1],
    "to_empty": lambda layer: (layer.to("meta").to_empty(device="cpu").reset_parameters(), layer)[1],
    "load packed": lambda layer: (layer.load_state_dict(tgl.GroupedLinear(G, K, N).state_dict()), layer)[1],
    "after a backward": lambda layer: (layer(torch.randn(T, K), SPLITS).sum().backward(), layer.double().float())[1],
}


def write(layer):
    with torch.no_grad():
        layer.weight1.add_(1)


@pytest.mark.parametrize("origin", ORIGINS)
def test_discrete_weights(origin):
    layer = ORIGINS[origin](discrete())
    x = torch.randn(T, K, requires_grad=True)
    y = layer(x, SPLITS)
    write(layer)
    with pytest.raises(RuntimeError, match=CHANGED):
        y.sum().backward()
    layer(x, SPLITS).sum().backward()  # the next call works


def test_weights_that_are_copied_for_every_call_may_be_written():
    """The gradient is that of the values the forward saw."""
    layer = with_own_parameters(discrete())
    x = torch.randn(T, K, requires_grad=True)
    (expected,) = torch.autograd.grad(layer(x, SPLITS).sum(), x)
    y = layer(x, SPLITS)
    write(layer)
    y.sum().backward()
    assert torch.equal(x.grad, expected)


@pytest.mark.cover(1)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("origin", ["made", "cast", "deepcopy"])
def test_discrete_weights_compiled(origin, backend, fresh_compiler):
    layer = ORIGINS[origin](discrete())
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    x = torch.randn(T, K, requires_grad=True)
    y = compiled(x, SPLITS)
    write(layer)
    with pytest.raises(RuntimeError, match=CHANGED):
        y.sum().backward()
    compiled(x, SPLITS).sum().backward()


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_expert_counts(frozen):
    layer = discrete()
    layer.group_parameters("weight")[frozen].requires_grad_(False)
    x = torch.randn(T, K, requires_grad=True)
    y = layer(x, SPLITS)
    write(layer)
    with pytest.raises(RuntimeError, match=CHANGED):
        y.sum().backward()


@pytest.mark.parametrize("feature", ["out", "recompute", "offload", "delay"])
def test_discrete_weights_with_a_feature(feature):
    x = torch.randn(T, K, requires_grad=True)
    if feature == "recompute":
        mlp = tgl.GroupedMLP(G, K, 8, single_grouped_weight=False, recompute_activation=True)
        y, layer = mlp(x, SPLITS), mlp.fc1
    else:
        layer = discrete(delay_wgrad_compute=feature == "delay")
        out = torch.empty(T, N) if feature == "out" else None
        with tgl.cpu_offload(feature == "offload", min_bytes=0):
            y = layer(x, SPLITS, out=out)
    write(layer)
    with pytest.raises(RuntimeError, match=CHANGED):
        y.sum().backward()


def test_only_an_input_gradient_reads_the_weight():
    layer = discrete()
    y = layer(torch.randn(T, K), SPLITS)
    write(layer)
    y.sum().backward()
    assert layer.weight0.grad is not None


def test_an_optimizer_between_two_steps():
    layer = discrete()
    optimizer = torch.optim.Adam(layer.parameters())
    for _ in range(3):
        layer(torch.randn(T, K, requires_grad=True), SPLITS).sum().backward()
        optimizer.step()


def test_attributes_and_identity_survive_packing():
    layer = discrete()
    layer.weight0.main_grad = torch.zeros(N, K)
    twin = pickle.loads(pickle.dumps(layer))
    assert twin.weight0 is twin.group_parameters("weight")[0]
    assert twin.weight0.main_grad.shape == (N, K)
    assert twin.weight0.requires_grad
    assert type(twin.weight0) is nn.Parameter


def test_parameters_that_cannot_count_their_versions_together():
    """They keep their attributes and are copied for every call: the gradient is that of the forward's values."""
    layer = discrete(bias=False)
    own = [nn.Parameter(torch.randn(N, K)) for _ in range(G)]
    hooked = []
    own[2].register_hook(hooked.append)
    layer.load_state_dict({f"weight{i}": p for i, p in enumerate(own)}, assign=True)
    x = torch.randn(T, K, requires_grad=True)
    (expected,) = torch.autograd.grad(layer(x, SPLITS).sum(), x)
    y = layer(x, SPLITS)
    write(layer)
    y.sum().backward()
    assert torch.equal(x.grad, expected)
    assert len(hooked) == 1
    assert layer.weight2 is own[2]


# --- quantised weights ------------------------------------------------------------------------------------------------


def held_quantised():
    torch.manual_seed(0)
    layer = tgl.GroupedLinear(G, K, N, recipe=tgl.recipes.MXFP8BlockScaling())
    layer.quantize_weight()
    return layer


QUANTISED_WRITES = {
    "quantize_": lambda layer: layer.weight.quantize_(torch.randn(G, N, K)),
    "copy_": lambda layer: layer.weight.copy_(torch.randn(G, N, K)),
    "one expert": lambda layer: layer.weight.unbind()[1].quantize_(torch.randn(N, K)),
    "load_state_dict": lambda layer: layer.load_state_dict(tgl.GroupedLinear(G, K, N).state_dict(), strict=False),
}


@pytest.mark.cover(1)
@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
@pytest.mark.parametrize("change", QUANTISED_WRITES)
def test_a_weight_held_quantised(change, backend, fresh_compiler):
    layer = held_quantised()
    run = layer if backend is None else torch.compile(layer, backend=backend, fullgraph=True)
    x = torch.randn(T, K, requires_grad=True)
    y = run(x, SPLITS)
    with torch.no_grad():
        QUANTISED_WRITES[change](layer)
    with pytest.raises(RuntimeError, match=CHANGED):
        y.sum().backward()
    run(x, SPLITS).sum().backward()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_weight_written_by_a_graph(backend, fresh_compiler):
    layer = held_quantised()
    x = torch.randn(T, K, requires_grad=True)
    y = layer(x, SPLITS)

    @torch.compile(backend=backend, fullgraph=True)
    def step(weight, values):
        with torch.no_grad():
            weight.quantize_(values)

    step(layer.weight, torch.randn(G, N, K))
    with pytest.raises(RuntimeError, match=CHANGED):
        y.sum().backward()


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_a_quantised_input(backend, fresh_compiler):
    layer = tgl.GroupedLinear(G, K, N, recipe=tgl.recipes.MXFP8BlockScaling())
    values = torch.randn(T, K)
    x = tgl.quantize(values, None, m_splits=SPLITS, format="mxfp8", scale_layout="blocked")
    run = layer if backend is None else torch.compile(layer, backend=backend, fullgraph=True)
    y = run(x, SPLITS)
    x.quantize_(values)
    with pytest.raises(RuntimeError, match=CHANGED):
        y.sum().backward()
