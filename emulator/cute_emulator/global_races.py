"""Races in global memory: the last write and the last two reads of every byte, of one launch.

An access is noted by the number of its epoch: an agent, its stamp (``races``) and the scope of the access if it is
strong (atomic, or with a memory order), as strong ones do not race with each other. The bytes of a region get their
shadow when something writes to the region; until then its reads are only listed, so that inputs cost next to nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .errors import RaceError
from .happens_before import SYSTEM, Words, knows
from .races import LINE_MASK, Clocks

_LISTED = 20_000  # reads of a region before they go into its shadow
NO_SCOPE = -1  # instead of the scope of a strong access


class Rows(NamedTuple):
    """Accesses of ``width`` bytes each, aligned to that: their numbers in the region."""

    width: int
    numbers: np.ndarray


class Box(NamedTuple):
    """Elements of ``size`` bytes at strides, from a byte of the region on."""

    offset: int
    shape: list[int]
    strides: list[int]
    size: int


Cells = slice | Rows | Box  # bytes of a region


class Epochs:
    """Epochs of the accesses of a launch, or of those of several ranks, and the words that synchronise."""

    def __init__(self) -> None:
        self.words = Words()
        self.clocks: list[Clocks | None] = [None]
        self.slots, self.stamps, self.scopes, self.names = [0], [0], [NO_SCOPE], [""]

    def number(self, agent: Any, scope: int) -> int:
        """Return the epoch of what ``agent`` does now."""
        stamp = agent.clock | agent.line
        known = agent.epoch
        if known[0] == stamp and known[1] == scope:
            return int(known[2])
        self.clocks.append(agent.clocks)
        self.slots.append(agent.slot)
        self.stamps.append(stamp)
        self.scopes.append(scope)
        self.names.append(agent.name)
        agent.epoch = (stamp, scope, len(self.stamps) - 1)
        return len(self.stamps) - 1

    def before(self, epoch: int, agent: Any) -> bool:
        """Return whether an epoch is ordered before the current operation of ``agent``."""
        clocks = self.clocks[epoch]
        return clocks is None or knows(agent, clocks, self.slots[epoch], self.stamps[epoch])

    def together(self, epoch: int, agent: Any, scope: int) -> bool:
        """Return whether an epoch and the access that ``agent`` makes now are strong, which is no race.

        It is a warning where they are of two ranks, and the scope of one does not include the other.
        """
        if scope == NO_SCOPE or self.scopes[epoch] == NO_SCOPE:
            return False
        mine, clocks = agent.clocks.origin, self.clocks[epoch]
        if clocks is not None and clocks.origin.device is not mine.device and min(scope, self.scopes[epoch]) < SYSTEM:
            mine.warnings[
                f"{agent.name} at {{line {agent.line}}} and {self.names[epoch]} at {self.place(epoch, agent)} access a "
                "word of another rank's memory at the same time, and not both with scope sys"
            ] += 1
        return True

    def place(self, epoch: int, agent: Any) -> str:
        """Return the line of an epoch, for a report of ``agent``'s launch."""
        clocks, line = self.clocks[epoch], self.stamps[epoch] & LINE_MASK
        mine = agent.clocks.origin
        if clocks is None or clocks.origin is mine:
            return f"{{line {line}}}"
        theirs = clocks.origin
        return theirs.locate(line) + (f" in kernel {theirs.kernel}" if theirs.kernel != mine.kernel else "")


