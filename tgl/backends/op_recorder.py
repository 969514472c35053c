"""A rehearsal of what is made of ops: it runs on meta tensors, and something else is done at each of its ops.

``tgl.backends`` looks here when it is asked for an op on the meta device, where no op has an implementation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Rehearsal(NamedTuple):
    """What to rehearse.

    Attributes:
        call: takes meta tensors wherever it would take tensors of ``device``.
        device: what they stand for; the meta device means that of the rehearsal around this one.
    """

    call: Callable[[], object]
    device: torch.device


class Rehearsed(threading.local):
    """Of this thread's rehearsal.

    Attributes:
        device: what meta tensors stand for; None outside of a rehearsal.
        each: what is called in place of an op, with its name, the meta device and the arguments.
        made: what it returned so far.
    """

    device: torch.device | None = None
    each: Callable[..., Any] | None = None

    def __init__(self) -> None:
        self.made: list[Any] = []

    def stands_for(self, device: torch.device) -> torch.device:
        """The device that is meant by ``device``: another one by the meta device of a rehearsal."""
        return self.device if self.device is not None and device.type == "meta" else device

    def instead(self, op: str, *args: Any, **kwargs: Any) -> None:
        """At an op of the rehearsal."""
        if self.each is not None:
            self.made.append(self.each(op, torch.device("meta"), *args, **kwargs))


rehearsed = Rehearsed()


def rehearse(rehearsal: Rehearsal, each: Callable[..., Any]) -> tuple[Any, ...]:
    """What ``each`` returns for the ops of a rehearsal, in order; none of them runs."""
    before = rehearsed.device, rehearsed.each, rehearsed.made
    rehearsed.device, rehearsed.each, rehearsed.made = rehearsed.stands_for(rehearsal.device), each, []
    try:
        rehearsal.call()
        return tuple(rehearsed.made)
    finally:
        rehearsed.device, rehearsed.each, rehearsed.made = before
