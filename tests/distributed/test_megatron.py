"""Layers under Megatron-Core's DistributedDataParallel, against one rank that sees every row, in float64.

Its buffers ask CUDA for the current device, and from 0.19 on for the current stream: these questions are answered with
the CPU and with a stream that nothing waits for, and nothing else of it is replaced.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import tgl

G, H, I, T, STEPS, MICROBATCHES, RATE = 3, 8, 4, 6, 3, 2, 0.05
SPLITS = torch.tensor([3, 0, 2])

# What its config is given. A bucket is smaller than a layer's weights, so that its end lies between experts.
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlap_grad_reduce": {"overlap_grad_reduce": True, "bucket_size": 40},
    "use_distributed_optimizer": {"use_distributed_optimizer": True},
    "overlap_param_gather": {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "bucket_size": 40,
    },
}


class Model(nn.Module):
    """A grouped layer, or an MLP of two, with an ordinary layer on either side."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.before = nn.Linear(H, H, dtype=torch.float64)
        if kind == "mlp":
            self.experts = tgl.GroupedMLP(G, H, I, params_dtype=torch.float64, bias=True, **options)
        else:
            self.experts = tgl.GroupedLinear(G, H, H, params_dtype=torch.float64, **options)
        self.after = nn.Linear(H, H, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.experts(self.before(x), SPLITS))


def model(kind: str, **options: Any) -> Model:
    torch.manual_seed(3)
    return Model(kind, **options)


def batches(world: int) -> Tensor:
    """``[step, microbatch, rank, T, H]``"""
    torch.manual_seed(4)
    return torch.randn(STEPS, MICROBATCHES, world, T, H, dtype=torch.float64)


@contextmanager
def cpu_for_cuda() -> Iterator[None]:
    device = mock.patch("torch.cuda.current_device", return_value=torch.device("cpu"))
    stream = mock.patch("torch.cuda.current_stream", return_value=None)
    with device, stream, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages that are not installed
        yield


def step_on_one_rank(module: Model, data: Tensor) -> None:
    """One SGD step on the mean over ranks of the sum over microbatches."""
    module.zero_grad()
    for x in data.flatten(0, 1):
        (module(x).square().mean() / data.shape[1]).backward()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter -= RATE * parameter.grad


def wrap(module: Model, mode: str, group: Any, delay: bool) -> Any:
    # Imported where a rank needs it: that takes seconds.
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig

    alone = ALONE[dist.get_rank()]
    groups = ProcessGroupCollection(dp=group, dp_cp=group, expt_dp=group, tp=alone, pp=alone, ep=alone)
    config = TransformerConfig(num_layers=1, hidden_size=H, num_attention_heads=1)
    ddp_config = DistributedDataParallelConfig(delay_wgrad_compute=delay, **MODES[mode])
    return DistributedDataParallel(config, ddp_config, module, pg_collection=groups)


ALONE: list[Any] = []


def groups_of_one() -> None:
    if not ALONE:
        ALONE.extend(dist.new_group([rank]) for rank in range(dist.get_world_size()))


def update(ddp: Any, mode: str) -> None:
    """SGD: every rank steps what it owns of each buffer, the shard its reduction left there, and gathers the rest."""
    for buffer in ddp.buffers:
        for bucket in buffer.buckets:
            if buffer.param_data is None:
                for parameter in bucket.params_list:
                    parameter.data -= RATE * parameter.main_grad
            else:
                size = bucket.param_data.numel() // ddp.dp_group.size()
                mine = slice(ddp.dp_group.rank() * size, (ddp.dp_group.rank() + 1) * size)
                bucket.param_data[mine] -= RATE * bucket.grad_data[mine]
    if MODES[mode].get("use_distributed_optimizer") and mode != "overlap_param_gather":
        ddp.start_param_sync()


def check(kind: str, world: int, mode: str, packed: bool, fused: bool, delay: bool) -> None:
    groups_of_one()
    group = ALONE[dist.get_rank()] if world == 1 else dist.group.WORLD
    options = {"single_grouped_weight": packed}
    reference, data = model(kind, **options), batches(world)
    module = model(kind, fuse_wgrad_accumulation=fused, delay_wgrad_compute=delay, **options)
    layers = [m for m in module.modules() if isinstance(m, tgl.GroupedLinear)]
    with cpu_for_cuda():
        ddp = wrap(module, mode, group, delay)
        weights = [w for layer in layers for w in layer.group_parameters("weight")]
        addresses = [w.data_ptr() for w in weights]
        for step in range(STEPS):
            ddp.zero_grad_buffer()
            for microbatch in range(MICROBATCHES):
                last = microbatch == MICROBATCHES - 1
                with nullcontext() if last else ddp.no_sync():
                    loss = ddp(data[step, microbatch, group.rank()]).square().mean()
                    loss.backward()
                    assert all(w.grad is None for w in weights)
                    if module.experts.need_backward_dw():
                        module.experts.backward_dw()
                    assert all(w.grad is None for w in weights)
            assert all(w.grad_added_to_main_grad == fused for w in weights)
            ddp.finish_grad_sync()
            update(ddp, mode)
            step_on_one_rank(reference, data[step])
        if mode == "overlap_param_gather":
            ddp.disable_forward_pre_hook()
        for (name, mine), exact in zip(module.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine, exact, rtol=0, atol=1e-13, msg=lambda m, name=name: f"{name}: {m}")
        assert [w.data_ptr() for w in weights] == addresses, "the optimizer's buffer stays where the weights are"
        before = model(kind, **options)
        assert all((a - b).abs().max() > 1e-5 for a, b in zip(weights[:1], before.experts.parameters()))


CASES = [
    (kind, mode, *flags)
    for kind in ("linear", "mlp")
    for mode in MODES
    for flags in itertools.product((True, False), repeat=3)
]
NAMES = {True: ("packed", "fused", "delay"), False: ("discrete", "grad", "now")}
IDS = ["-".join((kind, mode, *(NAMES[on][i] for i, on in enumerate(flags)))) for kind, mode, *flags in CASES]


@pytest.mark.cover(2)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("kind, mode, packed, fused, delay", CASES, ids=IDS)
def test_training(ranks, world, kind, mode, packed, fused, delay):
    ranks(check, kind, world, mode, packed, fused, delay)
