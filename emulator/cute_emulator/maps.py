"""Tensor maps that a kernel writes: the proxy fences between the writes and the copies that use the map.

The copy units read tensor maps through a proxy of their own. A map that was written in this launch (by ``st``, by an
atomic, by ``tensormap.replace``) may be used once the write is followed by ``fence.proxy.tensormap::generic.release``
(or came from ``tensormap.cp_fenceproxy``, which ends in one), and that fence by
``fence.proxy.tensormap::generic.acquire`` of the map's address, each ordered after the one before.
"""

from __future__ import annotations

import bisect
from collections import deque
from typing import Any, NamedTuple

import numpy as np

from .errors import MemoryAccessError, RaceError
from .memory import Region

BLOCK = 64  # bytes; a map is two aligned blocks
_FENCES = 16  # acquiring fences that are kept per address and warp


class _Who(NamedTuple):
    """A warp, without what it holds."""

    name: str
    cta: tuple[int, int, int]
    cluster: int
    slot: int


class _Event(NamedTuple):
    """A write, a fence or a use: when it was executed and by whom, its stamp there, and what that warp knew."""

    order: int
    who: _Who
    line: int
    clock: int
    known: Any

    def knows(self, other: _Event) -> bool:
        """Return whether ``other`` precedes this event, in the order of one warp or by synchronisation."""
        if other.order > self.order:
            return False
        if other.who == self.who or self.known is None or other.who.cluster != self.who.cluster:
            return True  # between clusters, and where races are not detected, the order of this run has to do
        slot = other.who.slot
        return slot < self.known.size and bool(self.known[slot] >= other.clock)


class MapFences:
    """Generic writes to global memory and the fences after them, of one launch.

    Only for kernels with tensor maps in memory: every store to global memory is noted, by blocks of 64 bytes.
    """

    def __init__(self, regions: list[Region]):
        for r in regions:
            r.writes = np.zeros((r.end - 1) // BLOCK - r.base // BLOCK + 1, np.int32)
        self.order = 0
        self.writes: dict[int, _Event] = {}
        self.releases: list[_Event] = []
        self.acquires: dict[int, dict[_Who, deque[_Event]]] = {}  # address -> warp -> fences

    def _event(self, warp: Any, fence: bool) -> _Event:
        """Return the next event, so that accesses after a fence have another stamp than those before it."""
        self.order += 1
        a = warp.agent
        slot, clock = (-1, 0) if a is None else (a.slot, a.clock)
        who = _Who(warp.name, warp.cta.id, warp.cta.cluster.index, slot)
        return _Event(self.order, who, warp.line, clock, a.release() if fence and a is not None else None)

    def wrote(self, warp: Any, region: Region, blocks: Any) -> None:
        """A generic write of the blocks with these numbers (address // 64)."""
        e = self._event(warp, False)
        self.writes[e.order] = e
        region.writes[blocks - region.base // BLOCK] = e.order

    def release(self, warp: Any) -> None:
        self.releases.append(self._event(warp, True))

    def acquire(self, warp: Any, addr: int) -> None:
        e = self._event(warp, True)
        self.acquires.setdefault(addr, {}).setdefault(e.who, deque(maxlen=_FENCES)).append(e)

    def check_use(self, warp: Any, region: Region, addr: int) -> None:
        """A copy of ``warp`` uses the map at ``addr``: raise if a fence is missing after the last writes of it."""
        first = addr // BLOCK - region.base // BLOCK
        orders = region.writes[first : first + 2].tolist()
        newest = max(orders)
        if not newest or warp.fenced_maps.get(addr) == newest:
            return
        use = self._event(warp, True)
        for order in set(orders) - {0}:
            self._check(self.writes[order], use, addr)
        warp.fenced_maps[addr] = newest

    def _check(self, write: _Event, use: _Event, addr: int) -> None:
        text = (
            f"{use.who.name} at {{line {use.line}}}: a copy uses the tensor map at {addr:#x}, which {write.who.name} "
            f"wrote at {{line {write.line}}}"
        )
        start = bisect.bisect(self.releases, write.order, key=lambda e: e.order)
        releases = [r for r in self.releases[start:] if r.knows(write)]
        if not releases:
            raise MemoryAccessError(
                f"{text}, without fence.proxy.tensormap::generic.release (or tensormap.cp_fenceproxy) after the write"
            )
        acquires = [
            f
            for who, fences in self.acquires.get(addr, {}).items()
            if who.cluster == use.who.cluster and (use.known is not None or who.cta == use.who.cta)
            for f in fences
            if f.order > releases[0].order and use.knows(f)
        ]
        if not acquires:
            raise MemoryAccessError(
                f"{text}, without fence.proxy.tensormap::generic.acquire of that address between the write and the copy"
            )
        if not any(f.knows(r) for f in acquires for r in releases):
            raise RaceError(
                f"{text}: no synchronisation orders the acquiring fence after the releasing one at "
                f"{{line {releases[0].line}}}"
            )
