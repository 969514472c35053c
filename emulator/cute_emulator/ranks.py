"""Kernels of several ranks in one process: memory that all of them access, and their launches at the same time."""

from __future__ import annotations

import contextvars
import itertools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from .devices import Device, Window, World
from .errors import DeadlockError, EmulatorError, MemoryAccessError
from .launch import LIVELOCK_STEPS, Launch, located
from .quiet import no_garbage_collection, single_threaded_blas
from .runtime import Emulation, active, entered

_SILENT_TURNS = 1_000  # of every warp, without a barrier, a copy or a store of any, after which all wait for ever
_TURNS = 256  # between two looks at that


class Symmetric(Sequence[Any]):
    """Memory that every rank has, and that all ranks access: a torch tensor of one shape for each, by rank.

    Attributes:
        tensors: of the ranks.
        multicast: the tensor of the same shape at multicast addresses, for multimem instructions alone. It has no
            contents of its own: the host cannot read or write the ranks' memory by it.
    """

    def __init__(self, tensors: Sequence[Any]):
        import torch

        self.tensors = list(tensors)
        self.multicast = torch.empty_like(self.tensors[0])

    def __getitem__(self, rank: Any) -> Any:
        return self.tensors[rank]

    def __len__(self) -> int:
        return len(self.tensors)

    @property
    def addresses(self) -> Any:
        """Return the start of each rank's memory, as an int64 tensor that a kernel may take."""
        import torch

        return torch.tensor([t.data_ptr() for t in self.tensors])

    def fill_(self, value: float) -> Symmetric:
        """Write one value everywhere, as between two calls of a kernel whose flags have to be reset."""
        for t in self.tensors:
            t.fill_(value)
        return self

    @property
    def window(self) -> Window:
        """The multicast addresses."""
        start = self.multicast.data_ptr()
        return Window(start, start + self._bytes, tuple(t.data_ptr() for t in self.tensors))

    @property
    def _bytes(self) -> int:
        return int(self.multicast.nbytes)

    def spans(self, number: int) -> list[tuple[int, int, str]]:
        """Return the address, bytes and name of the memory of each rank."""
        return [
            (t.data_ptr(), self._bytes, f"symmetric buffer {number} of rank {rank}")
            for rank, t in enumerate(self.tensors)
        ]


class Ranks:
    """Several GPUs of one host, whose kernels run at the same time and access each other's memory.

        with emulate("sm_90a"):
            ranks = Ranks(2)
            data, flags = ranks.symmetric(1024), ranks.symmetric(2, dtype=torch.int32)
            ranks.run(lambda rank: kernel(data[rank], data[1 - rank], flags[rank], flags[1 - rank]))

    What ranks do is interleaved as the seed of the ``emulate`` block has it, so that a run can be repeated.

    Args:
        count: how many.
    """

    def __init__(self, count: int):
        if count < 1:
            raise ValueError(f"the number of ranks must be positive, got {count}")
        self.count = count
        self._symmetric: list[Symmetric] = []

    def __len__(self) -> int:
        return self.count

    def symmetric(self, *shape: int, dtype: Any = None) -> Symmetric:
        """Allocate symmetric memory, of zeros.

        Args:
            shape: of the tensor of each rank.
            dtype: its torch dtype, float32 if None.
        """
        import torch

        return self.share([torch.zeros(shape, dtype=dtype or torch.float32) for _ in range(self.count)])

    def share(self, tensors: Sequence[Any]) -> Symmetric:
        """Make symmetric memory of tensors that exist.

        Args:
            tensors: contiguous CPU tensors of one shape and dtype, by rank.
        Raises:
            ValueError: other tensors, or memory that is symmetric already.
        """
        if len(tensors) != self.count:
            raise ValueError(f"tensors must be one for each of {self.count} ranks, got {len(tensors)}")
        first = tensors[0]
        for rank, t in enumerate(tensors):
            if t.device.type != "cpu" or not t.is_contiguous() or (t.shape, t.dtype) != (first.shape, first.dtype):
                raise ValueError(
                    f"tensors must be contiguous CPU tensors of one shape and dtype; that of rank {rank} is "
                    f"{tuple(t.shape)} {t.dtype} on {t.device}, strides {t.stride()}; that of rank 0 is "
                    f"{tuple(first.shape)} {first.dtype}"
                )
        added = Symmetric(tensors)
        spans = sorted(span for n, s in enumerate([*self._symmetric, added]) for span in s.spans(n))
        for (start, size, name), (other, _, what) in itertools.pairwise(spans):
            if other < start + size:
                raise ValueError(f"tensors must not overlap: {name} and {what} share memory")
        self._symmetric.append(added)
        return added

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """Call ``function(rank)`` for every rank at the same time, and return what the calls return.

        Each call launches kernels, one or several, as on a stream of its rank's device: they run one after the other,
        together with those of the other ranks. Host code of two ranks never runs at once, so it need not be
        thread-safe, but a call must not wait for the host code of another rank.

        Raises:
            EmulatorError: outside an ``emulate`` block, or what a kernel did wrong: that of the first rank that failed.
        """
        machine = active()
        if machine is None:
            raise EmulatorError("Ranks.run() needs an open emulate(...) block")
        if machine.device.rank is not None:
            raise EmulatorError(f"Ranks.run() was called by the host code of rank {machine.device.rank} of a run")
        if machine.timing == "clocked":
            raise EmulatorError('ranks have no model of time: Ranks.run() needs another timing than "clocked"')
        if machine.patience is not None:
            raise EmulatorError("Ranks.run() waits for ranks of this process alone: machine.patience must be None")
        spans = [span for n, s in enumerate(self._symmetric) for span in s.spans(n)]
        world = World(spans, [s.window for s in self._symmetric], machine.detect_races)
        hosts = [_Host(machine, Device(rank, world), function) for rank in range(self.count)]
        try:
            _run(hosts, machine)
        finally:
            for host in hosts:
                host.stop()
        return [host.result for host in hosts]


