"""``emulate``: the context in which compiled CuTe DSL functions run on the emulator."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import cache
from .arguments import adopted_span, as_cuda, call_spans, mapped_ranges, storage_spans, tensor_span
from .chips import chip_of
from .clocked import ClockedLaunch, Cycles, costs_of
from .devices import Device
from .dsl import Dsl
from .engine import TIMINGS
from .errors import EmulatorError
from .launch import Extent, Launch, Rules, located
from .parser import parse_module
from .quiet import no_garbage_collection, single_threaded_blas


@dataclass
class LaunchRecord:
    """The record of an emulated launch.

    ``tma_bytes`` counts global-memory bytes by direction (load, store, reduce), ``global_bytes`` those of plain loads
    and stores, of the lanes that take part (once if all have one address), ``copied_bytes`` what ``cp.async`` reads;
    ``bank_conflicts`` the shared-memory passes
    beyond those that conflict-free accesses would take; ``steps`` scheduler turns. ``unsupported`` lists instructions
    the translation refused and the launch did not reach, with their PTX line. ``overlaps`` is whether the launch may
    begin before the previous one has ended (programmatic stream serialisation), and ``early`` where a warp of it first
    accessed global memory before it had waited for that end, ``at_once`` where one let the next launch begin before.
    ``cycles`` is what it took by the model of time, with ``timing="clocked"``. ``rank`` is which of several ranks
    launched it.
    """

    kernel: str
    arch: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_bytes: int
    overlaps: bool = False
    early: str | None = None
    at_once: str | None = None
    instructions: Counter[str] = field(default_factory=Counter)
    tma_bytes: dict[str, int] = field(default_factory=dict)
    global_bytes: dict[str, int] = field(default_factory=dict)
    copied_bytes: int = 0
    mma_count: int = 0
    mma_flops: int = 0
    barriers: int = 0
    bank_conflicts: int = 0
    warnings: dict[str, int] = field(default_factory=dict)
    unsupported: dict[str, int] = field(default_factory=dict)
    tensor_memory_columns: int = 0
    steps: int = 0
    seconds: float = 0.0
    translate_seconds: float = 0.0
    cycles: Cycles | None = None
    rank: int | None = None

    @property
    def warp_instructions(self) -> int:
        """Instructions executed, each counted once per warp."""
        return sum(self.instructions.values())


class Emulation:
    """The machine of an ``emulate`` block. Options may change between launches; ``launches`` grows with each one.

    ``patience`` is for memory that other processes write to as well (``register``): seconds for which a launch without
    progress waits for them, while ``%globaltimer`` is the host's clock. With None, as it begins, nothing else writes,
    and a launch ends after a number of steps without progress.

    ``front`` does the remaining writes of the launch before one that overlaps: called once in every such launch, when
    nothing of it can go on without that end. So a test shows that nothing is read before it is there, or written while
    it is read.
    """

    def __init__(
        self,
        arch: str,
        seed: int,
        timing: str,
        resident_clusters: int,
        detect_races: bool,
        strict_loads: bool,
        strict_exits: bool,
        strict_proxies: bool,
    ):
        if resident_clusters < 1:
            raise ValueError(f"resident_clusters must be positive, got {resident_clusters}")
        if timing not in TIMINGS:
            raise ValueError(f"timing must be one of {TIMINGS}, got {timing!r}")
        self.chip, self.seed, self.timing = chip_of(arch), seed, timing
        if timing == "clocked":
            costs_of(self.chip.name)
        self.target = self.chip.target if arch == self.chip.name else arch
        self.resident_clusters, self.detect_races = resident_clusters, detect_races
        self.strict_loads, self.strict_exits, self.strict_proxies = strict_loads, strict_exits, strict_proxies
        self.patience: float | None = None
        self.front: Callable[[], object] | None = None
        self.launches: list[LaunchRecord] = []
        self.error: BaseException | None = None
        self.edit_ptx: Callable[[str], str] | None = None
        self.depth = 0
        self.device = Device()
        self._executor: Callable[[Launch], None] | None = None
        self._whole: Emulation | None = None  # of all ranks
        self._registered: list[tuple[int, int, Any]] = []
        self._call: list[tuple[int, int]] = []

    @property
    def rules(self) -> Rules:
        """Return the rules of the next launch."""
        if self.patience is not None and not self.patience > 0:
            raise ValueError(f"patience must be positive or None, got {self.patience}")
        return Rules(
            self.seed,
            self.timing,
            self.resident_clusters,
            self.detect_races,
            self.strict_loads,
            self.strict_exits,
            self.strict_proxies,
            self.patience,
            self.device,
            self.front,
        )

    def register(self, tensor: Any) -> None:
        """Let kernels access a tensor that they reach only through a pointer in memory, not through an argument."""
        start, size = tensor_span(tensor)
        self._registered.append((start, size, tensor))

    def check(self) -> None:
        """Raise the error of the last launch, if it has not been raised yet."""
        error, self.error = self.error, None
        if error is not None:
            raise error

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a TVM-FFI function that was reloaded from an object file, with CPU tensors.

        Functions from ``cute.compile`` are called directly; a reloaded one is a plain ``tvm_ffi.Function``, which takes
        CUDA tensors only and turns the error of a launch into one of its own.

        Raises:
            EmulatorError: what a kernel did wrong.
        """
        return self._current()._guarded(function, args, {}, True)

    def of_rank(self, device: Device, executor: Callable[[Launch], None]) -> Emulation:
        """Return the emulation of one of several ranks: with these options, and one list of launches for all.

        Args:
            device: the rank's.
            executor: runs its launches.
        """
        e = copy.copy(self)
        e.device, e._executor, e.error, e.depth, e._call = device, executor, None, 0, []
        e._whole = self
        return e

    def _current(self) -> Emulation:
        """Return the rank's emulation where its host code runs, else this one."""
        e = active()
        return e if e is not None and e._whole is self else self

    # ---- called by the hooks and the host library ----
    def _guarded(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], convert: bool) -> Any:
        """Call host code: note its tensors, show them as CUDA memory, and raise the launch's own error."""
        outer = self.depth == 0
        if outer:
            self.error = None
        self._call += call_spans((args, kwargs))
        if convert:
            args, kwargs = [as_cuda(a) for a in args], {k: as_cuda(v) for k, v in kwargs.items()}
        self.depth += 1
        try:
            return function(*args, **kwargs)
        except Exception:
            self.check()
            raise
        finally:
            self.depth -= 1
            if outer:
                self._call = []
                self.check()

    def _failed(self, error: BaseException) -> None:
        if self.error is None:
            self.error = error

    def _attribute(self, number: int) -> int:
        """cudaDeviceGetAttribute for those attributes that host code queries."""
        chip = self.chip
        major, minor = chip.capability
        known = {75: major, 76: minor, 16: chip.multiprocessors, 97: chip.shared_of_cta, 81: chip.shared, 10: 32}
        return known.get(number, 0)

    def _spans(self, program: cache.Program, params: bytes) -> list[tuple[int, int]]:
        """Memory the launch may touch: tensors of the call, registered ones, and what its pointers point into."""
        spans = self._call + [(a, n) for a, n, _ in self._registered]
        unknown = []
        for offset, size in program.params:
            # the only pointer of a tensor map is its first word, and its second half is not initialised
            for i in range(offset, offset + (8 if size == 128 else size) - 7, 8):
                v = int.from_bytes(params[i : i + 8], "little")
                if not 1 << 20 < v < 1 << 48 or any(a <= v < a + n for a, n in spans):
                    continue
                span = adopted_span(v)  # of a call that the hooks do not see: a function decorated with cute.jit
                if span is not None:
                    spans.append(span)
                else:
                    unknown.append(v)
        mapped = mapped_ranges() if unknown else []
        unknown = [v for v in unknown if any(a <= v < b for a, b in mapped)]  # the others are numbers, not pointers
        if unknown:
            spans += storage_spans(unknown)
        return spans

    def launch_ptx(
        self,
        text: str,
        args: Sequence[Any],
        *,
        grid: tuple[int, int, int] = (1, 1, 1),
        block: tuple[int, int, int] = (32, 1, 1),
        cluster: tuple[int, int, int] = (1, 1, 1),
        smem: int = 0,
        overlaps: bool = False,
    ) -> LaunchRecord:
        """Run the (first) kernel of a PTX module, without the DSL.

        Args:
            text: PTX.
            args: one per parameter: a CPU tensor (its address is passed) or an integer.
            grid, block, cluster: sizes, (x, y, z).
            smem: dynamic shared memory in bytes.
            overlaps: whether the launch may begin before the previous one has ended.
        Raises:
            EmulatorError: what the kernel did wrong.
            ValueError: the number of arguments.
        """
        e = self._current()
        name = next(iter(parse_module(text).kernels))
        program = cache.get_program(text, name, self.timing == "clocked")
        if len(args) != len(program.params):
            raise ValueError(f"kernel {name} has {len(program.params)} parameters, got {len(args)} arguments")
        params = bytearray(program.param_size)
        for (offset, size), a in zip(program.params, args, strict=True):
            value = a if isinstance(a, int) else a.data_ptr()
            params[offset : offset + size] = (value & ((1 << 8 * size) - 1)).to_bytes(size, "little")
        e._call = call_spans(args)
        try:
            return e._run(program, Extent(grid, block, cluster, smem, overlaps), bytes(params), 0.0)
        finally:
            e._call = []

    def _launch(self, text: str, name: str, dims: Sequence[int], smem: int, args: Any) -> None:
        """A launch by compiled host code; ``args`` are the addresses of the parameters."""
        if self.edit_ptx is not None:
            text = self.edit_ptx(text)
        t0 = time.perf_counter()
        program = cache.get_program(text, name, self.timing == "clocked")
        translate = time.perf_counter() - t0
        params = bytearray(program.param_size)
        for i, (offset, size) in enumerate(program.params):
            params[offset : offset + size] = ctypes.string_at(args[i], size)
        x, y, z, bx, by, bz, cx, cy, cz, overlaps = dims
        extent = Extent((x, y, z), (bx, by, bz), (cx, cy, cz), smem, bool(overlaps))
        self._run(program, extent, bytes(params), translate)

    def _run(
        self,
        program: cache.Program,
        extent: Extent,
        params: bytes,
        translate_seconds: float,
    ) -> LaunchRecord:
        record = LaunchRecord(program.name, program.target, *extent, rank=self.device.rank)
        record.translate_seconds = translate_seconds
        record.unsupported = dict(program.unsupported)
        self.launches.append(record)
        if not self.chip.runs(program.target):
            raise EmulatorError(
                f"kernel {program.name} was compiled for {program.target}; the emulated machine is {self.chip.name}"
            )
        t0 = time.perf_counter()
        kind = ClockedLaunch if self.timing == "clocked" else Launch
        launch = None
        try:
            launch = kind(program, extent, params, self._spans(program, params), self.chip, self.rules)
            if self._executor is not None:
                self._executor(launch)
            else:
                with single_threaded_blas(), no_garbage_collection():
                    launch.run()
        except EmulatorError as e:
            text = located(str(e), program)
            rank = "" if record.rank is None else f" of rank {record.rank}"
            raise type(e)(f"{text}\nin kernel {program.name}{rank}, seed {self.seed}, timing {self.timing}") from (
                e.__cause__
            )
        finally:
            record.seconds = time.perf_counter() - t0
            if launch is not None:
                _fill(record, launch)
        return record


