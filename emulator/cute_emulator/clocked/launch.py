"""A launch in which every warp has a clock, and copies and MMAs keep the units of a multiprocessor busy."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..engine import Copy, Product
from ..errors import DeadlockError
from ..launch import LIVELOCK_STEPS, Launch
from ..sync import MBarrier, Wait
from ..warp import Warp
from .costs import Costs, costs_of

PORTS = 4  # of a multiprocessor: warp i issues by port i mod 4
_KINDS = {"f16": "f16", "bf16": "f16", "tf32": "tf32", "s8": "i8", "u8": "i8", "e4m3": "f8f6f4", "e5m2": "f8f6f4"}


class Unit:
    """Serves one request after the other."""

    __slots__ = ("busy", "free")

    def __init__(self) -> None:
        self.free = self.busy = 0.0

    def serve(self, now: float, cycles: float) -> float:
        """Return when a request of ``now`` that takes so many cycles is done."""
        self.busy += cycles
        self.free = max(self.free, now) + cycles
        return self.free


class Link(Unit):
    """The path from the L2 to two multiprocessors; data that both request while it is on its way is sent once."""

    __slots__ = ("coming",)

    def __init__(self) -> None:
        super().__init__()
        self.coming: dict[Any, float] = {}

    def bring(self, now: float, work: Copy, costs: Costs, latency: int) -> float:
        """Return when the data of a copy reaches the start of its way through shared memory."""
        came = self.coming.get(work.source)
        if came is None or came + latency <= now:
            came = self.coming[work.source] = self.serve(now, work.size / costs.l2)
        return came


class Multiprocessor:
    """The units of a multiprocessor, which one CTA has for itself.

    ``tensor`` and ``tmem`` have a part beside each port; MMAs of tcgen05, which use all four, are counted by the first.
    ``done`` is when the last of those is.
    """

    def __init__(self, costs: Costs, pair: Link) -> None:
        self.costs = costs
        self.ports, self.tensor, self.tmem = ([Unit() for _ in range(PORTS)] for _ in range(3))
        self.shared, self.outgoing, self.incoming = Unit(), Unit(), pair
        self.memory = Unit()
        self.memory.free = costs.behind / costs.memory
        self.done = 0.0

    def multiply(self, now: float, work: Product, part: int = 0) -> float:
        """Return when an MMA, or a warp's part of one, is done: products and reads of its operands overlap."""
        products = self.tensor[part].serve(now, work.flops / self.costs.tensor[work.kind])
        return max(products, self.shared.serve(now, work.operands / self.costs.shared))

    def load(self, now: float, work: Copy, latency: int) -> float:
        """Return when data from the L2 has been written."""
        came = self.incoming.bring(now, work, self.costs, latency)
        return max(came, self.shared.serve(now, work.size / self.costs.shared)) + latency

    def store(self, now: float, work: Copy) -> float:
        """Return when a store has read its data."""
        sent = self.outgoing.serve(now, work.size / self.costs.l2)
        sent = max(sent, self.memory.serve(now, work.size / self.costs.memory) - self.costs.behind / self.costs.memory)
        return max(sent, self.shared.serve(now, work.size / self.costs.shared)) + self.costs.read

    @property
    def busy(self) -> dict[str, float]:
        """Cycles by unit."""
        units = {"tensor": self.tensor[0], "shared": self.shared, "incoming": self.incoming, "outgoing": self.outgoing}
        ports = {f"port {i}": port for i, port in enumerate(self.ports)}
        return {name: unit.busy for name, unit in (units | ports).items()}


@dataclass
class Usage:
    """Usage of a warp's time, in cycles of the launch.

    Attributes:
        issued: instructions, each a cycle of the warp's port.
        end: when it ended.
        waits: cycles in which it waited, by what for: ``mbarrier`` and its offset, ``bar.sync`` and its number, ...
    """

    issued: int = 0
    end: float = 0.0
    waits: Counter[str] = field(default_factory=Counter)


@dataclass
class Cycles:
    """Modelled cycles of a launch.

    Attributes:
        total: cycles from the start of the first warp to the end of the last.
        warps: by CTA and number of the warp.
        busy: cycles that units of a CTA's multiprocessor worked, by CTA and name.
    """

    total: float
    warps: dict[tuple[tuple[int, int, int], int], Usage]
    busy: dict[tuple[int, int, int], dict[str, float]]


