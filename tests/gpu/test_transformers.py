"""Quantised experts of transformers on a device: no further from float64 than on a CPU, compiled and in a graph too."""

import pytest
import torch

pytest.importorskip("transformers")

from tests.gpu.device import DEVICE
from tests.integrations import test_transformers_fp8 as fp8
from tests.integrations.test_transformers_fp8 import kernels  # noqa: F401 (a fixture of every test)
from tests.integrations.test_transformers_mxfp4 import (  # noqa: F401 (fixtures)
    EXPERTS,
    HIDDEN,
    TOP_K,
    checkpoint,
    decoded,
    load,
    packed,
    registered,
)

pytestmark = pytest.mark.gpu

TOKENS = 200
BF16 = torch.bfloat16


def results(call, data):
    """Output, and the gradients of the tokens and the routing weights, on the CPU."""
    x, index, weights, dy = data
    out = call(x, index, weights)
    return [t.double().cpu() for t in (out.detach(), *torch.autograd.grad(out, (x, weights), dy))]


def placed(data, device, dtype):
    x, index, weights, dy = (t.detach().to(device) for t in data)
    return x.to(dtype).requires_grad_(), index, weights.to(dtype).requires_grad_(), dy.to(dtype)


def assert_as_near(found, cpu, reference):
    """Compare norms of errors; a tenth more is allowed for other roundings."""
    for ours, other, exact in zip(found, cpu, reference, strict=True):
        assert (ours - exact).norm() <= 1.1 * (other - exact).norm()


@pytest.mark.parametrize("how", ["called", "compiled"])
def test_packed_mxfp4(checkpoint, how):  # noqa: F811
    experts = packed(load(checkpoint, dtype=BF16))[0]
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).to(BF16)
    index = torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOP_K).indices
    weights = torch.rand(TOKENS, TOP_K, generator=generator).to(BF16)
    data = x, index, weights, torch.randn(TOKENS, HIDDEN, generator=generator).to(BF16)
    wide = decoded(checkpoint).model.layers[0].mlp.experts.double()
    reference = results(wide, placed(data, "cpu", torch.float64))
    cpu = results(experts, placed(data, "cpu", BF16))
    experts = experts.to(DEVICE)
    call = torch.compile(experts, fullgraph=True) if how == "compiled" else experts
    assert_as_near(results(call, placed(data, DEVICE, BF16)), cpu, reference)


def test_packed_mxfp4_generates(checkpoint):  # noqa: F811
    model = load(checkpoint, dtype=BF16).to(DEVICE)
    prompt = torch.randint(50, (2, 6), generator=torch.Generator().manual_seed(5)).to(DEVICE)
    made = model.generate(prompt, max_new_tokens=8, do_sample=False)
    assert made.shape == (2, 14)
    assert torch.equal(made, model.generate(prompt, max_new_tokens=8, do_sample=False))


@pytest.mark.parametrize("case", fp8.CASES)
def test_fp8(case):
    """An activation that squares, which transformers runs as its own code and tgl as its op."""
    experts, data = fp8.make(fp8.CASES[case], has_gate=False, hidden_act="relu2"), fp8.inputs(dtype=BF16)
    reference = [t.double() for t in fp8.exact(experts, data)]
    cpu = [t.double() for t in fp8.run(experts, "tgl", data)]
    experts = experts.to(DEVICE)
    assert_as_near(results(experts, placed(data, DEVICE, BF16)), cpu, reference)


def test_packed_fp4_in_a_graph():
    experts = fp8.make_fp4(torch.int8, has_gate=True).to(DEVICE)
    x, index, weights, _ = (t.detach().to(DEVICE) for t in fp8.inputs(dtype=BF16))
    stream = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(stream):
        experts(x, index, weights)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = experts(x, index, weights)
    for shift in range(3):
        index.copy_((index + shift) % fp8.EXPERTS)
        graph.replay()
        with torch.no_grad():
            assert torch.equal(out, experts(x, index, weights))
