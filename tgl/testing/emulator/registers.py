"""Register values that asynchronous instructions have not delivered yet.

A register is a Python int or bool (the same in all lanes) or a 32-lane array. The results of wgmma and tcgen05.ld are
``Pending`` until the wait that covers them; only ``mov`` and the accumulation of a later wgmma may touch them before.
"""

from __future__ import annotations

from typing import Any

from .errors import RaceError


class Group:
    """Asynchronous register writes that one wait completes; ``what`` names them and ``line`` is their last PTX line."""

    __slots__ = ("clock", "done", "line", "wait", "what")

    def __init__(self, what: str, wait: str):
        self.what, self.wait = what, wait
        self.done = False
        self.line = 0
        self.clock = 0


class Pending:
    """A register value that is valid once its group is done."""

    __slots__ = ("group", "line", "value")

    def __init__(self, value: Any, group: Group, line: int):
        self.value, self.group, self.line = value, group, line


def ready(v: Any, w: Any) -> Any:
    """The value of a register for an ordinary instruction; raises RaceError while its write is in flight."""
    if type(v) is not Pending:
        return v
    if not v.group.done:
        raise RaceError(
            f"{w.where()}: the instruction at {{line {w.line}}} uses a register that the {v.group.what} at "
            f"{{line {v.line}}} has not delivered: no {v.group.wait} in between"
        )
    return v.value


def peek(v: Any) -> Any:
    """The value of a register whether or not it has been delivered."""
    return v.value if type(v) is Pending else v
