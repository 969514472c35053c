"""Asynchronous work: what is in flight, and when it happens.

Copies and tensor-core instructions are queued as tasks. Copies complete in any order; the tensor-core instructions of
one warp complete in the order of issue. With adversarial timing each launch draws how eagerly work completes, and some
operations are held back until nothing else in the machine can move; with in-order timing a task runs when it is issued.
The third timing is that of ``clocked``.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

TIMINGS = ("adversarial", "in_order", "clocked")


class Copy(NamedTuple):
    """Traffic of a copy, for a model of time: bytes of a CTA's shared memory, and of what (None: of its own)."""

    cta: Any
    size: int
    source: Any = None


class Product(NamedTuple):
    """Work of an MMA: FLOPs of a ``kind`` as tcgen05 names them, and bytes of operands in shared memory."""

    kind: str
    flops: float
    operands: float


class Engine:
    """Tasks in flight. ``delays`` tells whether a task may run later than it was issued."""

    def __init__(self, seed: int, timing: str):
        if timing not in TIMINGS:
            raise ValueError(f"timing must be one of {TIMINGS}, got {timing!r}")
        self.random = rnd = random.Random(seed)
        self.delays = timing != "in_order"
        self.agent: Any = None  # on whose behalf memory is accessed right now
        self.progress = 0
        self.pending: list[tuple[Any, Callable[[], None]]] = []
        self.queues: dict[Any, deque] = {}
        self.held: list[tuple[Any, Callable[[], None]]] = []
        self.p_hold = dict.fromkeys(("load", "store"), 0.0)
        self.p_async = self.p_spurious = self.p_slow = 0.0
        self.slow_warps: set[int] = set()
        self.spin_limit = 500
        if timing == "adversarial":
            self.p_hold = {k: rnd.choice((0.0, 0.0, 0.1, 0.9)) for k in ("load", "store")}
            self.p_spurious = 0.2
            self.spin_limit = 100
            self.p_async = rnd.choice((0.03, 0.25, 0.6))
            self.slow_warps = {i for i in range(64) if rnd.random() < 0.3}
            self.p_slow = rnd.choice((0.7, 0.97, 0.998))

    def issue(
        self,
        queue: Any,
        agent: Any,
        fn: Callable[[], None],
        kind: str = "load",
        work: Copy | Product | None = None,
    ) -> None:
        """Start a task: in the in-order queue named, or unordered if it is None; ``agent`` performs its accesses.

        ``work`` is what keeps a unit busy: only a model of time asks.
        """
        if not self.delays:
            self.agent = agent
            fn()
            self.progress += 1
        elif queue is None:
            (self.held if self.random.random() < self.p_hold[kind] else self.pending).append((agent, fn))
        else:
            q = self.queues.get(queue)
            if q is None:
                q = self.queues[queue] = deque()
            q.append((agent, fn))

    def run_one(self, stalled: bool = False) -> bool:
        """Run one task in flight; held ones only if nothing else can move. False if there is none."""
        queues = [q for q in self.queues.values() if q]
        n = len(self.pending) + len(queues)
        if n:
            i = self.random.randrange(n)
            if i < len(self.pending):
                task = self.pending[i]
                self.pending[i] = self.pending[-1]
                self.pending.pop()
            else:
                task = queues[i - len(self.pending)].popleft()
        elif stalled and self.held:
            task = self.held.pop(self.random.randrange(len(self.held)))
        else:
            return False
        self.agent = task[0]
        task[1]()
        self.progress += 1
        return True

    def forget(self, warp: Any) -> None:
        """An exited warp issues nothing more: drop its queue once it is empty."""
        key = ("tcgen05", warp)
        q = self.queues.get(key)
        if q is not None and not q:
            del self.queues[key]