def _fill(record: LaunchRecord, launch: Launch) -> None:
    stat = launch.stat
    record.instructions = launch.opcodes
    record.tma_bytes = {
        "load": stat["tma_load_bytes"] + stat["bulk_load_bytes"],
        "store": stat["tma_store_bytes"] + stat["bulk_store_bytes"],
        "reduce": stat["tma_reduce_bytes"],
    }
    record.global_bytes = {"load": stat["global_load_bytes"], "store": stat["global_store_bytes"]}
    record.copied_bytes = stat["copied_bytes"]
    record.mma_count, record.mma_flops = stat["mma"], stat["mma_flops"]
    record.barriers = stat["barriers"] + stat["cluster_barriers"]
    record.bank_conflicts = stat["bank_conflicts"]
    record.early = None if launch.early is None else launch.program.location(launch.early)
    record.at_once = None if launch.at_once is None else launch.program.location(launch.at_once)
    record.tensor_memory_columns = stat["tmem_columns"]
    record.steps = stat["steps"]
    if isinstance(launch, ClockedLaunch):
        record.cycles = launch.cycles()
    for text, n in launch.warnings.items():
        text = located(text, launch.program)
        record.warnings[text] = record.warnings.get(text, 0) + n


_dsl: list[Dsl] = []


@contextlib.contextmanager
def entered(e: Emulation) -> Iterator[None]:
    """Let an emulation be the active one."""
    _dsl[0].push(e)
    try:
        yield
    finally:
        _dsl[0].pop()


