"""How many rows the calls of a layer needed, kept on the device, and read by the host without waiting for a call."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .. import backends


class Needed:
    """The most of each of some counts over the calls since the last ``clear``.

    Attributes:
        most: int32 ``[n]`` on the device of the calls.
    """

    def __init__(self, counts: int, device: torch.device | str | None) -> None:
        self.most = torch.zeros(counts, dtype=torch.int32, device=device)
        self._copy: Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    def to_device(self, move: Callable[[Tensor], Tensor]) -> None:
        """Do to the counts what ``Module._apply`` does to buffers; from the meta device none have come."""
        moved = move(self.most)
        self.most = torch.zeros_like(moved) if self.most.is_meta else moved
        self._copy = self._copied = None

    def __getstate__(self) -> dict[str, Tensor | None]:
        """Of a copy, on disk too: what is on its way to the host stays with this one."""
        return {"most": self.most, "_copy": None, "_copied": None}

    def note(self, counts: Tensor) -> None:
        """Take the counts of one call."""
        self.most.copy_(torch.maximum(self.most, counts))

    def clear(self) -> None:
        self.most.zero_()
        self._copy = self._copied = None

    def send(self) -> None:
        """Behind the routing of an eager call: let the counts travel to the host, which asks before the next call."""
        if self.most.device.type == "cuda" and not backends.capturing(self.most.device):
            if self._copy is None:
                self._copy = torch.empty(self.most.shape, dtype=torch.int32, device="cpu", pin_memory=True)
            self._copy.copy_(self.most, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def arrived(self) -> list[int]:
        """Before an eager call: the counts after the last ``send``, hence alike on all ranks; none before the first.

        What is waited for is the routing of the call before.
        """
        if self.most.device.type == "cpu":
            return self.most.tolist()
        if self._copy is None or self._copied is None or backends.capturing(self.most.device):
            return []
        self._copied.synchronize()
        return self._copy.tolist()
