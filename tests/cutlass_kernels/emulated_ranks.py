"""Ranks of an emulated machine, whose kernels run at the same time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from torch import Tensor

import cute_emulator
from tests.ranks_on_one_device import World
from tgl.cutlass_kernels.launchers import expert_parallel
from tgl.cutlass_kernels.launchers.exchange_kernels import BARRIER, BarrierCall
from tgl.cutlass_kernels.runtime import launcher
from tgl.meta import symmetric_memory
from tgl.testing import emulate

OPS = {op.name: op for op in expert_parallel.OPS}


def emulated() -> Iterator[cute_emulator.Emulation]:
    """Emulate a Hopper for a fixture, and forget its plans afterwards."""
    with emulate("sm_90a") as machine:
        yield machine
    launcher.compiled_kernels.clear()
    launcher.forget()


class Group:
    """The ranks of a world, whose kernels run at the same time and write to each other's memory."""

    def __init__(self, world: World) -> None:
        self.world, self.ranks, self.seeds = world, cute_emulator.Ranks(world.ranks), itertools.count()
        self.ranks.share(world.memories)
        machine = cute_emulator.active()
        for name in world.names:  # for a rank that is launched alone as well
            known = symmetric_memory.memory_of(name)
            machine.register(known.memory)
            machine.register(known.missed)

    def run(self, function: Callable[[int], None]) -> None:
        """Run ``function`` on every rank, on another schedule than before."""
        cute_emulator.active().seed = next(self.seeds)
        self.ranks.run(function)

    def play(self, op: str, calls: list[tuple[tuple, dict]]) -> None:
        """Run an op on every rank."""
        complete = [
            (args, {**kwargs, "engine": "symmetric_memory", "group_name": name})
            for name, (args, kwargs) in zip(self.world.names, calls)
        ]
        for args, kwargs in complete:
            assert OPS[op].reason(*args, **kwargs) is None
        self.run(lambda rank: OPS[op].run(*complete[rank][0], **complete[rank][1]))

    def barrier(self, tokens: list[Tensor | None]) -> None:
        """Run the barrier of all ranks; with ``tokens`` the first of an exchange."""
        self.run(lambda rank: BARRIER.run(barrier_call(self.world, rank, tokens[rank])))


def barrier_call(world: World, rank: int, token: Tensor | None) -> BarrierCall:
    """Return the call with which a rank comes to a barrier."""
    known = symmetric_memory.memory_of(world.names[rank])
    return BarrierCall(known.table, known.control, known.told, token, known.watch[0], rank)
