"""Arms in turns: every turn takes one reading of each, in an order that changes from turn to turn.

On a GPU an arm is a captured graph. Before each replay 256 MB are written, so that L2 holds nothing of use, and events
enclose the replay alone. With ``clean_l2`` another 256 MB are read, so that nothing in L2 has to be written back
at the cost of the arm. (A copy leaves half of its bytes behind itself; an op that only reads does not.) ``BusyClock``
reads what a call takes while the device is kept at its power limit.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import cuda

L2_BYTES = 256 << 20
AHEAD = 500_000  # cycles
WARM_UP = 3
Call = Callable[[], Any]
Arms = Mapping[str, Call]
Mark = TypeVar("Mark")


class Clock(Protocol, Generic[Mark]):
    """Takes readings, which may be complete only after ``settle``."""

    def take(self, call: Call) -> Mark: ...

    def settle(self) -> None: ...

    def read(self, mark: Mark) -> float: ...


def rotated(names: list[str]) -> Iterator[list[str]]:
    """Endless orders: each name is first equally often."""
    while names:
        yield names
        names = names[1:] + names[:1]


def shuffled(names: list[str]) -> Iterator[list[str]]:
    """Endless orders: random ones, by a fixed seed."""
    generator = random.Random(0)
    while names:
        yield generator.sample(names, len(names))


def interleaved(
    arms: Arms,
    clock: Clock[Mark],
    turns: Iterable[object],
    order: Callable[[list[str]], Iterator[list[str]]] = rotated,
    warm_up: int = 0,
) -> dict[str, list[float]]:
    """Readings of every arm, of all turns but the first ``warm_up``."""
    marks: dict[str, list[Mark]] = {name: [] for name in arms}
    for (turn, _), names in zip(enumerate(turns), order(list(arms))):
        for name in names:
            mark = clock.take(arms[name])
            if turn >= warm_up:
                marks[name].append(mark)
        clock.settle()
    return {name: [clock.read(mark) for mark in own] for name, own in marks.items()}


# --- the host ---------------------------------------------------------------------------------------------------------


class HostClock:
    """Seconds of one call: the mean over ``calls`` in a row, by ``now``."""

    def __init__(self, now: Callable[[], float] = time.process_time, calls: int = 1):
        self.now, self.calls = now, calls

    def take(self, call: Call) -> float:
        start = self.now()
        for _ in range(self.calls):
            call()
        return (self.now() - start) / self.calls

    def settle(self) -> None:
        """A reading is complete at once."""

    def read(self, mark: float) -> float:
        return mark


def for_seconds(seconds: float, least: int, now: Callable[[], float] = time.perf_counter) -> Iterator[int]:
    """Run as many turns as begin within ``seconds``, and at least ``least`` of them."""
    end, turn = now() + seconds, 0
    while turn < least or now() < end:
        yield turn
        turn += 1


# --- a GPU ------------------------------------------------------------------------------------------------------------


class Replay:
    """A call captured as a graph, after ``runs`` of it to warm up; calling it replays the graph.

    Graphs that are replayed one after another, and whose results are not read, can share the memory of a ``pool``.

    Attributes:
        call: held with what it refers to, since a graph does not hold what it reads.
        result: what the captured call returned, held since a graph does not hold what it writes to; None with a pool.
    """

    def __init__(self, call: Call, runs: int = WARM_UP, pool: Any = None):
        self.call = call
        warm_up(call, runs)
        self.graph = cuda.CUDAGraph()
        with cuda.graph(self.graph, pool=pool):
            made = call()
        self.result = made if pool is None else None

    def __call__(self) -> None:
        self.graph.replay()


def warm_up(call: Call, runs: int = WARM_UP) -> None:
    """Runs on a stream of their own, as capture wants it."""
    stream = cuda.Stream()
    stream.wait_stream(cuda.current_stream())
    with cuda.stream(stream):
        for _ in range(runs):
            call()
    cuda.current_stream().wait_stream(stream)


def why(error: Exception) -> str:
    """An error in one line."""
    first, *_ = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {first[:160]}"


def captured(arms: Arms) -> tuple[dict[str, Replay], dict[str, str]]:
    """Every arm's graph, and why there is none of the others."""
    graphs, failed = {}, {}
    for name, call in arms.items():
        try:
            graphs[name] = Replay(call)
        except Exception as error:  # of one arm; the others go on
            cuda.synchronize()
            failed[name] = why(error)
    return graphs, failed


class L2:
    """Memory that is written, and read if ``clean``, to push everything else out of L2."""

    def __init__(self, clean: bool, device: str = "cuda", size: int = L2_BYTES):
        self.written = torch.empty(size, dtype=torch.uint8, device=device)
        self.read = torch.zeros(size // 4, dtype=torch.float32, device=device) if clean else None

    def flush(self) -> None:
        self.written.zero_()
        if self.read is not None:
            self.read.sum()


class DeviceClock:
    """Milliseconds of the device between two events around a call, with a cold L2.

    Args:
        l2: is flushed before each call.
        host: whether what the host takes to issue a call counts. Otherwise the device is kept busy meanwhile, so that
            no launch latency is in the reading.
        before: work of the device that the reading begins behind, such as a barrier.
    """

    def __init__(self, l2: L2, host: bool = False, before: Call | None = None):
        self.l2, self.host, self.before = l2, host, before

    def take(self, call: Call) -> tuple[cuda.Event, cuda.Event]:
        start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        if not self.host:
            cuda._sleep(AHEAD)
        self.l2.flush()
        if self.host:
            cuda.synchronize()
        if self.before is not None:
            self.before()
        start.record()
        call()
        end.record()
        return start, end

    def settle(self) -> None:
        cuda.synchronize()

    def read(self, mark: tuple[cuda.Event, cuda.Event]) -> float:
        start, end = mark
        return start.elapsed_time(end)


class BusyClock:
    """Milliseconds of a call when the device has had no rest: of many in a row, which begin behind as many.

    A GPU that rests before every call runs it at a higher clock than its power lets it keep.

    Args:
        seconds: that the calls take whose time is read.
    """

    def __init__(self, seconds: float):
        self.seconds = seconds

    def take(self, call: Call) -> tuple[cuda.Event, cuda.Event, int]:
        start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        cuda.synchronize()
        count = max(1, round(self.seconds * 1e3 / start.elapsed_time(end)))
        for event in (start, end):
            for _ in range(count):
                call()
            event.record()
        return start, end, count

    def settle(self) -> None:
        cuda.synchronize()

    def read(self, mark: tuple[cuda.Event, cuda.Event, int]) -> float:
        start, end, count = mark
        return start.elapsed_time(end) / count


def replays(graphs: Arms, samples: int, clean_l2: bool = False, busy: float = 0.0) -> dict[str, list[float]]:
    """Milliseconds of ``samples`` readings of each graph, in rotating order: of one replay, or by a ``BusyClock``."""
    if busy:
        return interleaved(graphs, BusyClock(busy), range(samples), rotated)
    return interleaved(graphs, DeviceClock(L2(clean_l2)), range(samples + WARM_UP), rotated, WARM_UP)


def calls(arms: Arms, samples: int, clean_l2: bool = False) -> dict[str, list[float]]:
    """Milliseconds of ``samples`` calls of each arm, which include what the host takes to issue them.

    Every turn has a random order: a clock follows what ran before.
    """
    return interleaved(arms, DeviceClock(L2(clean_l2), host=True), range(samples + WARM_UP), shuffled, WARM_UP)
