"""A warp: identity, divergence, and the helpers that generated code calls."""

from __future__ import annotations

from collections import deque
from typing import Any, NoReturn

import numpy as np

from .. import numerics as N
from ..errors import EmulatorError, MemoryAccessError, SyncError
from ..races import LINE_MASK, TICK, Agent, Operation

_BITS = np.uint64(1) << np.arange(32, dtype=np.uint64)


class WarpCore:
    """Identity and control flow of a warp; the layers above add memory, synchronisation and the asynchronous units.

    ``line`` is the PTX line of the instruction that last touched memory or synchronised; ``agent`` is the warp's vector
    clock, or None when races are not detected; ``waited`` is whether the previous launch has ended for it. Generated
    code keeps the active mask and the fragments of a diverged warp (block number -> mask) and calls ``split`` /
    ``resched`` / ``ret`` at block ends.
    """

    def __init__(self, launch: Any, cta: Any, wid: int):
        self.launch, self.cta, self.wid = launch, cta, wid
        self.waited = not launch.overlaps
        block, n = launch.block, cta.nthreads
        lin = wid * 32 + np.arange(32)
        self.live = lin < n
        self.nlive = int(self.live.sum())
        self.tidx: Any = (lin % block[0]).astype(np.uint32)
        self.tidy: Any = 0
        self.tidz: Any = 0
        if block[1] * block[2] > 1:
            self.tidx, self.tidy, self.tidz = (
                int(a[0]) if (a == a[0]).all() else a
                for a in (
                    self.tidx,
                    (lin // block[0] % block[1]).astype(np.uint32),
                    (lin // (block[0] * block[1])).astype(np.uint32),
                )
            )
        self.laneid = N.LANES
        self.lanemask_lt = (_BITS - np.uint64(1)).astype(np.uint32)
        self.lanemask_eq = _BITS.astype(np.uint32)
        self.lanemask_le = self.lanemask_lt | self.lanemask_eq
        self.lanemask_gt = ~self.lanemask_le
        self.lanemask_ge = ~self.lanemask_lt
        self.spin = 0
        self.spin_limit = launch.spin_limit
        self.pc = 0
        self.line = 0
        self.wait: Any = None
        self.gen: Any = None
        self.frags: dict[int, np.ndarray] = {}
        self.local: np.ndarray | None = None
        self.name = f"{launch.device.prefix}warp {wid} of CTA {cta.id}"
        clocks = cta.cluster.clocks
        self.agent: Any = Agent(clocks, self.name) if clocks else None  # None: races are not detected
        self.units: dict[str, Agent] = {}  # asynchronous units working for this warp
        self.op_slots: dict[str, deque[tuple[int, int]]] = {}

    def where(self) -> str:
        return f"{self.name} at {{line {self.line}}}"

    def fail(self, msg: str, kind: type[EmulatorError] = MemoryAccessError) -> NoReturn:
        """Raise ``kind``; the message begins with the place of this warp."""
        raise kind(f"{self.where()}: {msg}")

    def together(self, what: str, m: np.ndarray, members: Any) -> None:
        """Raise unless every live lane that ``members`` names is among ``m``, the lanes that execute ``what``."""
        mask = int(self.one_lane(m, members)[0])
        away = [i for i in range(32) if mask >> i & 1 and self.live[i] and not m[i]]
        if away:
            self.fail(
                f"{what} names lanes {away} of the warp, which do not execute it with the others: "
                "they have branched away, and the hardware waits for them for ever",
                SyncError,
            )

    # ---- happens-before ----
    def here(self) -> Any:
        """This warp's agent with the line of the current instruction, or None."""
        a = self.agent
        if a is not None:
            a.line = self.line
        return a

    def unit(self, kind: str) -> Any:
        """The agent of one of this warp's in-order asynchronous units, ordered after everything the warp did so far."""
        a = self.agent
        if a is None:
            return None
        u = self.units.get(kind)
        if u is None:
            u = self.units[kind] = Agent(a.clocks, f"{kind} of {self.name}")
        u.join(a.release())
        u.line = self.line
        return u

    def operation(self, kind: str) -> Any:
        """Return a new asynchronous operation, unordered with everything the warp issued before it.

        A clock slot is used again once this warp knows that its former user is complete: the new operation then comes
        after it, so nothing is lost.
        """
        a = self.agent
        if a is None:
            return None
        queue = self.op_slots.setdefault(kind, deque())
        slot = clock = -1
        for _ in range(min(4, len(queue))):
            s, c = queue.popleft()
            if s < a.vc.size and a.vc[s] >= c:
                slot, clock = s, c + TICK
                break
            queue.append((s, c))
        if slot < 0:
            slot, clock = a.clocks.new_slot(f"{kind} issued by {self.name}"), TICK
        vc = a.release()
        if slot >= vc.size:
            vc = np.concatenate([vc, np.zeros(a.clocks.capacity - vc.size, np.int64)])
        vc[slot] = clock | LINE_MASK
        queue.append((slot, clock))
        return Operation(a.clocks, slot, clock, vc, f"{kind} issued by {self.name}", self.line)

    # ---- control flow ----
    def split(self, frags: dict, m: np.ndarray, t: np.ndarray, taken: int, fall: int) -> tuple[int, np.ndarray]:
        """Take a branch that may diverge, and return the block to go on with: the lowest number of the fragments."""
        a = m & t
        if not a.any():
            return fall, m
        b = m & ~t
        if not b.any():
            return taken, m
        for pc, x in ((taken, a), (fall, b)):
            frags[pc] = frags[pc] | x if pc in frags else x
        pc = min(frags)
        return pc, frags.pop(pc)

    def resched(self, frags: dict, pc: int, m: np.ndarray) -> tuple[int, np.ndarray]:
        """Reconverge a diverged warp at a block boundary, and continue with the lowest block number."""
        if pc < min(frags):
            return pc, m
        frags[pc] = frags[pc] | m if pc in frags else m
        pc = min(frags)
        return pc, frags.pop(pc)

    def ret(self, frags: dict, m: np.ndarray) -> tuple[int, np.ndarray | None]:
        self.live = self.live & ~m
        self.nlive = int(self.live.sum())
        if frags:
            pc = min(frags)
            return pc, frags.pop(pc)
        return 0, None

    def ret_if(self, frags: dict, m: np.ndarray, c: Any, following: int) -> tuple[int, np.ndarray | None]:
        if c is True:
            return self.ret(frags, m)
        if c is False:
            return following, m
        stay = m & ~c
        self.live = self.live & ~(m & c)
        self.nlive = int(self.live.sum())
        if stay.any():
            frags[following] = frags[following] | stay if following in frags else stay
        if frags:
            pc = min(frags)
            return pc, frags.pop(pc)
        return 0, None

    def one_lane(self, m: np.ndarray, *vals: Any) -> list:
        """Return the operands as the first active lane sees them, as Python numbers."""
        i = -1
        r = []
        for v in vals:
            if type(v) is int or type(v) is bool:
                r.append(v)
            else:
                if i < 0:
                    i = int(m.argmax())
                r.append(v[i].item())
        return r
