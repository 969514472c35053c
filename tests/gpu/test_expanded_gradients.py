"""``layer(...).sum().backward()`` in eager mode on a device: a gradient of one number at every stride 0, and biases."""

import copy

import pytest
import torch

import tgl
from tests.gpu.device import DEVICE, TAIL
from tests.kernel_cases import integers, poisoned

pytestmark = pytest.mark.gpu

SIZES = (130, 0, 300, 1)
DEPTH, COLUMNS, RANK = 64, 136, 8
BF16 = torch.bfloat16


def linear(**options):
    return tgl.GroupedLinear(len(SIZES), DEPTH, COLUMNS, params_dtype=BF16, **options)


def packed():
    return tgl.GroupedPackedLinear(len(SIZES), DEPTH, COLUMNS)


LAYERS = {
    "dense": linear,
    "discrete": lambda: linear(single_grouped_weight=False),
    "low rank": lambda: tgl.GroupedLoRALinear(linear(), RANK),
    "packed": packed,
    "low rank, packed": lambda: tgl.GroupedLoRALinear(packed(), RANK),
}


def step(layer, x, device):
    """The result, and every gradient: all sums are of integers below 256, hence exact in bfloat16."""
    layer, rows = copy.deepcopy(layer).to(device), x.to(device).requires_grad_()
    y = layer(rows, torch.tensor(SIZES, device=device))
    y.sum().backward()
    found = {"y": y.detach(), "x": rows.grad} | {n: p.grad for n, p in layer.named_parameters() if p.grad is not None}
    return {name: t.cpu() for name, t in found.items()}


@pytest.mark.parametrize("kind", LAYERS)
def test_expanded_gradients_have_the_bits_of_a_cpu(kind):
    torch.manual_seed(0)
    layer = LAYERS[kind]()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(integers(*parameter.shape))
    x = poisoned(integers(sum(SIZES) + TAIL, DEPTH), SIZES)
    found, wanted = step(layer, x, DEVICE), step(layer, x, "cpu")
    assert found.keys() == wanted.keys()
    assert wanted["y"].any()
    assert wanted["x"].any()
    for name, t in wanted.items():
        assert torch.equal(found[name], t), name
