"""Choices of a router grouped by expert on a device, in one launch and in two, captured in a graph too."""

import pytest
import torch

import tgl
from tests.routing_oracle import expected

pytestmark = pytest.mark.gpu

CASES = [(1, 8, 128), (64, 8, 128), (300, 16, 1000), (700, 8, 7), (16384, 8, 128), (32768, 10, 512), (400000, 4, 1024)]


@pytest.mark.parametrize("beyond", [0, 2])
@pytest.mark.parametrize("tokens, top_k, experts", CASES)
def test_route(tokens, top_k, experts, beyond):
    """Replays see other choices."""
    first, second = torch.randint(-beyond, experts + beyond, (2, tokens, top_k), device="cuda")
    index = first.clone()
    assert tgl.explain("route", index, experts).chosen.name == "tgl kernel"
    tgl.warmup("route", index, experts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = torch.ops.tgl.route(index, experts)
    for choices in (first, second):
        index.copy_(choices)
        graph.replay()
        for ours, wanted in zip(made, expected(choices.cpu(), experts), strict=True):
            assert torch.equal(ours.cpu(), wanted)
