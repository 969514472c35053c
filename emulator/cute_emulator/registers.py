"""Register values that asynchronous instructions have not delivered yet.

A register is a Python int or bool (the same in all lanes) or a 32-lane array. The results of wgmma and tcgen05.ld are
``Pending`` until the wait that covers them; only ``mov`` and the accumulation of a later wgmma may touch them before.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from .errors import RaceError
from .mma import fragment_in, fragment_out


class Group:
    """Asynchronous register writes that one wait completes.

    A use of ``tolerated`` ones before that wait is a warning: undefined in PTX, but the assembler has the hardware wait
    for the register, which shows that the operation with the given clock ``stamp`` (slot, clock) is complete.
    """

    __slots__ = ("done", "stamp", "tolerated", "wait", "what")

    def __init__(self, what: str, wait: str, tolerated: bool = False):
        self.what, self.wait, self.tolerated = what, wait, tolerated
        self.done = False
        self.stamp = (0, 0)


class Pending:
    """A register whose value, ``source[index]``, is valid once its group is done."""

    __slots__ = ("group", "index", "line", "source")

    def __init__(self, source: Any, index: int, group: Group, line: int):
        self.source, self.index, self.group, self.line = source, index, group, line

    @property
    def value(self) -> Any:
        return self.source[self.index]


class Accumulator:
    """The result of one wgmma, ``[16, N]`` values of a warp; its registers are made when one of them is read."""

    __slots__ = ("dt", "registers", "values")

    def __init__(self, values: np.ndarray, dt: str):
        self.values, self.dt = values, dt
        self.registers: list[np.ndarray] | None = None

    def __getitem__(self, i: int) -> np.ndarray:
        if self.registers is None:
            self.registers = fragment_out(self.values, self.dt)
        return self.registers[i]


class Accumulators:
    """Recent accumulators of one warp: a chain of wgmmas hands values on without going through registers."""

    def __init__(self) -> None:
        self.recent: deque[tuple[Accumulator, tuple[Pending, ...]]] = deque(maxlen=8)

    def registers(self, values: np.ndarray, dt: str, group: Group, line: int) -> tuple[Pending, ...]:
        """Return the registers of a new accumulator."""
        acc = Accumulator(values, dt)
        n = values.shape[1] // (4 if dt == "f16" else 2)
        regs = tuple([Pending(acc, i, group, line) for i in range(n)])
        self.recent.append((acc, regs))
        return regs

    def values(self, regs: tuple, n: int, dt: str) -> np.ndarray:
        """Return the values ``[16, n]`` of accumulator registers."""
        first = regs[0]
        if type(first) is Pending:
            for acc, known in self.recent:
                if first.source is acc and acc.dt == dt and regs == known:
                    return acc.values
        return fragment_in([peek(r) for r in regs], n, dt)


def ready(v: Any, w: Any) -> Any:
    """Return the value of a register for an ordinary instruction; raises RaceError while its write is in flight."""
    if type(v) is not Pending:
        return v
    group = v.group
    if not group.done:
        text = (
            f"uses a register that the {group.what} at {{line {v.line}}} has not delivered: no {group.wait} in between"
        )
        if not group.tolerated:
            raise RaceError(f"{w.where()} {text}")
        w.launch.warn(f"the instruction at {{line {w.line}}} {text} (undefined in PTX; ptxas waits for the register)")
        group.done = True
        if w.agent is not None:
            w.agent.learn(*group.stamp)
    return v.value


def peek(v: Any) -> Any:
    """Return the value of a register whether or not it has been delivered."""
    return v.value if type(v) is Pending else v
