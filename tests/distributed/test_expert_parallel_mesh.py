"""Expert parallelism in one dimension of a mesh, data parallelism in the other: four ranks train as one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import tgl
from tgl.distributed import ExpertParallelMLP

from .test_expert_parallel_mlp import E, H, I, chosen

TOKENS, TOP_K = 5, 3  # of each rank


class Layers(nn.Module):
    """Layers with a residual."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, index, weights)
        return x


def sharded(model: Layers, mesh: DeviceMesh) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def replicated(model: Layers, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


WRAPPERS = {"fully_shard": sharded, "DistributedDataParallel": replicated}
RATE = 1e-3  # weights stay as large as they are


def check(wrapper: str, compiled: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    options: dict[str, Any] = {"params_dtype": torch.float64, "bias": True}
    count = 1 if compiled else 2  # a layer is a graph of its own
    whole = Layers([tgl.MoE(E, H, I, **options) for _ in range(count)])
    room = {"group": mesh["ep"], "top_k": TOP_K, "max_tokens": TOKENS}
    model = Layers([ExpertParallelMLP(E, H, I, **room, **options) for _ in range(count)])
    experts = slice(mesh.get_local_rank("ep") * E // 2, (mesh.get_local_rank("ep") + 1) * E // 2)
    with torch.no_grad():
        for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
            ours.copy_(theirs[experts])
    x, index = torch.randn(4 * TOKENS, H).double(), chosen("even", 4 * TOKENS)
    weights = torch.rand(4 * TOKENS, TOP_K).double()
    place = 2 * mesh.get_local_rank("dp") + mesh.get_local_rank("ep")
    rows = slice(place * TOKENS, (place + 1) * TOKENS)

    counter = CompileCounterWithBackend("aot_eager")
    if compiled:  # every layer, as the hooks of wrappers are no part of a graph
        torch._dynamo.reset()
        for layer in model.layers:
            layer.compile(fullgraph=True, backend=counter)
    wrapped = WRAPPERS[wrapper](model, mesh)
    before = [p.detach().clone() for p in whole.parameters()]
    # Wrappers average over the two ranks of "dp"; a layer sums over those of "ep".
    for trained, share, factor in ((whole, slice(None), 1.0), (wrapped, rows, 2.0)):
        optimizer = torch.optim.SGD(trained.parameters(), RATE)
        for _ in range(3):
            optimizer.zero_grad()
            (factor * trained(x[share], index[share], weights[share]).square().sum()).backward()
            optimizer.step()
    for ours, theirs, old in zip(model.parameters(), whole.parameters(), before, strict=True):
        value = ours.full_tensor() if isinstance(ours, DTensor) else ours
        assert (theirs - old)[experts].abs().max() > RATE  # it has learned something
        torch.testing.assert_close(value, theirs[experts], rtol=0, atol=1e-12)
    assert counter.frame_count == (1 if compiled else 0)


@pytest.mark.cover(1)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_data_parallel_in_the_other_dimension(four_ranks, wrapper, compiled):
    four_ranks(check, wrapper, compiled)
