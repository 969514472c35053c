"""Memory of a GPU that calls allocate, and the speed of that memory."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Allocated:
    """Bytes that the allocator has handed out beyond its state when this was made."""

    def __init__(self) -> None:
        torch.cuda.synchronize()
        self._before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()

    def now(self) -> int:
        return torch.cuda.memory_allocated() - self._before

    def at_most(self) -> int:
        """Return the bytes at the highest point so far."""
        return torch.cuda.max_memory_allocated() - self._before


def copying(size: int, device: torch.device) -> Callable[[], object]:
    """A call of torch's kernel for a change of sign that moves ``size`` bytes, half of them read."""
    source = torch.zeros(size // 8, device=device)
    target = torch.empty_like(source)
    return lambda: torch.neg(source, out=target)
