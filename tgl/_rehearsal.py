"""A rehearsal of what is made of ops: it runs on meta tensors, and each of its ops is reported instead of run.

``tgl.backends`` looks here when it is asked for an op on the meta device, where no op has an implementation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch


class Rehearsed(threading.local):
    """Of this thread's rehearsal.

    Attributes:
        device: what meta tensors stand for; None outside of a rehearsal.
        ran: the reports so far.
    """

    device: torch.device | None = None

    def __init__(self) -> None:
        self.ran: list[Any] = []

    def stands_for(self, device: torch.device) -> torch.device:
        """The device that is meant by ``device``: another one by the meta device of a rehearsal."""
        return self.device if self.device is not None and device.type == "meta" else device


rehearsed = Rehearsed()


def rehearse(call: Callable[[], object], device: torch.device) -> tuple[Any, ...]:
    """The reports (``backends.Explanation``) of the ops that ``call`` runs, in order; none of them runs.

    Args:
        call: takes meta tensors wherever it would take tensors of ``device``.
        device: the meta device means that of the rehearsal around this one.
    """
    before = rehearsed.device, rehearsed.ran
    rehearsed.device, rehearsed.ran = rehearsed.stands_for(device), []
    try:
        call()
        return tuple(rehearsed.ran)
    finally:
        rehearsed.device, rehearsed.ran = before
