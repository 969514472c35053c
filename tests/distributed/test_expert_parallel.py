"""Two ranks with half of the experts and half of the tokens each, against one rank with everything."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map

import tgl
from tgl.distributed import expert_parallel_host

E, H, I, S, TOP_K = 4, 6, 5, 16, 2
NAMES = ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]


def experts_of(parameters: dict[str, Tensor]) -> Any:
    """A function of rows and ends that runs a ``GroupedMLP`` with the given parameters."""
    mlp = tgl.GroupedMLP(parameters["fc1.weight"].shape[0], H, I, bias=True, device="meta")
    run = torch.func.functional_call
    return lambda rows, offs: run(mlp, parameters, (rows, torch.diff(offs, prepend=offs[:1] * 0)))


def whole(x: Tensor, index: Tensor, weights: Tensor, parameters: dict[str, Tensor]) -> Tensor:
    routing = tgl.route(index, E)
    y = experts_of(parameters)(tgl.dispatch(x, routing), routing.offs)
    return tgl.combine(y, routing, weights)


def problem(case: str) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Tokens, choices, weights and parameters, the same on both ranks."""
    index = torch.randint(0, E, (S, TOP_K))
    if case == "one expert takes all":
        index.fill_(1)
    elif case == "nothing crosses":
        index = torch.cat([index[: S // 2] % 2, index[S // 2 :] % 2 + 2])
    elif case == "everything crosses":
        index = torch.cat([index[: S // 2] % 2 + 2, index[S // 2 :] % 2])
    elif case == "sentinels":
        index[::3, 1], index[5], index[S // 2 + 1, 0] = E, E + 7, -1
    elif case == "nothing is routed":
        index.fill_(E)
    mlp = tgl.GroupedMLP(E, H, I, bias=True, params_dtype=torch.float64)
    parameters = {name: p.detach().requires_grad_() for name, p in mlp.named_parameters()}
    x = torch.randn(S, H, dtype=torch.float64, requires_grad=True)
    return x, index, torch.rand(S, TOP_K, dtype=torch.float64, requires_grad=True), parameters


def check(case: str) -> None:
    x, index, weights, parameters = problem(case)
    leaves = [x, weights, *parameters.values()]
    expected = whole(x, index, weights, parameters)
    grads = torch.autograd.grad(expected.sin().sum(), leaves)

    mesh = init_device_mesh("cpu", (2,))
    group = mesh.get_group()

    def layer(x: Tensor, index: Tensor, weights: Tensor, *values: Tensor) -> Tensor:
        return expert_parallel_host(experts_of(dict(zip(NAMES, values))), x, index, weights, E, group)

    over_ranks = local_map(
        layer, out_placements=[Shard(0)], in_placements=([Shard(0)],) * (3 + len(NAMES)), device_mesh=mesh
    )
    shards = {
        id(t): distribute_tensor(t.detach(), mesh, [Shard(0)]).requires_grad_(t.requires_grad) for t in (*leaves, index)
    }
    y = over_ranks(*(shards[id(t)] for t in (x, index, weights, *(parameters[name] for name in NAMES))))
    torch.testing.assert_close(y.full_tensor(), expected)
    loss = y.to_local().sin().sum()
    for mine, theirs in zip(torch.autograd.grad(loss, [shards[id(t)] for t in leaves]), grads):
        assert mine.placements == (Shard(0),)
        torch.testing.assert_close(mine.full_tensor(), theirs)


def check_example_of_the_documentation() -> None:
    """The example of docs/expert_parallel.md as it stands there, but for two ranks."""
    page = (Path(__file__).parents[2] / "docs" / "expert_parallel.md").read_text()
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def layer" in block)
    assert '("cpu", (1,)), 8 ' in code
    names: dict[str, Any] = {}
    exec(code.replace('("cpu", (1,)), 8 ', '("cpu", (2,)), 8 '), names)
    mesh, num_experts = names["mesh"], names["num_experts"]
    assert names["y"].shape == (16, 64)
    index, weights = torch.randint(num_experts, (S, TOP_K)), torch.rand(S, TOP_K, dtype=torch.float64)
    x = torch.randn(S, H, dtype=torch.float64)
    mlp = tgl.GroupedMLP(num_experts, H, I, params_dtype=torch.float64)
    routing = tgl.route(index, num_experts)
    expected = tgl.combine(mlp.forward_offsets(tgl.dispatch(x, routing), routing.offs), routing, weights)
    tensors = x, index, weights, mlp.fc1.weight, mlp.fc2.weight
    y = names["moe"](*(distribute_tensor(t.detach(), mesh, [Shard(0)]) for t in tensors))
    torch.testing.assert_close(y.full_tensor(), expected)


def check_number_of_experts() -> None:
    x, index, weights, parameters = problem("random")
    with pytest.raises(ValueError, match="`num_experts` must be a multiple of the 2 ranks of `group`, but got 5"):
        expert_parallel_host(experts_of(parameters), x, index, weights, 5, dist.group.WORLD)


@pytest.mark.parametrize(
    "case",
    ["random", "one expert takes all", "nothing crosses", "everything crosses", "sentinels", "nothing is routed"],
)
def test_values_and_gradients(ranks, case):
    ranks(check, case)


def test_example_of_the_documentation(ranks):
    ranks(check_example_of_the_documentation)


def test_number_of_experts(ranks):
    ranks(check_number_of_experts)