class ClockedWarp(Warp):
    """A warp with a clock."""

    def __init__(self, launch: Any, cta: Any, wid: int):
        super().__init__(launch, cta, wid)
        self.clock, self.usage = launch.now, launch.usage.setdefault((cta.id, wid), Usage())
        self.sm = launch.multiprocessor(cta)
        self.part = wid % PORTS
        self.port = self.sm.ports[self.part]
        self.loaded = self.multiplied = 0.0  # when its last read of tensor memory, and its last MMA, are done
        self.copied = 0.0  # when its last cp.async is done
        self.copied_groups: deque[float] = deque()  # the same of each group that has not been waited for

    def spend(self, slots: int, cycles: int) -> None:
        """Instructions that need as many slots of the port, and take as many cycles where it is free."""
        start = max(self.clock, self.port.free)
        self.port.serve(start, slots)
        self.clock = start + max(cycles, slots)
        self.usage.issued += slots

    def idle(self, until: float, what: str) -> None:
        """The warp goes on at ``until``, if that is later."""
        if until > self.clock:
            self.usage.waits[what] += until - self.clock
            self.clock = until

    # ---- cp.async ----
    def cp_async(self, dst: Any, src: Any, n: int, srcn: Any, m: np.ndarray) -> None:
        before = len(self.copy_group)
        super().cp_async(dst, src, n, srcn, m)
        lanes = [(copy[3], copy[4]) for copy in self.copy_group[before:]]  # address and bytes
        work = Copy(self.cta, sum(size for _, size in lanes), tuple(lanes))
        self.copied = max(self.copied, self.sm.load(self.clock, work, self.launch.costs.copy))

    def cp_async_commit(self) -> None:
        super().cp_async_commit()
        self.copied_groups.append(self.copied)

    def cp_async_wait(self, n: int) -> None:
        super().cp_async_wait(n)
        done = 0.0
        while len(self.copied_groups) > max(n, 0):
            done = self.copied_groups.popleft()
        self.idle(done, "cp.async.wait_group")

    def arrive_copied(self, barriers: list[MBarrier], vc: Any) -> None:
        arrive = super().arrive_copied
        self.launch.at(max(self.copied, self.clock), None, lambda: arrive(barriers, vc))

    # ---- wgmma: each warp has its rows multiplied beside its port ----
    def wgmma(
        self, shape: str, dt: str, at: str, bt: str, dregs: tuple, a: Any, a_in_regs: bool, *rest: Any
    ) -> tuple[Any, ...]:
        n, k = (int(x) for x in shape[len("m64n") :].split("k"))
        operands = 32 * (n / PORTS + (0 if a_in_regs else 16))  # bytes: 32 a row, those of B once for the four warps
        work = Product(_KINDS[at], 2 * 64 * n * k, operands)
        self.multiplied = max(self.multiplied, self.sm.multiply(self.clock, work, self.part))
        return super().wgmma(shape, dt, at, bt, dregs, a, a_in_regs, *rest)

    def _group(self, number: int) -> tuple:
        return self.cta.id, self.wid // 4, number

    def wgmma_commit(self) -> None:
        launch, key = self.launch, self._group(self._warpgroup().committed[self.wid % 4])
        super().wgmma_commit()
        launch.groups[key] = max(launch.groups.get(key, 0.0), self.multiplied + launch.costs.drain)
        launch.at(launch.groups[key])

    def wgmma_wait(self, n: int) -> Wait:
        wait, launch = super().wgmma_wait(n), self.launch
        key, committed = self._group(self._warpgroup().committed[self.wid % 4] - n - 1), wait.ready
        wait.ready = lambda: committed() and launch.now >= launch.groups.get(key, 0.0)
        return wait

    # ---- tcgen05 ----
    def tc_ld(self, shape: str, num: int, addr: Any, pack16: bool, imm: int) -> list[Any]:
        found = super().tc_ld(shape, num, addr, pack16, imm)
        self.loaded = self.sm.tmem[self.part].serve(self.clock, len(found))  # a column of its 32 lanes in a cycle
        return found

    def tc_wait(self, what: str) -> None:
        super().tc_wait(what)
        if what == "ld":
            self.idle(self.loaded + self.launch.costs.drain, "tcgen05.wait::ld")


