"""What calls take of a GPU's memory."""

from __future__ import annotations

import torch


class Allocated:
    """What the allocator has handed out beyond what it had when this was made, in bytes."""

    def __init__(self) -> None:
        torch.cuda.synchronize()
        self._before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()

    def now(self) -> int:
        return torch.cuda.memory_allocated() - self._before

    def at_most(self) -> int:
        """At its highest point so far."""
        return torch.cuda.max_memory_allocated() - self._before
