"""Caller buffers, main_grad and delayed gradients on a device: captured and compiled, exact on integers."""

import pytest
import torch

import tgl
from tests.gpu.device import DEVICE, integers
from tests.kernel_cases import CANARY

pytestmark = pytest.mark.gpu


BF16, F32 = torch.bfloat16, torch.float32
G, K, N, T = 4, 264, 328, 600


def make_layer(**options):
    layer = tgl.GroupedLinear(G, K, N, params_dtype=BF16, device=DEVICE, **options)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(integers(*p.shape))
    return layer


def expected(layer, x, dy, sizes):
    """Return output, input gradient, weight gradient and bias gradient in float64."""
    weight, bias = layer.packed("weight").double().requires_grad_(), layer.packed("bias").double().requires_grad_()
    rows = x.detach()[: sum(sizes)].double().requires_grad_()
    parts = zip(rows.split(sizes), weight, bias)
    y = torch.cat([torch.nn.functional.linear(part, w, b) for part, w, b in parts])
    y.backward(dy[: sum(sizes)].double())
    return y.detach(), rows.grad, weight.grad, bias.grad


@pytest.mark.parametrize("single", [True, False], ids=["packed", "discrete"])
def test_one_captured_graph_for_every_routing(single):
    """Two replays between two ``backward_dw``: each takes the next place, and nothing is read on the host."""
    layer = make_layer(single_grouped_weight=single, delay_wgrad_compute=True, fuse_wgrad_accumulation=True)
    main_grad = tgl.allocate_wgrad(G, (N, K), F32, DEVICE).zero_()
    weights = layer.group_parameters("weight")
    if single:
        main_grad = torch.zeros(G, N, K, device=DEVICE)
    for weight, slot in zip(weights, [main_grad] if single else main_grad):
        weight.main_grad = slot
    layer.reserve_delayed_wgrad(T, microbatches=2)
    x, dy = integers(T, K).requires_grad_(), integers(T, N)
    out, dgrad_out = (
        torch.full((T, N), CANARY, device=DEVICE).to(BF16),
        torch.full((T, K), CANARY, device=DEVICE).to(BF16),
    )
    splits = torch.tensor([100, 0, 50, 7], device=DEVICE)

    def step():
        y = layer(x, splits, out=out, dgrad_out=dgrad_out)
        wanted = (x, *layer.parameters())  # a gradient that is not requested is not delayed either
        return y, torch.autograd.grad(y, wanted, dy, allow_unused=True)[0]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    layer.backward_dw()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, dx = step()
    assert y.data_ptr() == out.data_ptr()
    assert dx.data_ptr() == dgrad_out.data_ptr()
    for routings in (([200, 0, 300, 10], [1, 2, 3, 4]), ([0, 0, 0, 600], [150, 150, 150, 150])):
        main_grad.zero_()
        for b in layer.group_parameters("bias"):
            b.grad = None
        totals = [0.0, 0.0]
        for sizes in routings:
            splits.copy_(torch.tensor(sizes))
            with torch.no_grad():
                x.copy_(integers(T, K))
            dy.copy_(integers(T, N))
            out.fill_(CANARY)
            dgrad_out.fill_(CANARY)
            graph.replay()
            want_y, want_dx, *gradients = expected(layer, x, dy, sizes)
            used = sum(sizes)
            assert torch.equal(out[:used], want_y.to(BF16))
            assert torch.equal(dgrad_out[:used], want_dx.to(BF16))
            assert (out[used:] == CANARY).all()
            assert (dgrad_out[used:] == CANARY).all()
            totals = [a + b for a, b in zip(totals, gradients)]
        layer.backward_dw()
        assert torch.equal(main_grad.double(), totals[0])
        biases = [b.grad for b in layer.group_parameters("bias")]
        assert torch.equal((biases[0] if single else torch.stack(biases)), totals[1].to(BF16))


@pytest.mark.parametrize("single", [True, False], ids=["packed", "discrete"])
def test_compiled(single):
    layer = make_layer(single_grouped_weight=single)
    step = torch.compile(layer, fullgraph=True)
    for sizes in ([100, 0, 50, 7], [0, 600, 0, 0]):
        layer.zero_grad()
        x, dy = integers(T, K).requires_grad_(), integers(T, N)
        out, dgrad_out = torch.full((T, N), CANARY, device=DEVICE).to(BF16), torch.zeros(T, K, device=DEVICE).to(BF16)
        y = step(x, torch.tensor(sizes, device=DEVICE), out=out, dgrad_out=dgrad_out)
        y.backward(dy)
        want_y, want_dx, dweight, dbias = expected(layer, x, dy, sizes)
        assert y.data_ptr() == out.data_ptr()
        assert torch.equal(out[: sum(sizes)], want_y.to(BF16))
        assert torch.equal(dgrad_out[: sum(sizes)], want_dx.to(BF16))
        for name, want in (("weight", dweight), ("bias", dbias)):
            have = [p.grad for p in layer.group_parameters(name)]
            assert torch.equal(have[0] if single else torch.stack(have), want.to(BF16))
        if not single:
            assert all(w.grad.data_ptr() % 256 == 0 for w in layer.group_parameters("weight"))
