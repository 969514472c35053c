"""Barriers of the emulated machine: mbarriers, named barriers, cluster barriers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from .errors import SyncError
from .races import merge_into

_PHASES = 8  # whose released clocks are kept
_TX_LIMIT = (1 << 20) - 1  # the transaction count of an mbarrier has 20 bits and a sign


class Wait:
    """The condition that a blocked warp waits for; a call returns whether it holds and then acquires what it guards.

    ``soft`` waits (try_wait) may time out: the scheduler resumes the warp with the wait unfulfilled when nothing else
    can run.
    """

    __slots__ = ("acquire", "ready", "soft", "what")

    def __init__(
        self, ready: Callable[[], bool], what: tuple, acquire: Callable[[], None] | None = None, soft: bool = False
    ):
        self.ready, self.what, self.acquire, self.soft = ready, what, acquire, soft

    def __call__(self) -> bool:
        if not self.ready():
            return False
        if self.acquire is not None:
            self.acquire()
        return True


class MBarrier:
    """An mbarrier object.

    A phase ends when no arrival is pending and the transaction count is zero. The count may be negative while arrivals
    are pending: a peer's copy may complete before the ``expect_tx`` of this CTA. ``gathered`` is the vector clock of
    all arrivals so far, ``released`` what it was at the end of each of the last phases. Who sees a phase end learns
    what that phase released, and nothing of later ones, although they may be over by then in this schedule: so a
    producer that overtakes its consumers is seen to write what they read.
    """

    __slots__ = (
        "count", "cta", "fenced", "gathered", "init_clock", "init_slot", "name", "offset", "pending", "phase",
        "released", "tx",
    )  # fmt: skip

    def __init__(self, count: int, cta: Any, offset: int):
        self.cta, self.offset = cta, offset
        self.name = f"at shared offset {offset:#x} of CTA {cta.id}"
        self.count = self.pending = count
        self.tx = 0
        self.phase = 0
        self.gathered: Any = None
        self.released: deque[Any] = deque(maxlen=_PHASES)
        self.fenced = False
        self.init_slot, self.init_clock = 0, 0

    def _settle(self) -> None:
        if self.pending == 0 and self.tx == 0:
            self.phase += 1
            self.pending = self.count
            self.released.append(self.gathered.copy() if self.gathered is not None else None)

    def released_by(self, phase: int) -> Any:
        """Return the state that the end of a completed phase released; of an old phase, that of the oldest one kept."""
        return self.released[max(0, phase - self.phase + len(self.released))]

    def _add(self, tx: int) -> None:
        self.tx += tx
        if abs(self.tx) > _TX_LIMIT:
            raise SyncError(f"mbarrier {self.name}: transaction count {self.tx} overflows")

    def arrive(self, n: int, tx: int, vc: Any) -> None:
        """``n`` arrivals that also expect ``tx`` more bytes; ``vc`` is the vector clock they release (or None)."""
        if n > self.pending:
            raise SyncError(
                f"mbarrier {self.name}: {n} arrivals with only {self.pending} of {self.count} pending "
                f"(phase {self.phase})"
            )
        if tx:
            self._add(tx)
        if vc is not None:
            self.gathered = merge_into(self.gathered, vc)
        self.pending -= n
        self._settle()

    def expect(self, tx: int) -> None:
        self._add(tx)

    def complete(self, nbytes: int, vc: Any) -> None:
        """``nbytes`` of asynchronous copies have landed."""
        if self.cta.exited:
            self.cta.alive(f"complete_tx on mbarrier {self.name}")
        self._add(-nbytes)
        if self.tx < 0 and self.pending == 0:
            raise SyncError(f"mbarrier {self.name}: {-self.tx} more bytes completed than expected (phase {self.phase})")
        if vc is not None:
            self.gathered = merge_into(self.gathered, vc)
        self._settle()

    def __repr__(self) -> str:
        return (
            f"mbarrier {self.name} (phase {self.phase}, {self.pending} of {self.count} arrivals pending, tx {self.tx})"
        )


class NamedBarrier:
    """A named barrier, one of the 16 of a CTA (bar.sync / bar.arrive)."""

    __slots__ = ("arrived", "gathered", "generation", "waiting", "warps")

    def __init__(self) -> None:
        self.arrived = 0
        self.generation = 0
        self.gathered: Any = None
        self.warps: list[Any] = []  # that arrived
        self.waiting: list[Any] = []  # of those, the ones that also wait

    def arrive(self, warp: Any, bid: int, n: int, wait: bool) -> Wait | None:
        """Let a warp arrive; return what it has to wait for, or None if it goes on at once."""
        if n % 32 or not 0 <= bid < 16 or n <= 0:
            raise SyncError(f"{warp.where()}: barrier {bid} with {n} threads")
        self.arrived += 32
        if self.arrived > n:
            raise SyncError(f"{warp.where()}: barrier {bid}: {self.arrived} threads arrived, {n} expected")
        self.warps.append(warp)
        if wait:
            self.waiting.append(warp)
        agent = warp.agent
        if agent is not None:
            self.gathered = merge_into(self.gathered, agent.vc)
            agent.tick()
        if self.arrived < n:
            generation = self.generation
            return (
                Wait(lambda: self.generation != generation, ("bar.sync", bid, n, f"{self.arrived} arrived"))
                if wait
                else None
            )
        self.arrived = 0
        self.generation += 1
        for w in self.warps:
            w.publish()
        for w in self.waiting:
            if w.agent is not None:
                w.agent.join(self.gathered)
        self.warps, self.waiting, self.gathered = [], [], None
        return None


class Cluster:
    """The CTAs of one cluster, its barrier and the state of its collectives."""

    def __init__(self, launch: Any, index: int, base: tuple[int, int, int], clocks: Any):
        from .memory import Cta

        self.launch, self.index, self.clocks = launch, index, clocks
        c = launch.cluster
        self.size = c[0] * c[1] * c[2]
        self.arrived = 0
        self.generation = 0
        self.live = 0  # warps that have not exited
        self.gathered: Any = None
        self.released: Any = None
        self.alloc_requests: dict[int, dict[int, list]] = {}
        self.ctas = []
        for rank in range(self.size):
            x, y, z = rank % c[0], rank // c[0] % c[1], rank // (c[0] * c[1])
            self.ctas.append(Cta(launch, self, rank, (base[0] + x, base[1] + y, base[2] + z)))

    def settle(self) -> None:
        """Complete the cluster barrier when every live warp has arrived."""
        if self.live and self.arrived >= self.live:
            self.arrived = 0
            self.generation += 1
            self.released, self.gathered = self.gathered, None
            self.launch.progress += 1
