"""Exchange kernels of ranks that run at the same time: rows are read while others are still being sent.

A row that is read before its flag has come, or whose flag comes before it, is a race, and NaN in one of the schedules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

import cutlass
import cutlass.cute as cute
from cutlass import Int32

import cute_emulator
from tests.cutlass_kernels.emulated_ranks import Group, emulated
from tests.ranks_on_one_device import world
from tgl.cutlass_kernels.expert_parallel import exchange as module
from tgl.cutlass_kernels.launchers.exchange_kernels import EXCHANGE, ExchangeCall, ExchangeKey
from tgl.cutlass_kernels.permute.tiling import MOST, cut_of
from tgl.meta import symmetric_memory

RANKS, TOKENS, PAIR_ROWS, COLUMNS, PIECE = 2, 9, 11, 1184, 2  # columns: four shares of a token and part of a fifth
PLACES = RANKS * PAIR_ROWS
SEEDS, BLOCKS, VECTOR, TURNS = 6, 2, 4, 20


machine = pytest.fixture(scope="module")(emulated)


class Early(module.ExchangeKernel):
    """A mutant: flags before the rows that they stand for."""

    @cute.jit
    def send(
        self, all_moved: Any, token: Any, ways: module.ExchangeState, peer: module.Peer, first: Int32, count: Int32
    ):
        """Too late: others have a turn while this warp waits for an atomic operation."""
        self.release(ways, peer, first // ways.piece)
        for _ in cutlass.range(TURNS, unroll=1):
            cute.arch.atomic_add((ways.epoch.iterator + 1).llvm_ptr, Int32(0), sem="relaxed", scope="gpu")
        super().send(all_moved, token, ways, peer, first, count)


def kernel(columns: int, answers: bool, most: int = MOST) -> Callable[..., None]:
    """Compile an exchange of float32 rows; ``most`` top-k slots of a token at a time."""
    sums = (cut_of(columns, VECTOR, RANKS, most=most),) if answers else ()
    return EXCHANGE.build(ExchangeKey("sm_90", True, (cut_of(columns, VECTOR, 1),), sums, ("float32",), ("float32",)))


def flow(launch: Callable[..., None], group: Group, given: tuple[Tensor | None, ...]) -> None:
    """Run one exchange of all ranks, behind a barrier."""
    made = group.world
    rows, out, token, position = given
    for name in made.names:
        symmetric_memory.memory_of(name).flags.zero_()
    made.poison(0xFF)
    made.arrived.fill_(TOKENS)
    made.leaving.fill_(TOKENS)
    made.epochs.copy_(torch.tensor([7, 0]).expand(made.ranks, 2))

    def step(rank: int) -> None:
        known = symmetric_memory.memory_of(made.names[rank])
        (part,) = known.parts([(PLACES, rows.shape[2], torch.float32)])
        ways = known.table, known.flags, *known.told, known.watch[0], PIECE, rank
        places = (None if t is None else t[rank] for t in (token, position))
        c = ExchangeCall(*ways, ((rows[rank], part, out[rank]),), *places, BLOCKS, RANKS)
        launch(*EXCHANGE.arguments(c))

    group.run(step)


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


def wrong(launch: Callable[..., None], answers: bool, columns: int = COLUMNS) -> int:
    """Return how many schedules give another result."""
    with world(RANKS, [(PLACES, columns, torch.float32)]) as made:
        group = Group(made)
        given, wanted = problem(answers, columns)
        out, count = given[1], 0
        for _ in range(SEEDS):
            out.zero_()
            flow(launch, group, given)
            count += not torch.equal(out, wanted)
        return count


@pytest.mark.parametrize("answers", [False, True])
def test_rows_are_read_behind_their_flags(machine, answers):
    assert wrong(kernel(COLUMNS, answers), answers) == 0


def test_sums_of_more_choices_than_a_batch(machine):
    assert wrong(kernel(COLUMNS, True, most=1), True) == 0


def test_few_columns_of_many_tokens(machine):
    """A warp has some tokens at a time, and a lane some of their choices."""
    assert wrong(kernel(VECTOR, True), True, VECTOR) == 0


@pytest.mark.parametrize("answers", [False, True])
def test_a_flag_in_front_of_its_rows_is_found(machine, monkeypatch, answers):
    monkeypatch.setattr(module, "ExchangeKernel", Early)
    early = kernel(COLUMNS, answers)
    with pytest.raises(cute_emulator.RaceError, match="of symmetric buffer 0 of rank"):
        wrong(early, answers)


@pytest.mark.parametrize("answers", [False, True])
def test_readers_that_do_not_wait_are_found(machine, monkeypatch, answers):
    monkeypatch.setattr(module, "wait", lambda *args, **kwargs: None)
    impatient = kernel(COLUMNS, answers)
    with pytest.raises(cute_emulator.RaceError, match="of symmetric buffer 0 of rank"):
        wrong(impatient, answers)
