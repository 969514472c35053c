"""A model of several expert-parallel blocks, compiled under autocast: every gradient against the model in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import tgl
from tgl.distributed import ExpertParallelMLP

EXPERTS, HIDDEN, FFN, TOKENS, TOP_K, BLOCKS = 4, 32, 48, 24, 2, 2


class Block(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False, dtype=options.get("params_dtype"))
        room = {"group": dist.group.WORLD, "top_k": TOP_K, "max_tokens": TOKENS, "capacity_factor": 2.0}
        self.experts = ExpertParallelMLP(EXPERTS, HIDDEN, FFN, **room, **options)

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        routed = tgl.topk_router(self.gate(x), TOP_K, index=index)
        return x + self.experts(x, routed.top_k_index, routed.weights)


class Model(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(**options) for _ in range(BLOCKS))

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, index)
        return x


def gradients(model: nn.Module, call: Any, x: Tensor, index: Tensor, autocast: bool) -> dict[str, Tensor]:
    x = x.detach().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = call(x, index)
    leaves = {"x": x, **dict(model.named_parameters())}
    return dict(zip(leaves, torch.autograd.grad(y.square().mean(), leaves.values())))


def check(backend: str | None) -> None:
    torch.manual_seed(0)
    model = Model()
    exact = Model(params_dtype=torch.float64)
    exact.load_state_dict(model.state_dict())
    x, index = torch.randn(TOKENS, HIDDEN), torch.rand(TOKENS, EXPERTS).topk(TOP_K).indices
    call = torch.compile(model, fullgraph=True, backend=backend) if backend else model
    expected = gradients(exact, exact, x.double(), index, False)
    for name, found in gradients(model, call, x, index, True).items():
        error = float((found.double() - expected[name]).norm() / expected[name].norm())
        assert error < 0.04, f"{name}: {error}"


@pytest.mark.parametrize("backend", [None, "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_every_gradient_under_autocast(ranks, backend):
    ranks(check, backend)
