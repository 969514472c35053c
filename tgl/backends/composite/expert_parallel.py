"""The ops of expert parallelism by collectives of static sizes, on any backend of ``torch.distributed``.

Place ``d P + i`` of the send buffer holds token number i of those that go to rank d, in the order of tokens, and
arrives there as row ``r P + i`` from rank r. So a rank computes places from what it knows locally, rows from one rank
are contiguous and in the order of tokens, and a rank that writes into another's memory needs nothing else. The rest of
every P rows is zeros, which are sent as well.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import profiler
from torch.distributed.distributed_c10d import _resolve_process_group

from ... import backends
from ...meta.expert_parallel import ALL_TO_ALL, NEED_OF_PEERS, SYMMETRIC_MEMORY, as_words, nvshmem
from ...meta.specs import TensorSpec


def supports(*args: Any, engine: str, **options: Any) -> backends.Reason:
    """Serve calls whose engine is collectives."""
    return None if engine == ALL_TO_ALL else f"the call requests engine={engine!r}"


def why_no_symmetric_memory(*args: Any, engine: str, **options: Any) -> backends.Reason:
    """Return why tensors on a CPU cannot use symmetric memory, for a report."""
    asked = "" if engine == SYMMETRIC_MEMORY else f"the call requests engine={engine!r}, and "
    return f"{asked}{NEED_OF_PEERS}, but the tensors are on a CPU"


def why_not_by_device_counts(*args: Any, **options: Any) -> backends.Reason:
    """Return why torch's op that reads row counts on the device does not serve the call, for a report."""
    return f"not offered as an `engine`: it sends a row for every top-k slot; {nvshmem()}"


def _group(op: str, name: str) -> dist.ProcessGroup:
    try:
        return _resolve_process_group(name)  # type: ignore[arg-type]  # a string with a name of its own in torch 2.13
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"tgl::{op}: `group_name` must be the name of a group of this process, but got {name!r}"
        ) from error


def _exchange(op: str, out: Tensor, t: Tensor, group: dist.ProcessGroup) -> None:
    """Exchange blocks: block r of ``out`` gets the block of rank r's ``t`` that has this rank's number."""
    if t.shape[0] % group.size():
        raise ValueError(f"tgl::{op}: `token` must be [W P] with W = {group.size()} ranks, but got ({t.shape[0]},)")
    try:
        if profiler._is_profiler_enabled:
            with profiler.record_function("tgl: exchange"):
                dist.all_to_all_single(out, t, group=group)
        else:
            dist.all_to_all_single(out, t, group=group)
    except RuntimeError as error:
        ranks = dist.get_process_group_ranks(group)
        raise RuntimeError(
            f"tgl::{op}: the exchange among ranks {ranks} failed on rank {dist.get_rank()}. Each of them must make the "
            "call: where one has raised an error or left, the others wait until the time-out of the group"
        ) from error


def route(
    top_k_index: Tensor,
    num_experts: int,
    *,
    group_size: int,
    pair_rows: int,
    expert_rows: int,
    invariant: bool,
    group_name: str,
    engine: str,
    position: Tensor,
    token: Tensor,
    index: Tensor,
    needed: Tensor,
) -> None:
    """Compute the places of tokens, then exchange the counts of all experts and pairs, and the top-k slots."""
    group = _group("ep_route", group_name)
    if group.size() != group_size:
        raise ValueError(f"tgl::ep_route: `group_size` must be {group.size()} like the group, but got {group_size}")
    local = num_experts // group_size
    chosen = top_k_index.long()
    absent = (chosen < 0) | (chosen >= num_experts)
    owner = torch.div(chosen, local, rounding_mode="floor").masked_fill_(absent, group_size)
    places, pairs = (_by_choice if invariant else _by_rank)(owner, group_size, pair_rows)
    position.copy_(places)
    source = _inverse(places, index.shape[0])
    copies = chosen.shape[1] if invariant else group_size
    torch.div(source, copies, rounding_mode="floor", out=token)  # floor division keeps -1

    experts = torch.zeros(num_experts + 1, dtype=torch.int32, device=chosen.device)
    experts.scatter_add_(
        0, chosen.masked_fill(absent, num_experts).view(-1), experts.new_ones(()).expand(absent.numel())
    )
    counts = torch.cat([experts[:-1], pairs])
    gathered = counts.new_empty(group_size, counts.shape[0])
    _exchange("ep_route", gathered, counts.expand_as(gathered).contiguous(), group)
    of_experts, of_pairs = gathered.split([num_experts, group_size], 1)
    arriving = of_experts.reshape(group_size, group_size, local).sum((0, 2))
    needed.copy_(torch.stack([of_pairs.max(), arriving.max()]))

    sent = _local_choices(chosen, token, local, pair_rows)
    if invariant:
        own = torch.arange(copies, device=source.device) == (source % copies)[:, None]
        sent.masked_fill_(~own, -1)
    _exchange("ep_route", index, sent, group)
    _spoil((needed[0] > pair_rows) | (needed[1] > expert_rows), position, index, local, pair_rows)


