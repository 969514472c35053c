"""Happens-before race detection with vector clocks.

Every warp is an agent, and so is every asynchronous unit that works on its behalf: the tensor-core queue of a warp, its
wgmma groups, its bulk stores, its cp.async copies, its tcgen05.ld / tcgen05.st, and each single TMA load. An access is
stamped with the agent's clock; a release (arrival on a barrier, commit) hands the agent's vector clock to the barrier
and advances the clock; an acquire (a wait that succeeds) joins the barrier's clock into the waiter's. Two accesses to
one location, at least one a write, race if the later one's agent has not learnt of the earlier one's stamp. The order
in which the emulator happened to run them does not matter, so one schedule finds the races of all schedules that take
the same path.

A stamp is ``clock << 20 | PTX line``; vector clock entries are ``clock << 20 | 0xFFFFF``, so "known" is one comparison
and every report can name the line of both accesses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy import count_nonzero  # of few elements several times as fast as the method `any`

from .errors import RaceError

LINE_BITS = 20
LINE_MASK = (1 << LINE_BITS) - 1
TICK = 1 << LINE_BITS


NO_EPOCH = (0, None, 0)  # see ``global_races``


class Agent:
    """A vector clock and the slot of it that is the agent's own.

    ``clock`` is the stamp base of the next access; ``vc[slot] == clock | LINE_MASK`` unless the agent is a view of
    another one's operations.
    """

    __slots__ = ("clock", "clocks", "epoch", "line", "name", "slot", "vc")

    def __init__(self, clocks: Clocks, name: str):
        self.clocks = clocks
        self.epoch = NO_EPOCH
        self.name = name
        self.slot = clocks.new_slot(name)
        self.clock = TICK
        self.vc = np.zeros(clocks.capacity, np.int64)
        self.vc[self.slot] = self.clock | LINE_MASK
        self.line = 0

    def join(self, vc: np.ndarray | None) -> None:
        """Acquire: learn everything that ``vc`` knows."""
        if vc is None:
            return
        if self.vc.size < vc.size:
            self.grow(vc.size)
        mine = self.vc[: vc.size]
        np.maximum(mine, vc, out=mine)

    def knows(self, vc: np.ndarray | None) -> bool:
        """Return whether the agent has acquired everything that ``vc`` knows."""
        if vc is None:
            return True
        if self.vc.size < vc.size:
            self.grow(vc.size)
        return not count_nonzero(vc > self.vc[: vc.size])

    def learn(self, slot: int, clock: int) -> None:
        """Acquire of one agent's operations up to ``clock`` (a wait for that agent's own asynchronous work)."""
        if slot >= self.vc.size:
            self.grow(self.clocks.capacity)
        if self.vc[slot] < clock | LINE_MASK:
            self.vc[slot] = clock | LINE_MASK

    def tick(self) -> None:
        """After a release: later accesses are not covered by it."""
        self.clock += TICK
        self.vc[self.slot] = self.clock | LINE_MASK

    def release(self) -> np.ndarray:
        """Return a copy of what the agent knows, to hand on; what it does from now on is not covered by it."""
        vc = self.vc.copy()
        self.tick()
        return vc

    def grow(self, size: int) -> None:
        vc = np.zeros(max(size, self.clocks.capacity), np.int64)
        vc[: self.vc.size] = self.vc
        self.vc = vc


class Operation:
    """An asynchronous operation in flight as an agent: its stamp, and the operations it is ordered after."""

    __slots__ = ("clock", "clocks", "epoch", "line", "name", "slot", "vc")

    def __init__(self, clocks: Clocks, slot: int, clock: int, vc: np.ndarray, name: str, line: int):
        self.clocks, self.slot, self.clock, self.vc, self.name, self.line = clocks, slot, clock, vc, name, line
        self.epoch = NO_EPOCH


class Origin(NamedTuple):
    """The launch of a cluster, as reports of other launches name it.

    Attributes:
        device: on which it runs (``devices.Device``).
        number: of the launch among those of its device.
        kernel: its name.
        locate: the place in the source of a PTX line.
        warnings: of the launch.
    """

    device: Any
    number: int
    kernel: str
    locate: Callable[[int], str]
    warnings: Counter[str]


class Clocks:
    """The agents of one cluster (shared and tensor memory are never shared more widely).

    ``gained`` and ``fences``, by slot, are those of ``happens_before``.
    """

    def __init__(self, capacity: int, origin: Origin):
        self.capacity, self.origin = capacity, origin
        self.names: list[str] = []
        self.gained: dict[int, list] = {}
        self.fences: dict[int, Any] = {}

    def new_slot(self, name: str) -> int:
        self.names.append(name)
        if len(self.names) > self.capacity:
            self.capacity *= 2
        return len(self.names) - 1


def merge_into(target: np.ndarray | None, vc: np.ndarray) -> np.ndarray:
    """Join ``vc`` into the clock that a barrier accumulates; returns the array to keep."""
    if target is None:
        return vc.copy()
    if target.size < vc.size:
        grown = vc.copy()
        part = grown[: target.size]
        np.maximum(part, target, out=part)
        return grown
    part = target[: vc.size]
    np.maximum(part, vc, out=part)
    return target


class _Reads:
    """Stamps of one agent's last reads, and the newest of them; ``rows`` sees four cells as one row."""

    __slots__ = ("last", "rows", "stamp")

    def __init__(self, shape: tuple[int, ...]):
        self.stamp = np.zeros(shape, np.int64)
        self.rows = self.stamp.reshape(-1, 4)
        self.last = 0


