"""Several ranks on one device: a memory for each between canaries, and the collectives of a group of threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from tgl import backends
from tgl.backends.composite import expert_parallel as collectives
from tgl.meta import symmetric_memory
from tgl.meta.symmetric_memory import Peers

MARGIN, BYTE = 256, 0xA5
Call = dict[str, Any]


class World:
    """The ranks; group ``names[r]`` is the group as rank r sees it.

    Args:
        ranks: how many.
        specs: of the largest exchange.
        device: where they are.
        seconds: that they wait for each other.
    """

    def __init__(
        self, ranks: int, specs: list[symmetric_memory.Spec], device: str = "cpu", seconds: float = 60.0
    ) -> None:
        size, control = symmetric_memory.size(ranks, specs), symmetric_memory.size(ranks, [])
        self.ranks, self.room = ranks, torch.full((ranks, size + 2 * MARGIN), BYTE, dtype=torch.uint8, device=device)
        self.memories = [room[MARGIN:-MARGIN] for room in self.room]
        self.tables = torch.tensor([[m.data_ptr() for m in self.memories]] * ranks, device=device)
        self.epochs = torch.zeros(ranks, 2, dtype=torch.int32, device=device)
        self.arrived = torch.full((ranks, ranks), -5, dtype=torch.int32, device=device)
        self.leaving = torch.full_like(self.arrived, -7)
        self.names = [f"as rank {r} of {ranks} sees it" for r in range(ranks)]
        for rank, memory in enumerate(self.memories):
            memory[:control] = 0
            told = self.epochs[rank], self.arrived[rank], self.leaving[rank]
            known = Peers(rank, self.tables[rank], memory, *told, self, seconds)
            symmetric_memory.put(self.names[rank], known)

    def poison(self, byte: int) -> None:
        """Fill the memory of the exchanges, which follows that of the barrier, with ``byte``."""
        for memory in self.memories:
            memory[symmetric_memory.size(self.ranks, []) :] = byte

    def intact(self) -> bool:
        """Return whether nothing was written around the memories."""
        return bool((self.room[:, :MARGIN] == BYTE).all() and (self.room[:, -MARGIN:] == BYTE).all())


@contextmanager
def world(*args: Any, **kwargs: Any) -> Iterator[World]:
    """A ``World`` whose groups are forgotten afterwards."""
    made = World(*args, **kwargs)
    try:
        yield made
        assert made.intact()
    finally:
        for name in made.names:
            symmetric_memory.forget(name)


class Threads:
    """A group of threads that exchange blocks as the ranks of a process group do."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.sent = ranks, [torch.empty(0)] * ranks
        self.turn = threading.Barrier(ranks, timeout=60)
        self.me = threading.local()

    def size(self) -> int:
        return self.ranks

    def exchange(self, op: str, out: Tensor, t: Tensor, group: Any) -> None:
        self.sent[self.me.rank] = t
        self.turn.wait()
        blocks = [sent.chunk(self.ranks)[self.me.rank] for sent in self.sent]
        out.copy_(torch.cat(blocks))
        self.turn.wait()

    def __call__(self, function: Callable[..., None], calls: list[tuple[tuple, Call]]) -> None:
        """``function`` on every rank, by collectives."""
        errors: list[BaseException] = []

        def run(rank: int) -> None:
            self.me.rank = rank
            args, kwargs = calls[rank]
            try:
                function(*args, **kwargs, group_name="threads", engine="all_to_all")
            except BaseException as error:
                errors.append(error)
                self.turn.abort()

        with pytest.MonkeyPatch.context() as patch, backends.emulated_device("none"):
            patch.setattr(collectives, "_exchange", self.exchange)
            patch.setattr(collectives, "_group", lambda op, name: self)
            threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self.ranks)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if errors:
            raise errors[0]