class _Stopped(EmulatorError):
    """Ends the host code of a rank because another one has failed."""


class _Host:
    """The host code of one rank: a thread, in the caller's context, that runs only while everything else waits for it.

    Attributes:
        launch, turns: what it has launched and waits for, None while it runs.
        taken: turns of its launches.
        result, error: of the function.
    """

    def __init__(self, machine: Emulation, device: Device, function: Callable[[int], Any]):
        import torch

        self.emulation = machine.of_rank(device, self._wait_for)
        self.device, self.function = device, function
        self.launch: Launch | None = None
        self.turns: Iterator[None] = iter(())
        self.taken = 0
        self.result: Any = None
        self.error: BaseException | None = None
        self._raised: BaseException | None = None  # by the launch
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        caller = contextvars.copy_context()
        self._thread = threading.Thread(
            target=caller.run, args=(self._main, torch.is_grad_enabled()), name=f"rank {device.rank}", daemon=True
        )
        self.done = False

    def _main(self, grad: bool) -> None:
        import torch

        self._go.acquire()
        try:
            torch.set_grad_enabled(grad)
            self.result = self.function(self.device.rank or 0)
        except BaseException as e:
            self.error = e
        self.done = True
        self._back.release()

    def _wait_for(self, launch: Launch) -> None:
        """Called by the thread: have a launch executed by whoever resumed it."""
        self.launch, self.turns = launch, launch.turns()
        self._back.release()
        self._go.acquire()
        self.launch, error, self._raised = None, self._raised, None
        if error is not None:
            raise error

    def resume(self, raised: BaseException | None = None) -> None:
        """Run host code up to its next launch or its end, after its launch has ended or raised an error."""
        self._raised = raised
        if self._thread.ident is None:
            self._thread.start()
        self._let_run()
        if self.error is not None:
            raise self.error

    def stop(self) -> None:
        """End the thread, whatever it waits for."""
        while self._thread.ident is not None and not self.done:
            self._raised = _Stopped("another rank has failed")
            self._let_run()
        self.device.known = {}  # of a cycle with the clocks that it names

    def _let_run(self) -> None:
        """Wait while the thread runs, up to its next launch or its end."""
        with entered(self.emulation):
            self._go.release()
            self._back.acquire()

    def turn(self, others: list[_Host]) -> None:
        """Take a turn of the launch; with its last one, host code goes on."""
        assert self.launch is not None
        self.taken += 1
        try:
            next(self.turns)
            return
        except StopIteration:
            error = _foreign(self.launch, [h.launch for h in others if h.launch is not None and h is not self])
        except Exception as e:
            error = e
        self.resume(error)


