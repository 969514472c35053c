"""Happens-before between warps of different clusters: releases and acquires by words of global memory.

The vector clocks of ``races`` are those of one cluster. Knowledge of other clusters comes by words of global memory
alone. It is not in an agent's vector clock but noted once, by the clock slot of the warp that acquired it and the time
of that: whoever learns of that time, by any barrier of the cluster, knows what the warp had acquired.

A release is ``.release`` on a store or an atomic, or a fence before a relaxed one; an acquire is ``.acquire`` on a load
or an atomic, or a fence after a relaxed one. Both count within the smaller of their scopes only. An atomic continues
the releases that it follows, any other store to the word ends them.

Launches of one device come one after the other. All that its earlier launches did is known together: under the device,
how many of them are over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from .races import Agent, Clocks

Knowledge = dict[Any, np.ndarray]  # vector clocks by cluster, launches over by device; the arrays are never changed

SCOPES = {"cta": 0, "cluster": 1, "gpu": 2, "gl": 2, "sys": 3}
GPU, SYSTEM = 2, 3


class Order(NamedTuple):
    """The order of a memory access.

    Attributes:
        kind: of ``acquire``, ``release``, ``acq_rel``, ``relaxed`` and ``volatile``; empty if the access is weak.
        scope: how far it reaches, of ``SCOPES``.
        atomic: whether a load is followed by a store, or a store follows a load, as one.
    """

    kind: str = ""
    scope: int = GPU
    atomic: bool = False


WEAK = Order()
_FENCES = 8  # that are kept per warp


def merged(known: Knowledge, more: Knowledge) -> Knowledge:
    """Return the union of both, ``known`` itself where ``more`` adds nothing."""
    out = known
    for clocks, vc in more.items():
        old = known.get(clocks)
        if old is vc:
            continue
        if old is not None:
            n = min(old.size, vc.size)
            if not (vc[:n] > old[:n]).any() and not vc[n:].any():
                continue
            grown = np.zeros(max(old.size, vc.size), np.int64)
            grown[: old.size] = old
            np.maximum(grown[: vc.size], vc, out=grown[: vc.size])
            vc = grown
        if out is known:
            out = dict(known)
        out[clocks] = vc
    return out


def _known_to(agent: Any) -> Iterator[Knowledge]:
    """Yield the knowledge that earlier launches left, and that of the warps whose acquires ``agent`` knows of."""
    known = agent.clocks.origin.device.known
    if known:
        yield known
    vc = agent.vc
    for slot, entries in agent.clocks.gained.items():
        if slot < vc.size:
            clock = int(vc[slot])
            known = next((knowledge for at, knowledge in reversed(entries) if at <= clock), None)
            if known is not None:
                yield known


def knows(agent: Any, clocks: Clocks, slot: int, stamp: int) -> bool:
    """Return whether a cluster's access with a stamp is ordered before the current operation of ``agent``."""
    mine = agent.clocks
    if mine is clocks:
        return bool(slot < agent.vc.size and agent.vc[slot] >= stamp)
    origin = clocks.origin
    for knowledge in _known_to(agent):
        vc = knowledge.get(clocks)
        if vc is not None and slot < vc.size and vc[slot] >= stamp:
            return True
        over = knowledge.get(origin.device)
        if over is not None and origin.number < over[0]:
            return True
    return False


def all_known(agent: Agent) -> Knowledge:
    """Return all that happened before an agent's next access, for a release; later accesses are not covered by it."""
    out: Knowledge = {}
    for knowledge in _known_to(agent):
        out = merged(out, knowledge)
    return {**out, agent.clocks: agent.release()}


def gain(agent: Agent, knowledge: Knowledge) -> None:
    """Acquire what another agent released."""
    agent.join(knowledge.get(agent.clocks))
    foreign = {clocks: vc for clocks, vc in knowledge.items() if clocks is not agent.clocks}
    entries = agent.clocks.gained.setdefault(agent.slot, []) if foreign else []
    before: Knowledge = entries[-1][1] if entries else {}
    after = merged(before, foreign)
    if after is not before:
        agent.tick()
        entries.append((agent.clock, after))


def _places(warp: Any, scope: int) -> tuple[Any, ...]:
    """Return the places within a scope, the widest first: all devices (None), the warp's own, its cluster, its CTA."""
    clocks = warp.agent.clocks
    return (None, clocks.origin.device, clocks, warp.cta)[SYSTEM - scope :]


class Words:
    """The words of global memory that were released, of one launch.

    For each word what an acquire gets that reads it: by the CTA, the cluster or the device to which the release was
    confined, or under None for all.
    """

    def __init__(self) -> None:
        self.released: dict[int, dict[Any, Knowledge]] = {}

    def write(self, warp: Any, addr: int, order: Order) -> None:
        """A strong store or atomic of ``warp``."""
        word = addr >> 2
        after = dict(self.released.get(word, {})) if order.atomic else {}
        for reach, knowledge in self._releases(warp.agent, order):
            for place in _places(warp, reach):
                after[place] = merged(after[place], knowledge) if place in after else knowledge
        if after or word in self.released:
            self.released[word] = after

    @staticmethod
    def _releases(agent: Agent, order: Order) -> Iterator[tuple[int, Knowledge]]:
        """Yield what a store releases, with its scope."""
        if order.kind in ("release", "acq_rel"):
            yield order.scope, all_known(agent)
            return
        for slot, fences in agent.clocks.fences.items():
            if slot < agent.vc.size:
                for clock, reach, knowledge in fences:
                    if clock <= agent.vc[slot]:
                        yield min(reach, order.scope), knowledge

    def read(self, warp: Any, addr: int, order: Order) -> None:
        """A strong load or atomic of ``warp``."""
        released = self.released.get(addr >> 2)
        if not released:
            return
        if order.kind in ("acquire", "acq_rel"):
            self._acquire(warp, released, order.scope)
        else:
            warp.unfenced_reads[id(released)] = released, order.scope

    @staticmethod
    def _acquire(warp: Any, released: dict[Any, Knowledge], scope: int) -> None:
        for place in _places(warp, scope):
            if place in released:
                gain(warp.agent, released[place])

    def fence(self, warp: Any, scope: int, releases: bool) -> None:
        """Acquire what relaxed loads have read, and with ``releases`` keep what is known now for relaxed stores."""
        for released, reach in warp.unfenced_reads.values():
            self._acquire(warp, released, min(reach, scope))
        warp.unfenced_reads.clear()
        if not releases:
            return
        agent = warp.agent
        knowledge = all_known(agent)
        fences = agent.clocks.fences.setdefault(agent.slot, deque(maxlen=_FENCES))
        fences.append((agent.clock, scope, knowledge))
