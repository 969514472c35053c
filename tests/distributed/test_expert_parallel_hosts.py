"""Four ranks on two hosts of two: values against one rank, and the bytes between the hosts."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from .test_expert_parallel_mlp import MOST, E, Problem

HOST = 2  # ranks


def check(pair_capacity_factor: float | None) -> None:
    """Bytes between hosts are the other host's share of the bytes that ``traffic`` reports, tokens or not."""
    crossed: list[int] = []  # bytes of every exchange
    used: list[int] = []  # rows of them that tokens take
    exchange = dist.all_to_all_single

    def counted(out: Tensor, t: Tensor, group: dist.ProcessGroup) -> None:
        blocks = t.unflatten(0, (group.size(), -1))
        there = blocks[[r for r in range(group.size()) if r // HOST != group.rank() // HOST]]
        crossed.append(there.numel() * there.element_size())
        used.append(int((there != 0).flatten(0, -2).any(1).sum()))
        exchange(out, t, group=group)

    problem = Problem("full", torch.float64)
    layer = problem.layer(pair_capacity_factor=pair_capacity_factor)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", counted)
        results = problem.results(layer, problem.tokens)
    for name, expected in problem.expected.items():
        torch.testing.assert_close(results[name], expected, rtol=0, atol=1e-12)
    layer.check()
    assert layer.pair_rows == (MOST if pair_capacity_factor is None else 5)

    ranks, (sent, _) = problem.ranks, layer.traffic(torch.float64)
    assert crossed[0] == HOST * (E + ranks) * 4  # counts
    assert sum(crossed[1:5]) == sent * (ranks - HOST) // ranks
    assert sum(crossed[5:]) == sum(crossed[2:5])
    # A token crosses once for each rank that it goes to there, twice if it goes to both.
    owners = (problem.index[problem.tokens] * ranks // E).tolist()
    assert used[2] == sum(rank // HOST != problem.me // HOST for token in owners for rank in set(token))


@pytest.mark.parametrize("pair_capacity_factor", [None, 1.1])
def test_two_hosts(four_ranks, pair_capacity_factor):
    four_ranks(check, pair_capacity_factor)
