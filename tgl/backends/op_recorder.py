"""An op recorder: it runs a composition on meta tensors, and calls a function instead of each of its ops.

``tgl.backends`` uses it for ops on the meta device, where no op has an implementation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Composition(NamedTuple):
    """A composition of ops to record.

    Attributes:
        call: the composition, called with meta tensors instead of tensors of ``device``.
        device: the device they stand for; the meta device means that of the enclosing composition.
    """

    call: Callable[[], object]
    device: torch.device


class Recorder(threading.local):
    """State of this thread's recorder.

    Attributes:
        device: the device that meta tensors stand for; None if nothing is recorded.
        each: called instead of an op, with its name, the meta device and the arguments.
        made: its results so far.
    """

    device: torch.device | None = None
    each: Callable[..., Any] | None = None

    def __init__(self) -> None:
        self.made: list[Any] = []

    def stands_for(self, device: torch.device) -> torch.device:
        """Return the device meant by ``device``: while ops are recorded, the meta device stands for another one."""
        return self.device if self.device is not None and device.type == "meta" else device

    def instead(self, op: str, *args: Any, **kwargs: Any) -> None:
        """Call ``each`` instead of an op that is recorded."""
        if self.each is not None:
            self.made.append(self.each(op, torch.device("meta"), *args, **kwargs))


recorder = Recorder()


def record(composition: Composition, each: Callable[..., Any]) -> tuple[Any, ...]:
    """Return the results of ``each`` for the ops of a composition, in order; none of the ops runs."""
    before = recorder.device, recorder.each, recorder.made
    recorder.device, recorder.each, recorder.made = recorder.stands_for(composition.device), each, []
    try:
        composition.call()
        return tuple(recorder.made)
    finally:
        recorder.device, recorder.each, recorder.made = before
