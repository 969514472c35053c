"""A block of few choices on a device: replays whose launches overlap have the bits of the composition."""

import pytest
import torch

import tgl
from tests.gpu.device import DEVICE
from tgl.cutlass_kernels import overlap
from tgl.cutlass_kernels.ops import few

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.wide_mmas,
    pytest.mark.skipif(torch.cuda.get_device_capability(DEVICE) != (9, 0), reason="the kernels are those of sm_90"),
]

EXPERTS, CHOICES, LAYERS, REPLAYS = 64, 4, 3, 50
HIDDEN, INNER = 1024, 256  # 64 experts are fewer bytes than the most


def matrices(*shape):
    return (torch.randn(*shape, device=DEVICE) * shape[-1] ** -0.5).bfloat16()


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tokens", [1, 4, 16])
@torch.no_grad()
def test_replays_follow_the_routing(tokens, biased, monkeypatch):
    """Layers in a row, so that every launch overlaps one that reads or writes what it needs."""
    torch.manual_seed(tokens)
    weights = [(matrices(EXPERTS, 2 * INNER, HIDDEN), matrices(EXPERTS, HIDDEN, INNER)) for _ in range(LAYERS)]
    biases = [(matrices(EXPERTS, 2 * INNER), matrices(EXPERTS, HIDDEN)) if biased else () for _ in range(LAYERS)]
    routers = [matrices(EXPERTS, HIDDEN) for _ in range(LAYERS)]
    x = torch.randn(tokens, HIDDEN, device=DEVICE).bfloat16()

    def call():
        y = x
        for (w1, w2), both, router in zip(weights, biases, routers):
            chosen = tgl.topk_router(y @ router.t(), CHOICES, renormalize=True)
            y = y + tgl.moe(y, chosen.top_k_index, chosen.weights, w1.transpose(1, 2), w2.transpose(1, 2), *both)
        return y

    stream, found = torch.cuda.Stream(), {}
    for most in (overlap.FEW_CHOICES, 0):
        monkeypatch.setattr(overlap, "FEW_CHOICES", most)
        with torch.cuda.stream(stream):
            call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found[most] = graph, call()
    made = torch.Generator(DEVICE).manual_seed(0)
    for _ in range(REPLAYS):
        x.copy_(torch.randn(x.shape, generator=made, device=DEVICE))
        for graph, _ in found.values():
            graph.replay()
        (_, ours), (_, composed) = found.values()
        assert ours.isfinite().all()
        assert torch.equal(ours, composed)


def test_they_are_served():
    x, chosen = matrices(16, HIDDEN), torch.zeros(16, CHOICES, dtype=torch.int32, device=DEVICE)
    routing = tgl.route(chosen, EXPERTS)
    places = routing.source, routing.position, routing.token, routing.offs
    w1, w2 = matrices(EXPERTS, 2 * INNER, HIDDEN).transpose(1, 2), matrices(EXPERTS, HIDDEN, INNER).transpose(1, 2)
    assert tgl.explain("moe", x, w1, w2, *places, None, top_k=CHOICES).chosen is few.IMPLEMENTATION
