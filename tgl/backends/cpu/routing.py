"""Routing of top-k slots to experts on a CPU, where values may be read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...meta import topk_slots as steps

_RADIX = 1 << 15  # size from which torch sorts integers by radix, so that narrow ones take fewer passes
_NARROW = torch.iinfo(torch.uint8).max


def produce_route(specs: Any, operands: list) -> dict[str, Tensor]:
    """Produce the outputs; dropped slots take extra steps, if there are any."""
    top_k_index, num_experts = operands
    (pairs,), (rows,), device = specs["position"].shape, specs["source"].shape, top_k_index.device
    choices = steps.flattened(top_k_index)
    narrow = pairs >= _RADIX and num_experts < _NARROW
    if narrow:
        choices = steps.narrow(choices, num_experts)
    experts, order = torch.sort(choices, stable=True)
    if not narrow and pairs and int(experts[0]) < 0:
        experts, order = torch.sort(steps.behind(choices, num_experts), stable=True)
    groups = torch.arange(num_experts, dtype=experts.dtype, device=device)
    offs = torch.searchsorted(experts, groups, right=True, out_int32=True)
    source = order.int()
    position = torch.empty_like(source).scatter_(0, order, torch.arange(pairs, dtype=torch.int32, device=device))
    top_k = top_k_index.shape[1]
    power_of_two = top_k & (top_k - 1) == 0
    token = source >> top_k.bit_length() - 1 if power_of_two else source // top_k  # a division takes ten times as long
    routed = min(int(offs[-1]), rows) if num_experts else 0
    if routed < pairs:
        source[routed:] = token[routed:] = -1
        position[order[routed:]] = -1
    if rows != pairs:
        source, token = steps.resized(source, rows), steps.resized(token, rows)
        offs.clamp_(max=rows)
    return {"source": source, "position": position, "token": token, "offs": offs}
