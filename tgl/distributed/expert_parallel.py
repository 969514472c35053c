"""Expert parallelism: every rank holds some of the experts, and tokens travel to them and back."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd

from ..nn.routing import combine, dispatch, route


def expert_parallel_host(
    experts: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    num_experts: int,
    group: dist.ProcessGroup,
) -> Tensor:
    """Run a layer of experts of which rank ``r`` of ``group`` holds numbers ``r E`` to ``(r + 1) E - 1``.

    Every rank sends each of its (token, choice) pairs to the rank of the chosen expert, runs its own experts on the
    rows that it received, and sends the results back: two exchanges (``all_to_all_single``) forward and two backward.
    The host reads the number of rows for each rank once per call, which the name says; CUDA graphs cannot capture it.

    All tensors are local. To use it on DTensors, go through ``torch.distributed.tensor.experimental.local_map`` with
    tokens and experts sharded in dimension 0.

    Args:
        experts: ``experts(rows [R, H], offs [E]) -> [R, H]``: this rank's experts on rows grouped by local expert, for
            instance ``GroupedMLP(E, ...).forward_offsets``.
        x: ``[S, H]``: this rank's tokens.
        top_k_index: integer ``[S, k]``: experts chosen by each token, counted over all ranks; out of range means none.
        top_k_weights: ``[S, k]``: routing weights.
        num_experts: over all ranks.
        group: the ranks.

    Returns:
        ``[S, H]``: for each token the sum over its choices of weight times result.

    Raises:
        ValueError: ``num_experts`` is not a multiple of the number of ranks.
    """
    world = dist.get_world_size(group)
    if num_experts % world:
        raise ValueError(f"`num_experts` must be a multiple of the {world} ranks of `group`, but got {num_experts}")
    local = num_experts // world

    routing = route(top_k_index, num_experts)
    counts = torch.diff(routing.offs, prepend=routing.offs.new_zeros(1))  # rows for each expert, hence by rank
    arriving = all_to_all_single(counts, None, None, group)
    sent, received = torch.stack([counts, arriving]).view(2, world, local).sum(2).tolist()

    rows = dispatch(x, routing)
    inbox = all_to_all_single_autograd(rows[: sum(sent)], received, sent, group)
    # What has arrived is grouped by sender and then by expert; regroup it by expert.
    owner = torch.arange(local, device=x.device).repeat(world).repeat_interleave(arriving, output_size=sum(received))
    arrived = route(owner[:, None], local)
    answers = combine(experts(dispatch(inbox, arrived), arrived.offs), arrived)
    outbox = all_to_all_single_autograd(answers, sent, received, group)
    # Pairs that chose no expert are the last rows, and get zeros.
    outbox = torch.nn.functional.pad(outbox, (0, 0, 0, rows.shape[0] - sum(sent)))
    return combine(outbox, routing, top_k_weights)