def active() -> Emulation | None:
    """Return the innermost open ``emulate`` block, or None."""
    return _dsl[0].stack[-1] if _dsl and _dsl[0].stack else None


@contextlib.contextmanager
def emulate(
    arch: str,
    *,
    seed: int = 0,
    timing: str = "adversarial",
    resident_clusters: int = 4,
    detect_races: bool = True,
    strict_loads: bool = False,
    strict_exits: bool = True,
    strict_proxies: bool = True,
) -> Iterator[Emulation]:
    """Run compiled CuTe DSL functions on the kernel emulator.

    Inside the block, functions compiled by ``cute.compile`` (with or without TVM-FFI) and called with CPU tensors
    execute their kernels' PTX on those tensors; a launch's error is raised by the call. Compile inside a block: such
    functions stay bound to the emulator and may be called in any later block for the same architecture, while functions
    compiled outside stay bound to the CUDA runtime. Blocks may be nested and entered any number of times, for different
    architectures. A kernel runs on the chips that hardware would load it on: ``chips.Chip.runs``.

    Args:
        arch: a chip of ``chips.CHIPS``, ``"sm_100"``, or a target of one, ``"sm_100f"``, which is then what kernels are
            compiled for that name no target themselves.
        seed: of everything that is random: completion of asynchronous work, order of warps, spurious time-outs.
        timing: ``"adversarial"``; ``"in_order"`` (asynchronous work completes when it is issued); or ``"clocked"``,
            by a model of time of ``sm_90`` and ``sm_100``: records have ``cycles``.
        resident_clusters: clusters that run at a time; more start when all of them wait.
        detect_races: keep vector clocks and report unordered accesses (about twice the time).
        strict_loads: make the use of a tcgen05.ld register before tcgen05.wait::ld an error. It is undefined in PTX,
            but the assembler makes the hardware wait, and kernels rely on it: by default it is a warning.
        strict_exits: make an arrival or a ``tcgen05.commit`` on an mbarrier of a CTA that has exited, or may have, an
            error. It is undefined in PTX; where nothing waits for it, hardware is not known to mind. With False it is a
            warning and has no effect. Accesses to the shared memory of such a CTA are errors either way.
        strict_proxies: make it an error that TMA stores or MMAs read shared memory which ``st.shared`` or ``cp.async``
            wrote and no ``fence.proxy.async`` has made visible to them. With False it is a warning, for kernels that
            are known to run without that fence.
    Yields:
        ``Emulation``, whose ``launches`` describe what ran.
    Raises:
        EmulatorError: no C compiler or no nvidia-cutlass-dsl; from calls inside: what a kernel did wrong.
        ValueError: a bad argument.
    """
    e = Emulation(arch, seed, timing, resident_clusters, detect_races, strict_loads, strict_exits, strict_proxies)
    if not _dsl:
        _dsl.append(Dsl())
    with entered(e):
        yield e
    e.check()


