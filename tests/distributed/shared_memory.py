"""Ranks that are processes, each with an emulated device, whose symmetric memory is files that all of them have mapped.

What stands for hardware is here and nothing else: that there are devices, and the rendezvous. Layers, ops, kernels and
the barriers between them are the package's own. Every process has its own addresses of all memories.
"""

from __future__ import annotations

import functools
import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import cute_emulator
from tgl import backends
from tgl.cutlass_kernels.launchers.exchange_kernels import BARRIER, EXCHANGE
from tgl.cutlass_kernels.runtime.launcher import Launcher
from tgl.distributed import _symmetric_memory
from tgl.meta import symmetric_memory
from tgl.testing import emulate

EMULATED = frozenset({"ep_route", "ep_dispatch", "ep_combine", "combine"})
"""Ops that run as kernels; all others compute as on any CPU, the same for both engines."""
POISON = 0xFF  # NaN in every floating point dtype, and -1
LIMIT, PATIENCE = 40.0, 60.0  # seconds that a late rank waits for the others, and they for it


@dataclass
class Device:
    """This rank's device, and in which order its launches and those of the others come.

    A rank that is late before a launch lets all others run until they stand in the barrier that it has to reach next,
    or have sent it the rows that it has to wait for, which it sees in its own memory. So what others do too early they
    have done by then, on a machine of any speed.

    Attributes:
        machine: what executes the kernels.
        launches: since ``start``, ``tells`` (a barrier with numbers of rows), ``meets`` (one without), ``flows`` (rows
            that go and come) or ``moves``.
        late: numbers of launches before which this rank is late.
        hasty: numbers of barriers and exchanges that do not wait.
        until: what the others have done before a late rank goes on: ``barrier``, they have reached the next one;
            ``rows``, they have sent rows behind it; None for the first of the two that it waits for itself.
    """

    machine: cute_emulator.Emulation
    launches: list[str] = field(default_factory=list)
    late: frozenset[int] = frozenset()
    hasty: frozenset[int] = frozenset()
    until: str | None = None

    def start(self, late: Iterable[int] = (), hasty: Iterable[int] = (), until: str | None = None) -> None:
        self.launches, self.late, self.hasty, self.until = [], frozenset(late), frozenset(hasty), until

    def before(self, launcher: Launcher, c: Any) -> None:
        """Run before a launch."""
        number, barrier = len(self.launches), launcher is BARRIER
        kind = "flows" if launcher is EXCHANGE else "moves" if not barrier else "meets" if c.token is None else "tells"
        self.launches.append(kind)
        if number in self.late:
            self.wait(kind)
        if kind == "tells":  # no rank writes here before this rank has come
            mine = _made[-1]
            mine.memory[mine.control.nbytes + mine.flags.nbytes :] = POISON
        if barrier and number in self.hasty:
            # As if all had come: what they write here themselves when they do, and nothing more as long as this waits.
            c.control[: c.table.shape[0]] = int(c.told[0][0]) + 1
        if launcher is EXCHANGE and number in self.hasty:
            c.flags.fill_(c.epoch[0])

    def wait(self, kind: str) -> None:
        mine, end = _made[-1], time.monotonic() + LIMIT
        others = [rank for rank in range(mine.ranks) if rank != mine.rank]
        passed, until = int(mine.epoch[0]), self.until

        def there(rank: int) -> bool:
            if until == "rows" or (until is None and kind == "flows"):
                return int(mine.flags[rank, 0]) == passed + (kind != "flows")
            return int(mine.control[rank]) > passed

        while not all(map(there, others)):
            assert time.monotonic() < end, "the others do not come"
            time.sleep(0.002)


_made: list[symmetric_memory.Peers] = []  # the last one is in use


def rendezvous(group: Any, size: int, seconds: float) -> symmetric_memory.Peers:
    """Every rank makes a file, and all map all of them."""
    handle, own = tempfile.mkstemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    os.truncate(handle, size)
    os.close(handle)
    paths: list[Any] = [None] * group.size()
    dist.all_gather_object(paths, own, group=group)
    memories = [torch.from_file(path, shared=True, size=size, dtype=torch.uint8) for path in paths]
    dist.barrier(group)
    os.unlink(own)
    made = symmetric_memory.Peers(
        rank=group.rank(),
        table=torch.tensor([memory.data_ptr() for memory in memories]),
        memory=memories[group.rank()],
        epoch=torch.zeros(2, dtype=torch.int32),
        arrived=torch.zeros(group.size(), dtype=torch.int32),
        leaving=torch.zeros(group.size(), dtype=torch.int32),
        group=group,
        seconds=seconds,
        handle=memories,
    )
    machine = cute_emulator.active()
    assert machine is not None
    for memory in (*memories, made.missed):
        machine.register(memory)
    _made.append(made)
    return made


@contextmanager
def device(arch: str = "sm_90a", seconds: float = symmetric_memory.WAIT) -> Iterator[Device]:
    """Kernels of symmetric memory serve this process until the end; barriers wait so many seconds."""
    candidates, run = backends.registry.registered, Launcher.run

    def some(op: str, where: torch.device) -> tuple[backends.Implementation, ...]:
        found = candidates(op, where)
        return found if op in EMULATED else tuple(i for i in found if i.device == where.type)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends.registry, "registered", some)
        patch.setattr(_symmetric_memory, "_reason", lambda group: None)
        patch.setattr(_symmetric_memory, "_rendezvous", functools.partial(rendezvous, seconds=seconds))
        with emulate(arch, detect_races=False) as machine:
            machine.patience = PATIENCE
            made = Device(machine)

            def watched(launcher: Launcher, c: Any) -> Any:
                made.before(launcher, c)
                return run(launcher, c)

            patch.setattr(Launcher, "run", watched)
            try:
                yield made
            finally:
                symmetric_memory.forget(str(dist.group.WORLD.group_name))
                _made.clear()


def alike(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Equal bits."""
    assert list(ours) == list(theirs)
    for name, t in ours.items():
        assert torch.equal(t, theirs[name]), name