def _run(hosts: list[_Host], machine: Emulation) -> None:
    """Let ranks take turns until all have ended."""
    rnd = random.Random(machine.seed)
    adversarial = machine.timing == "adversarial"
    slow = {h for h in hosts if adversarial and rnd.random() < 0.4}
    p_slow, most = rnd.choice((0.5, 0.9, 0.98)), rnd.choice((1, 8, 64)) if adversarial else 1
    progress, picks = _Progress(hosts, machine.seed), 0
    with single_threaded_blas(), no_garbage_collection():
        for host in rnd.sample(hosts, len(hosts)) if adversarial else hosts:
            host.resume()
        while running := [h for h in hosts if not h.done]:
            picks += 1
            host = running[rnd.randrange(len(running)) if adversarial else picks % len(running)]
            if host in slow and not progress.silent and len(running) > 1 and rnd.random() < p_slow:
                continue
            for _ in range(rnd.randint(1, most)):
                host.turn(running)
                progress.count()
                if host.done:
                    break


class _Progress:
    """Turns since ranks last made progress by a launch, a barrier or a copy, or at least by a store.

    Attributes:
        silent: whether there was no progress in the last turns.
    """

    def __init__(self, hosts: list[_Host], seed: int):
        self.hosts, self.seed, self.silent = hosts, seed, False
        self._turns = self._last_event = 0
        self._events: list[tuple[int, int]] = []
        self._stores: list[int] = []
        self._taken = [0] * len(hosts)  # turns, at the last event or store

    def count(self) -> None:
        """Count a turn; raise DeadlockError if ranks have long taken turns in vain, and no cluster can start."""
        self._turns += 1
        if self._turns % _TURNS:
            return
        launches = [h.launch for h in self.hosts]
        events = [(h.device.launches, x.progress if x else 0) for h, x in zip(self.hosts, launches, strict=True)]
        stores = [x.stat["global_store_bytes"] if x else 0 for x in launches]
        self.silent = events == self._events and stores == self._stores
        if events != self._events or any(x is not None and x.todo for x in launches):
            self._last_event = self._turns
        if not self.silent or self._last_event == self._turns:
            self._taken = [h.taken for h in self.hosts]
        self._events, self._stores = events, stores
        in_vain = [
            (h.taken - taken) / max(2, sum(w.wait is None for w in x.warps))
            for h, x, taken in zip(self.hosts, launches, self._taken, strict=True)
            if x is not None
        ]
        if in_vain and (min(in_vain) >= _SILENT_TURNS or self._turns - self._last_event >= LIVELOCK_STEPS):
            self._fail(launches)

    def _fail(self, launches: list[Launch | None]) -> None:
        waiting = "\n".join(
            f"  rank {h.device.rank} has ended" if x is None else located(x.describe(), x.program)
            for h, x in zip(self.hosts, launches, strict=True)
        )
        raise DeadlockError(
            f"deadlock of ranks: in {self._turns - self._last_event} turns of warps none has passed a barrier, and no "
            f"rank has written what another one waits for\n{waiting}\nseed {self.seed}"
        )


def _foreign(launch: Launch, others: list[Launch]) -> Exception | None:
    """Return the error of a launch that has ended, if it and another rank's used memory that is not symmetric."""
    for other in others:
        for mine in launch.private:
            for theirs in other.private:
                start, end = max(mine.start, theirs.start), min(mine.end, theirs.end)
                if end <= start or mine.shadow is None:
                    continue
                a, b = mine.shadow, theirs.shadow
                if a.writer is None and b.writer is None:  # an input of both: its reads stay listed
                    continue
                bad = a.written(start, end) & b.accessed(start, end) | a.accessed(start, end) & b.written(start, end)
                if bad.any():
                    at = np.flatnonzero(bad)
                    return MemoryAccessError(
                        f"rank {launch.device.rank} and rank {other.device.rank} access bytes [{int(at[0])}, "
                        f"{int(at[-1]) + 1}) of the memory at {start:#x}, one of them by writing, and it is not "
                        f"symmetric: only the memory of Ranks.symmetric() and Ranks.share() is that of all ranks (the "
                        f"other kernel is {other.program.name})"
                    )
    return None
