"""Data parallel training over two ranks reaches the weights of one rank that sees both halves of the batch.

The bound. Both runs sum the same products; only the order differs: each rank rounds the sum over its half, and the
halves are added afterwards. With eps the spacing of the dtype and n <= 100 terms per weight gradient, one gradient
differs by at most n eps max|grad|, and ``STEPS`` of SGD at rate ``RATE`` from equal weights by ``STEPS RATE n eps
max|grad|`` to first order, which is below 100 eps for gradients below 3. The same test in float64, where the bound is
2e-14, is what tells rounding from an error.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import tgl

H, I, E, S, TOP_K, STEPS, RATE = 8, 6, 3, 16, 2, 5, 0.05


class Layer(nn.Module):
    """Norm, router, and experts: three of them, which two ranks cannot share evenly."""

    def __init__(self, dtype: torch.dtype, **options: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(H, dtype=dtype)
        self.router = nn.Linear(H, E, bias=False, dtype=dtype)
        self.experts = tgl.GroupedMLP(E, H, I, params_dtype=dtype, **{"bias": True, **options})

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        weights, chosen = self.router(h).softmax(-1).topk(TOP_K)
        routing = tgl.route(chosen, E)
        probs = tgl.dispatch_weights(weights, routing)
        return x + tgl.combine(self.experts.forward_offsets(tgl.dispatch(h, routing), routing.offs, probs), routing)


def model(dtype: torch.dtype, **options: Any) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(Layer(dtype, **options) for _ in range(2)))


def batches(dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(4)
    return [(torch.randn(S, H, dtype=dtype), torch.randn(S, H, dtype=dtype)) for _ in range(STEPS)]


def train(module: nn.Module, data: list[tuple[Tensor, Tensor]]) -> None:
    optimizer = torch.optim.SGD(module.parameters(), RATE)
    for x, target in data:
        optimizer.zero_grad()
        nn.functional.mse_loss(module(x), target).backward()
        optimizer.step()


def half(data: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    mine = slice(dist.get_rank() * S // 2, (dist.get_rank() + 1) * S // 2)
    return [(x[mine], target[mine]) for x, target in data]


def compare(trained: nn.Module, dtype: torch.dtype, **options: Any) -> None:
    single = model(dtype, **options)
    before = [p.detach().clone() for p in single.parameters()]
    train(single, batches(dtype))
    bound = 100 * torch.finfo(dtype).eps
    for mine, theirs, old in zip(trained.parameters(), single.parameters(), before, strict=True):
        value = mine.full_tensor() if isinstance(mine, DTensor) else mine
        assert (theirs - old).abs().max() > 1e-4  # it has learned something
        assert (value - theirs).abs().max() <= bound


def check_ddp(dtype: torch.dtype, packed: bool) -> None:
    module = DistributedDataParallel(model(dtype, single_grouped_weight=packed))
    train(module, half(batches(dtype)))
    compare(module, dtype, single_grouped_weight=packed)


def shard(module: nn.Sequential, unit: str, reshard: bool = True) -> nn.Sequential:
    """FSDP2 with the whole layer as a unit, or with its experts as one of their own."""
    mesh = init_device_mesh("cpu", (2,))
    for layer in module:
        part = layer if unit == "layer" else layer.experts
        fully_shard(part, mesh=mesh, reshard_after_forward=reshard)
        if unit == "experts":  # parameters are gathered before `forward` alone, unless other methods are registered
            register_fsdp_forward_method(part, "forward_offsets")
    return fully_shard(module, mesh=mesh)


def check_fully_shard(dtype: torch.dtype, unit: str, reshard: bool) -> None:
    module = shard(model(dtype), unit, reshard)
    weight = module[0].experts.fc1.weight
    assert isinstance(weight, DTensor)
    assert weight.to_local().shape[0] == (2, 1)[dist.get_rank()]  # of three experts
    train(module, half(batches(dtype)))
    compare(module, dtype)


def check_fully_shard_of_discrete_weights(dtype: torch.dtype) -> None:
    """Every expert's matrix is sharded in its rows; gathered ones lie apart and are copied together by every call."""
    module = shard(model(dtype, single_grouped_weight=False), "layer")
    assert module[0].experts.fc1.weight0.to_local().shape == (I, H)  # of twelve rows
    train(module, half(batches(dtype)))
    compare(module, dtype, single_grouped_weight=False)


def check_main_grad_under_fully_shard(packed: bool) -> None:
    """The layer computes with gathered parameters: what was set on the sharded ones is not there."""
    module = shard(
        model(torch.float32, single_grouped_weight=packed, fuse_wgrad_accumulation=True, bias=False), "layer"
    )
    for parameter in module.parameters():
        parameter.main_grad = torch.zeros(parameter.shape)
    with pytest.raises(ValueError, match=r"main_grad`(?s:.*)fully_shard"):
        module(torch.randn(S, H))