class ClockedLaunch(Launch):
    """A grid whose CTAs have a multiprocessor each; the warp with the least clock goes on."""

    warp_type = ClockedWarp

    def __init__(self, program: Any, extent: Any, params: bytes, spans: list, chip: Any, rules: Any):
        super().__init__(program, extent, params, spans, chip, rules)
        self.costs = costs_of(chip.name)
        self.now = 0.0
        self.events: list[tuple[float, int, Any, Callable[[], None] | None]] = []  # a heap
        self.running: Any = None
        self.links: dict[int, Link] = {}
        self.sms: dict[tuple[int, int, int], Multiprocessor] = {}
        self.usage: dict[tuple[tuple[int, int, int], int], Usage] = {}
        self.groups: dict[tuple, float] = {}  # when groups of wgmma are done: of CTA, warpgroup and number

    def multiprocessor(self, cta: Any) -> Multiprocessor:
        if cta.id not in self.sms:
            link = self.links.setdefault(cta.smid // 2, Link())
            self.sms[cta.id] = Multiprocessor(self.costs, link)
        return self.sms[cta.id]

    # ---- services for warps ----
    def clock(self) -> int:
        return int(self.now)

    def bank(self, what: str, offsets: np.ndarray, width: int) -> None:
        before = self.stat["shared_passes"]
        super().bank(what, offsets, width)
        self.running.sm.shared.serve(self.now, self.stat["shared_passes"] - before)

    def at(self, time: float, agent: Any = None, act: Callable[[], None] | None = None) -> None:
        """Do something at a time, and see who can go on then."""
        heapq.heappush(self.events, (time, self.numbered(), agent, act))

    def numbered(self) -> int:
        self.time += 1
        return self.time

    def issue(
        self,
        queue: Any,
        agent: Any,
        fn: Callable[[], None],
        kind: str = "load",
        work: Copy | Product | None = None,
    ) -> None:
        self.at(self._end(queue, kind, work), agent, fn)

    def _end(self, queue: Any, kind: str, work: Copy | Product | None) -> float:
        """Return when a task issued now is done."""
        now, costs = self.now, self.costs
        if queue is None:
            if isinstance(work, Copy):
                sm = self.multiprocessor(work.cta)
                return sm.load(now, work, costs.load) if kind == "load" else sm.store(now, work)
            return now + (costs.load if kind == "load" else costs.store)
        sm = self.multiprocessor(queue[1].cta)
        if isinstance(work, Product):
            sm.done = max(sm.done, sm.multiply(now, work))
        elif isinstance(work, Copy):
            sm.done = max(sm.done, sm.tensor[0].serve(now, work.size / costs.shared))
        else:
            return max(sm.done, now) + costs.drain
        return sm.done

    # ---- scheduling ----
    def schedule(self) -> Generator[None, None, int]:
        steps = last_progress = last_step = 0
        if self.in_front:
            self.end_front()
        while self.todo or self.warps or self.events:
            yield
            while self.todo and len(self.clusters) < self.resident:
                self.start_cluster()
            warp = min((w for w in self.warps if w.wait is None), key=lambda w: w.clock, default=None)
            if self.events and (warp is None or self.events[0][0] <= warp.clock):
                self.now, _, agent, act = heapq.heappop(self.events)
                if act is not None:
                    self.agent = agent
                    act()
                    self.progress += 1
            elif warp is not None:
                self.now, self.running = warp.clock, warp
                self.step(warp)
                warp.usage.end = warp.clock
                steps += 1
                if self.progress != last_progress:
                    last_progress, last_step = self.progress, steps
                elif steps - last_step > LIVELOCK_STEPS:
                    raise self.livelock()
            else:
                raise DeadlockError("deadlock: every warp is blocked\n" + self.describe())
            for w in self.warps:
                if w.wait is not None and w.wait.ready():
                    if self.now > w.clock:
                        w.idle(self.now + self.costs.wake, _named(w.wait.what))
                    w.wait = None
        return steps

    def cycles(self) -> Cycles:
        """Return the cycles of the launch."""
        total = max((usage.end for usage in self.usage.values()), default=0.0)
        return Cycles(total, self.usage, {cta: sm.busy for cta, sm in self.sms.items()})


def _named(what: tuple) -> str:
    """Return a short name for the event that a warp waits for."""
    bar = getattr(what[0], "bar", None)
    if bar is not None:
        return f"mbarrier {bar.offset:#x}"
    return f"{what[0]} {what[1]}" if what[0] == "bar.sync" else str(what[0])
