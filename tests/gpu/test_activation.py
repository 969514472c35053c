"""Activation kernels on a device: as the torch operators do it, in one graph for every routing, the same bits again."""

import pytest
import torch

import tgl
from tests.activation_cases import CASES, width
from tests.gpu.device import DEVICE, TAIL, ends, served
from tests.kernel_cases import ROUTINGS as ALL
from tests.memory import same_bytes
from tgl.meta.activations import TABLE

pytestmark = pytest.mark.gpu

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ROUTINGS = {name: ALL[name] for name in ("edges", "one takes all", "all empty", "many")}


def inputs(kind, sizes, columns, dtype, probs):
    """dy, x, offs and probs; NaN in every tail."""
    rows = sum(sizes) + TAIL
    x = (torch.randn(rows, width(kind, columns), device=DEVICE) * 3).to(dtype)
    dy = torch.randn(rows, columns, device=DEVICE).to(dtype)
    probs = torch.rand(rows, device=DEVICE) if probs else None
    for t in (dy, x, probs):
        if t is not None:
            t[sum(sizes) :] = float("nan")
    return dy, x, ends(sizes), probs


def close(got, wanted):
    """A unit in the last place: values may lie on either side of a rounding's edge. Sums near 0 may lose float32's."""
    info = torch.finfo(got.dtype)
    torch.testing.assert_close(got.float(), wanted.float(), rtol=max(info.eps, 2**-18), atol=max(info.tiny, 2**-17))


def on_the_cpu(op, *args, **kwargs):
    moved = [a.cpu() if isinstance(a, torch.Tensor) else a for a in args]
    result = getattr(torch.ops.tgl, op)(*moved, **kwargs)
    return result.to(DEVICE) if isinstance(result, torch.Tensor) else tuple(t.to(DEVICE) for t in result)


@pytest.mark.parametrize("sizes", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
@pytest.mark.parametrize(
    ("dtype", "columns", "with_probs"), [(BF16, 776, True), (BF16, 33, False), (F16, 1032, True), (F32, 260, True)]
)
def test_values_are_those_of_a_cpu(sizes, options, dtype, columns, with_probs):
    dy, x, offs, probs = inputs(options["kind"], sizes, columns, dtype, with_probs)
    y = served("grouped_activation", x, offs, probs, **options)
    dx, dprobs = served("grouped_activation_backward", dy, x, offs, probs, **options)
    wanted = on_the_cpu("grouped_activation", x, offs, probs, **options)
    wanted_dx, wanted_dprobs = on_the_cpu("grouped_activation_backward", dy, x, offs, probs, **options)
    close(y, wanted)
    close(dx, wanted_dx)
    torch.testing.assert_close(dprobs, wanted_dprobs, rtol=1e-5, atol=2e-3)
    for t in (y, dx, dprobs):
        assert t[sum(sizes) :].eq(0).all()
    if TABLE[options["kind"]].exact:
        assert torch.equal(y, wanted)
        assert torch.equal(dx, wanted_dx)
    for _ in range(5):
        assert torch.equal(served("grouped_activation", x, offs, probs, **options), y)
        again = served("grouped_activation_backward", dy, x, offs, probs, **options)
        assert torch.equal(again[0], dx)
        assert torch.equal(again[1], dprobs)


@pytest.mark.parametrize("sizes", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
@pytest.mark.parametrize(
    ("dtype", "quantising", "with_probs"),
    [
        (BF16, {"format": "mxfp8", "scale_layout": "blocked"}, True),
        (BF16, {"format": "mxfp8"}, False),
        (F32, {"format": "mxfp8", "scale_layout": "blocked"}, True),
        (BF16, {"format": "fp8_block"}, True),
        (F32, {"format": "fp8_block", "power_of_two": False}, False),
        (BF16, {"format": "fp8_block", "columnwise": False}, False),
        (BF16, {"format": "fp8_tensor"}, True),
    ],
    ids=str,
)
def test_activation_quantize_has_the_bytes_of_two_ops(sizes, options, dtype, quantising, with_probs):
    _, x, offs, probs = inputs(options["kind"], sizes, 776, dtype, with_probs)
    scale = torch.full((len(sizes),), 2.0, device=DEVICE) if quantising["format"] == "fp8_tensor" else None
    ours = served("grouped_activation_quantize", x, offs, probs, scale, **options, **quantising)
    y = tgl.grouped_activation(x, offs, probs, **options)
    for name, a, b in zip(ours._fields, ours, tgl.group_quantize(y, offs, scale, **quantising)):
        assert same_bytes(a, b), name
    cpu = tgl.group_quantize(y.cpu(), offs.cpu(), None if scale is None else scale.cpu(), **quantising)
    for name, a, b in zip(ours._fields, ours, cpu):
        assert same_bytes(a.cpu(), b), name


def test_one_graph_for_every_routing():
    rows, columns = 3000, 520
    x = torch.randn(rows, 2 * columns, device=DEVICE).to(BF16)
    dy, probs = torch.randn(rows, columns, device=DEVICE).to(BF16), torch.rand(rows, device=DEVICE)
    offs = ends((rows,))

    def step():
        y = tgl.grouped_activation(x, offs, probs)
        quantised = tgl.grouped_activation_quantize(x, offs, probs, format="mxfp8", scale_layout="blocked")
        return y, *torch.ops.tgl.grouped_activation_backward(dy, x, offs, probs), quantised.data

    wanted = [t.clone() for t in step()]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for end in (0, 1, 777, rows, 128):
        offs.fill_(end)
        for result in results:
            result.view(torch.uint8).fill_(0x7F)
        graph.replay()
        for got, whole in zip(results, wanted):
            assert same_bytes(got[:end], whole[:end]), end
            assert got[end:].view(torch.uint8).eq(0).all(), end
