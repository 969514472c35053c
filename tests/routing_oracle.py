"""Routings by a loop over (token, choice) pairs."""

from typing import NamedTuple

import torch
from torch import Tensor


class Expected(NamedTuple):
    """The results of ``tgl::route``."""

    source: Tensor
    position: Tensor
    token: Tensor
    offs: Tensor


def expected(index: Tensor, num_experts: int, num_rows: int | None = None) -> Expected:
    """The routing of ``index [S, k]`` to so many rows, one per choice by default."""
    rows: list[list[int]] = [[] for _ in range(num_experts)]
    flat = index.reshape(-1).tolist()
    for pair, expert in enumerate(flat):
        if 0 <= expert < num_experts:
            rows[expert].append(pair)
    count = len(flat) if num_rows is None else num_rows
    source = [pair for pairs in rows for pair in pairs][:count]
    position = [-1] * len(flat)
    for row, pair in enumerate(source):
        position[pair] = row
    token = [pair // index.shape[1] for pair in source]
    none = [-1] * (count - len(source))
    offs = torch.tensor([len(pairs) for pairs in rows], dtype=torch.int32).cumsum(0, dtype=torch.int32).clamp(max=count)
    return Expected(*(torch.tensor(t, dtype=torch.int32) for t in (source + none, position, token + none)), offs)
