"""The rows that a layer's calls needed, kept on the device and read without waiting for the current call."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .. import backends


class Needed:
    """The maximum of some counts over the calls since the last ``clear``.

    Attributes:
        most: int32 ``[n]`` on the device of the calls.
    """

    def __init__(self, counts: int, device: torch.device | str | None) -> None:
        self.most = torch.zeros(counts, dtype=torch.int32, device=device)
        self._copy: Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    def to_device(self, move: Callable[[Tensor], Tensor]) -> None:
        """Move the counts as ``Module._apply`` moves buffers; counts on the meta device are new ones."""
        moved = move(self.most)
        self.most = torch.zeros_like(moved) if self.most.is_meta else moved
        self._copy = self._copied = None

    def __getstate__(self) -> dict[str, Tensor | None]:
        """Return the state of a copy, also on disk, without the pending transfer to the host."""
        return {"most": self.most, "_copy": None, "_copied": None}

    def note(self, counts: Tensor) -> None:
        """Update the maximum with the counts of one call."""
        self.most.copy_(torch.maximum(self.most, counts))

    def clear(self) -> None:
        self.most.zero_()
        self._copy = self._copied = None

    def send(self) -> None:
        """Start copying the counts to the host, after the routing of an eager call; the host reads them before the next
        call.
        """
        if self.most.device.type == "cuda" and not backends.capturing(self.most.device):
            if self._copy is None:
                self._copy = torch.empty(self.most.shape, dtype=torch.int32, device="cpu", pin_memory=True)
            self._copy.copy_(self.most, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def arrived(self) -> list[int]:
        """Return the counts of the last ``send``, before an eager call, equal on all ranks; none before the first.

        This waits for the routing of the previous call.
        """
        if self.most.device.type == "cpu":
            return self.most.tolist()
        if self._copy is None or self._copied is None or backends.capturing(self.most.device):
            return []
        self._copied.synchronize()
        return self._copy.tolist()
