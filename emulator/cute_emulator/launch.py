"""A kernel launch: grid, parameters, global memory, and the scheduler of its warps."""

from __future__ import annotations

import bisect
import ctypes
import math
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple

import numpy as np

from .chips import Chip
from .devices import Device
from .engine import Engine
from .errors import DeadlockError, EmulatorError, MemoryAccessError, SyncError
from .global_races import Epochs, RegionShadow
from .maps import MapFences
from .memory import Region
from .races import Clocks, Origin, merge_into
from .sync import Cluster
from .warp import Warp

MAX_CLUSTER = 16
_SPINNING_STEPS = 1_000  # without progress, after which what was held back happens ...
_TURNS = 4  # ... and of each warp until the next such thing does
_STALLED_STEPS = 20_000
LIVELOCK_STEPS = 400_000
_PATIENT_STEPS, _NAP = 20, 0.001  # without progress, and seconds of each further one that other processes have


class Extent(NamedTuple):
    """Sizes (x, y, z) of a launch, and its dynamic shared memory in bytes.

    Attributes:
        overlaps: whether it may begin before the previous launch has ended (programmatic stream serialisation).
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    smem: int
    overlaps: bool = False


class Rules(NamedTuple):
    """Rules of a launch.

    Attributes:
        seed, timing: see ``engine``.
        resident_clusters: how many clusters run at a time (more start when all of them wait).
        detect_races: keep vector clocks.
        strict_loads: a use of tcgen05.ld registers before tcgen05.wait::ld is an error, not a warning.
        strict_exits: an arrival on an mbarrier of a CTA that may have exited is an error, not a warning.
        strict_proxies: a missing fence.proxy.async is an error, not a warning.
        patience: seconds without progress while other processes may write to the memory; None: no other process does.
        device: on which it is launched.
        front: the writes that the previous launch, which overlaps, has still to do; None: none.
    """

    seed: int
    timing: str
    resident_clusters: int
    detect_races: bool
    strict_loads: bool
    strict_exits: bool
    strict_proxies: bool
    patience: float | None
    device: Device
    front: Callable[[], object] | None = None


class Launch(Engine):
    """A grid being executed.

    Args:
        program: the translated kernel.
        extent: of the grid.
        params: the parameter block.
        spans: ``(address, bytes)`` of the host memory that is the kernel's global memory.
        chip: what it runs on.
        rules: see ``Rules``.
    """

    warp_type = Warp

    def __init__(
        self,
        program: Any,
        extent: Extent,
        params: bytes,
        spans: list[tuple[int, int]],
        chip: Chip,
        rules: Rules,
    ):
        super().__init__(rules.device.seed(rules.seed), rules.timing)
        self.program, self.device, world = program, rules.device, rules.device.world
        self.grid, self.block, self.cluster, self.smem, self.overlaps = grid, _, cluster, _, _ = extent
        self.early: int | None = None
        self.at_once: int | None = None
        self.waited, self.in_front, self.front = not self.overlaps, self.overlaps, rules.front
        self.resident, self.detect_races = rules.resident_clusters, rules.detect_races
        self.strict_loads, self.strict_exits = rules.strict_loads, rules.strict_exits
        self.strict_proxies = rules.strict_proxies
        self.patience, self.deadline = rules.patience, 0.0
        self.spinning_steps = _SPINNING_STEPS if rules.patience is None else _PATIENT_STEPS
        self.chip, self.num_sms = chip, chip.multiprocessors
        self._check_shape()
        self.nclusters = tuple(grid[i] // cluster[i] for i in range(3))
        self.param_bytes = params
        self._buffer = (ctypes.c_uint8 * (len(params) + 256))()
        self.param_addr = -(-ctypes.addressof(self._buffer) // 128) * 128
        ctypes.memmove(self.param_addr, params, len(params))
        self.epochs = Epochs() if self.detect_races else None
        if world is not None:
            self.epochs, spans = world.epochs, world.private(spans)
        self.regions = [Region(start, size) for start, size in _union(spans)]
        for region in self.regions:
            region.shadow = None if self.epochs is None else RegionShadow(region, self.epochs)
        self.private = self.regions  # by this device alone
        if world is not None:
            self.regions = self.private + world.regions()
        self.map_fences = MapFences(self.regions) if program.maps_in_memory else None
        self.regions.append(Region(self.param_addr, max(len(params), 1)))
        self.regions.sort(key=lambda r: r.start)
        self.starts = [r.start for r in self.regions]
        self.tensor_maps: dict[bytes, Any] = {}
        self.stat: Counter[str] = Counter()
        self.warnings: Counter[str] = Counter()
        self.origin = Origin(self.device, self.device.launches, program.name, program.location, self.warnings)
        self.clocks: list[Clocks] = []  # of all clusters
        self.opcodes: Counter[str] = Counter()
        self.time = 0
        self.warps: list[Any] = []  # of ``warp_type``
        self.clusters: list[Cluster] = []
        self.started = 0
        self.todo: deque[tuple[int, int, int]] = deque()
        self.counts = [0] * len(program.histogram)
        self._bank_cache: dict[Any, tuple[int, int]] = {}

    def _check_shape(self) -> None:
        grid, block, cluster = self.grid, self.block, self.cluster
        shared = self.smem + self.program.dynamic_shared - 1024
        if shared > self.chip.shared_of_cta:
            raise SyncError(f"{shared} bytes of shared memory exceed {self.chip.shared_of_cta}")
        if block[0] * block[1] * block[2] > 1024 or cluster[0] * cluster[1] * cluster[2] > MAX_CLUSTER or min(grid) < 1:
            raise SyncError(f"illegal launch: grid {grid}, block {block}, cluster {cluster}")
        if self.program.reqntid and tuple(block) != self.program.reqntid:
            raise SyncError(f"block {block} differs from .reqntid {self.program.reqntid}")
        if any(g % c for g, c in zip(grid, cluster, strict=True)):
            raise SyncError(f"grid {grid} is not a multiple of the cluster {cluster}")

    # ---- services for warps ----
    def clock(self) -> int:
        """A counter that advances with every look at it: the emulator does not model time."""
        self.time += 100
        return self.time & 0xFFFFFFFF

    def global_timer(self) -> int:
        """Nanoseconds: those of the host where other processes are waited for, who take their time."""
        return self.clock() if self.patience is None else time.monotonic_ns()

    def warn(self, text: str) -> None:
        self.warnings[text] += 1

    def count_mma(self, flops: int) -> None:
        """Note an MMA of a warp, a warpgroup, a CTA or a pair of CTAs."""
        self.stat["mma"] += 1
        self.stat["mma_flops"] += flops

    def param(self, offset: int, size: int) -> int:
        return int.from_bytes(self.param_bytes[offset : offset + size], "little")

    def find(self, addr: int, n: int, who: Any) -> Region:
        """Return the region that holds ``n`` bytes at ``addr``; raises MemoryAccessError if none does."""
        i = bisect.bisect_right(self.starts, addr) - 1
        if i >= 0:
            r = self.regions[i]
            if addr + n <= r.end:
                if who is not None and not who.waited and self.early is None:
                    self.early = who.line
                return r
        where = who.where() + ": " if who is not None else ""
        hint = ""
        if self.device.world is not None and self.device.world.window(addr) is not None:
            raise MemoryAccessError(
                f"{where}access of {n} bytes at the multicast address {addr:#x}, which only multimem instructions may "
                "access"
            )
        if i >= 0:
            r = self.regions[i]
            hint = (
                f"; the nearest tensor below is [{r.start:#x}, {r.end:#x}), the access ends {addr + n - r.end} bytes "
                "past it"
            )
        raise MemoryAccessError(
            f"{where}global access of {n} bytes at {addr:#x} is outside every tensor of the call{hint} "
            "(machine.register(tensor) admits memory that a kernel reaches only through a pointer in memory)"
        )

    def bank(self, what: str, offsets: np.ndarray, width: int) -> None:
        """Count the shared-memory passes of one access, and those a conflict-free one would need."""
        first = int(offsets[0])
        key = (what, width, first & 127, (offsets - first).tobytes())
        passes = self._bank_cache.get(key)
        if passes is None:
            together = max(1, 128 // width)  # lanes served at a time
            actual = 0
            for i in range(0, len(offsets), together):
                words = offsets[i : i + together, None] // 4 + np.arange(max(1, width // 4))
                actual += int(np.bincount(np.unique(words) % 32).max())
            passes = self._bank_cache[key] = (actual, -(-len(offsets) * width // 128))
        self.stat["shared_passes"] += passes[0]
        if passes[0] > passes[1]:
            self.stat["bank_conflicts"] += passes[0] - passes[1]

    def bank_matrices(self, what: str, addr: np.ndarray, n: int) -> None:
        for j in range(n):
            self.bank(what, (addr[8 * j : 8 * j + 8] & np.uint64(0xFFFFFF)).astype(np.int64), 16)

    # ---- scheduling ----
    def start_cluster(self) -> None:
        """Make the next cluster of the grid resident."""
        self.progress += 1
        c = self.cluster
        nwarps = -(-self.block[0] * self.block[1] * self.block[2] // 32) * c[0] * c[1] * c[2]
        clocks = Clocks(2 * nwarps + 64, self.origin) if self.detect_races else None
        if clocks is not None:
            self.clocks.append(clocks)
        cl = Cluster(self, self.started, self.todo.popleft(), clocks)
        self.started += 1
        self.clusters.append(cl)
        for cta in cl.ctas:
            for i in range(cta.nwarps):
                w = self.warp_type(self, cta, i)
                w.gen = self.program.function(w, w.live, self.counts, w.frags)
                self.warps.append(w)
                cl.live += 1
                cta.live_warps += 1

    def run(self) -> None:
        """Execute the grid."""
        for _ in self.turns():
            pass

    def turns(self) -> Iterator[None]:
        """Execute the grid, a turn of a warp at a time."""
        n, c = self.nclusters, self.cluster
        self.todo.extend((x * c[0], y * c[1], z * c[2]) for z in range(n[2]) for y in range(n[1]) for x in range(n[0]))
        self.stat["steps"] = yield from self.schedule()
        while self.run_one(True):
            pass
        self.device.finish(self.clocks)
        if not self.waited:
            raise SyncError(
                f"kernel {self.program.name} may begin before the previous launch has ended, and no warp of it has "
                "waited for that end (griddepcontrol.wait): the next launch would not see that one at work"
            )
        for count, histogram in zip(self.counts, self.program.histogram, strict=True):
            if count:
                for op, k in histogram.items():
                    self.opcodes[op] += count * k

    def schedule(self) -> Generator[None, None, int]:
        """Run all clusters; returns how many steps warps have taken."""
        livelock_steps = LIVELOCK_STEPS if self.device.world is None else math.inf  # others may write what is awaited
        rnd, warps, p_async, p_slow, slow = self.random, self.warps, self.p_async, self.p_slow, self.slow_warps
        stall = steps = last_progress = last_step = 0
        while self.todo or warps:
            yield
            while self.todo and len(self.clusters) < self.resident:
                self.start_cluster()
            if p_async and rnd.random() < p_async:
                self.run_one()
            first = int(rnd.random() * len(warps))
            chosen = None
            for w in warps[first:] + warps[:first]:
                wait = w.wait
                if wait is None or wait.ready():
                    chosen = w
                    if w.wid in slow and rnd.random() < p_slow:
                        continue
                    break
            if chosen is not None:
                self.step(chosen)
                steps += 1
                if self.progress != last_progress:
                    last_progress, last_step = self.progress, steps
                elif (self.held or self.in_front) and steps - last_step >= self.spinning_steps:
                    self.run_held()
                    last_progress = self.progress
                    last_step = steps - max(0, self.spinning_steps - _TURNS * len(warps))
                elif self.patience is not None and steps - last_step >= _PATIENT_STEPS:
                    self.wait_for_others(steps - last_step)
                elif steps - last_step > _STALLED_STEPS:
                    if self.todo:  # somebody may be spinning on memory that a cluster not yet resident will write
                        self.start_cluster()
                        last_step = steps
                    elif steps - last_step > livelock_steps:
                        raise self.livelock()
                continue
            if self.run_held():
                stall = 0
                continue
            before = self.progress
            for w in [x for x in warps if x.wait.soft]:  # nothing can run: every try_wait times out once
                self.step(w)
            if self.progress != before:
                stall = 0
                continue
            stall += 1
            if stall > 3:
                if not self.todo:
                    raise DeadlockError("deadlock: every warp is blocked\n" + self.describe())
                self.start_cluster()
                stall = 0
        return steps

    def run_held(self) -> bool:
        """Let something happen that was held back until nothing else could go on; False if nothing was."""
        if self.run_one(True):
            return True
        if not self.in_front:
            return False
        self.end_front()
        return True

    def livelock(self) -> DeadlockError:
        """Return the error for warps that run on without end."""
        text = f"livelock: no barrier or copy made progress for {LIVELOCK_STEPS} steps"
        return DeadlockError(f"{text}\n{self.describe()}")

    def end_front(self) -> None:
        """End the previous launch, as late as possible: no warp of this one can go on before it has ended."""
        self.in_front = False
        self.progress += 1
        if self.front is not None:
            self.front()

    def wait_for_others(self, steps: int) -> None:
        """Yield the core after so many steps without progress to other processes, whose writes are waited for."""
        assert self.patience is not None
        now = time.monotonic()
        if steps == _PATIENT_STEPS:
            self.deadline = now + self.patience
        elif now > self.deadline and not self.todo:
            raise DeadlockError(
                f"livelock: no barrier or copy made progress for {self.patience:g} s, and no other process has written "
                f"what is waited for\n{self.describe()}"
            )
        if self.todo and steps % 100 == 0:  # it may be a cluster not yet resident that will
            self.start_cluster()
        time.sleep(_NAP)

    def step(self, w: Warp) -> None:
        """Run a warp up to its next wait."""
        try:
            w.wait = next(w.gen)
        except StopIteration:
            self._exit(w)
        except EmulatorError:
            raise
        except Exception as e:
            raise EmulatorError(f"{w.where()}: internal error of the emulator: {e!r}") from e

    def _exit(self, w: Warp) -> None:
        self.warps.remove(w)
        self.progress += 1
        self.forget(w)
        cta, cl = w.cta, w.cta.cluster
        cta.live_warps -= 1
        cl.live -= 1
        if w.agent is not None:
            cta.exit_clock = merge_into(cta.exit_clock, w.agent.vc)
        w.check_exit()
        self.waited = self.waited or w.waited
        if cta.live_warps == 0:
            cta.exited = True
            if w.agent is not None:
                cta.check_exit()
            if cta.tmem_allocs:
                raise SyncError(f"CTA {cta.id} exits with tensor memory still allocated: columns {cta.tmem_allocs}")
        if cl.live == 0:
            self.clusters.remove(cl)
        else:
            cl.settle()

    def describe(self) -> str:
        """Return the wait of every warp, as text."""
        return "\n".join(
            f"  {w.where()} waits on {' '.join(map(str, w.wait.what)) if w.wait else self._spinning(w)}"
            + (f" [diverged: blocks {sorted(w.frags)}]" if w.frags else "")
            for w in self.warps
        )

    def _spinning(self, w: Warp) -> str:
        """Describe a warp that no barrier blocks: by the word that it polls, if it does."""
        if w.polled is None:
            return "nothing (runnable)"
        region = self.find(w.polled, 4, None)
        offset = w.polled - region.start
        value = int.from_bytes(region.u8[w.polled - region.base :][:4].tobytes(), "little")
        return f"nothing (runnable; it last read the word at byte {offset} of {region.name}, which is {value:#x})"


def located(text: str, program: Any) -> str:
    """Return a report with the places in the source of a program instead of its PTX lines."""
    return re.sub(r"\{line (\d+)\}", lambda m: program.location(int(m.group(1))), text)


def _union(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge overlapping or touching spans."""
    out: list[list[int]] = []
    for start, size in sorted(spans):
        if size <= 0:
            continue
        if out and start < out[-1][1]:
            out[-1][1] = max(out[-1][1], start + size)
        else:
            out.append([start, start + size])
    return [(a, b - a) for a, b in out]
