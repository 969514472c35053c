"""Memories of the emulated machine: global regions, and a CTA's shared and tensor memory.

Shared memory keeps, per 4-byte word, whether it was written and whether the asynchronous proxy may see the write. A
race detector (``races.Shadow``) is attached to both memories when the launch detects races.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np

from .errors import MemoryAccessError, RaceError, SyncError
from .races import Shadow

SHARED_BASE, LOCAL_BASE = 1 << 56, 2 << 56  # generic address windows (shared, local); global addresses are the host's
SHARED_START = 1024  # the first KiB of a CTA's shared memory belongs to the system
OFFSET_MASK = 0xFFFFFF  # a shared address is CTA rank << 24 | offset
DTYPES = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

NEVER, GENERIC, ASYNC = (
    0,
    1,
    2,
)  # state of a shared word: unwritten, written by generic stores, visible to the async proxy
_ALL_ASYNC = 0x02020202
_LENIENT = "(emulate(strict_exits=False) makes late arrivals warnings)"
TMEM_LANES, TMEM_COLUMNS = 128, 512
CELL_LANES = 16  # TMEM races are tracked per 16 lanes and column


class Region:
    """Bytes ``[start, end)`` of host memory that a kernel may access as global memory.

    ``base`` is ``start`` rounded down to 16, where the views begin, so that a device address is aligned exactly when
    its offset from ``base`` is. ``name`` is for reports.
    """

    __slots__ = ("base", "end", "name", "shadow", "size", "start", "u8", "v", "writes")

    def __init__(self, start: int, size: int, name: str = ""):
        self.start, self.end = start, start + size
        self.name = name or f"the tensor at {start:#x}"
        self.base = start & ~15
        self.size = n = self.end - self.base
        self.u8 = np.ctypeslib.as_array((ctypes.c_uint8 * n).from_address(self.base))
        self.v = {s: self.u8[: n // s * s].view(d) for s, d in DTYPES.items()}
        self.writes: Any = None  # see ``maps``: the last generic write of every 64 bytes
        self.shadow: Any = None  # see ``global_races``


def _shared_cells(cta: Cta):
    def describe(mask: np.ndarray) -> str:
        w = np.flatnonzero(mask)
        return f"shared memory of CTA {cta.id} [{int(w[0]) * 4:#x}, {int(w[-1]) * 4 + 4:#x})"

    return describe


def _tmem_cells(cta: Cta):
    def describe(mask: np.ndarray) -> str:
        lanes, cols = np.nonzero(mask)
        low, high = int(lanes.min()) * CELL_LANES, int(lanes.max() + 1) * CELL_LANES
        return f"tensor memory of CTA {cta.id} columns [{int(cols.min())}, {int(cols.max()) + 1}) lanes [{low}, {high})"

    return describe


class Cta:
    """A thread block: its place in grid and cluster, its shared and tensor memory and its barriers."""

    def __init__(self, launch: Any, cluster: Any, rank: int, idx: tuple[int, int, int]):
        self.launch, self.cluster, self.rank, self.id = launch, cluster, rank, idx
        c = launch.cluster
        self.cluster_ctaid = tuple(idx[i] % c[i] for i in range(3))
        self.cluster_id = tuple(idx[i] // c[i] for i in range(3))
        self.shared_base = rank << 24
        self.size = launch.program.dynamic_shared + launch.smem
        size = -(-self.size // 16) * 16
        self.mem = np.full(size, 0xFF, np.uint8)
        self.mv = self.mem.data
        self.v = {s: self.mem[: size // s * s].view(d) for s, d in DTYPES.items()}
        self.chunks16 = self.mem.reshape(-1, 16)
        self.state = np.zeros(size // 4, np.uint8)
        self.state32 = self.state.view(np.uint32)  # one entry per 16-byte chunk
        self.published: list[Any] = []  # generic writes handed over at a barrier, not yet fenced for the async proxy
        self.exited = False
        self.exit_clock: Any = None  # what the exited warps of this CTA knew
        self.remote: dict[
            int, tuple[int, str, int]
        ] = {}  # clock slot -> last asynchronous or remote access: clock, name, line
        self.arrivals: dict[int, tuple[int, str, int]] = {}  # the same of arrivals on its mbarriers
        self.mbars: dict[int, Any] = {}
        self.named: dict[int, Any] = {}
        self.flags: dict[int, Any] = {}  # shared word -> vector clock released by synchronising stores
        self.wgmma_groups: dict[int, Any] = {}
        self.tmem: np.ndarray | None = None
        self.tmem_allocs: list[tuple[int, int]] = []
        self.tmem_freed: list[tuple[int, int, str]] = []  # columns that the peer of the pair has deallocated
        self.live_warps = 0
        self.smid = (cluster.index * cluster.size + rank) % launch.num_sms
        b = launch.block
        self.nthreads = b[0] * b[1] * b[2]
        self.nwarps = -(-self.nthreads // 32)
        clocks = cluster.clocks
        self.shadow: Any = Shadow(clocks, (size // 4,), _shared_cells(self)) if clocks else None
        self.tmem_shadow: Any = (
            Shadow(clocks, (TMEM_LANES // CELL_LANES, TMEM_COLUMNS), _tmem_cells(self)) if clocks else None
        )

    # ---- liveness ----
    def alive(self, what: str) -> None:
        if self.exited:
            raise SyncError(f"CTA {self.id} (rank {self.rank}): {what} after that CTA has exited")

    def late_arrival(self, line: int) -> bool:
        """Return whether an arrival on an mbarrier of this CTA follows its exit; raises in a strict launch."""
        if not self.exited:
            return False
        if self.launch.strict_exits:
            raise SyncError(
                f"arrival at {{line {line}}} on an mbarrier of CTA {self.id} (rank {self.rank}) after that CTA has "
                f"exited {_LENIENT}"
            )
        self.launch.warn(f"arrival on an mbarrier of a CTA that has exited, at {{line {line}}}")
        return True

    def note_remote(self, agent: Any) -> None:
        """``agent``, asynchronous or of another CTA, touches this memory: that must be over before the CTA exits."""
        if agent is not None:
            self.remote[agent.slot] = (agent.clock, agent.name, agent.line)

    def note_arrival(self, agent: Any) -> None:
        """``agent``, asynchronous or of another CTA, arrives on an mbarrier of this CTA."""
        if agent is not None:
            self.arrivals[agent.slot] = (agent.clock, agent.name, agent.line)

    def _unordered(self, accesses: dict[int, tuple[int, str, int]]) -> Iterator[tuple[str, int]]:
        """Return the agents and lines of those accesses that are not ordered before the exit of this CTA."""
        known = self.exit_clock
        for slot, (clock, name, line) in accesses.items():
            if slot >= known.size or known[slot] < clock:
                yield name, line

    def check_exit(self) -> None:
        """The CTA exits: raise if an access by another CTA is not ordered before that."""
        for name, line in self._unordered(self.remote):
            raise RaceError(
                f"race: CTA {self.id} exits although the access to its shared memory by {name} at {{line {line}}} "
                "is not ordered before its exit"
            )
        for name, line in self._unordered(self.arrivals):
            if self.launch.strict_exits:
                raise RaceError(
                    f"race: CTA {self.id} exits although the arrival on its mbarrier by {name} at {{line {line}}} "
                    f"is not ordered before its exit {_LENIENT}"
                )
            self.launch.warn(
                f"arrival on an mbarrier that is not ordered before the exit of its CTA, at {{line {line}}}"
            )

    def mbar(self, offset: int) -> Any:
        """Return the mbarrier at a shared offset, which must be initialised and its CTA alive."""
        if self.exited:
            self.alive("mbarrier access")
        b = self.mbars.get(offset)
        if b is None:
            raise SyncError(f"CTA {self.id}: shared offset {offset:#x} is not an initialised mbarrier")
        return b

    # ---- shared memory, asynchronous proxy ----
    def check_async(self, chunks: Any, what: str) -> None:
        """Every 16-byte chunk must hold data that the asynchronous proxy may see."""
        ok = self.state32[chunks] == _ALL_ASYNC
        if ok.all():
            return
        words = self.state.reshape(-1, 4)[chunks]
        if words.min() == NEVER:
            raise MemoryAccessError(
                f"CTA {self.id}: {what} reads shared memory that was never written, or that an asynchronous copy is "
                "overwriting"
            )
        text = "reads shared memory written by st.shared or cp.async without fence.proxy.async"
        if self.launch.strict_proxies:
            raise MemoryAccessError(
                f"CTA {self.id}: {what} {text} (emulate(strict_proxies=False) makes this a warning)"
            )
        self.launch.warn(f"{what} {text}")

    def read_chunks(self, idx: np.ndarray, what: str) -> np.ndarray:
        """Asynchronous-proxy read of 16-byte chunks.

        Args:
            idx: chunk numbers (shared offset / 16), any shape.
            what: the reader, for messages.
        Returns:
            uint8 of shape ``idx.shape + (16,)``.
        Raises:
            MemoryAccessError: outside shared memory, unwritten, or written without a proxy fence.
            RaceError: not ordered after the last write.
        """
        if int(idx.max()) * 16 >= self.size or int(idx.min()) * 16 < SHARED_START:
            raise MemoryAccessError(
                f"CTA {self.id}: {what} reads shared offsets [{int(idx.min()) * 16:#x}, "
                f"{int(idx.max()) * 16 + 16:#x}), outside [{SHARED_START:#x}, {self.size:#x})"
            )
        self.check_async(idx, what)
        if self.shadow is not None:
            self.shadow.read(self.launch.agent, idx, True)
        return self.chunks16[idx]

    def write_chunks(self, idx: np.ndarray, data: np.ndarray) -> None:
        """Asynchronous-proxy write of 16-byte chunks; ``data`` is uint8 of shape ``idx.shape + (16,)``."""
        self.alive("asynchronous write")
        if int(idx.max()) * 16 >= self.size or int(idx.min()) * 16 < SHARED_START:
            raise MemoryAccessError(
                f"CTA {self.id}: asynchronous write to shared offsets [{int(idx.min()) * 16:#x}, "
                f"{int(idx.max()) * 16 + 16:#x}), outside [{SHARED_START:#x}, {self.size:#x})"
            )
        if self.shadow is not None:
            self.shadow.write(self.launch.agent, idx, True)
        self.chunks16[idx] = data
        self.state32[idx] = _ALL_ASYNC

    # ---- tensor memory ----
    def tensor_memory(self) -> np.ndarray:
        if self.tmem is None:
            self.tmem = np.full((TMEM_LANES, TMEM_COLUMNS), 0xFFFFFFFF, np.uint32)
        return self.tmem

    def check_cols(self, col: int, n: int, what: str) -> None:
        """Columns ``[col, col + n)`` must lie inside one allocation of this CTA."""
        for a, k, who in self.tmem_freed:
            if a < col + n and col < a + k:
                raise MemoryAccessError(
                    f"CTA {self.id}: {what} touches TMEM columns that {who} has deallocated for the pair"
                )
        for a, k in self.tmem_allocs:
            if a <= col and col + n <= a + k:
                return
        allocs = ", ".join(f"[{a}, {a + k})" for a, k in self.tmem_allocs) or "none"
        raise MemoryAccessError(
            f"CTA {self.id}: {what} touches TMEM columns [{col}, {col + n}) outside the allocation ({allocs})"
        )

    def _region(self, rows: Any, cols: Any, what: str) -> tuple[Any, Any]:
        """Check a rectangle (outer product of rows and columns); returns the numpy index and the race cells."""
        self.alive(what)
        c0, c1 = (cols.start, cols.stop) if type(cols) is slice else (int(cols.min()), int(cols.max()) + 1)
        self.check_cols(c0, c1 - c0, what)
        if type(rows) is slice:
            if rows.start < 0 or rows.stop > TMEM_LANES:
                raise MemoryAccessError(f"CTA {self.id}: {what} touches TMEM lanes [{rows.start}, {rows.stop})")
            if type(cols) is slice:
                return (rows, cols), (slice(rows.start // CELL_LANES, -(-rows.stop // CELL_LANES)), cols)
            return (rows, cols), (slice(rows.start // CELL_LANES, -(-rows.stop // CELL_LANES)), cols)
        if int(rows.min()) < 0 or int(rows.max()) >= TMEM_LANES:
            raise MemoryAccessError(f"CTA {self.id}: {what} touches TMEM lanes [{rows.min()}, {rows.max() + 1})")
        halves = np.unique(rows // CELL_LANES)[:, None]
        if type(cols) is slice:
            cols = np.arange(cols.start, cols.stop)
        return (rows[:, None], cols[None, :]), (halves, cols[None, :])

    def tmem_read(self, rows: Any, cols: Any, what: str) -> np.ndarray:
        """TMEM words of ``rows`` x ``cols`` (slices with explicit bounds, or 1-D index arrays), uint32, a copy."""
        t = self.tensor_memory()
        sel, cells = self._region(rows, cols, what)
        if self.tmem_shadow is not None:
            self.tmem_shadow.read(self.launch.agent, cells)
        return np.array(t[sel])

    def tmem_write(self, rows: Any, cols: Any, values: np.ndarray, what: str) -> None:
        """Write ``values`` (uint32, rows x cols) to TMEM."""
        t = self.tensor_memory()
        sel, cells = self._region(rows, cols, what)
        if self.tmem_shadow is not None:
            self.tmem_shadow.write(self.launch.agent, cells)
        t[sel] = values

    def _elements(self, lanes: np.ndarray, cols: np.ndarray, what: str) -> Any:
        self.alive(what)
        c0, c1 = int(cols.min()), int(cols.max()) + 1
        self.check_cols(c0, c1 - c0, what)
        low, high = int(lanes.min()) // CELL_LANES, int(lanes.max()) // CELL_LANES + 1
        return slice(low, high), slice(c0, c1)

    def tmem_read_at(self, lanes: np.ndarray, cols: np.ndarray, what: str) -> np.ndarray:
        """TMEM words at pairs ``(lanes[i], cols[i])``; the arrays have one shape, which is the result's."""
        t = self.tensor_memory()
        cells = self._elements(lanes, cols, what)
        if self.tmem_shadow is not None:
            self.tmem_shadow.read(self.launch.agent, cells)
        return t[lanes, cols]

    def tmem_write_at(self, lanes: np.ndarray, cols: np.ndarray, values: np.ndarray, what: str) -> None:
        """Write ``values`` at pairs ``(lanes[i], cols[i])``."""
        t = self.tensor_memory()
        cells = self._elements(lanes, cols, what)
        if self.tmem_shadow is not None:
            self.tmem_shadow.write(self.launch.agent, cells)
        t[lanes, cols] = values
