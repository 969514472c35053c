"""Synchronisation of a warp: named, cluster and memory barriers, fences."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import RaceError, SyncError
from ..memory import ASYNC, OFFSET_MASK
from ..races import merge_into
from ..sync import MBarrier, NamedBarrier, Wait
from .multicast import MulticastWarp


class _PhaseEnd:
    """A wait for the end of a phase, named for reports."""

    __slots__ = ("bar", "parity", "warp")

    def __init__(self, warp: SyncWarp, bar: MBarrier, parity: int):
        self.warp, self.bar, self.parity = warp, bar, parity

    def __str__(self) -> str:
        text = f"{self.bar!r} parity {self.parity}"
        if self.warp.agent is None or self.warp.awaited_phase(self.bar, self.parity) >= self.bar.phase:
            return text
        return f"{text}, missed: such a phase was over, and the next one too before this warp had seen it"


class SyncWarp(MulticastWarp):
    """Barriers, mbarriers and fences."""

    def __init__(self, launch: Any, cta: Any, wid: int):
        super().__init__(launch, cta, wid)
        self.unfenced_mbars: list[MBarrier] = []
        self.fenced: np.ndarray | None = None  # what this warp knew at its last cluster-wide release fence
        self.cluster_generation = 0
        self.phases: dict[MBarrier, int] = {}  # how many phases are over as far as this warp knew when it last waited

    # ---- proxy fences ----
    def publish(self) -> None:
        """Hand unfenced generic writes over to whoever fences them after this synchronisation."""
        if self.dirty:
            self.cta.published += self.dirty
            self.dirty = []

    def fence_proxy_async(self) -> None:
        """fence.proxy.async: generic writes this warp knows of become visible to the asynchronous proxy."""
        for pending in (self.dirty, self.cta.published):
            for cta, words in pending:
                cta.state[words] = ASYNC
            pending.clear()
        self.fence_mbarrier_init()

    def fence_mbarrier_init(self) -> None:
        for b in self.unfenced_mbars:
            b.fenced = True
        self.unfenced_mbars.clear()
        self.fence_release()

    def fence_release(self) -> None:
        """A release fence: a later relaxed arrival on the cluster barrier hands on what came before the fence."""
        if self.agent is not None:
            self.fenced = self.agent.release()

    def fence(self, scope: int, releases: bool) -> None:
        """A memory fence: it makes a release of later relaxed stores and an acquire of earlier relaxed loads."""
        if releases:
            self.fence_release()
        if self.agent is not None:
            self.launch.epochs.words.fence(self, scope, releases)

    # ---- named barriers ----
    def bar(self, bid: Any, n: Any, m: np.ndarray, wait: bool) -> Wait | None:
        bid, n = self.one_lane(m, bid, n)
        b = self.cta.named.get(bid)
        if b is None:
            b = self.cta.named[bid] = NamedBarrier()
        self.launch.progress += 1
        self.launch.stat["barriers"] += 1
        return b.arrive(self, bid, n, wait)

    # ---- cluster barrier ----
    def cluster_arrive(self, relaxed: bool) -> None:
        cl = self.cta.cluster
        self.cluster_generation = cl.generation
        cl.arrived += 1
        self.launch.progress += 1
        self.launch.stat["cluster_barriers"] += 1
        self.publish()
        if self.agent is not None:
            vc = self.fenced if relaxed else self.agent.vc
            if vc is not None:
                cl.gathered = merge_into(cl.gathered, vc)
            if not relaxed:
                self.agent.tick()
        cl.settle()

    def cluster_wait(self) -> Wait:
        cl, g = self.cta.cluster, self.cluster_generation
        acquire = (lambda: self.agent.join(cl.released)) if self.agent is not None else None
        return Wait(lambda: cl.generation != g, ("barrier.cluster.wait",), acquire)

    def let_next_begin(self) -> None:
        if not self.waited and self.launch.at_once is None:
            self.launch.at_once = self.line

    def front_wait(self) -> Wait:
        return Wait(lambda: not self.launch.in_front, ("griddepcontrol.wait",))

    # ---- mbarriers ----
    def mbar_at(self, addr: int, asynchronous: bool = False) -> MBarrier:
        """Return the mbarrier at a shared address; its initialisation must be ordered before this use."""
        addr = self.shared_address(addr)
        b = self.target_cta(addr).mbar(addr & OFFSET_MASK)
        self.check_mbar(b, asynchronous)
        return b

    def arrival_at(self, addr: int, asynchronous: bool = False) -> MBarrier | None:
        """``mbar_at`` of an arrival: None if it comes after the exit of the barrier's CTA, where that is allowed."""
        addr = self.shared_address(addr)
        if self.named_cta(addr).late_arrival(self.line):
            return None
        return self.mbar_at(addr, asynchronous)

    def check_mbar(self, b: MBarrier, asynchronous: bool = False) -> None:
        """Raise unless the initialisation of ``b`` is ordered before this use of it."""
        a = self.agent
        if a is None:
            return
        if b.init_slot >= a.vc.size or a.vc[b.init_slot] < b.init_clock:
            raise RaceError(f"{self.where()}: use of the mbarrier {b.name}, not ordered after its mbarrier.init")
        if (asynchronous or b.cta is not self.cta) and not b.fenced:
            raise SyncError(
                f"{self.where()}: the mbarrier {b.name} is used by the asynchronous proxy or by another CTA, but its "
                "mbarrier.init was not followed by fence.mbarrier_init or fence.proxy.async"
            )

    def mbar_init(self, addr: Any, count: Any, m: np.ndarray) -> None:
        addr, count = self.one_lane(m, addr, count)
        addr = self.shared_address(addr)
        cta, o = self.target_cta(addr), addr & OFFSET_MASK
        if o % 8:
            self.fail(f"mbarrier at offset {o:#x} is not 8-byte aligned", SyncError)
        if not 1 <= count <= (1 << 20) - 1:
            self.fail(f"mbarrier.init with count {count}", SyncError)
        if o + 8 > cta.size:
            self.fail(f"mbarrier at offset {o:#x} is outside shared memory")
        b = cta.mbars[o] = MBarrier(count, cta, o)
        words = slice(o >> 2, (o >> 2) + 2)
        cta.state[words] = ASYNC
        a = self.here()
        if a is not None:
            cta.shadow.write(a, words)
            b.init_slot, b.init_clock = a.slot, a.clock
        self.unfenced_mbars.append(b)

    def mbar_inval(self, addr: Any, m: np.ndarray) -> None:
        (addr,) = self.one_lane(m, addr)
        addr = self.shared_address(addr)
        self.target_cta(addr).mbars.pop(addr & OFFSET_MASK, None)

    def mbar_wait(self, addr: Any, parity: Any, m: np.ndarray, relaxed: bool) -> Any:
        """try_wait / test_wait: True, or False (a spurious time-out), or a soft ``Wait``."""
        if type(addr) is not int or type(parity) is not int:
            addr, parity = self.one_lane(m, addr, parity)
        b = self.mbar_at(addr)
        parity &= 1
        a = self.agent
        if (b.phase & 1) != parity:
            if a is not None:
                self._phase_over(b, parity, relaxed)
            return True
        launch = self.launch
        if launch.p_spurious and launch.random.random() < launch.p_spurious:
            self.spin += 1
            return False  # the time limit of the suspension may expire at once; a caller that ignores it has a bug
        acquire = (lambda: self._phase_over(b, parity, relaxed)) if a is not None else None
        return Wait(lambda: (b.phase & 1) != parity, (_PhaseEnd(self, b, parity),), acquire, True)

    def awaited_phase(self, b: MBarrier, parity: int) -> int:
        """The phase whose end this warp waits for: the first that may still be running, or the one before it."""
        phase = self.phases.get(b, 0)
        while phase < b.phase and self.agent.knows(b.released_by(phase)):
            phase += 1
        return phase if phase & 1 == parity else phase - 1

    def _phase_over(self, b: MBarrier, parity: int, relaxed: bool) -> None:
        """A wait has succeeded: learn what came before the end of the phase that it was for, and nothing later."""
        phase = self.awaited_phase(b, parity)
        if phase >= 0 and not relaxed:
            self.agent.join(b.released_by(phase))
        self.phases[b] = phase + 1

    def mbar_arrive(self, addr: Any, count: Any, m: np.ndarray, tx: Any, relaxed: bool) -> None:
        self.launch.progress += 1
        self.publish()
        a = None if relaxed else self.agent
        vc = a.vc if a is not None else None
        if type(addr) is int and type(count) is int and type(tx) is int:
            n = int(np.count_nonzero(m))
            self._arrive(addr, count * n, tx * n, vc)
        else:
            for lane in np.flatnonzero(m):
                at, n, expected = [x if type(x) is int else int(x[lane]) for x in (addr, count, tx)]
                self._arrive(at, n, expected, vc)
        if a is not None:
            a.tick()

    def _arrive(self, addr: int, count: int, tx: int, vc: Any) -> None:
        b = self.arrival_at(addr)
        if b is not None:
            b.arrive(count, tx, vc)
            if b.cta is not self.cta:
                b.cta.note_arrival(self.here())

    def mbar_expect(self, addr: Any, tx: Any, m: np.ndarray) -> None:
        addr, tx = self.one_lane(m, addr, tx)
        self.mbar_at(addr).expect(tx * int(np.count_nonzero(m)))

    def mbar_complete(self, addr: Any, tx: Any, m: np.ndarray) -> None:
        addr, tx = self.one_lane(m, addr, tx)
        self.mbar_at(addr).complete(tx, None)
