"""Expert parallelism: every rank holds some of the experts, and tokens are sent to them and back."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd

from ..nn._errors import fail
from ..nn._parameters import decided_when_traced
from ..nn.routing import combine, dispatch, route
from ._agreement import difference_in

_agreed: set[tuple[str, int]] = set()  # groups, and numbers of experts on which their ranks have agreed
_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


def expert_parallel_host(
    experts: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    num_experts: int,
    group: dist.ProcessGroup,
    *,
    sentinels: bool = False,
) -> Tensor:
    """Run a layer of experts of which rank ``r`` of ``group`` holds numbers ``r E`` to ``(r + 1) E - 1``.

    Every rank sends each of its (token, slot) pairs to the rank of the chosen expert, runs its own experts on the rows
    that it received, and sends the results back: two exchanges (``all_to_all_single``) forward and two backward. The
    host reads the number of rows for each rank once per call, hence the name; CUDA graphs cannot capture it.

    All tensors are local. To use it on DTensors, go through ``torch.distributed.tensor.experimental.local_map`` with
    tokens and experts sharded in dimension 0.

    Args:
        experts: ``experts(rows [R, H], offs [E]) -> [R, H]``: this rank's experts on rows grouped by local expert, for
            instance ``GroupedMLP(E, ...).forward_offsets``.
        x: ``[S, H]``: this rank's tokens.
        top_k_index: integer ``[S, k]``: experts chosen by each token, counted over all ranks; out of range means none,
            which is an error inside ``tgl.debug_checks()`` unless ``sentinels``.
        top_k_weights: ``[S, k]``: routing weights.
        num_experts: over all ranks.
        group: the ranks.
        sentinels: whether experts out of range are allowed and mean dropped slots.

    Returns:
        ``[S, H]``, for each token the sum over its top-k slots of weight times result.

    Raises:
        ValueError: ``num_experts`` is not a multiple of the number of ranks; or the ranks do not agree on it, on H or
            on the dtype of ``x``, which is an error on all of them.
    """
    if x.dim() != 2:
        fail(f"expert_parallel_host: `x` must be [S, H], but got shape {tuple(x.shape)}")
    difference = _difference_in(str(group.group_name), num_experts)
    if difference is not None:
        fail(difference)
    world = dist.get_world_size(group)
    if num_experts % world:
        raise ValueError(f"`num_experts` must be a multiple of the {world} ranks of `group`, but got {num_experts}")
    local = num_experts // world

    routing = route(top_k_index, num_experts, sentinels=sentinels)
    counts = torch.diff(routing.offs, prepend=routing.offs.new_zeros(1))  # rows for each expert, hence by rank
    form = [counts.new_full((world, 1), value) for value in (_DTYPES.index(x.dtype), x.shape[1])]
    counts = counts.view(world, local)
    every = all_to_all_single(torch.cat([counts, *form], 1).view(-1), None, None, group).view(world, local + 2)
    arriving, forms = every.split([local, 2], 1)
    sent, received, dtypes, widths = torch.stack([counts.sum(1), arriving.sum(1), *forms.unbind(1)]).tolist()
    _check_form("x.dtype", [_DTYPES[place] for place in dtypes])
    _check_form("hidden_size", widths)

    rows = dispatch(x, routing)
    inbox = all_to_all_single_autograd(rows[: sum(sent)], received, sent, group)
    # Arrived rows are grouped by sender and then by expert; regroup them by expert.
    owner = torch.arange(local, device=x.device).repeat(world)
    owner = owner.repeat_interleave(arriving.reshape(-1), output_size=sum(received))
    arrived = route(owner[:, None], local)
    answers = combine(experts(dispatch(inbox, arrived), arrived.offs), arrived)
    outbox = all_to_all_single_autograd(answers, sent, received, group)
    # Pairs of dropped slots are the last rows, and get zeros.
    outbox = torch.nn.functional.pad(outbox, (0, 0, 0, rows.shape[0] - sum(sent)))
    return combine(outbox, routing, top_k_weights)


def _check_form(argument: str, values: list) -> None:
    if any(value != values[0] for value in values):
        fail(f"expert_parallel_host: `{argument}` must be equal on all ranks of `group`, but got {values}")


@decided_when_traced
def _difference_in(group_name: str, num_experts: int) -> str | None:
    if (group_name, num_experts) in _agreed:
        return None
    caller = expert_parallel_host.__name__
    difference = difference_in(group_name, f"{caller}/{group_name}", caller, num_experts=num_experts)
    if difference is None:
        _agreed.add((group_name, num_experts))
    return difference
