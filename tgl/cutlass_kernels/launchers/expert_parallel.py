"""The ops of expert parallelism on symmetric memory: every rank writes to the others' memory, behind a barrier.

An op is a list of steps, each a launch: the local work that must precede the barrier, the barrier, writes and reads.
Rows are read as they arrive, in the launch that writes others; a routing has a second barrier. Nothing is read on the
host and no launch depends on a count, so a CUDA graph can capture them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import backends
from ...meta import symmetric_memory
from ...meta.expert_parallel import SYMMETRIC_MEMORY, as_words
from ...meta.symmetric_memory import Peers
from ..archs import ARCHS, chips
from ..runtime import device
from ..runtime.launcher import Launcher
from ..runtime.requirements import MAX_ROWS
from .exchange_kernels import (
    ARRIVAL,
    BARRIER,
    EXCHANGE,
    PLACEMENT,
    PUT,
    SLOT_EXCHANGE,
    ArrivalCall,
    BarrierCall,
    ExchangeCall,
    PlacementCall,
    PutCall,
    SlotExchangeCall,
)
from .permutation import DTYPES
from .reduce import INTEGERS

MOST_EXPERTS = 4096  # that fit the shared memory of one block, with the ranks
MOST_CHOICES = 64  # a lane has all top-k slots of a token in registers
BLOCKS = 264  # that exchange rows, at most: two for each multiprocessor of an H100

Step = tuple[Launcher, Any]
Spec = tuple[int, int, torch.dtype]


class EpRouteCall(NamedTuple):
    """Arguments of ``ep_route``."""

    top_k_index: Tensor
    num_experts: int
    group_size: int
    pair_rows: int
    expert_rows: int
    invariant: bool
    group_name: str
    engine: str
    position: Tensor
    token: Tensor
    index: Tensor  # type: ignore[assignment]  # a name that tuples have
    needed: Tensor

    @property
    def specs(self) -> list[Spec]:
        """Return the symmetric tensors: counts of all ranks, and top-k slots of arriving tokens."""
        rows, top_k = self.index.shape
        counts = self.group_size, self.num_experts + self.group_size, torch.int32
        return [counts, (rows, top_k, torch.int32)]

    def reason(self, ranks: int) -> backends.Reason:
        """Return why the kernels do not support the dtype and the sizes, or None."""
        if self.top_k_index.dtype not in INTEGERS:
            return f"takes {', '.join(map(str, INTEGERS))}, got {self.top_k_index.dtype}"
        if self.group_size != ranks:
            return f"the group has {ranks} ranks, got group_size={self.group_size}"
        for what, count, most in (
            ("experts", self.num_experts, MOST_EXPERTS),
            ("experts per token", self.top_k_index.shape[1], MOST_CHOICES),
        ):
            if count > most:
                return f"takes up to {most} {what}, got {count}"
        return None


class ExchangeOpCall(NamedTuple):
    """Arguments of ``ep_dispatch`` or ``ep_combine``."""

    t: Tensor
    weights: Tensor | None
    token: Tensor
    position: Tensor
    top_k: int
    group_name: str
    engine: str
    out: Tensor
    out_weights: Tensor

    @property
    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Return the tensors to exchange with their destinations, bytes as words; none without columns."""
        both = [(as_words(self.t), as_words(self.out))]
        if self.weights is not None:
            both.append((self.weights, self.out_weights))
        return [(t, out) for t, out in both if t.shape[1]]

    @property
    def specs(self) -> list[Spec]:
        """Return a symmetric tensor for each pair."""
        return [(self.token.shape[0], t.shape[1], t.dtype) for t, _ in self.pairs]

    def reason(self, ranks: int) -> backends.Reason:
        """Return why the kernels do not support the dtypes and the sizes, or None."""
        for t, _ in self.pairs:
            if t.dtype not in DTYPES:
                return f"takes float32, bfloat16 and float16, got {t.dtype}"
        for t in (self.token, self.position):
            if t.dtype != torch.int32:
                return f"takes places of int32 as ep_route makes them, got {t.dtype}"
        rows = self.token.shape[0]
        return f"takes [W P] places of W = {ranks} ranks, got {rows}" if rows % ranks else None


# --- steps ------------------------------------------------------------------------------------------------------------


def barrier_step(mine: Peers, op: str, token: Tensor | None) -> Step:
    """Return the barrier step: with ``token`` the first one of an exchange, which signals how many rows go where."""
    watch = mine.watch[symmetric_memory.OPS.index(op)]
    return BARRIER, BarrierCall(mine.table, mine.control, mine.told, token, watch, mine.rank)


