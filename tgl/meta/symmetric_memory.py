"""Symmetric memory of a group's ranks, which kernels of every rank write to, and its layout.

A rank's memory starts with the state of the group's barrier (``control``) and the flags of rows (``flags``), followed
by the parts of one exchange at a time (``parts``), whose offsets follow from the sizes of the exchange and are equal on
all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .expert_parallel import NEED_OF_PEERS

Spec = tuple[int, int, torch.dtype]
"""Rows, columns and dtype of a part."""

MOST_RANKS = 32  # one warp of one block per rank
_LINE = 256  # bytes, alignment of a part
_PIECE = 16  # bytes, alignment of its rows
SLOTS = 2  # counts of this exchange, and of the next one from ranks that are ahead
FLAGS = 4096  # per rank, each for a piece of the rows that it sends
OPS = ("ep_route", "ep_dispatch", "ep_combine")
BARRIERS = ("before", "behind")  # before or after the writes of an exchange; flags of pieces count as "behind"
WAIT = 600.0  # seconds, for a group without a timeout


@dataclass(frozen=True, eq=False)
class Peers:
    """One rank's view of its group's symmetric memory.

    Attributes:
        rank: of this process in the group.
        table: int64 ``[W]``: the address of every rank's memory, as this rank's device sees it.
        memory: uint8: this rank's own memory, initially zero.
        epoch: int32 ``[2]``, initially 0: barriers that this rank has passed, and pieces that warps have taken since
            the last one.
        arrived, leaving: int32 ``[W]``: rows from and to every rank in the current exchange.
        group: the process group that owns the memory; a later group may have the same name.
        seconds: time that a barrier waits for a rank before it stops the device with an error.
        handle: object that keeps the memory of the other ranks mapped.
        missed: int32 ``[3, 2, W]`` in host memory that the device can write: by op, barrier and rank, 1 after a timeout
            for that rank, else 0. A device that has stopped cannot be read.
        watch: int64 ``[3, 2]``: for each op the timeout of its barriers in nanoseconds, and the address of its
            ``missed``.
    """

    rank: int
    table: Tensor
    memory: Tensor
    epoch: Tensor
    arrived: Tensor
    leaving: Tensor
    group: object
    seconds: float = WAIT
    handle: object = None
    missed: Tensor = field(init=False)
    watch: Tensor = field(init=False)

    def __post_init__(self) -> None:
        device = self.table.device
        missed = torch.zeros(
            len(OPS), len(BARRIERS), self.ranks, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda"
        )
        nanoseconds = min(int(self.seconds * 1e9), torch.iinfo(torch.int64).max)
        watch = [[nanoseconds, of_op.data_ptr()] for of_op in missed]
        object.__setattr__(self, "missed", missed)
        object.__setattr__(self, "watch", torch.tensor(watch, dtype=torch.int64, device=device))

    @property
    def told(self) -> tuple[Tensor, Tensor, Tensor]:
        """The results of a barrier: ``epoch``, ``arrived`` and ``leaving``."""
        return self.epoch, self.arrived, self.leaving

    def failure(self) -> str | None:
        """Return a message on barriers that timed out, or None; reads only host memory."""
        away: dict[tuple[int, int], list[int]] = {}
        for op, barrier, rank in self.missed.nonzero().tolist():
            if rank != self.rank:  # which sends itself nothing
                away.setdefault((op, barrier), []).append(rank)
        if not away:
            return None
        said = [
            f"for rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} in {OPS[op]}, in the barrier "
            f"{BARRIERS[barrier]} its writes"
            for (op, barrier), ranks in away.items()
        ]
        return (
            f"rank {self.rank} of {self.ranks} waited {self.seconds:g} s {' and '.join(said)}. A missing rank has "
            "raised an error, has exited, or makes other calls; a device whose barrier times out cannot be used again"
        )

    @property
    def ranks(self) -> int:
        """W."""
        return self.table.shape[0]

    @property
    def control(self) -> Tensor:
        """int32 ``[W + 2 W]``: the epoch of every rank, and the counts of ranks in this exchange and the one before.

        A rank that is ahead writes the counts of its next exchange before the others have read those of this one.
        """
        return self.memory[: _counts(self.ranks)].view(torch.int32)

    @property
    def flags(self) -> Tensor:
        """int32 ``[W, FLAGS]`` after ``control``: by rank and piece, the epoch whose rows have all arrived."""
        return self.memory[_counts(self.ranks) : _control(self.ranks)].view(torch.int32).view(self.ranks, FLAGS)

    def parts(self, specs: Sequence[Spec]) -> list[Tensor]:
        """Return the part of this rank's memory for every ``(rows, columns, dtype)``; rows are 16-byte aligned."""
        made = []
        for (rows, columns, dtype), start, pitch in _laid_out(self.ranks, specs):
            part = self.memory[start : start + rows * pitch].view(dtype).view(rows, pitch // dtype.itemsize)
            made.append(part[:, :columns])
        return made


def rows_of_piece(pair_rows: int) -> int:
    """Return the rows of a piece, which shares one flag, of the rows for a rank."""
    return -(-pair_rows // FLAGS)


def _counts(ranks: int) -> int:
    return (1 + SLOTS) * ranks * 4


def _control(ranks: int) -> int:
    return _counts(ranks) + ranks * FLAGS * 4


def _laid_out(ranks: int, specs: Sequence[Spec]) -> list[tuple[Spec, int, int]]:
    """Return every part with its start and row pitch in bytes."""
    made, start = [], _up(_control(ranks), _LINE)
    for spec in specs:
        rows, columns, dtype = spec
        pitch = _up(columns * dtype.itemsize, _PIECE)
        made.append((spec, start, pitch))
        start += _up(rows * pitch, _LINE)
    return made


def size(ranks: int, specs: Sequence[Spec]) -> int:
    """Return the bytes of a rank's memory for these parts."""
    if not specs:
        return _up(_control(ranks), _LINE)
    (rows, _, _), start, pitch = _laid_out(ranks, specs)[-1]
    return start + _up(rows * pitch, _LINE)


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


_groups: dict[str, Peers] = {}
_outgrown: list[Peers] = []


def of(group_name: str) -> Peers | None:
    """Return the symmetric memory of a group; None if it has none."""
    return _groups.get(group_name)


def memory_of(group_name: str) -> Peers:
    """Return the symmetric memory of a group that has some."""
    return _groups[group_name]


def failure_of(group_name: str) -> str | None:
    """Return why a barrier of the group stopped this rank's device, or None; includes memory that old graphs use."""
    now = _groups.get(group_name)
    if now is None:
        return None
    known = [now, *(before for before in _outgrown if before.group is now.group)]
    return next((said for peers in known if (said := peers.failure()) is not None), None)


def reason_against(group_name: str, device: torch.device, specs: Sequence[Spec]) -> str | None:
    """Return why an exchange of these parts on this device cannot use the memory of the group, or None."""
    peers = _groups.get(group_name)
    if peers is None:
        return f"the group {group_name!r} has no symmetric memory, which a layer makes with its engine: {NEED_OF_PEERS}"
    if peers.memory.device != device:
        return f"the symmetric memory of the group is on {peers.memory.device}, the tensors are on {device}"
    needed, there = size(peers.ranks, specs), peers.memory.shape[0]
    return f"takes {needed} bytes of symmetric memory, and the group has {there}" if needed > there else None


def put(group_name: str, peers: Peers) -> None:
    """Set the memory for exchanges of a group. The previous memory is kept, because captured graphs write to it."""
    before = _groups.get(group_name)
    if before is not None:
        _outgrown.append(before)
    _groups[group_name] = peers


def forget(group_name: str) -> None:
    """Remove the memory of a group."""
    _groups.pop(group_name, None)
