"""Loads, stores and atomics of a warp, in every address space."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import numerics as N
from ..global_races import NO_SCOPE, Cells, Rows
from ..happens_before import WEAK, Order
from ..maps import BLOCK
from ..memory import DTYPES, GENERIC, LOCAL_BASE, NEVER, OFFSET_MASK, SHARED_BASE, SHARED_START, Cta, Region
from ..races import merge_into
from .core import WarpCore

_U24 = np.uint32(OFFSET_MASK)
_LANES = np.arange(32)
_SYNCHRONISING = frozenset(("acquire", "release", "acq_rel", "relaxed", "volatile"))


class MemoryWarp(WarpCore):
    """ld, st, atom, red, ldmatrix, stmatrix."""

    def __init__(self, launch: Any, cta: Cta, wid: int):
        super().__init__(launch, cta, wid)
        self.dirty: list[Any] = []  # generic shared writes not yet fenced: (CTA, words)
        self.unfenced_reads: dict[int, tuple[dict, int]] = {}  # releases that relaxed loads have read, and their scope
        self.polled: int | None = None  # the word of global memory that the last load with a memory order read

    # ---- addresses ----
    @staticmethod
    def shared_address(addr: int) -> int:
        """Return the shared address (CTA rank << 24 | offset) of a generic or shared one."""
        return addr - SHARED_BASE if addr >> 56 == 1 else addr

    def target_cta(self, addr: int) -> Cta:
        """Return the CTA of the cluster that a shared address names, which must not have exited."""
        cta = self.named_cta(addr)
        if cta.exited:
            cta.alive(f"access from {self.name}")
        return cta

    def named_cta(self, addr: int) -> Cta:
        """Return the CTA of the cluster that a shared address names, even if it has exited."""
        rank = addr >> 24
        if rank == self.cta.rank:
            return self.cta
        ctas = self.cta.cluster.ctas
        if rank >= len(ctas):
            self.fail(f"shared address {addr:#x} names CTA rank {rank} outside the cluster")
        return ctas[rank]

    @staticmethod
    def space_of(space: str, addr: Any, m: np.ndarray) -> tuple[str, Any]:
        """Resolve a generic address (the same space in all lanes)."""
        if space != "generic":
            return space, addr
        window = (addr if type(addr) is int else int(addr[int(m.argmax())])) >> 56
        if window == 1:
            return "shared", addr - SHARED_BASE if type(addr) is int else (addr - np.uint64(SHARED_BASE)).astype(
                np.uint32
            )
        return ("local" if window == 2 else "global"), addr

    def _bounds(self, cta: Cta, lo: int, hi: int, what: str) -> None:
        if hi > cta.size or lo < SHARED_START:
            self.fail(f"shared {what} of offsets [{lo:#x}, {hi:#x}), outside [{SHARED_START:#x}, {cta.size:#x})")

    def _per_lane(self, addr: Any, m: np.ndarray) -> list[tuple[int, int]]:
        return [(int(i), int(addr[i])) for i in np.flatnonzero(m)]

    # ---- loads ----
    def ld(
        self,
        space: str,
        addr: Any,
        size: int,
        n: int,
        m: np.ndarray,
        order: Order = WEAK,
    ) -> tuple:
        """Return ``n`` elements of ``size`` bytes at each lane's address."""
        space, addr = self.space_of(space, addr, m)
        if space == "local":
            return self._ld_local(addr, size, n, m)
        width = size * n
        if type(addr) is int:
            if addr % width:
                self.fail(f"misaligned {space} load of {width} bytes at {addr:#x}")
            if space == "global" or space == "const":
                r = self.launch.find(addr, width, self)
                if order.kind:
                    self.polled = addr
                self.launch.stat[f"{space}_load_bytes"] += width
                o = addr - r.base
                if r.shadow is not None:
                    self._read_global(r, [addr], slice(o, o + width), order)
                u: Any = r.u8[o : o + width].tobytes()
                return tuple([int.from_bytes(u[j : j + size], "little") for j in range(0, width, size)])
            cta = self.target_cta(addr)
            o = addr & OFFSET_MASK
            self._bounds(cta, o, o + width, "load")
            if not cta.state[o >> 2]:
                self.launch.warn(f"load of uninitialised shared memory at {{line {self.line}}}")
            if self.agent is not None:
                self._note_read(cta, slice(o >> 2, (o + width + 3) >> 2), order)
            u = cta.mv
            return tuple([int.from_bytes(u[o + j : o + j + size], "little") for j in range(0, width, size)])
        act = addr if m.all() else addr[m]
        lo, hi = int(act.min()), int(act.max()) + width
        if (act % act.dtype.type(width)).any():
            self.fail(f"misaligned {space} load of {width} bytes at {lo:#x}")
        if space == "global" or space == "const":
            r = self.launch.find(lo, width, self)
            if hi > r.end:
                return self._ld_split(space, addr, size, n, m, order)
            if order.kind:
                self.polled = lo
            self.launch.stat[f"{space}_load_bytes"] += width * len(act)
            if r.shadow is not None:
                self._read_global(r, act, self._rows(r, act, width), order)
            index = (addr - np.uint64(r.base)).astype(np.int64) // size
            view = r.v[size]
        else:
            cta = self.target_cta(lo)
            if lo >> 24 != (hi - width) >> 24:
                return self._ld_split("shared", addr, size, n, m, order)
            self._bounds(cta, lo & OFFSET_MASK, (hi - width & OFFSET_MASK) + width, "load")
            offsets = (act & _U24).astype(np.int64)
            self.launch.bank("ld", offsets, width)
            words = self._words(offsets, width)
            if cta.state[words].min() == NEVER:
                self.launch.warn(f"load of uninitialised shared memory at {{line {self.line}}}")
            if self.agent is not None:
                self._note_read(cta, words, order)
            index = (addr & _U24).astype(np.int64) // size
            view = cta.v[size]
        if act is not addr:
            index = np.where(m, index, index[int(m.argmax())])
        if n == 1:
            return (self._widen(view[index]),)
        return tuple([self._widen(view[index + j]) for j in range(n)])

    @staticmethod
    def _words(offsets: np.ndarray, width: int) -> np.ndarray:
        first = offsets >> 2
        return first if width <= 4 else (first[:, None] + np.arange(width // 4)).ravel()

    def _ld_split(self, space: str, addr: Any, size: int, n: int, m: np.ndarray, order: Order) -> tuple:
        """A load whose lanes reach several allocations or CTAs: lane by lane."""
        out = [np.zeros(32, DTYPES[max(size, 2)]) for _ in range(n)]
        for lane, a in self._per_lane(addr, m):
            for o, x in zip(out, self.ld(space, a, size, n, m, order), strict=True):
                o[lane] = x
        return tuple(out)

    @staticmethod
    def _widen(a: np.ndarray) -> np.ndarray:
        return a.astype(np.uint16) if a.dtype == np.uint8 else a

    def _local_offsets(self, addr: Any, width: int, m: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        size = self.launch.program.local_size
        if self.local is None:
            self.local = np.full((32, size), 0xFF, np.uint8)
        off = (N.full(addr, 64) & np.uint64(LOCAL_BASE - 1)).astype(np.int64)
        if (off[m] + width > size).any():
            self.fail(f"local access of {width} bytes at offset {int(off[m].max()):#x}, beyond {size}")
        return self.local, np.where(m, off, 0)

    def _ld_local(self, addr: Any, size: int, n: int, m: np.ndarray) -> tuple:
        mem, off = self._local_offsets(addr, size * n, m)
        out = []
        for j in range(n):
            b = np.ascontiguousarray(mem[_LANES[:, None], off[:, None] + j * size + np.arange(size)])
            out.append(self._widen(b.view(DTYPES[size])[:, 0]))
        return tuple(out)

    # ---- stores ----
    def st(
        self,
        space: str,
        addr: Any,
        size: int,
        vals: tuple,
        m: np.ndarray,
        order: Order = WEAK,
    ) -> None:
        """Store ``vals`` (elements of ``size`` bytes) at each lane's address."""
        space, addr = self.space_of(space, addr, m)
        if space == "local":
            return self._st_local(addr, size, vals, m)
        n = len(vals)
        width = size * n
        if type(addr) is int:
            if addr % width:
                self.fail(f"misaligned {space} store of {width} bytes at {addr:#x}")
            lane = -1
            data = b""
            for v in vals:
                if type(v) is not int:
                    if lane < 0:
                        lane = 31 - int(m[::-1].argmax())  # several lanes store to one address: one of them wins
                    v = int(v[lane])
                data += (v & N.MASK[8 * size]).to_bytes(size, "little")
            if space == "global":
                r = self.launch.find(addr, width, self)
                self.launch.stat["global_store_bytes"] += width
                if r.shadow is not None:
                    o = addr - r.base
                    self._write_global(r, [addr], slice(o, o + width), order)
                r.u8[addr - r.base : addr - r.base + width] = np.frombuffer(data, np.uint8)
                if r.writes is not None:
                    self.launch.map_fences.wrote(self, r, addr // BLOCK)
                return None
            cta = self.target_cta(addr)
            o = addr & OFFSET_MASK
            self._bounds(cta, o, o + width, "store")
            span = slice(o >> 2, (o + width + 3) >> 2)
            if self.agent is not None:
                self._note_write(cta, span, order)
            cta.mv[o : o + width] = data
            cta.state[span] = GENERIC
            self.dirty.append((cta, span))
            return None
        all_lanes = bool(m.all())
        act = addr if all_lanes else addr[m]
        lo, hi = int(act.min()), int(act.max()) + width
        if (act % act.dtype.type(width)).any():
            self.fail(f"misaligned {space} store of {width} bytes at {lo:#x}")
        if space == "global":
            r = self.launch.find(lo, width, self)
            if hi > r.end:
                return self._st_split(space, addr, size, vals, m, order)
            self.launch.stat["global_store_bytes"] += width * len(act)
            if r.shadow is not None:
                self._write_global(r, act, self._rows(r, act, width), order)
            index = (act - np.uint64(r.base)).astype(np.int64) // size
            view = r.v[size]
            if r.writes is not None:
                self.launch.map_fences.wrote(self, r, act.astype(np.int64) // BLOCK)
        else:
            cta = self.target_cta(lo)
            if lo >> 24 != (hi - width) >> 24:
                return self._st_split("shared", addr, size, vals, m, order)
            self._bounds(cta, lo & OFFSET_MASK, (hi - width & OFFSET_MASK) + width, "store")
            offsets = (act & _U24).astype(np.int64)
            self.launch.bank("st", offsets, width)
            words = self._words(offsets, width)
            if self.agent is not None:
                self._note_write(cta, words, order)
            cta.state[words] = GENERIC
            self.dirty.append((cta, words))
            index = offsets // size
            view = cta.v[size]
        dt = DTYPES[size]
        for j, v in enumerate(vals):
            if type(v) is int:
                view[index + j] = dt(v & N.MASK[8 * size])
            else:
                view[index + j] = (v if all_lanes else v[m]).astype(dt, copy=False)
        return None

    def _st_split(self, space: str, addr: Any, size: int, vals: tuple, m: np.ndarray, order: Order) -> None:
        for lane, a in self._per_lane(addr, m):
            self.st(space, a, size, tuple(v if type(v) is int else int(v[lane]) for v in vals), m, order)

    def _st_local(self, addr: Any, size: int, vals: tuple, m: np.ndarray) -> None:
        mem, off = self._local_offsets(addr, size * len(vals), m)
        lanes = np.flatnonzero(m)
        for j, v in enumerate(vals):
            b = N.full(v, max(8 * size, 16)).astype(DTYPES[size]).view(np.uint8).reshape(32, size)
            mem[lanes[:, None], off[lanes, None] + j * size + np.arange(size)] = b[lanes]

    # ---- races ----
    def _note_read(self, cta: Cta, words: Any, order: Order) -> None:
        a = self.agent
        if order.kind in _SYNCHRONISING:  # flags in shared memory: the access itself synchronises
            for w in self._word_list(words):
                a.join(cta.flags.get(w))
            return
        a.line = self.line
        if cta is not self.cta:
            cta.note_remote(a)
        if type(words) is slice and words.stop - words.start == 1:
            cta.shadow.read_word(a, words.start)
        else:
            cta.shadow.read(a, words)

    def _note_write(self, cta: Cta, words: Any, order: Order) -> None:
        a = self.agent
        if order.kind in _SYNCHRONISING:
            for w in self._word_list(words):
                cta.flags[w] = merge_into(cta.flags.get(w), a.vc)
            a.tick()
            return
        a.line = self.line
        cta.shadow.write(a, words)
        if cta is not self.cta:
            cta.note_remote(a)

    @staticmethod
    def _word_list(words: Any) -> list[int]:
        return list(range(words.start, words.stop)) if type(words) is slice else [int(w) for w in words]

    @staticmethod
    def _rows(region: Region, addresses: np.ndarray, width: int) -> Rows:
        """Return the accesses of ``width`` bytes for the shadow of a region, which is aligned to 16 bytes alone."""
        offsets = (addresses - np.uint64(region.base)).astype(np.int64)
        if width <= 16:
            return Rows(width, offsets // width)
        return Rows(16, (offsets[:, None] // 16 + np.arange(width // 16)).ravel())

    def _read_global(self, region: Region, addresses: Any, cells: Cells, order: Order) -> None:
        a = self.here()
        if order.kind:
            for addr in addresses:
                self.launch.epochs.words.read(self, int(addr), order)
        if not order.atomic:
            region.shadow.read(a, cells, order.scope if order.kind else NO_SCOPE)

    def _write_global(self, region: Region, addresses: Any, cells: Cells, order: Order) -> None:
        region.shadow.write(self.here(), cells, order.scope if order.kind else NO_SCOPE)
        if order.kind:
            for addr in addresses:
                self.launch.epochs.words.write(self, int(addr), order)

    # ---- atomics ----
    def atom(self, space: str, op: Any, size: int, addr: Any, vals: tuple, m: np.ndarray, order: Order) -> Any:
        """Read, modify and write atomically, lane by lane; return the old values (of the first element).

        ``op(old, *values) -> new`` works on bit patterns; if ``vals`` is one tuple of values, it is applied to each of
        these at consecutive addresses. A compare-and-swap that fails is a load.
        """
        vector, changed = type(vals[0]) is tuple, False
        compares = len(vals) == 2
        old_values = np.zeros(32, DTYPES[max(size, 2)])
        for lane in np.flatnonzero(m):
            a = addr if type(addr) is int else int(addr[lane])
            vs = [v if type(v) is int else int(v[lane]) for v in (vals[0] if vector else vals)]
            old = self.ld(space, a, size, len(vs) if vector else 1, m, order)
            new = tuple(op(o, v) for o, v in zip(old, vs, strict=True)) if vector else (op(old[0], *vs),)
            old_values[lane] = old[0]
            if compares and old[0] != vs[0]:
                self.ld(space, a, size, 1, m, order._replace(atomic=False))
                continue
            changed = changed or new != old
            self.st(space, a, size, new, m, order)
        self.launch.progress += changed  # not of a warp that spins
        return old_values

    # ---- 8x8 matrices ----
    def _matrix_rows(self, addr: Any, j: int, what: str) -> tuple[Cta, np.ndarray]:
        """CTA and 16-byte chunk numbers of the eight rows of matrix ``j``, whose addresses lanes 8j..8j+7 hold."""
        a = N.full(addr, 64)[8 * j : 8 * j + 8].astype(np.uint64)
        a = np.where(a >> np.uint64(56) == 1, a - np.uint64(SHARED_BASE), a).astype(np.int64)
        cta = self.target_cta(int(a[0]))
        if (a >> 24 != a[0] >> 24).any():
            self.fail(f"{what}: rows in several CTAs")
        o = a & OFFSET_MASK
        if (o % 16).any():
            self.fail(f"{what}: misaligned row address {int(a[(o % 16) != 0][0]):#x}")
        self._bounds(cta, int(o.min()), int(o.max()) + 16, what)
        return cta, o >> 4

    def stmatrix(self, m: np.ndarray, addr: Any, regs: tuple, trans: bool) -> None:
        self.launch.bank_matrices("st", N.full(addr, 64), len(regs))
        for j, r in enumerate(regs):
            h = np.empty((8, 8), np.uint16)
            pair = N.full(r, 32).view(np.uint16).reshape(8, 4, 2)  # lane / 4, lane % 4, half
            h[:, 0::2], h[:, 1::2] = pair[:, :, 0], pair[:, :, 1]
            if trans:
                h = h.T
            cta, chunks = self._matrix_rows(addr, j, "stmatrix")
            words = (chunks[:, None] * 4 + np.arange(4)).ravel()
            if self.agent is not None:
                self._note_write(cta, words, WEAK)
            cta.chunks16[chunks] = np.ascontiguousarray(h).view(np.uint8)
            cta.state[words] = GENERIC
            self.dirty.append((cta, words))

    def ldmatrix(self, m: np.ndarray, addr: Any, n: int, trans: bool) -> list[np.ndarray]:
        rows = self._read_matrices(addr, n)
        halves = (np.ascontiguousarray(row).view(np.uint16) for row in rows)
        return [np.ascontiguousarray(h.T if trans else h).view(np.uint32).reshape(32) for h in halves]

    def ldmatrix_bytes(self, m: np.ndarray, addr: Any, n: int) -> list[np.ndarray]:
        """``.m16n16.trans.b8``: thread t has rows 4 (t % 4) to + 3 of column t / 4, then of column t / 4 + 8.

        Lanes 16 j to 16 j + 15 hold the addresses of the rows of matrix j; each matrix fills two of ``n`` registers.
        """
        rows = self._read_matrices(addr, n)
        both = (np.concatenate(rows[j : j + 2]) for j in range(0, n, 2))
        return [np.ascontiguousarray(h.T[i : i + 8]).view(np.uint32).reshape(32) for h in both for i in (0, 8)]

    def _read_matrices(self, addr: Any, n: int) -> list[np.ndarray]:
        """Return bytes ``[8, 16]`` of every eight rows, whose addresses lanes 8j..8j+7 hold."""
        self.launch.bank_matrices("ld", N.full(addr, 64), n)
        out = []
        for j in range(n):
            cta, chunks = self._matrix_rows(addr, j, "ldmatrix")
            words = (chunks[:, None] * 4 + np.arange(4)).ravel()
            if cta.state[words].min() == NEVER:
                self.launch.warn(f"load of uninitialised shared memory at {{line {self.line}}}")
            if self.agent is not None:
                self._note_read(cta, words, WEAK)
            out.append(cta.chunks16[chunks])
        return out
