"""Asynchronous copies issued by a warp: TMA, bulk copies, cp.async, tensor-map edits, cluster launch control."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import tma
from ..engine import Copy
from ..errors import SyncError
from ..global_races import NO_SCOPE
from ..happens_before import GPU, WEAK
from ..maps import BLOCK
from ..memory import ASYNC, GENERIC, NEVER, OFFSET_MASK, Cta
from ..races import LINE_MASK, Operation
from ..sync import MBarrier, Wait
from .sync import SyncWarp


def _signed(v: int) -> int:
    return v - (1 << 32) if v & 0x80000000 else v


class _Store:
    """A bulk store in flight: whether it has read shared memory, and whether its writes are done."""

    __slots__ = ("done", "read", "waited")

    def __init__(self) -> None:
        self.read = self.done = self.waited = False


class BulkWarp(SyncWarp):
    """cp.async, cp.async.bulk, cp.async.bulk.tensor, tensormap, clusterlaunchcontrol, st.async."""

    def __init__(self, launch: Any, cta: Cta, wid: int):
        super().__init__(launch, cta, wid)
        self.fenced_maps: dict[int, int] = {}  # address of a tensor map -> its last write, known to be fenced
        self.store_group: list[_Store] = []
        self.store_groups: list[tuple[list[_Store], int, int]] = []  # (stores, clocks of the units that read and write)
        self.dropped = 0  # of the groups that are no longer in there, the last such clock of the unit that writes
        self.copy_group: list[tuple] = []
        self.copy_groups: list[tuple[list[tuple], int]] = []

    # ---- helpers ----
    def tensor_map(self, addr: int) -> tma.TensorMap:
        r = self.launch.find(addr, 128, self)
        o = addr - r.base
        if addr % 64:
            self.fail(f"tensor map at {addr:#x} is not 64-byte aligned")
        if r.writes is not None:
            self.launch.map_fences.check_use(self, r, addr)
        key = r.u8[o : o + 64].tobytes()
        t = self.launch.tensor_maps.get(key)
        if t is None:
            t = self.launch.tensor_maps[key] = tma.TensorMap.decode(key)
        return t

    def _targets(self, dst: int, mbar: int, mask: int, group: int) -> list[tuple[Cta, MBarrier]]:
        """Destination CTAs of a load and the mbarrier that each copy signals.

        A multicast lands at one offset in every CTA of the mask; with cta_group::2 the signal goes to the CTA of that
        pair with the parity of the mbarrier address.
        """
        ctas = self.cta.cluster.ctas
        if not mask:
            return [(self.target_cta(dst), self.mbar_at(mbar, True))]
        if mask >> len(ctas):
            self.fail(f"multicast mask {mask:#x} names CTAs outside the cluster")
        targets = []
        for rank in range(len(ctas)):
            if mask >> rank & 1:
                signal = (rank & ~1) | (mbar >> 24 & 1) if group == 2 else rank
                targets.append((ctas[rank], self.mbar_at(signal << 24 | mbar & OFFSET_MASK, True)))
        return targets

    def _claim(self, cta: Cta, lo: int, hi: int) -> None:
        """An asynchronous write of shared bytes [lo, hi) starts: they are undefined until it is done."""
        if lo < 1024 or hi > cta.size:
            self.fail(f"asynchronous copy to shared offsets [{lo:#x}, {hi:#x}), outside [0x400, {cta.size:#x})")
        cta.state[lo >> 2 : (hi + 3) >> 2] = NEVER
        if self.launch.delays:
            cta.mem[lo:hi] = 0xFF

    # ---- TMA ----
    def tma_load(
        self, dim: int, dst: Any, tmap: Any, coords: tuple, mbar: Any, mask: Any, group: int, m: np.ndarray
    ) -> None:
        active = np.count_nonzero(m)
        if active != 1:
            if active == 0:
                return
            self.fail(f"TMA load issued by {active} lanes: each of them copies and signals", SyncError)
        launch = self.launch
        dst, tmap, mbar, mask, *coords = self.one_lane(m, dst, tmap, mbar, mask, *coords)  # type: ignore[assignment]
        dst, mbar = self.shared_address(dst), self.shared_address(mbar)
        t = self.tensor_map(tmap)
        at = [_signed(c) for c in coords]
        if t.rank != dim:
            self.fail(f"{dim}-dimensional TMA load with a tensor map of rank {t.rank}")
        gather = len(at) == 5 and dim == 2  # tile::gather4: {column, row0..row3} of a one-row box
        if gather and t.bsz[1] != 1:
            self.fail(f"gather4 with a box of {t.bsz[1]} rows")
        nbytes, tx_bytes = (n * (4 if gather else 1) for n in (t.nbytes, t.tx_bytes))
        offset = dst & OFFSET_MASK
        t.check_dst(offset, self.fail)
        targets = self._targets(dst, mbar, mask, group)
        stat = launch.stat
        stat["tma_load"] += 1
        stat["tma_load_bytes"] += nbytes
        stat["tma_load_bytes_shared"] += nbytes * len(targets)
        for cta, bar in targets:
            self._claim(cta, offset, offset + nbytes)
            op = self.operation("TMA load")
            cta.note_remote(op)

            def land(cta: Cta = cta, bar: MBarrier = bar, op: Any = op) -> None:
                if gather:
                    box = np.concatenate([t.read(launch, [at[0], row], self.fail) for row in at[1:]])
                else:
                    box = t.read(launch, at, self.fail)
                t.scatter(cta, offset, box)
                bar.complete(tx_bytes, op.vc if op is not None else None)

            launch.issue(None, op, land, "load", Copy(cta, nbytes, (tmap, *at)))

    def tma_store(self, dim: int, tmap: Any, coords: tuple, src: Any, red: str | None, m: np.ndarray) -> None:
        launch = self.launch
        if np.count_nonzero(m) != 1:
            if not m.any():
                return
            if red:
                self.fail(f"TMA reduction issued by {np.count_nonzero(m)} lanes: each of them adds", SyncError)
            launch.warn(f"TMA store issued by {np.count_nonzero(m)} lanes at {{line {self.line}}}")
        src, tmap, *coords = self.one_lane(m, src, tmap, *coords)  # type: ignore[assignment]
        src = self.shared_address(src)
        t = self.tensor_map(tmap)
        at = [_signed(c) for c in coords]
        if t.rank != dim:
            self.fail(f"{dim}-dimensional TMA store with a tensor map of rank {t.rank}")
        cta, offset = self.target_cta(src), src & OFFSET_MASK
        t.check_dst(offset, self.fail)
        scatter = len(at) == 5 and dim == 2
        if scatter and t.bsz[1] != 1:
            self.fail(f"scatter4 with a box of {t.bsz[1]} rows")
        rows = 4 if scatter else 1
        launch.stat["tma_reduce" if red else "tma_store"] += 1
        launch.stat["tma_reduce_bytes" if red else "tma_store_bytes"] += t.nbytes * rows
        state = _Store()
        self.store_group.append(state)
        op, writes = self._store_operations("TMA store")

        def read() -> None:
            if cta.exited:  # the shared memory of an exited CTA may already belong to another one
                launch.warn("a TMA store still reads shared memory after its CTA has exited: missing bulk wait_group")
            box = t.gather(cta, offset, rows)
            state.read = True

            def write() -> None:
                if scatter:
                    for i, row in enumerate(at[1:]):
                        t.write(launch, [at[0], row], box[i : i + 1], red, self.fail)
                else:
                    t.write(launch, at, box, red, self.fail)
                state.done = True

            launch.issue(None, writes, write, "store")

        launch.issue(None, op, read, "store", Copy(cta, t.nbytes * rows))

    def _store_operations(self, kind: str) -> tuple[Any, Any]:
        """Agents of a bulk store: the one that reads shared memory, and the one that writes global memory after it."""
        units = self.unit("bulk store"), self.unit("bulk store's writes")
        if self.agent is None:
            return units
        names = f"{kind} of {self.name}", f"{kind} of {self.name} (complete after a wait_group without .read)"
        read, write = (
            Operation(u.clocks, u.slot, u.clock, u.vc.copy(), name, self.line)
            for u, name in zip(units, names, strict=True)
        )
        return read, write

    def bulk_commit(self) -> None:
        clocks = [0, 0]
        for i, kind in enumerate(("bulk store", "bulk store's writes")):
            unit = self.units.get(kind)
            if unit is not None:
                clocks[i] = unit.clock
                unit.tick()
        self.store_groups.append((self.store_group, clocks[0], clocks[1]))
        self.store_group = []

    def bulk_wait(self, n: int, read: bool) -> Wait:
        """Return the wait until all but the ``n`` most recent groups have read their source, or are complete."""
        old = self.store_groups[: max(0, len(self.store_groups) - n)]
        what = "read" if read else "done"

        waiting = [x for group, _, _ in old for x in group if not getattr(x, what)]

        def ok() -> bool:
            while waiting and getattr(waiting[-1], what):
                waiting.pop()
            return not waiting

        def acquire() -> None:
            unit = self.units.get("bulk store")
            if old and unit is not None:
                self.agent.learn(unit.slot, old[-1][1])
            for group in old:
                for store in group[0]:
                    store.waited = True
                if self.store_groups[0] is group and all(x.done for x in group[0]):
                    self.dropped = self.store_groups.pop(0)[2]
            if unit is not None and not read:
                self.agent.learn(self.units["bulk store's writes"].slot, old[-1][2] if old else self.dropped)

        return Wait(ok, ("bulk wait_group", n, what), acquire)

    def check_exit(self) -> None:
        """The warp exits: a bulk store may still read the CTA's shared memory, which another CTA may get then."""
        stores = [*self.store_group, *(s for group, _, _ in self.store_groups for s in group)]
        if not all(s.waited for s in stores):
            self.launch.warn(f"warp exits without a wait_group for its bulk stores, at {{line {self.line}}}")

    # ---- bulk copies without a tensor map ----
    def bulk_g2s(self, dst: Any, src: Any, size: Any, mbar: Any, mask: Any, m: np.ndarray) -> None:
        launch = self.launch
        for lane in np.flatnonzero(m):
            d, s, n, b, k = [x if type(x) is int else int(x[lane]) for x in (dst, src, size, mbar, mask)]
            d, b = self.shared_address(d), self.shared_address(b)
            if d % 16 or s % 16 or n % 16:
                self.fail(f"cp.async.bulk misaligned: destination {d:#x} source {s:#x} size {n}")
            r = launch.find(s, n, self)
            offset = d & OFFSET_MASK
            launch.stat["bulk_load_bytes"] += n
            for cta, bar in self._targets(d, b, k, 1):
                self._claim(cta, offset, offset + n)
                op = self.operation("bulk load")
                cta.note_remote(op)

                def land(
                    cta: Cta = cta,
                    bar: MBarrier = bar,
                    offset: int = offset,
                    s: int = s,
                    n: int = n,
                    r: Any = r,
                    op: Any = op,
                ) -> None:
                    cells = slice(s - r.base, s - r.base + n)
                    if r.shadow is not None:
                        r.shadow.read(op, cells)
                    data = r.u8[cells].reshape(-1, 16)
                    cta.write_chunks(np.arange(offset // 16, (offset + n) // 16), data)
                    bar.complete(n, op.vc if op is not None else None)

                launch.issue(None, op, land, "load", Copy(cta, n, s))

    def bulk_s2g(self, dst: Any, src: Any, size: Any, red: Any, m: np.ndarray) -> None:
        """Bulk store; ``red(old bytes, new bytes) -> bytes`` reduces instead of overwriting."""
        launch = self.launch
        for lane in np.flatnonzero(m):
            d, s, n = [x if type(x) is int else int(x[lane]) for x in (dst, src, size)]
            s = self.shared_address(s)
            if d % 16 or s % 16 or n % 16:
                self.fail(f"cp.async.bulk misaligned: destination {d:#x} source {s:#x} size {n}")
            cta, offset = self.target_cta(s), s & OFFSET_MASK
            r = launch.find(d, n, self)
            state = _Store()
            self.store_group.append(state)
            launch.stat["bulk_store_bytes"] += n
            op, writes = self._store_operations("bulk store")

            def read(
                cta: Cta = cta,
                offset: int = offset,
                d: int = d,
                n: int = n,
                r: Any = r,
                state: _Store = state,
                writes: Any = writes,
            ) -> None:
                data = cta.read_chunks(np.arange(offset // 16, (offset + n) // 16), "bulk store").reshape(-1)
                state.read = True

                def write() -> None:
                    cells = slice(d - r.base, d - r.base + n)
                    if r.shadow is not None:
                        r.shadow.write(writes, cells, NO_SCOPE if red is None else GPU)
                    r.u8[cells] = data if red is None else red(r.u8[cells], data)
                    state.done = True

                launch.issue(None, writes, write, "store")

            launch.issue(None, op, read, "store", Copy(cta, n))

    def bulk_s2s(self, dst: Any, src: Any, size: Any, mbar: Any, m: np.ndarray) -> None:
        launch = self.launch
        for lane in np.flatnonzero(m):
            d, s, n, b = [x if type(x) is int else int(x[lane]) for x in (dst, src, size, mbar)]
            d, s, b = self.shared_address(d), self.shared_address(s), self.shared_address(b)
            if d % 16 or s % 16 or n % 16:
                self.fail(f"cp.async.bulk misaligned: destination {d:#x} source {s:#x} size {n}")
            source, target, bar = self.target_cta(s), self.target_cta(d), self.mbar_at(b, True)
            so, do = s & OFFSET_MASK, d & OFFSET_MASK
            self._claim(target, do, do + n)
            op = self.operation("bulk copy")
            target.note_remote(op)

            def land(
                source: Cta = source,
                target: Cta = target,
                so: int = so,
                do: int = do,
                n: int = n,
                bar: MBarrier = bar,
                op: Any = op,
            ) -> None:
                data = source.read_chunks(np.arange(so // 16, (so + n) // 16), "bulk copy")
                target.write_chunks(np.arange(do // 16, (do + n) // 16), data)
                bar.complete(n, op.vc if op is not None else None)

            launch.issue(None, op, land, "load")

    def st_async(self, addr: Any, size: int, vals: tuple, mbar: Any, m: np.ndarray) -> None:
        """st.async: a small store that counts its bytes on an mbarrier of the destination CTA."""
        launch = self.launch
        for lane in np.flatnonzero(m):
            a, b = [self.shared_address(x if type(x) is int else int(x[lane])) for x in (addr, mbar)]
            data = b"".join(
                ((v if type(v) is int else int(v[lane])) & ((1 << 8 * size) - 1)).to_bytes(size, "little") for v in vals
            )
            cta, o, bar, n = self.target_cta(a), a & OFFSET_MASK, self.mbar_at(b, True), len(data)
            if o % n:
                self.fail(f"misaligned st.async of {n} bytes at {a:#x}")
            self._claim(cta, o, o + n)
            op = self.operation("st.async")
            cta.note_remote(op)

            def land(
                cta: Cta = cta, o: int = o, data: bytes = data, bar: MBarrier = bar, n: int = n, op: Any = op
            ) -> None:
                words = slice(o >> 2, (o + n + 3) >> 2)
                if cta.shadow is not None:
                    cta.shadow.write(op, words)
                cta.mv[o : o + n] = data
                cta.state[words] = ASYNC
                bar.complete(n, op.vc if op is not None else None)

            launch.issue(None, op, land, "load")

    # ---- tensor maps edited on the device ----
    def _map_bytes(self, addr: int, shared: bool, write: bool) -> np.ndarray:
        """Return the 128 bytes of a tensor map, which generic instructions read and, with ``write``, change."""
        if addr % 64:
            self.fail(f"tensor map at {addr:#x} is not 64-byte aligned")
        if shared or addr >> 56 == 1:
            addr = self.shared_address(addr)
            cta, o = self.target_cta(addr), addr & OFFSET_MASK
            self._bounds(cta, o, o + 128, "tensor map")
            words = slice(o >> 2, (o >> 2) + 32)
            if self.agent is not None:
                self._note_read(cta, words, WEAK)
                if write:
                    self._note_write(cta, words, WEAK)
            if write:
                cta.state[words] = GENERIC
                self.dirty.append((cta, words))
            return cta.mem[o : o + 128]
        r = self.launch.find(addr, 128, self)
        if write and r.writes is not None:
            self.launch.map_fences.wrote(self, r, np.arange(addr // BLOCK, addr // BLOCK + 2))
        return r.u8[addr - r.base : addr - r.base + 128]

    def fence_map_release(self) -> None:
        """fence.proxy.tensormap::generic.release: the warp's generic writes of tensor maps are handed to the copies."""
        if self.launch.map_fences is not None:
            self.launch.map_fences.release(self)

    def fence_map_acquire(self, addr: Any, m: np.ndarray) -> None:
        """fence.proxy.tensormap::generic.acquire: later copies see what was released to the map at ``addr``."""
        if self.launch.map_fences is not None:
            for a in {addr} if type(addr) is int else set(addr[m].tolist()):
                self.launch.map_fences.acquire(self, a)

    def tensormap_replace(self, field: str, ordinal: int, addr: Any, value: Any, shared: bool, m: np.ndarray) -> None:
        addr, value = self.one_lane(m, addr, value)
        b = self._map_bytes(addr, shared, True)
        u = tma.replace_field(int.from_bytes(b[:64].tobytes(), "little"), field, ordinal, value)
        b[:64] = np.frombuffer(u.to_bytes(64, "little"), np.uint8)

    def tensormap_copy(self, dst: Any, src: Any, m: np.ndarray) -> None:
        dst, src = self.one_lane(m, dst, src)
        self._map_bytes(dst, False, True)[:] = self._map_bytes(src, True, False)
        self.fence_map_release()

    # ---- cluster launch control ----
    def clc_try_cancel(self, addr: Any, mbar: Any, multicast: bool, m: np.ndarray) -> None:
        """Take a cluster that has not started yet; the 16-byte response lands asynchronously."""
        launch = self.launch
        addr, mbar = self.one_lane(m, addr, mbar)
        addr, mbar = self.shared_address(addr), self.shared_address(mbar)
        ctas = self.cta.cluster.ctas if multicast else [self.target_cta(addr)]
        o = addr & OFFSET_MASK
        if o % 16:
            self.fail("clusterlaunchcontrol.try_cancel: the response is not 16-byte aligned")
        targets = [
            (c, self.mbar_at(c.rank << 24 | mbar & OFFSET_MASK, True), self.operation("try_cancel")) for c in ctas
        ]
        for cta, _, op in targets:
            self._claim(cta, o, o + 16)
            cta.note_remote(op)

        def land() -> None:
            value = 0
            if launch.todo:
                x, y, z = launch.todo.popleft()
                value = x | y << 32 | z << 64 | 1 << 96
            data = np.frombuffer(value.to_bytes(16, "little"), np.uint8)
            for cta, bar, op in targets:
                launch.agent = op
                cta.write_chunks(np.array(o >> 4), data)
                bar.complete(16, op.vc if op is not None else None)

        launch.issue(None, None, land, "load")

    # ---- cp.async: each thread's copies land at the latest legal moment, and are poisoned until then ----
    def cp_async(self, dst: Any, src: Any, n: int, srcn: Any, m: np.ndarray) -> None:
        unit = self.unit("cp.async")
        for lane in np.flatnonzero(m):
            d, s, k = [x if type(x) is int else int(x[lane]) for x in (dst, src, srcn)]
            d = self.shared_address(d)
            if d % n or s % n:
                self.fail(f"cp.async of {n} bytes misaligned: destination {d:#x} source {s:#x}")
            cta, o = self.target_cta(d), d & OFFSET_MASK
            self._bounds(cta, o, o + n, "cp.async")
            if k:
                r = self.launch.find(s, k, self)
                if r.shadow is not None:
                    r.shadow.read(unit, slice(s - r.base, s - r.base + k))
            self.launch.stat["copied_bytes"] += k
            words = slice(o >> 2, (o + n + 3) >> 2)
            if unit is not None:
                cta.shadow.write(unit, words)
            if self.launch.delays:
                cta.mem[o : o + n] = 0xFF
            self.copy_group.append((cta, o, n, s, k, words))
        if not self.launch.delays:
            self._land_copies(self.copy_group)
            self.copy_group = []

    def _land_copies(self, copies: list[tuple]) -> None:
        for cta, o, n, s, k, words in copies:
            data = bytes(n)
            if k:
                r = self.launch.find(s, k, self)
                data = r.u8[s - r.base : s - r.base + k].tobytes() + bytes(n - k)
            cta.mv[o : o + n] = data
            cta.state[words] = GENERIC
            self.dirty.append((cta, words))

    def cp_async_commit(self) -> None:
        unit = self.units.get("cp.async")
        clock = 0
        if unit is not None:
            clock = unit.clock
            unit.tick()
        self.copy_groups.append((self.copy_group, clock))
        self.copy_group = []

    def cp_async_wait(self, n: int) -> None:
        """Wait for all but the ``n`` most recent groups; ``n < 0`` is wait_all."""
        if n < 0:
            self.cp_async_commit()
            n = 0
        while len(self.copy_groups) > n:
            copies, clock = self.copy_groups.pop(0)
            self._land_copies(copies)
            unit = self.units.get("cp.async")
            if unit is not None:
                self.agent.learn(unit.slot, clock)

    def cp_async_mbarrier(self, addr: Any, noinc: bool, m: np.ndarray) -> None:
        """Arrive on an mbarrier when all prior cp.async of the thread are complete."""
        if not noinc:
            self.fail("cp.async.mbarrier.arrive without .noinc", SyncError)
        for copies, _ in [*self.copy_groups, (self.copy_group, 0)]:
            self._land_copies(copies)
        self.copy_groups, self.copy_group = [], []
        self.publish()
        a, unit = self.agent, self.units.get("cp.async")
        vc = None
        if a is not None:
            vc = a.vc.copy()
            if unit is not None:
                if unit.slot >= vc.size:
                    vc = np.concatenate([vc, np.zeros(a.clocks.capacity - vc.size, np.int64)])
                vc[unit.slot] = unit.clock | LINE_MASK
                unit.tick()
            a.tick()
        self.arrive_copied([self.mbar_at(addr if type(addr) is int else int(addr[i])) for i in np.flatnonzero(m)], vc)

    def arrive_copied(self, barriers: list[MBarrier], vc: Any) -> None:
        """The copies of a ``cp.async.mbarrier.arrive`` are complete: a thread arrives on each of these."""
        self.launch.progress += 1
        for barrier in barriers:
            barrier.arrive(1, 0, vc)