class Shadow:
    """Last writer and last reads of every cell of one memory (a 4-byte shared word; 16 TMEM lanes of one column).

    Cells are selected by any numpy index of ``shape``, or with ``rows`` by an index of rows of four (16-byte chunks).
    """

    def __init__(self, clocks: Clocks, shape: tuple[int, ...], describe: Callable[[np.ndarray], str]):
        self.clocks = clocks
        self.shape = shape
        self.writer = np.zeros(shape, np.int32)
        self.written = np.zeros(shape, np.int64)
        self.writer_rows = self.writer.reshape(-1, 4)
        self.written_rows = self.written.reshape(-1, 4)
        self.reads: dict[int, _Reads] = {}
        self.describe = describe  # names the cells of a mask in a report

    def _known(self, agent: Any) -> np.ndarray:
        """Return the agent's vector clock, with an entry for every slot."""
        vc = agent.vc
        if vc.size < self.clocks.capacity:
            vc = agent.vc = np.concatenate([vc, np.zeros(self.clocks.capacity - vc.size, np.int64)])
        return vc

    def _reads_of(self, slot: int) -> _Reads:
        r = self.reads.get(slot)
        if r is None:
            r = self.reads[slot] = _Reads(self.shape)
        return r

    def read(self, agent: Any, cells: Any, rows: bool = False) -> None:
        """Record a read; raises RaceError if an unordered write exists."""
        vc = self._known(agent)
        written, writer = (self.written_rows, self.writer_rows) if rows else (self.written, self.writer)
        if count_nonzero(written[cells] > vc[writer[cells]]):
            self._report(agent, cells, rows, "reads", vc)
        r = self._reads_of(agent.slot)
        stamp = agent.clock | agent.line
        (r.rows if rows else r.stamp)[cells] = stamp
        if stamp > r.last:
            r.last = stamp

    def read_word(self, agent: Any, i: int) -> None:
        """``read`` of one cell of a one-dimensional memory."""
        vc = self._known(agent)
        if self.written[i] > vc[self.writer[i]]:
            self._report(agent, slice(i, i + 1), False, "reads", vc)
        r = self._reads_of(agent.slot)
        stamp = agent.clock | agent.line
        r.stamp[i] = stamp
        if stamp > r.last:
            r.last = stamp

    def write(self, agent: Any, cells: Any, rows: bool = False) -> None:
        """Record a write; raises RaceError if an unordered read or write exists."""
        self.check_write(agent, cells, rows)
        written, writer = (self.written_rows, self.writer_rows) if rows else (self.written, self.writer)
        writer[cells] = agent.slot
        written[cells] = agent.clock | agent.line

    def check_write(self, agent: Any, cells: Any, rows: bool = False) -> None:
        """Raise RaceError if a write would race; record nothing."""
        vc = self._known(agent)
        written, writer = (self.written_rows, self.writer_rows) if rows else (self.written, self.writer)
        if count_nonzero(written[cells] > vc[writer[cells]]):
            self._report(agent, cells, rows, "writes", vc)
        for slot, r in self.reads.items():
            if r.last <= vc[slot] or slot == agent.slot:
                continue  # all of that agent's reads are known, whatever the cells
            if count_nonzero((r.rows if rows else r.stamp)[cells] > vc[slot]):
                self._report(agent, cells, rows, "writes", vc, slot)

    def _report(self, agent: Any, cells: Any, rows: bool, verb: str, vc: np.ndarray, reader: int | None = None) -> None:
        mask = np.zeros(self.shape, bool)
        (mask.reshape(-1, 4) if rows else mask)[cells] = True
        if reader is None:
            mask &= self.written > vc[self.writer]
            first = tuple(np.argwhere(mask)[0])
            other, stamp, what = self.clocks.names[self.writer[first]], int(self.written[first]), "the write"
        else:
            r = self.reads[reader]
            mask &= r.stamp > vc[reader]
            first = tuple(np.argwhere(mask)[0])
            other, stamp, what = self.clocks.names[reader], int(r.stamp[first]), "the read"
        raise RaceError(
            f"race: {agent.name} {verb} {self.describe(mask)} at {{line {agent.line}}}, "
            f"not ordered after {what} by {other} at {{line {stamp & LINE_MASK}}}"
        )
