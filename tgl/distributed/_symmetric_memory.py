"""Symmetric memory of a group's ranks, by ``torch.distributed._symmetric_memory``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .. import backends
from ..meta import symmetric_memory
from ..meta.expert_parallel import NEED_OF_PEERS, SYMMETRIC_MEMORY
from ._agreement import time_out


def reserve(group: dist.ProcessGroup, size: int, layer: str) -> None:
    """Reserve so many bytes of the group's memory for ``layer``, on each rank's current CUDA device; a collective call.

    Existing memory that is large enough is shared. Smaller memory is replaced, but not freed.

    Raises:
        RuntimeError: on all ranks, if one of them has no such memory; it says which, and why.
    """
    name = str(group.group_name)
    known = symmetric_memory.of(name)
    if known is not None and known.group is group and known.memory.shape[0] >= size:
        return
    _agree(group, layer, _reason(group))
    made, reason = None, None
    try:
        made = _rendezvous(group, size)
    except RuntimeError as error:
        reason = f"torch's rendezvous failed: {error}"
    _agree(group, layer, reason)
    assert made is not None
    symmetric_memory.put(name, made)
    try:
        _agree(group, layer, _reason_of_kernels(made, name))
    except RuntimeError:
        symmetric_memory.forget(name)
        raise


def _agree(group: dist.ProcessGroup, layer: str, reason: str | None) -> None:
    reasons: list[Any] = [None] * group.size()
    dist.all_gather_object(reasons, reason, group=group)
    said = [f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason is not None]
    if said:
        raise RuntimeError(f"{layer}: `engine={SYMMETRIC_MEMORY!r}` is not available: {'; '.join(said)}")


def _reason(group: dist.ProcessGroup) -> str | None:
    """Return why this rank has no symmetric memory, as far as it can tell locally, or None."""
    if group.size() > symmetric_memory.MOST_RANKS:
        return f"it takes up to {symmetric_memory.MOST_RANKS} ranks, got {group.size()}"
    if not torch.cuda.is_available():
        return f"{NEED_OF_PEERS}, and there is none"
    return None


def _rendezvous(group: dist.ProcessGroup, size: int) -> symmetric_memory.Peers:
    """Return the memory, zeroed on all ranks before any of them writes to it."""
    from torch.distributed import _symmetric_memory

    device = torch.device("cuda", torch.cuda.current_device())
    memory = _symmetric_memory.empty(size, dtype=torch.uint8, device=device).zero_()
    torch.cuda.synchronize(device)
    handle = _symmetric_memory.rendezvous(memory, group)
    places = [handle.get_buffer(rank, (1,), torch.uint8).data_ptr() for rank in range(group.size())]
    inside = memory.data_ptr() - places[group.rank()]  # offset in an allocation that may be larger, equal on all ranks
    return symmetric_memory.Peers(
        rank=group.rank(),
        table=torch.tensor([place + inside for place in places], dtype=torch.int64, device=device),
        memory=memory,
        epoch=torch.zeros(2, dtype=torch.int32, device=device),
        arrived=torch.zeros(group.size(), dtype=torch.int32, device=device),
        leaving=torch.zeros(group.size(), dtype=torch.int32, device=device),
        group=group,
        seconds=time_out(group, device),
        handle=handle,
    )


def _reason_of_kernels(made: symmetric_memory.Peers, name: str) -> str | None:
    """Return why no kernel runs on this rank's device, or None."""
    index = torch.empty(0, 1, dtype=torch.int32, device=made.memory.device)
    sizes = {"group_size": made.ranks, "pair_rows": 1, "expert_rows": 1 + made.ranks}
    return backends.explain("ep_route", index, made.ranks, **sizes, group_name=name, engine=SYMMETRIC_MEMORY).reason()
