"""Memory of the ranks of a group that kernels of every rank write to, and where it lies.

A rank's memory begins with what the group's barrier needs (``control``) and with flags of rows (``flags``), followed by
the parts of one exchange at a time (``parts``), whose places follow from the sizes of the exchange and are equal on all
ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .expert_parallel import NEED_OF_PEERS

Spec = tuple[int, int, torch.dtype]
"""Rows, columns and dtype of a part."""

MOST_RANKS = 32  # a warp of one block for each
_LINE = 256  # bytes, on which a part begins
_PIECE = 16  # bytes, on which its rows do
SLOTS = 2  # counts of this exchange, and of the next one from ranks that are ahead
FLAGS = 4096  # of a rank, each for a piece of the rows that it sends
OPS = ("ep_route", "ep_dispatch", "ep_combine")
BARRIERS = ("before", "behind")  # the writes of an exchange, in their order; flags of pieces are one of the latter
WAIT = 600.0  # seconds, of a group that has no time-out


@dataclass(frozen=True, eq=False)
class Peers:
    """What one rank knows of its group's memory.

    Attributes:
        rank: of this process in the group.
        table: int64 ``[W]``: the address of every rank's memory, as this rank's device sees it.
        memory: uint8: this rank's own, which is zero in the beginning.
        epoch: int32 ``[2]``, 0 in the beginning: barriers that this rank has passed, and pieces that warps have drawn
            since the last one.
        arrived, leaving: int32 ``[W]``: rows that every rank sends here in the exchange under way, and that go there.
        group: whose memory it is; a later group may have its name.
        seconds: that a barrier waits for a rank before it stops the device with an error.
        handle: what keeps the memory of the others in reach.
        missed: int32 ``[3, 2, W]`` of the host, in reach of the device: of an op, a barrier and a rank, 1 where
            that rank was waited for in vain, else 0. A device that has stopped cannot be asked.
        watch: int64 ``[3, 2]``: of an op, nanoseconds that its barriers wait, and the address of its ``missed``.
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
        """What a barrier leaves behind: ``epoch``, ``arrived`` and ``leaving``."""
        return self.epoch, self.arrived, self.leaving

    def failure(self) -> str | None:
        """Which barrier has waited for whom in vain, or None; asks the host alone."""
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
            f"rank {self.rank} of {self.ranks} waited {self.seconds:g} s {' and '.join(said)}. Who does not come has "
            "raised an error, has left, or makes other calls; a device whose barrier waits in vain stops for good"
        )

    @property
    def ranks(self) -> int:
        """W."""
        return self.table.shape[0]

    @property
    def control(self) -> Tensor:
        """int32 ``[W + 2 W]``: the epoch of every rank, and what ranks have told in this exchange and the one before.

        A rank that is ahead tells the counts of its next exchange before the others have read those of this one.
        """
        return self.memory[: _counts(self.ranks)].view(torch.int32)

    @property
    def flags(self) -> Tensor:
        """int32 ``[W, FLAGS]`` behind it: of a rank and a piece, the epoch of the exchange whose rows are all here."""
        return self.memory[_counts(self.ranks) : _control(self.ranks)].view(torch.int32).view(self.ranks, FLAGS)

    def parts(self, specs: Sequence[Spec]) -> list[Tensor]:
        """The part of this rank's memory for every ``(rows, columns, dtype)``; rows lie on 16 bytes."""
        made = []
        for (rows, columns, dtype), start, pitch in _laid_out(self.ranks, specs):
            part = self.memory[start : start + rows * pitch].view(dtype).view(rows, pitch // dtype.itemsize)
            made.append(part[:, :columns])
        return made


def rows_of_piece(pair_rows: int) -> int:
    """Rows of each piece of the rows for a rank, which has a flag."""
    return -(-pair_rows // FLAGS)


def _counts(ranks: int) -> int:
    return (1 + SLOTS) * ranks * 4


def _control(ranks: int) -> int:
    return _counts(ranks) + ranks * FLAGS * 4


def _laid_out(ranks: int, specs: Sequence[Spec]) -> list[tuple[Spec, int, int]]:
    """Every part with its first byte and the bytes from row to row."""
    made, start = [], _up(_control(ranks), _LINE)
    for spec in specs:
        rows, columns, dtype = spec
        pitch = _up(columns * dtype.itemsize, _PIECE)
        made.append((spec, start, pitch))
        start += _up(rows * pitch, _LINE)
    return made


def size(ranks: int, specs: Sequence[Spec]) -> int:
    """Bytes of a rank's memory for such parts."""
    if not specs:
        return _up(_control(ranks), _LINE)
    (rows, _, _), start, pitch = _laid_out(ranks, specs)[-1]
    return start + _up(rows * pitch, _LINE)


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


_groups: dict[str, Peers] = {}
_outgrown: list[Peers] = []


def of(group_name: str) -> Peers | None:
    """What is known of a group's memory; None if it has none."""
    return _groups.get(group_name)


def memory_of(group_name: str) -> Peers:
    """The memory of a group that has some."""
    return _groups[group_name]


def failure_of(group_name: str) -> str | None:
    """What has made a barrier of the group stop this rank's device, or None; graphs may use what it had before."""
    now = _groups.get(group_name)
    if now is None:
        return None
    known = [now, *(before for before in _outgrown if before.group is now.group)]
    return next((said for peers in known if (said := peers.failure()) is not None), None)


def reason_against(group_name: str, device: torch.device, specs: Sequence[Spec]) -> str | None:
    """Why an exchange of such parts, of tensors on this device, cannot use the memory of the group, or None."""
    peers = _groups.get(group_name)
    if peers is None:
        return f"the group {group_name!r} has no symmetric memory, which a layer makes with its engine: {NEED_OF_PEERS}"
    if peers.memory.device != device:
        return f"the symmetric memory of the group is on {peers.memory.device}, the tensors are on {device}"
    needed, there = size(peers.ranks, specs), peers.memory.shape[0]
    return f"takes {needed} bytes of symmetric memory, and the group has {there}" if needed > there else None


def put(group_name: str, peers: Peers) -> None:
    """Let the exchanges of a group use this memory from now on. What it had stays, as captured graphs write there."""
    before = _groups.get(group_name)
    if before is not None:
        _outgrown.append(before)
    _groups[group_name] = peers


def forget(group_name: str) -> None:
    """Let a group have no memory."""
    _groups.pop(group_name, None)
