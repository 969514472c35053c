"""Two or four processes connected by gloo, started once, which run one function after the other."""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.processes import FORKS

LIMIT = 180.0  # seconds for one function by default, start-up of the processes not counted
START = 120.0


def serve(rank: int, count: int, store: str, requests: Any) -> None:
    """Run requests from the pipe in a process, and answer with None or with a traceback."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
    requests.send(None)
    while True:
        function, args = requests.recv()
        torch.manual_seed(0)
        try:
            function(*args)
            requests.send(None)
        except BaseException:
            requests.send(traceback.format_exc())


class Ranks:
    """Calls ``function(*args)`` on every rank; an exception on one of them fails the call, and so does silence."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.processes: list[Any] = []

    def __call__(self, function: Callable[..., None], *args: Any, limit: float = LIMIT) -> None:
        if not self.processes:
            self.start()
        for pipe in self.pipes:
            pipe.send((function, args))
        self.collect(limit)

    def start(self) -> None:
        store = os.path.join(tempfile.mkdtemp(), "store")
        both = [FORKS.Pipe() for _ in range(self.count)]
        self.pipes = [ours for ours, _ in both]
        self.processes = [
            FORKS.Process(target=serve, args=(rank, self.count, store, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(both)
        ]
        for process in self.processes:
            process.start()
        self.collect(START)

    def collect(self, limit: float) -> None:
        deadline = time.monotonic() + limit
        answers: dict[int, str | None] = {}
        while len(answers) < self.count and time.monotonic() < deadline:
            for rank, pipe in enumerate(self.pipes):
                if rank not in answers and pipe.poll(0.05):
                    try:
                        answers[rank] = pipe.recv()
                    except EOFError:
                        answers[rank] = "the process ended"
                    if answers[rank] is not None:  # the other rank may wait for this one for ever
                        deadline = min(deadline, time.monotonic() + 2)
        failures = [f"rank {rank}:\n{text}" for rank, text in answers.items() if text is not None]
        failures += [f"rank {rank} did not answer" for rank in range(self.count) if rank not in answers]
        if len(answers) < self.count or "the process ended" in answers.values():
            self.stop()
        if failures:
            raise AssertionError("\n".join(failures))

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.processes = []


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    workers = Ranks(2)
    yield workers
    workers.stop()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    workers = Ranks(4)
    yield workers
    workers.stop()
