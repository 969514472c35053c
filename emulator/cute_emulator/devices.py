"""State of an emulated device that outlives a launch, and the memory that the devices of several ranks share."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .global_races import Epochs, RegionShadow
from .happens_before import Knowledge, merged
from .memory import Region
from .races import Clocks

_APART = 7919  # the seeds of two ranks


class Window(NamedTuple):
    """Multicast addresses ``[start, end)``, and where the memory of each rank begins that they stand for."""

    start: int
    end: int
    targets: tuple[int, ...]


class World:
    """The memory that launches of several ranks share while they run at the same time.

    Args:
        symmetric: ``(address, bytes, name)`` of the memory of each rank.
        windows: multicast addresses of that memory.
        detect_races: keep what is needed to find races between ranks.
    """

    def __init__(self, symmetric: list[tuple[int, int, str]], windows: list[Window], detect_races: bool):
        self.symmetric, self.windows = sorted(symmetric), sorted(windows)
        self.epochs = Epochs() if detect_races else None
        self._shared = sorted([(a, a + n) for a, n, _ in self.symmetric] + [(w.start, w.end) for w in self.windows])
        epochs = self.epochs
        self._shadows = {} if epochs is None else {s[0]: RegionShadow(Region(*s), epochs) for s in self.symmetric}

    def private(self, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the parts of ``(address, bytes)`` that are neither symmetric memory nor multicast addresses."""
        out = []
        for start, size in spans:
            end = start + size
            for low, high in self._shared:
                if low < end and start < high:
                    out.append((start, low - start))
                    start = high
            out.append((start, end - start))
        return [(start, size) for start, size in out if size > 0]

    def regions(self) -> list[Region]:
        """Return the symmetric memory, as regions for a launch."""
        out = [Region(*span) for span in self.symmetric]
        for region in out:
            region.shadow = self._shadows.get(region.start)
        return out

    def window(self, addr: int) -> Window | None:
        """Return the multicast addresses to which ``addr`` belongs, None if it is none."""
        return next((w for w in self.windows if w.start <= addr < w.end), None)


class Device:
    """A GPU: its rank if there are several, its number of launches, and the state that its launches have acquired.

    Args:
        rank: None if it is the only one.
        world: what it shares with the others.
    """

    def __init__(self, rank: int | None = None, world: World | None = None):
        self.rank, self.world = rank, world
        self.prefix = "" if rank is None else f"rank {rank}, "  # of the names of warps and CTAs
        self.launches = 0
        self.known: Knowledge = {}

    def seed(self, seed: int) -> int:
        """Return the seed of this device's launches."""
        return seed + _APART * (self.rank or 0)

    def finish(self, clusters: list[Clocks]) -> None:
        """Order later launches after one with these clusters, which is over, and after all that it has acquired."""
        self.launches += 1
        if self.world is None:
            return
        for clocks in clusters:
            for entries in clocks.gained.values():
                self.known = merged(self.known, entries[-1][1])
        self.known = {**self.known, self: np.array([self.launches], np.int64)}