def exchange_steps(c: ExchangeOpCall, mine: Peers, op: str) -> Iterator[Step]:
    """Yield the exchange of rows through the memory of ranks: dispatched as they are, combined by sums."""
    moved = tuple((by_rows(t), part, out) for (t, out), part in zip(c.pairs, mine.parts(c.specs)))
    if not moved:
        return
    token, position = (None, c.position) if op == "ep_combine" else (c.token, None)
    known = mine.table, mine.flags, *mine.told, mine.watch[symmetric_memory.OPS.index(op)]
    piece = symmetric_memory.rows_of_piece(c.token.shape[0] // mine.ranks)
    yield EXCHANGE, ExchangeCall(*known, piece, mine.rank, moved, token, position, BLOCKS, c.top_k)


def by_rows(t: Tensor) -> Tensor:
    """Return the tensor, or a copy whose rows are contiguous."""
    return t if t.stride(1) == 1 else t.contiguous()


def route_steps(c: EpRouteCall, mine: Peers) -> Iterator[Step]:
    """Yield the steps of a routing: places, counts and top-k slots to all ranks, and what follows from theirs."""
    counts = torch.empty(c.num_experts + c.group_size, dtype=torch.int32, device=c.top_k_index.device)
    of_all, choices = mine.parts(c.specs)
    yield PLACEMENT, PlacementCall(c.top_k_index, c.position, c.token, counts, c.group_size, c.invariant)
    yield barrier_step(mine, "ep_route", c.token)
    yield PUT, PutCall(counts.expand(of_all.shape), mine.table, of_all, mine.rank)
    given = c.top_k_index, c.position, c.token
    yield SLOT_EXCHANGE, SlotExchangeCall(*given, mine.table, counts, choices, mine.rank, c.invariant)
    yield barrier_step(mine, "ep_route", None)
    yield ARRIVAL, ArrivalCall(of_all, choices, mine.arrived, c.position, c.index, c.needed, c.expert_rows)


def dispatch_steps(c: ExchangeOpCall, mine: Peers) -> Iterator[Step]:
    """Yield the steps of a dispatch: tokens to the ranks of their experts."""
    yield barrier_step(mine, "ep_dispatch", c.token)
    yield from exchange_steps(c, mine, "ep_dispatch")


def combine_steps(c: ExchangeOpCall, mine: Peers) -> Iterator[Step]:
    """Yield the steps of a combine: results to the ranks of their tokens, which add them up as they arrive."""
    yield barrier_step(mine, "ep_combine", c.token)
    yield from exchange_steps(c, mine, "ep_combine")


# --- ops --------------------------------------------------------------------------------------------------------------


class Op(NamedTuple):
    """An op as a list of steps.

    Attributes:
        name: name of the op.
        call: makes a call of its arguments.
        steps: returns the steps of a call.
    """

    name: str
    call: Callable[..., Any]
    steps: Callable[[Any, Peers], Iterator[Step]]

    def of(self, args: tuple, kwargs: dict) -> Iterator[Step]:
        """Return the steps of a call that ``reason`` has accepted."""
        c = self.call(*args, **kwargs)
        return self.steps(c, symmetric_memory.memory_of(c.group_name))

    def run(self, *args: Any, **kwargs: Any) -> None:
        """Launch the steps."""
        c = self.call(*args, **kwargs)
        mine = symmetric_memory.memory_of(c.group_name)
        try:
            for launcher, step in self.steps(c, mine):
                launcher.run(step)
        except Exception as error:
            said = mine.failure()
            if said is None:
                raise
            raise RuntimeError(f"{self.name}: {said}") from error

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Compile the kernels of the steps."""
        for launcher, step in self.of(args, kwargs):
            if not launcher.is_empty(step):
                launcher.plan(step)

    def reason(self, *args: Any, **kwargs: Any) -> backends.Reason:
        """Return why the kernels do not support a call, or None."""
        c = self.call(*args, **kwargs)
        if c.engine != SYMMETRIC_MEMORY:
            return f"the call requests engine={c.engine!r}"
        reason = device.packages_reason() or symmetric_memory.reason_against(c.group_name, c[0].device, c.specs)
        if reason is not None:
            return reason
        most = max(c.token.shape[0], c.position.shape[0])
        if most > MAX_ROWS:
            return f"takes up to {MAX_ROWS} places, got {most}"
        return c.reason(symmetric_memory.memory_of(c.group_name).ranks)

    def implementation(self) -> backends.Implementation:
        """Return the implementation for the registry."""
        return backends.Implementation(
            self.name,
            "tgl kernels over symmetric memory",
            "cuda",
            self.run,
            self.reason,
            frozenset(chips(frozenset(ARCHS))),
            priority=10,
            emulable=True,
            note="ranks write to each other's memory behind a barrier of the group; nothing is read on the host",
            prepare=self.prepare,
        )


OPS = (
    Op("ep_route", EpRouteCall, route_steps),
    Op("ep_dispatch", ExchangeOpCall, dispatch_steps),
    Op("ep_combine", ExchangeOpCall, combine_steps),
)
