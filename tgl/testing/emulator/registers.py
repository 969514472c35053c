"""Register values that asynchronous instructions have not delivered yet.

A register is a Python int or bool (the same in all lanes) or a 32-lane array. The results of wgmma and tcgen05.ld are
``Pending`` until the wait that covers them; only ``mov`` and the accumulation of a later wgmma may touch them before.
"""

from __future__ import annotations

from typing import Any

from .errors import RaceError


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
    """A register value that is valid once its group is done."""

    __slots__ = ("group", "line", "value")

    def __init__(self, value: Any, group: Group, line: int):
        self.value, self.group, self.line = value, group, line


def ready(v: Any, w: Any) -> Any:
    """The value of a register for an ordinary instruction; raises RaceError while its write is in flight."""
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
    """The value of a register whether or not it has been delivered."""
    return v.value if type(v) is Pending else v