def _poison(tensor: Any) -> None:
    """Fill a tensor with NaN, or with all bits set."""
    import torch

    if tensor.element_size() == 1:
        tensor.view(torch.uint8).fill_(0xFF)
    elif tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    else:
        limits = torch.iinfo(tensor.dtype)
        tensor.fill_(-1 if limits.min < 0 else limits.max)


def _bits(tensor: Any) -> Any:
    """Return a copy of a tensor's elements, as bytes."""
    import torch

    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def sweep(
    call: Callable[[], Any],
    outputs: Sequence[Any],
    seeds: Iterable[int] = range(6),
    timings: Sequence[str] = ("adversarial",),
) -> list[list[LaunchRecord]]:
    """Run ``call()`` under several schedules of the active ``emulate`` block and demand identical bits.

    Args:
        call: launches kernels that overwrite ``outputs`` entirely.
        outputs: tensors; poisoned (NaN, or all bits set) before every run.
        seeds, timings: the schedules.
    Returns:
        The launch records of each run.
    Raises:
        EmulatorError: outside an ``emulate`` block, a run failed, or two schedules gave different bits.
    """
    import torch

    e = active()
    if e is None:
        raise EmulatorError("sweep() needs an open emulate(...) block")
    saved = e.seed, e.timing
    first: list[Any] | None = None
    runs = []
    try:
        for timing in timings:
            for seed in seeds:
                e.seed, e.timing = seed, timing
                for o in outputs:
                    _poison(o)
                start = len(e.launches)
                call()
                e.check()
                runs.append(e.launches[start:])
                got = [
                    o.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
                    for o in outputs
                ]
                if first is None:
                    first = got
                for i, (a, b) in enumerate(zip(first, got, strict=True)):
                    if not torch.equal(a, b):
                        raise EmulatorError(
                            f"output {i} depends on the schedule (timing {timing}, seed {seed}): there is a race"
                        )
    finally:
        e.seed, e.timing = saved
    return runs
