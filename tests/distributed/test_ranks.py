"""The harness itself: both ranks run, and what fails on one of them fails the test."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from .conftest import Ranks


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """Two processes for one test: those that the other tests share would end with the failure."""
    workers = Ranks(2)
    yield workers
    workers.stop()


def add_ranks(expected):
    total = torch.tensor(dist.get_rank() + 1)
    dist.all_reduce(total)
    assert total.item() == expected


def fail_on_one_rank():
    if dist.get_rank() == 1:
        raise ValueError("only here")
    dist.barrier()


def test_a_function_runs_on_both_ranks(ranks):
    ranks(add_ranks, 3)


def test_a_failure_on_one_rank_is_reported_and_the_next_call_works(ranks):
    with pytest.raises(AssertionError, match=r"(?s)rank 1:.*ValueError: only here.*rank 0 did not answer"):
        ranks(fail_on_one_rank)
    ranks(add_ranks, 3)


def test_a_wrong_value_fails(ranks):
    with pytest.raises(AssertionError, match=r"(?s)rank 0:.*rank 1:|rank 1:.*rank 0:"):
        ranks(add_ranks, 4)