class RegionShadow:
    """Accesses to one region of global memory."""

    __slots__ = ("epochs", "listed", "older", "reader", "region", "writer")

    def __init__(self, region: Any, epochs: Epochs):
        self.region, self.epochs = region, epochs
        self.listed: list[tuple[int, Cells]] = []
        self.writer: Any = None  # epochs by byte; None while nothing has been written
        self.reader: Any = None
        self.older: Any = None  # of a reader that the last one does not know of

    @staticmethod
    def _view(shadow: np.ndarray, cells: Cells) -> np.ndarray:
        """Return the part of a shadow, as a view; of ``Rows`` the rows of their width."""
        if type(cells) is slice:
            return shadow[cells]
        if type(cells) is Rows:
            return shadow[: shadow.size // cells.width * cells.width].reshape(-1, cells.width)
        assert isinstance(cells, Box)
        strides = [4 * s for s in cells.strides]
        return np.ndarray([*cells.shape, cells.size], np.int32, shadow, 4 * cells.offset, [*strides, 4])

    def _get(self, shadow: np.ndarray, cells: Cells) -> np.ndarray:
        view = self._view(shadow, cells)
        return view[cells.numbers] if type(cells) is Rows else view

    def _set(self, shadow: np.ndarray, cells: Cells, value: Any) -> None:
        self._view(shadow, cells)[cells.numbers if type(cells) is Rows else ...] = value

    def _unordered(self, epochs: np.ndarray, agent: Any, scope: int) -> list[int]:
        """Return those of the epochs that ``agent`` would race with."""
        first = int(epochs.min())
        if first == int(epochs.max()):
            found = [first] if first else []
        else:
            found = [int(e) for e in np.unique(epochs) if e]
        known = self.epochs
        return [e for e in found if not known.before(e, agent) and not known.together(e, agent, scope)]

    def read(self, agent: Any, cells: Cells, scope: int = NO_SCOPE) -> None:
        """Note a read; raises RaceError if an unordered write exists."""
        if agent is None:
            return
        epoch = self.epochs.number(agent, scope)
        if self.writer is None:
            self.listed.append((epoch, cells))
            if len(self.listed) > _LISTED:
                self._unlist()
            return
        races = self._unordered(self._get(self.writer, cells), agent, scope)
        if races:
            self._report(agent, cells, "reads", self.writer, races, "the write")
        self._note_read(agent, epoch, cells)

    def _note_read(self, agent: Any, epoch: int, cells: Cells) -> None:
        readers = self._get(self.reader, cells)
        if readers.any():
            others = self._unordered(readers, agent, NO_SCOPE)
            if others:
                apart = np.isin(readers, others)
                self._set(self.older, cells, np.where(apart, readers, self._get(self.older, cells)))
        self._set(self.reader, cells, epoch)

    def _unlist(self) -> None:
        """Put the reads that were listed into the shadow."""
        if self.reader is None:
            n = -(-self.region.size // 64) * 64
            self.reader, self.older = np.zeros(n, np.int32), np.zeros(n, np.int32)
        for epoch, cells in self.listed:
            readers = self._get(self.reader, cells)
            if readers.any():
                self._set(self.older, cells, np.where(readers == epoch, self._get(self.older, cells), readers))
            self._set(self.reader, cells, epoch)
        self.listed = []

    def write(self, agent: Any, cells: Cells, scope: int = NO_SCOPE) -> None:
        """Note a write; raises RaceError if an unordered access exists."""
        if agent is None:
            return
        if self.writer is None:
            self._unlist()
            self.writer = np.zeros(self.reader.size, np.int32)
        for shadow, what in ((self.writer, "the write"), (self.reader, "the read"), (self.older, "the read")):
            epochs = self._get(shadow, cells)
            if epochs.any():
                races = self._unordered(epochs, agent, scope)
                if races:
                    self._report(agent, cells, "writes", shadow, races, what)
        self._set(self.writer, cells, self.epochs.number(agent, scope))

    def written(self, start: int, end: int) -> np.ndarray:
        """Return which bytes of an address range have been written."""
        return self._marked(self.writer, start, end)

    def accessed(self, start: int, end: int) -> np.ndarray:
        """Return which bytes of an address range have been read or written."""
        self._unlist()
        return self._marked(self.reader, start, end) | self.written(start, end)

    def _marked(self, shadow: Any, start: int, end: int) -> np.ndarray:
        first = self.region.base
        return np.zeros(end - start, bool) if shadow is None else shadow[start - first : end - first] != 0

    def _report(self, agent: Any, cells: Cells, verb: str, shadow: np.ndarray, races: list[int], what: str) -> None:
        touched = np.zeros(shadow.size, np.int32)
        self._set(touched, cells, 1)
        other = races[0]
        bytes_ = np.flatnonzero(touched.astype(bool) & (shadow == other))
        base, start = self.region.base, self.region.start
        low, high = (int(bytes_[i]) + base - start for i in (0, -1))
        raise RaceError(
            f"race: {agent.name} {verb} global memory, bytes [{low}, {high + 1}) of {self.region.name}, at "
            f"{{line {agent.line}}}, not ordered after {what} by {self.epochs.names[other]} at "
            f"{self.epochs.place(other, agent)}"
        )