def _by_rank(owner: Tensor, ranks: int, pair_rows: int) -> tuple[Tensor, Tensor]:
    """Return the places of tokens ``[S W]``, -1 if not sent to a rank or over capacity, and counts int32 ``[W]``.

    ``owner [S, k]`` is the rank of every top-k slot, ``ranks`` for a dropped one.
    """
    goes = torch.zeros(ranks + 1, owner.shape[0], dtype=torch.int32, device=owner.device).scatter_(0, owner.t(), 1)[:-1]
    number = goes.cumsum(1) - 1  # parallel on a GPU, where a scan over the first dimension goes row by row
    absent = (goes == 0) | (number >= pair_rows)
    blocks = torch.arange(ranks, device=owner.device)[:, None] * pair_rows
    return (number + blocks).masked_fill_(absent, -1).t().reshape(-1), goes.sum(1, dtype=torch.int32)


def _by_choice(owner: Tensor, ranks: int, pair_rows: int) -> tuple[Tensor, Tensor]:
    """Return what ``_by_rank`` does, with a place per top-k slot, ``[S k]``."""
    ranked = owner.reshape(-1)
    goes = ranked == torch.arange(ranks, device=owner.device)[:, None]
    number = goes.cumsum(1).gather(0, ranked.clamp(max=ranks - 1)[None]).view(-1) - 1
    absent = (ranked == ranks) | (number >= pair_rows)
    return (number + ranked * pair_rows).masked_fill_(absent, -1), goes.sum(1, dtype=torch.int32)


def _inverse(places: Tensor, rows: int) -> Tensor:
    """Return the inverse ``[rows]`` of ``places``, -1 for rows without one."""
    source = places.new_full((rows + 1,), -1)
    source.scatter_(0, places.masked_fill(places < 0, rows), torch.arange(places.shape[0], device=places.device))
    return source[:-1]


def _local_choices(chosen: Tensor, token: Tensor, local: int, pair_rows: int) -> Tensor:
    """Return int32 ``[W P, k]``: local experts of every row's top-k slots on the receiving rank; else -1."""
    rows = token.shape[0]
    if not chosen.shape[0]:
        return token.new_full((rows, chosen.shape[1]), -1)
    first = torch.arange(rows, device=token.device) // pair_rows * local
    here = chosen.index_select(0, token.clamp(min=0)) - first[:, None]
    return here.masked_fill_((here < 0) | (here >= local) | (token < 0)[:, None], -1).int()


def _spoil(full: Tensor, position: Tensor, index: Tensor, local: int, pair_rows: int) -> None:
    """Set slots of a step that exceeds the capacity, where ``full`` is set: NaN in weights reaches all outputs.

    Every expert of the rank gets a row, and so does row 0 from every rank, which is the answer that all tokens read.
    """
    number = torch.arange(index.numel(), dtype=index.dtype, device=index.device).view(index.shape)
    some = number.masked_fill(number >= local, -1)
    some[::pair_rows, 0] = number[::pair_rows, 0] % local
    index.copy_(torch.where(full, some, index))
    position.masked_fill_(full, 0)


def dispatch(
    x: Tensor,
    weights: Tensor | None,
    token: Tensor,
    position: Tensor,
    *,
    top_k: int,
    group_name: str,
    engine: str,
    out: Tensor,
    out_weights: Tensor,
) -> None:
    """Copy rows in the order of places, then exchange them."""
    group = _group("ep_dispatch", group_name)
    for t, arrived in ((x, out), (weights, out_weights)):
        if t is not None:
            rows, to = as_words(t), as_words(arrived)
            spec = TensorSpec(tuple(to.shape), to.dtype, to.device)
            sent = backends.produce("dispatch", t.device, spec, [rows, token, position, None], top_k=top_k)
            _exchange("ep_dispatch", to, sent, group)


def combine(
    y: Tensor,
    weights: Tensor | None,
    token: Tensor,
    position: Tensor,
    *,
    top_k: int,
    group_name: str,
    engine: str,
    out: Tensor,
    out_weights: Tensor,
) -> None:
    """Exchange the answers, then sum those of each token, in the order of its places."""
    group = _group("ep_combine", group_name)
    for t, total in ((y, out), (weights, out_weights)):
        if t is not None:
            back = torch.empty(t.shape, dtype=t.dtype, device=t.device)
            _exchange("ep_combine", back, t.contiguous(), group)
            backends.run("combine", t.device, back, position, None, top_k=top_k, out=total)
