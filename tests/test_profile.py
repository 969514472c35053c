"""Ranges of an expert layer's stages in a profile."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import tgl

G, H, I = 4, 32, 48
FORWARD = ["FC1 + activation", "activation", "FC2"]
BACKWARD = {"FC2 dgrad + dactivation", "FC2 wgrad", "FC1 wgrad", "FC1 dgrad"}
INSIDE = {"dactivation", "activation"}  # only where no kernel is fused


def stages(function):
    """Return the stages that a profile of ``function()`` shows, in order."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        function()
    events = sorted(profiler.events(), key=lambda event: event.time_range.start)
    return [event.name.removeprefix("tgl: ") for event in events if event.name.startswith("tgl: ")]


def tokens():
    return torch.randn(9, H, requires_grad=True), torch.randint(G, (9, 2)), torch.rand(9, 2)


def test_stages_of_a_block():
    block, made = tgl.MoE(G, H, I, bias=True), []
    assert stages(lambda: made.append(block(*tokens()))) == ["dispatch", "dispatch", *FORWARD, "combine"]
    backward = stages(made[0].sum().backward)
    assert set(backward) - INSIDE == BACKWARD | {"dispatch", "combine", "FC1 dbias", "FC2 dbias"}
    assert backward.index("FC2 wgrad") < backward.index("FC1 dgrad") < backward.index("FC1 wgrad")


def test_stages_of_an_mlp():
    mlp, made = tgl.GroupedMLP(G, H, I, recompute_activation=True), []
    x, sizes = torch.randn(8, H, requires_grad=True), torch.full((G,), 2)
    assert stages(lambda: made.append(mlp(x, sizes))) == FORWARD
    assert set(stages(made[0].sum().backward)) - INSIDE == BACKWARD


def test_a_profile_changes_no_bit():
    block, args = tgl.MoE(G, H, I), tokens()
    results = []

    def step():
        y = block(*args)
        results.append([y, *torch.autograd.grad(y.sum(), (args[0], *block.parameters()))])

    step()
    assert stages(step)
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.usefixtures("fresh_compiler")
def test_graphs_compiled_and_exported_while_a_profiler_runs():
    block, (x, index, weights) = tgl.MoE(G, H, I), tokens()
    expected = block(x, index, weights)
    graph = torch.compile(block, backend="aot_eager", fullgraph=True)
    with profile(activities=[ProfilerActivity.CPU]):
        y = graph(x, index, weights)
        y.sum().backward()
        exported = torch.export.export(block, (x, index, weights))
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(exported.module()(x, index, weights), expected)
    assert not any("record_function" in str(node.target) for node in exported.graph.nodes)
