"""Tensor-core instructions of a warp: tcgen05 (sm_100a), wgmma (sm_90a)."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from .. import mma
from ..engine import Copy, Product
from ..errors import RaceError, SyncError, UnsupportedError
from ..memory import ASYNC, CELL_LANES, OFFSET_MASK, TMEM_COLUMNS, TMEM_LANES, Cta
from ..registers import Accumulators, Group, Pending
from ..sync import Wait
from .bulk import BulkWarp

_instruction = functools.lru_cache(maxsize=1024)(mma.Tcgen05)
_ROW = 32  # bytes of a row of an operand of an MMA
_ALL_LANES = slice(0, TMEM_LANES // CELL_LANES)


class _WgmmaGroups:
    """Groups that the four warps of a warpgroup have committed: wgmma is collective, so is waiting for it."""

    __slots__ = ("committed", "units")

    def __init__(self) -> None:
        self.committed = [0, 0, 0, 0]
        self.units: dict[int, list[tuple[Any, int]]] = {}  # group number -> (unit agent, clock) of each warp


class Warp(BulkWarp):
    """A warp with all its units."""

    def __init__(self, launch: Any, cta: Cta, wid: int):
        super().__init__(launch, cta, wid)
        self.wgmma_open = Group("wgmma", "wgmma.commit_group and wait_group")
        self.wgmma_pending: list[Group] = []
        self.accumulators = Accumulators()
        self.wgmma_fenced = False
        self.wgmma_waited = 0  # groups known to be complete in the whole warpgroup
        self.tmem_loads: list[Group] = []

    # ---- tcgen05: allocation ----
    def _pair(self, g: int) -> list[Cta]:
        """Return the CTA, or with cta_group::2 the pair it belongs to (even CTA first)."""
        if g == 1:
            return [self.cta]
        even = self.cta.rank & ~1
        ctas = self.cta.cluster.ctas
        if even + 1 >= len(ctas):
            self.fail("cta_group::2 without a CTA pair", SyncError)
        return [ctas[even], ctas[even + 1]]

    def tc_alloc(self, addr: Any, n: Any, g: int) -> Wait:
        """tcgen05.alloc; with cta_group::2 a collective that returns in neither CTA before both have asked."""
        addr, n = self.one_lane(self.live, addr, n)
        addr = self.shared_address(addr)
        cta = self.cta
        if n & (n - 1) or not 32 <= n <= TMEM_COLUMNS:
            self.fail(f"tcgen05.alloc of {n} columns (a power of two from 32 to 512)", SyncError)
        request = {"cta": cta, "n": n, "addr": addr, "warp": self, "done": False, "line": self.line}
        queues: dict[int, list] = {}
        if g == 2:
            self._pair(2)
            queues = cta.cluster.alloc_requests.setdefault(cta.rank & ~1, {0: [], 1: []})
            queues[cta.rank & 1].append(request)

        def granted() -> bool:
            if request["done"]:
                return True
            requests = [request]
            if g == 2:
                if not (queues[0] and queues[1]) or request is not queues[cta.rank & 1][0]:
                    return False
                requests = [queues[0][0], queues[1][0]]
                if requests[0]["n"] != requests[1]["n"]:
                    self.fail(
                        f"tcgen05.alloc.cta_group::2 of {requests[0]['n']} and of {requests[1]['n']} columns", SyncError
                    )
            col = 0
            for start, k in sorted({t for r in requests for t in r["cta"].tmem_allocs}):
                if col + n <= start:
                    break
                col = max(col, start + k)
            if col + n > TMEM_COLUMNS:
                return False
            for r in requests:
                self._grant(r, col)
            if g == 2:
                queues[0].pop(0)
                queues[1].pop(0)
                if self.agent is not None:
                    one, two = (r["warp"].agent for r in requests)
                    one.join(two.release())
                    two.join(one.release())
            self.launch.progress += 1
            return True

        return Wait(granted, ("tcgen05.alloc", n, f"cta_group::{g}"))

    @staticmethod
    def _grant(request: dict, col: int) -> None:
        cta, warp, n = request["cta"], request["warp"], request["n"]
        cta.tensor_memory()
        cta.tmem_freed = [f for f in cta.tmem_freed if f[0] >= col + n or f[0] + f[1] <= col]
        cta.tmem_allocs.append((col, n))
        target, o = warp.target_cta(request["addr"]), request["addr"] & OFFSET_MASK
        if warp.agent is not None:
            warp.agent.line = request["line"]
            target.shadow.write(warp.agent, slice(o >> 2, (o >> 2) + 1))
            cta.tmem_shadow.write(warp.agent, (_ALL_LANES, slice(col, col + n)))
        target.mv[o : o + 4] = col.to_bytes(4, "little")
        target.state[o >> 2] = ASYNC
        request["done"] = True
        stat = warp.launch.stat
        stat["tmem_columns"] = max(stat["tmem_columns"], sum(k for _, k in cta.tmem_allocs))

    def tc_dealloc(self, addr: Any, n: Any, g: int) -> None:
        """tcgen05.dealloc; with cta_group::2 no access of either CTA of the pair may be unordered with it."""
        addr, n = self.one_lane(self.live, addr, n)
        cta, col = self.cta, addr & 0xFFFF
        if (col, n) not in cta.tmem_allocs:
            self.fail(
                f"tcgen05.dealloc of columns [{col}, {col + n}), which are not allocated ({cta.tmem_allocs})", SyncError
            )
        a = self.here()
        for c in self._pair(g):
            if a is not None and c.tmem is not None:
                c.tmem_shadow.check_write(a, (_ALL_LANES, slice(col, col + n)))
            if c is not cta:
                c.tmem_freed.append((col, n, f"{self.name} at {{line {self.line}}}"))
        cta.tmem_allocs.remove((col, n))
        cta.tmem[:, col : col + n] = 0xFFFFFFFF

    # ---- tcgen05: MMA, copy, commit (one in-order queue per issuing warp) ----
    def tc_mma(
        self,
        g: int,
        kind: str,
        d: Any,
        a: Any,
        a_in_tmem: bool,
        b: Any,
        idesc: Any,
        disable: Any,
        enable: Any,
        scale_d: Any,
        scale_vec: str | None,
        scales: Any,
        m: np.ndarray,
    ) -> None:
        self._one_issuer(m, "tcgen05.mma")
        d, a, b, idesc, enable = self.one_lane(m, d, a, b, idesc, enable)
        if scales is not None:
            scales = tuple(self.one_lane(m, *scales))
        if disable is not None:
            disable = self.one_lane(m, *disable)
        if scale_d is not None:
            scale_d = self.one_lane(m, scale_d)[0] & 0xF
        ctas = self._pair(g)
        if g == 2 and self.cta.rank & 1:
            self.fail("tcgen05.mma.cta_group::2 issued by the odd CTA of the pair", SyncError)
        op = _instruction(kind, idesc, g, scale_vec)
        launch = self.launch
        flops = 2 * op.M * op.N * op.K
        launch.count_mma(flops)
        work = Product(kind, flops / g, _ROW * (op.M + op.N) / g)  # each CTA of a pair reads its half
        vc, line = self._issued()

        def run() -> None:
            self._resume_unit(vc, line)
            op.run(ctas, d, a, a_in_tmem, b, enable, disable, scale_d, scales)

        launch.issue(("tcgen05", self), None, run, work=work)

    def _one_issuer(self, m: np.ndarray, what: str) -> None:
        """Every lane that executes such an instruction issues it: more than one is a bug."""
        lanes = np.count_nonzero(m)
        if lanes != 1:
            self.fail(f"{what} issued by {lanes} lanes", SyncError)

    def _issued(self) -> tuple[Any, int]:
        return (self.agent.release() if self.agent is not None else None), self.line

    def _resume_unit(self, vc: Any, line: int) -> None:
        """The tensor-core queue of this warp executes an instruction issued when the warp knew ``vc``."""
        if vc is not None:
            u = self.units.get("tensor core queue") or self.unit("tensor core queue")
            u.join(vc)
            u.line = line
            self.launch.agent = u

    def tc_cp(self, shape: str, multicast: str, fmt: list[str], taddr: Any, desc: Any, g: int, m: np.ndarray) -> None:
        self._one_issuer(m, "tcgen05.cp")
        taddr, desc = self.one_lane(m, taddr, desc)
        ctas = self._pair(g)
        self.launch.stat["tcgen05_cp"] += 1
        rows, bits = map(int, shape[:-1].split("x"))
        vc, line = self._issued()

        def run() -> None:
            self._resume_unit(vc, line)
            mma.tc_cp(ctas, shape, multicast, fmt, taddr, desc)

        self.launch.issue(("tcgen05", self), None, run, work=Copy(self.cta, rows * bits // 8))

    def tc_commit(self, addr: Any, mask: Any, g: int, m: np.ndarray) -> None:
        """The mbarrier (in every CTA of the mask) gets one arrival when this warp's earlier tcgen05 work is done."""
        self._one_issuer(m, "tcgen05.commit")
        (addr,) = self.one_lane(m, addr)
        addr = self.shared_address(addr)
        ctas = self.cta.cluster.ctas
        if mask is None:
            found = [self.arrival_at(addr, True)]
        else:
            (mask,) = self.one_lane(m, mask)
            if mask >> len(ctas):
                self.fail(f"tcgen05.commit mask {mask:#x} names CTAs outside the cluster", SyncError)
            found = [
                self.arrival_at(rank << 24 | addr & OFFSET_MASK, True) for rank in range(len(ctas)) if mask >> rank & 1
            ]
        bars = [b for b in found if b is not None]
        vc, line = self._issued()

        def run() -> None:
            self._resume_unit(vc, line)
            unit = self.units.get("tensor core queue")
            for b in bars:
                if not b.cta.late_arrival(line):
                    b.arrive(1, 0, unit.vc if unit is not None else None)
                    b.cta.note_arrival(unit)
            if unit is not None:
                unit.tick()

        self.launch.issue(("tcgen05", self), None, run)

    # ---- tcgen05: loads and stores ----
    def _taddr(self, addr: Any) -> tuple[int, int]:
        if type(addr) is not int:
            first = int(addr[int(self.live.argmax())])
            if (addr[self.live] != first).any():
                self.fail("tcgen05.ld/st: the TMEM address differs between lanes", SyncError)
            addr = first
        return addr >> 16, addr & 0xFFFF

    def tc_ld(self, shape: str, num: int, addr: Any, pack16: bool, imm: int) -> list[Pending]:
        """tcgen05.ld: registers that are pending until tcgen05.wait::ld."""
        lane, col = self._taddr(addr)
        unit = self.launch.agent = self.unit("tcgen05.ld")
        values = mma.tc_ld(self, shape, num, lane, col, pack16, imm)
        group, line = Group("tcgen05.ld", "tcgen05.wait::ld", not self.launch.strict_loads), self.line
        if unit is not None:
            group.stamp = (unit.slot, unit.clock)
            unit.tick()
        self.tmem_loads.append(group)
        return [Pending(values, i, group, line) for i in range(len(values))]

    def tc_st(self, shape: str, num: int, addr: Any, vals: tuple, unpack16: bool, imm: int) -> None:
        lane, col = self._taddr(addr)
        self.launch.agent = self.unit("tcgen05.st")
        mma.tc_st(self, shape, num, lane, col, vals, unpack16, imm)

    def tc_wait(self, what: str) -> None:
        """tcgen05.wait::ld / wait::st: the warp's earlier loads or stores are complete."""
        if what == "ld":
            for group in self.tmem_loads:
                group.done = True
            self.tmem_loads.clear()
        u = self.units.get("tcgen05." + what)
        if u is not None:
            self.agent.learn(u.slot, u.clock)
            u.tick()

    # ---- wgmma ----
    def wgmma_fence(self) -> None:
        self.wgmma_fenced = True

    def wgmma(
        self,
        shape: str,
        dt: str,
        at: str,
        bt: str,
        dregs: tuple,
        a: Any,
        a_in_regs: bool,
        b: Any,
        scale_d: Any,
        imm: tuple,
        m: np.ndarray,
        satfinite: bool,
    ) -> tuple[Pending, ...]:
        """Compute a warp's 16 rows of a warpgroup MMA; the accumulators are pending until the group is waited for."""
        if not self.wgmma_fenced:
            raise RaceError(f"{self.where()}: wgmma without a wgmma.fence before it")
        if not m.all():
            self.fail("wgmma in a diverged warp", SyncError)
        self.launch.agent = self.unit("wgmma")
        n, k = (int(x) for x in shape[len("m64n") :].split("k"))
        (scale_d,) = self.one_lane(m, scale_d)
        old = self.accumulators.values(dregs, n, dt) if scale_d else None
        values = mma.wgmma(self, shape, dt, at, bt, old, a, a_in_regs, b, imm, m, satfinite)
        if self.wid % 4 == 0:
            self.launch.count_mma(2 * 64 * n * k)
        return self.accumulators.registers(values, dt, self.wgmma_open, self.line)

    def _warpgroup(self) -> _WgmmaGroups:
        g = self.cta.wgmma_groups.get(self.wid // 4)
        if g is None:
            g = self.cta.wgmma_groups[self.wid // 4] = _WgmmaGroups()
        return g

    def wgmma_commit(self) -> None:
        g, q = self._warpgroup(), self.wid % 4
        unit = self.units.get("wgmma")
        if unit is not None:
            g.units.setdefault(g.committed[q], []).append((unit, unit.clock))
            unit.tick()
        g.committed[q] += 1
        self.wgmma_pending.append(self.wgmma_open)
        self.wgmma_open = Group("wgmma", "wgmma.commit_group and wait_group")
        self.launch.progress += 1

    def wgmma_wait(self, n: int) -> Wait:
        """Wait for all but the ``n`` most recent groups, of all four warps: kernels let one of them free a stage."""
        g = self._warpgroup()
        target = g.committed[self.wid % 4] - n
        groups = self.wgmma_pending[: max(0, len(self.wgmma_pending) - n)]

        def acquire() -> None:
            for group in groups:
                group.done = True
            del self.wgmma_pending[: len(groups)]
            if self.agent is not None:
                for number in range(self.wgmma_waited, target):
                    for unit, clock in g.units.get(number, ()):
                        self.agent.learn(unit.slot, clock)
                self.wgmma_waited = max(self.wgmma_waited, target)

        return Wait(
            lambda: min(g.committed) >= target,
            ("wgmma.wait_group", n, f"groups issued per warp {g.committed}"),
            acquire,
        )


def unsupported(w: Warp, text: str) -> None:
    """An instruction refused at translation is reached."""
    raise UnsupportedError(f"{w.where()}: unsupported instruction: {text}")
