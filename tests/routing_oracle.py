"""Routings by a loop over (token, choice) pairs."""

from typing import NamedTuple

import torch
from torch import Tensor


class Expected(NamedTuple):
    """What ``tgl::route`` returns."""

    source: Tensor
    position: Tensor
    token: Tensor
    offs: Tensor


def expected(index: Tensor, num_experts: int) -> Expected:
    """The routing of ``index [S, k]``."""
    rows: list[list[int]] = [[] for _ in range(num_experts)]
    flat = index.reshape(-1).tolist()
    for pair, expert in enumerate(flat):
        if 0 <= expert < num_experts:
            rows[expert].append(pair)
    source = [pair for pairs in rows for pair in pairs]
    position = [-1] * len(flat)
    for row, pair in enumerate(source):
        position[pair] = row
    token = [pair // index.shape[1] for pair in source]
    none = [-1] * (len(flat) - len(source))
    offs = torch.tensor([len(pairs) for pairs in rows], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return Expected(*(torch.tensor(t, dtype=torch.int32) for t in (source + none, position, token + none)), offs)
