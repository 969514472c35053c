"""Adapters that PEFT put on experts of transformers, on a device: no further from float64 than on a CPU."""

import copy

import pytest
import torch

pytest.importorskip("peft")

from tests.gpu.device import DEVICE
from tests.gpu.test_transformers import assert_as_near, placed
from tests.integrations.test_peft import (  # noqa: F401 (a fixture of every test)
    EXPERTS,
    HIDDEN,
    MODELS,
    adapted,
    attached,
    experts_of,
    registered,
)

pytestmark = pytest.mark.gpu

TOKENS, TOP_K = 200, 2
BF16, F64 = torch.bfloat16, torch.float64


def step(experts, data):
    """Output, and the gradients of the tokens, the routing weights and the adapters, on the CPU."""
    x, index, weights, dy = data
    out = experts(x, index, weights)
    adapters = [p for p in experts.parameters() if p.requires_grad]
    assert len(adapters) == 4  # A and B of both parameters; the base is frozen
    return [t.double().cpu() for t in (out.detach(), *torch.autograd.grad(out, (x, weights, *adapters), dy))]


@pytest.mark.parametrize("how", ["called", "compiled"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_step_with_adapters(kind, how, fresh_compiler):
    """A bfloat16 model, whose adapters PEFT makes float32; the routing is given, so that no expert changes."""
    theirs, wide = adapted(kind, dtype=BF16), adapted(kind)
    wide.load_state_dict(theirs.state_dict())
    generator = torch.Generator().manual_seed(4)
    x, dy = (torch.randn(TOKENS, HIDDEN, generator=generator).to(BF16) for _ in range(2))
    index = torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOP_K).indices
    data = x, index, torch.rand(TOKENS, TOP_K, generator=generator).to(BF16), dy
    exact = step(experts_of(wide), placed(data, "cpu", F64))
    experts = experts_of(attached(theirs))
    cpu = step(experts, placed(data, "cpu", BF16))
    experts = copy.deepcopy(experts).to(DEVICE)
    call = torch.compile(experts, fullgraph=True) if how == "compiled" else experts
    assert_as_near(step(call, placed(data, DEVICE, BF16)), cpu, exact)
