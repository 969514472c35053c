"""A block of few choices on a device: replays whose launches overlap have the bits of the composition."""

import pytest
import torch

import tgl
from tests.gpu.device import DEVICE
from tgl.cutlass_kernels import overlap
from tgl.cutlass_kernels.launchers import decode_block

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.wide_mmas,
    pytest.mark.skipif(torch.cuda.get_device_capability(DEVICE) != (9, 0), reason="the kernels are those of sm_90"),
]

EXPERTS, CHOICES, LAYERS, REPLAYS = 64, 4, 4, 50
HIDDEN, INNER = 1024, 256  # 64 experts are fewer bytes than the most


def matrices(*shape):
    return (torch.randn(*shape, device=DEVICE) * shape[-1] ** -0.5).bfloat16()


def captures(call, monkeypatch):
    """Graphs of a call and what it returned: as it is, and by launches that do not overlap."""
    stream, found = torch.cuda.Stream(), []
    for most in (overlap.FEW_CHOICES, 0):
        monkeypatch.setattr(overlap, "FEW_CHOICES", most)
        with torch.cuda.stream(stream):
            call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found.append((graph, call()))
    return found


def same(ours, composed):
    """Replays of both have the same bits."""
    for graph, _ in (ours, composed):
        graph.replay()
    assert ours[1].isfinite().all()
    assert ours[1].any()
    assert torch.equal(ours[1], composed[1])


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tokens", [1, 4, 16])
@torch.no_grad()
def test_replays_take_new_routings(tokens, biased, monkeypatch):
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

    ours, composed = captures(call, monkeypatch)
    made = torch.Generator(DEVICE).manual_seed(0)
    for _ in range(REPLAYS):
        x.copy_(torch.randn(x.shape, generator=made, device=DEVICE))
        same(ours, composed)


@pytest.mark.parametrize("tokens", [1, 4, 16])
@torch.no_grad()
def test_replays_of_consecutive_blocks(tokens, monkeypatch):
    """With nothing in between: a block begins while the previous one ends, and reuses memory of earlier ones."""
    torch.manual_seed(tokens)
    weights = [(matrices(EXPERTS, 2 * INNER, HIDDEN), matrices(EXPERTS, HIDDEN, INNER)) for _ in range(LAYERS)]
    logits = torch.empty(LAYERS, tokens, EXPERTS, device=DEVICE, dtype=torch.bfloat16)
    x = torch.empty(tokens, HIDDEN, device=DEVICE, dtype=torch.bfloat16)

    def call():
        y = x
        for (w1, w2), own in zip(weights, logits):
            chosen = tgl.topk_router(own, CHOICES, renormalize=True, scale=3.0)  # so that results are about 1
            y = tgl.moe(y, chosen.top_k_index, chosen.weights, w1.transpose(1, 2), w2.transpose(1, 2))
        return y

    ours, composed = captures(call, monkeypatch)
    made = torch.Generator(DEVICE).manual_seed(0)
    for _ in range(REPLAYS):
        for t in (x, logits):
            t.copy_(torch.randn(t.shape, generator=made, device=DEVICE))
        same(ours, composed)


def test_small_blocks_are_served_by_the_decode_kernels():
    x, chosen = matrices(16, HIDDEN), torch.zeros(16, CHOICES, dtype=torch.int32, device=DEVICE)
    routing = tgl.route(chosen, EXPERTS)
    places = routing.source, routing.position, routing.token, routing.offs
    w1, w2 = matrices(EXPERTS, 2 * INNER, HIDDEN).transpose(1, 2), matrices(EXPERTS, HIDDEN, INNER).transpose(1, 2)
    assert tgl.explain("moe", x, w1, w2, *places, None, top_k=CHOICES).chosen is decode_block.IMPLEMENTATION
