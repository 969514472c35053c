"""Accesses to the memory of all ranks by a multicast address."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import UnsupportedError
from ..happens_before import WEAK, Order
from .memory import MemoryWarp


class MulticastWarp(MemoryWarp):
    """multimem.ld_reduce, multimem.st, multimem.red: one access to the memory of each rank, in the order of ranks."""

    def _addresses(self, addr: Any, width: int, m: np.ndarray) -> list[Any]:
        """Return the addresses in the memory of each rank that multicast addresses stand for."""
        first, last = (addr, addr) if type(addr) is int else (int(addr[m].min()), int(addr[m].max()))
        world = self.launch.device.world
        window = None if world is None else world.window(first)
        if window is None:
            self.fail(
                f"multimem access at {first:#x}, which is no multicast address: "
                "only those of Ranks.symmetric(...).multicast are"
            )
        if last >= window.end and world.window(last) is not None:
            self.fail("the lanes of a multimem access use multicast addresses of several buffers", UnsupportedError)
        if last + width > window.end:
            self.fail(f"multimem access of {width} bytes at {last:#x} ends {last + width - window.end} bytes past it")
        if type(addr) is int:
            return [addr - window.start + target for target in window.targets]
        return [addr - np.uint64(window.start) + np.uint64(target) for target in window.targets]

    def multimem_ld_reduce(
        self, reduction: Callable[[list], Any], addr: Any, size: int, n: int, m: np.ndarray, order: Order = WEAK
    ) -> list:
        """Return ``n`` elements of ``size`` bytes, each reduced over all ranks."""
        loaded = [self.ld("global", a, size, n, m, order) for a in self._addresses(addr, size * n, m)]
        return [reduction(list(values)) for values in zip(*loaded, strict=True)]

    def multimem_st(self, addr: Any, size: int, vals: tuple, m: np.ndarray, order: Order = WEAK) -> None:
        for a in self._addresses(addr, size * len(vals), m):
            self.st("global", a, size, vals, m, order)

    def multimem_red(self, op: Any, addr: Any, size: int, vals: tuple, m: np.ndarray, order: Order) -> None:
        for a in self._addresses(addr, size * len(vals), m):
            self.atom("global", op, size, a, (vals,), m, order)
