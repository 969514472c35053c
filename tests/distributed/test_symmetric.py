"""Symmetric memory: which tensors have it, which groups share it, and the errors of ranks that cannot.

The memory itself is a CPU's, as torch makes none there; ``tests/gpu/test_expert_parallel.py`` has torch's.
"""

from __future__ import annotations

import re
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tgl.distributed import ExpertParallelMLP, _agreement, _symmetric_memory
from tgl.distributed._symmetric_memory import reserve
from tgl.meta import symmetric_memory


def rendezvous(group: Any, size: int) -> symmetric_memory.Peers:
    """Instead of torch's: no rank can access another one's memory."""
    counts = torch.zeros(group.size(), dtype=torch.int32)
    memory = torch.zeros(size, dtype=torch.uint8)
    return symmetric_memory.Peers(
        group.rank(), torch.zeros(group.size(), dtype=torch.int64), memory, counts, counts, counts, group
    )


def check_sharing() -> None:
    first, second = dist.group.WORLD, dist.new_group(backend="gloo")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_reason", "_reason_of_kernels"):
            patch.setattr(_symmetric_memory, name, lambda *_: None)
        patch.setattr(_symmetric_memory, "_rendezvous", rendezvous)
        reserve(first, 1000, "a layer")
        memory = symmetric_memory.memory_of(first.group_name)
        reserve(first, 500, "a smaller layer")
        assert symmetric_memory.memory_of(first.group_name) is memory
        reserve(first, 2000, "a larger layer")
        assert symmetric_memory.memory_of(first.group_name).memory.shape == (2000,)
        reserve(second, 500, "a layer of another group")
        assert symmetric_memory.memory_of(first.group_name).memory.shape == (2000,)
        # A group that was destroyed leaves its name to another one.
        symmetric_memory.put(second.group_name, symmetric_memory.memory_of(first.group_name))
        reserve(second, 500, "a layer of a later group")
        assert symmetric_memory.memory_of(second.group_name).group is second
    for group in (first, second):
        symmetric_memory.forget(group.group_name)


def check_reasons() -> None:
    me, group = dist.get_rank(), dist.group.WORLD

    def refuse(group: Any, size: int) -> symmetric_memory.Peers:
        if me == 1:
            raise RuntimeError("no peer access")
        return rendezvous(group, size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_symmetric_memory, "_reason", lambda group: None)
        for function, reason in (
            (refuse, "rank 1: torch's rendezvous failed: no peer access"),
            (rendezvous, "rank 0: no ep_route: all_to_all_single: the call requests engine='symmetric_memory'"),
        ):
            patch.setattr(_symmetric_memory, "_rendezvous", function)
            said = "layer 7: `engine='symmetric_memory'` is not available: " + reason
            with pytest.raises(RuntimeError, match=re.escape(said)):
                reserve(group, 1000, "layer 7")
            assert symmetric_memory.of(group.group_name) is None


def check_seconds() -> None:
    """A group's own time-out, also where it has no backend for the device, and one that no clock reaches."""
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    limits = timedelta(seconds=2), timedelta(milliseconds=1500)
    for backend, limit in zip(("gloo", "cpu:gloo"), limits):
        group = dist.new_group(timeout=limit, backend=backend)
        for device in (cpu, cuda):
            assert _agreement.time_out(group, device) == limit.total_seconds()
    group = SimpleNamespace(_device_types=[cpu], _get_backend=lambda _: object())
    assert _agreement.time_out(group, cpu) == symmetric_memory.WAIT
    nothing = torch.zeros(1, dtype=torch.int32)
    endless = symmetric_memory.Peers(
        0, torch.zeros(1), nothing, nothing, nothing, nothing, None, timedelta.max.total_seconds()
    )
    assert endless.watch[0, 0] == 2**63 - 1


def test_the_time_out_is_that_of_the_group(ranks):
    ranks(check_seconds)


def check_failure() -> None:
    """A layer reports a device that does not answer."""
    group = dist.group.WORLD
    layer = ExpertParallelMLP(4, 16, 16, group=group, top_k=2, max_tokens=8, name="layer 7")
    index, x = torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 16)

    def stopped() -> list[int]:
        raise RuntimeError("CUDA error: unspecified launch failure")

    def answers(said: str) -> None:
        for ask in (lambda: layer(x, index), layer.check):
            with pytest.raises(RuntimeError, match=said):
                ask()

    needed = layer.exchange.needed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(needed, "arrived", stopped)
        patch.setattr(needed, "most", SimpleNamespace(tolist=stopped))
        answers(r"^CUDA error")
        known = rendezvous(group, 1000)
        symmetric_memory.put(group.group_name, known)
        answers(r"^CUDA error")
        known.missed[1, 0] = 1  # of which a rank is none that it waits for
        said = f"rank {group.rank()} of 2 waited 600 s for rank {1 - group.rank()} in ep_dispatch"
        waited = f"^layer 7: {said}, in the barrier before its"
        answers(waited)
        symmetric_memory.put(group.group_name, rendezvous(group, 2000))
        answers(waited)  # of a graph that was captured before the memory grew
        symmetric_memory.put("another group", known)
        symmetric_memory.forget("another group")
        known.missed.zero_()
        answers(r"^CUDA error")
    symmetric_memory.forget(group.group_name)


def test_a_layer_names_a_missing_rank(ranks):
    ranks(check_failure)


def test_layers_of_a_group_share_the_memory(ranks):
    ranks(check_sharing)


def test_a_rank_without_memory_is_named_by_all(ranks):
    ranks(check_reasons)
