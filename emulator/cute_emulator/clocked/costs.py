"""Costs of instructions and units of a chip, in cycles of its multiprocessors."""

from __future__ import annotations

from dataclasses import dataclass

from ..parser import Insn

LATENCIES = (
    ("ld.shared", 30),
    ("ldmatrix", 32),
    ("ld.", 500),
    ("atom", 700),
    ("shfl", 24),
    ("elect", 14),
    ("vote", 14),
    ("redux", 14),
    ("mbarrier.try_wait", 20),
    ("mbarrier.test_wait", 20),
    ("ex2", 18),
    ("lg2", 18),
    ("rcp", 18),
    ("rsqrt", 18),
    ("tanh", 18),
    ("div", 60),
    ("rem", 60),
    ("setp", 6),
    ("cvt", 6),
    ("", 4),
)
"""From issue to result, by the beginning of an opcode; the first that fits."""


@dataclass(frozen=True)
class Costs:
    """A chip.

    Attributes:
        tensor: FLOPs of a multiprocessor's tensor cores in a cycle, by kind of MMA.
        shared: bytes that shared memory moves in a cycle.
        l2: bytes that two multiprocessors get from the L2 in a cycle, or one sends there, while all others do too.
        memory: bytes that a multiprocessor's stores get to memory in a cycle while all others do too.
        behind: bytes of a multiprocessor's stores that the L2 holds back; it is full of those of whoever ran before.
        load: from the issue of a TMA load until its bytes begin to come.
        copy: from the issue of a cp.async until its bytes begin to come.
        read: from the issue of a store by TMA until it begins to read shared memory.
        store: from then until its writes are done.
        wake: from the end of a phase of a barrier until a warp that waited for it issues again.
        drain: from the last product of an MMA until somebody who waits for it can know.
    """

    tensor: dict[str, float]
    shared: float
    l2: float
    memory: float
    behind: int
    load: int
    copy: int
    read: int
    store: int
    wake: int
    drain: int


# Of both chips ``tensor`` is published, and ``shared`` what is published of loads by lanes. The latencies here and
# above are round numbers near published measurements of instructions, and were not fitted. ``l2`` and ``memory`` of
# sm_90 were found on an H100 (docs/notes/2026_11_28_emulator_model_of_time.md); those of sm_100 are assumed: twice the
# first, and 0.8 of the published bandwidth of memory over its multiprocessors at 1.85 GHz.
COSTS = {
    "sm_90": Costs(
        tensor={"f16": 4096, "tf32": 2048, "f8f6f4": 8192, "i8": 8192},
        shared=128,
        l2=64,
        memory=10,
        behind=131072,
        load=650,
        copy=500,
        read=100,
        store=500,
        wake=20,
        drain=30,
    ),
    "sm_100": Costs(
        tensor={
            "f16": 8192, "tf32": 4096, "f8f6f4": 16384, "i8": 16384, "mxf8f6f4": 16384, "mxf4": 32768,
            "mxf4nvf4": 32768,
        },
        shared=128,
        l2=128,
        memory=23,
        behind=131072,
        load=650,
        copy=500,
        read=100,
        store=500,
        wake=20,
        drain=30,
    ),
}  # fmt: skip


def costs_of(chip: str) -> Costs:
    """Return the costs on a chip, ``"sm_90"``.

    Raises:
        ValueError: the table has none.
    """
    if chip not in COSTS:
        raise ValueError(f"timing 'clocked' knows the costs of {', '.join(COSTS)}, not of {chip}")
    return COSTS[chip]


def latency(ins: Insn) -> int:
    """Return the cycles from the issue of an instruction until one that reads its result can be issued."""
    return next(cycles for start, cycles in LATENCIES if ins.op.startswith(start))
