"""Rows that are read while others are on their way: ranks in one launch, whose warps the emulator lets run as it likes.

Whoever reads a row before its flag has come, or finds the flag before the row, reads NaN under one of the schedules.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

import cute_emulator
from tests.cutlass_kernels.flow_together import VECTOR, Early, Together, flow, kernel
from tests.cutlass_kernels.wire_together import emulated
from tests.ranks_on_one_device import World, world
from tgl.cutlass_kernels.expert_parallel import flow as module

RANKS, TOKENS, PAIR_ROWS, COLUMNS, PIECE = 2, 9, 11, 1184, 2  # columns: four shares of a token and part of a fifth
PLACES = RANKS * PAIR_ROWS
SEEDS = range(6)


machine = pytest.fixture(scope="module")(emulated)


@pytest.fixture
def ranks(machine):
    with world(RANKS, [(PLACES, COLUMNS, torch.float32)]) as made:
        for memory in made.memories:
            machine.register(memory)
        made.arrived.fill_(TOKENS)
        yield made


def problem(answers: bool, columns: int) -> tuple[tuple[Tensor | None, ...], Tensor]:
    """Every token goes to every rank, or every rank answers each: operands and the result."""
    place = torch.arange(RANKS)[:, None] * PAIR_ROWS + torch.arange(TOKENS)
    if answers:
        rows = torch.randn(RANKS, PLACES, columns)
        out = torch.empty(RANKS, TOKENS, columns)
        position = place.t().flatten().int().expand(RANKS, -1).contiguous()
        wanted = rows.view(RANKS, RANKS, PAIR_ROWS, columns)[:, :, :TOKENS].sum(0)
        return (rows, out, None, position), wanted
    rows = torch.randn(RANKS, TOKENS, columns)
    out = torch.empty(RANKS, PLACES, columns)
    token = torch.full((RANKS, PLACES), -1, dtype=torch.int32)
    token[:, place.flatten()] = torch.arange(TOKENS).repeat(RANKS).int()
    wanted = torch.zeros(RANKS, PLACES, columns)
    wanted[:, place.flatten()] = rows.view(1, -1, columns)
    return (rows, out, token, None), wanted


def wrong(made: World, launch: object, answers: bool, columns: int = COLUMNS) -> int:
    """How many schedules give another result."""
    given, wanted = problem(answers, columns)
    out, count = given[1], 0
    assert out is not None
    for seed in SEEDS:
        cute_emulator.active().seed = seed
        out.zero_()
        flow(launch, made, given, PIECE)
        count += not torch.equal(out, wanted)
    return count


@pytest.mark.parametrize("answers", [False, True])
def test_rows_are_read_behind_their_flags(ranks, answers):
    assert wrong(ranks, kernel(Together, "sm_90", ranks, COLUMNS, answers, RANKS), answers) == 0


def test_sums_of_more_choices_than_a_batch(ranks):
    assert wrong(ranks, kernel(Together, "sm_90", ranks, COLUMNS, True, RANKS, most=1), True) == 0


def test_few_columns_of_many_tokens(machine):
    """A warp has some tokens at a time, and a lane some of their choices."""
    with world(RANKS, [(PLACES, VECTOR, torch.float32)]) as made:
        for memory in made.memories:
            machine.register(memory)
        made.arrived.fill_(TOKENS)
        assert wrong(made, kernel(Together, "sm_90", made, VECTOR, True, RANKS), True, VECTOR) == 0


@pytest.mark.parametrize("answers", [False, True])
def test_a_flag_in_front_of_its_rows_is_found(ranks, answers):
    early = kernel(Early, "sm_90", ranks, COLUMNS, answers, RANKS)
    with pytest.raises(cute_emulator.RaceError, match="global memory"):
        wrong(ranks, early, answers)


@pytest.mark.parametrize("answers", [False, True])
def test_readers_that_do_not_wait_are_found(ranks, monkeypatch, answers):
    monkeypatch.setattr(module, "wait", lambda *args, **kwargs: None)
    impatient = kernel(Together, "sm_90", ranks, COLUMNS, answers, RANKS)
    with pytest.raises(cute_emulator.RaceError, match="global memory"):
        wrong(ranks, impatient, answers)