def check_main_grad_under_ddp(dtype: torch.dtype) -> None:
    """DDP reduces ``grad`` alone: ``main_grad`` holds this rank's part until the caller adds them up."""
    ((x, target), *_) = batches(dtype)
    single = model(dtype)
    nn.functional.mse_loss(single(x), target).backward()
    module = model(dtype, fuse_wgrad_accumulation=True)
    weights = [p for name, p in module.named_parameters() if name.endswith(("fc1.weight", "fc2.weight"))]
    for weight in weights:
        weight.main_grad = torch.zeros_like(weight, requires_grad=False)
    ((mine, mine_target), *_) = half([(x, target)])
    wrapper = DistributedDataParallel(module)
    nn.functional.mse_loss(wrapper(mine), mine_target).backward()
    bound = 100 * torch.finfo(dtype).eps
    for parameter, expected in zip(module.parameters(), single.parameters(), strict=True):
        grad = parameter.grad
        if hasattr(parameter, "main_grad"):
            assert grad is None or not grad.any()
            grad = parameter.main_grad.clone()
            assert (grad / 2 - expected.grad).abs().max() > 1e-4
            dist.all_reduce(grad)
            grad /= 2
        assert (grad - expected.grad).abs().max() <= bound


DELAYED = r"`delay_wgrad_compute` must be False under %s, which takes gradients when the backward ends"


def check_delay_under_ddp(packed: bool) -> None:
    """DDP with delayed gradients raises before anything is computed, except for ``main_grad`` and ignored weights."""
    options = {"single_grouped_weight": packed, "delay_wgrad_compute": True, "bias": False}
    module = DistributedDataParallel(model(torch.float32, **options))
    with pytest.raises(RuntimeError, match=DELAYED % "torch's DistributedDataParallel"):
        module(torch.randn(S, H))
    module.module(torch.randn(S, H))  # these gradients are not reduced

    fused = model(torch.float32, **options, fuse_wgrad_accumulation=True)
    ignored = model(torch.float32, **options)
    names = [name for name, _ in ignored.named_parameters() if "experts" in name]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(ignored, names)
    for inner in (fused, ignored):
        for parameter in inner.parameters():
            parameter.main_grad = torch.zeros(parameter.shape)
        DistributedDataParallel(inner)(torch.randn(S, H)).sum().backward()
        for layer in inner:
            layer.experts.backward_dw()
            weight = layer.experts.fc1.group_parameters("weight")[-1]
            assert (weight.main_grad if inner is fused else weight.grad).any()


def check_delay_under_fully_shard(packed: bool, unit: str) -> None:
    options = {"single_grouped_weight": packed, "delay_wgrad_compute": True}
    module = shard(model(torch.float32, **options), unit)
    with pytest.raises(RuntimeError, match=DELAYED % "fully_shard"):
        module(torch.randn(S, H))


def check_delay_of_ignored_parameters(packed: bool) -> None:
    module = model(torch.float32, single_grouped_weight=packed, delay_wgrad_compute=True)
    fully_shard(
        module,
        mesh=init_device_mesh("cpu", (2,)),
        ignored_params={p for layer in module for p in layer.experts.parameters()},
    )
    module(torch.randn(S, H)).sum().backward()
    for layer in module:
        layer.experts.backward_dw()
        assert layer.experts.fc1.group_parameters("weight")[-1].grad.any()


def check_fully_shard_with_offload(unit: str) -> None:
    """The parameters gathered for the forward are parameters: they stay, and are gathered again for the backward."""
    (x, _), *_ = batches(torch.float64)
    results = []
    for module, min_bytes in (
        (model(torch.float64), 0),
        (shard(model(torch.float64), unit), 0),
        (shard(model(torch.float64), unit), 1 << 30),
    ):
        with tgl.cpu_offload(min_bytes=min_bytes) as context:
            y = module(x)
        y.sin().sum().backward()
        grads = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in module.parameters()]
        results.append((context.bytes_offloaded, grads))
    (moved, _), (moved_sharded, grads), (nothing, expected) = results
    assert moved_sharded == moved > 0
    assert nothing == 0
    for mine, theirs in zip(grads, expected, strict=True):
        assert torch.equal(mine, theirs)


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


@DTYPES
@pytest.mark.parametrize("packed", [True, False])
def test_ddp(ranks, dtype, packed):
    ranks(check_ddp, dtype, packed)


@DTYPES
@pytest.mark.parametrize("unit, reshard", [("layer", True), ("experts", True), ("experts", False)])
def test_fully_shard(ranks, dtype, unit, reshard):
    ranks(check_fully_shard, dtype, unit, reshard)


@DTYPES
def test_fully_shard_of_discrete_weights(ranks, dtype):
    ranks(check_fully_shard_of_discrete_weights, dtype)


@pytest.mark.parametrize("packed", [True, False])
def test_main_grad_under_fully_shard(ranks, packed):
    ranks(check_main_grad_under_fully_shard, packed)


@pytest.mark.parametrize("packed", [True, False])
def test_delayed_weight_gradients_under_ddp(ranks, packed):
    ranks(check_delay_under_ddp, packed)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("unit", ["layer", "experts"])
def test_delayed_weight_gradients_under_fully_shard(ranks, packed, unit):
    ranks(check_delay_under_fully_shard, packed, unit)


@pytest.mark.parametrize("packed", [True, False])
def test_delayed_weight_gradients_of_ignored_parameters(ranks, packed):
    ranks(check_delay_of_ignored_parameters, packed)


@DTYPES
def test_main_grad_under_ddp(ranks, dtype):
    ranks(check_main_grad_under_ddp, dtype)


@pytest.mark.parametrize("unit", ["layer", "experts"])
def test_fully_shard_with_offload(ranks, unit):
    ranks(check_fully_shard_with_offload, unit)
