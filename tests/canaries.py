"""Tensors with known bytes before and after them, which show on any device that nothing is written outside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

MARGIN = 1 << 16  # bytes on either side; a multiple of every alignment
CANARY, GARBAGE = 0xA5, 0xFF  # garbage is NaN in every format, and a wild index
FUNCTIONS = ("empty", "empty_strided", "empty_like", "zeros", "zeros_like", "ones", "ones_like", "full", "full_like")
METHODS = ("new_empty", "new_zeros", "new_full")


class Held(NamedTuple):
    """Memory with one tensor of ``used`` bytes in it; ``places`` are the bytes that may be written, None for all."""

    what: str
    room: Tensor
    used: int
    before: Tensor | None = None
    places: Tensor | None = None


class Guard:
    """Allocations between canaries, for one type of device.

    ``with guard.allocations():`` gives margins to all that Python code allocates; ``hold`` moves a tensor there.
    ``check`` looks at all of them, and lets go of them.
    """

    def __init__(self, device: str) -> None:
        self.device = torch.device(device).type
        self.held: list[Held] = []

    def _place(self, like: Tensor, what: str, fill: int) -> tuple[Tensor, Tensor, int]:
        """Uninitialised memory for a tensor laid out as ``like``, the memory around it, and its bytes."""
        span = 1 + sum((size - 1) * stride for size, stride in zip(like.shape, like.stride())) if like.numel() else 0
        used = span * like.element_size()
        room = torch.full((used + 2 * MARGIN,), CANARY, dtype=torch.uint8, device=like.device)
        room[MARGIN : MARGIN + used] = fill
        placed = torch.empty(0, dtype=like.dtype, device=like.device)
        placed.set_(room.untyped_storage(), MARGIN // like.element_size(), like.shape, like.stride())
        return placed, room, used

    def hold(self, t: Tensor, what: str, *, written: bool = False) -> Tensor:
        """``t`` in guarded memory with the same strides; what is not ``written`` must not change at all."""
        placed, room, used = self._place(t, what, CANARY)
        if t.numel():
            index = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in t.stride())
            placed[index] = t[index]  # an expanded tensor is one element many times
        places = None
        if written:
            places, spare = torch.zeros_like(room), torch.empty(0, dtype=t.dtype, device=t.device)
            spare.set_(places.untyped_storage(), placed.storage_offset(), t.shape, t.stride())
            spare.copy_(torch.full((t.element_size(),), 1, dtype=torch.uint8, device=t.device).view(t.dtype))
        self.held.append(Held(what, room, used, room.clone(), places))
        return placed

    @contextmanager
    def allocations(self) -> Iterator[None]:
        """Guard every tensor that Python code allocates on the device."""
        with pytest.MonkeyPatch.context() as patch:
            for owner, names in ((torch, FUNCTIONS), (torch.Tensor, METHODS)):
                for name in names:
                    patch.setattr(owner, name, self._guarded(name, getattr(owner, name)))
            yield

    def _guarded(self, name: str, function: Callable) -> Callable:
        def allocate(*args: Any, **kwargs: Any) -> Tensor:
            t = function(*args, **kwargs)
            if type(t) is not Tensor or t.device.type != self.device or self._busy:
                return t
            self._busy = True
            try:
                what = f"{name}{tuple(t.shape)} {t.dtype}"
                placed, room, used = self._place(t, what, GARBAGE)
                if "empty" not in name:
                    placed.copy_(t)
                self.held.append(Held(what, room, used))
            finally:
                self._busy = False
            return placed

        return allocate

    _busy = False

    def check(self) -> int:
        """Assert that no byte outside was written; returns how many tensors were looked at."""
        wrong = []
        for what, room, used, before, places in self.held:
            ahead, behind = room[:MARGIN], room[MARGIN + used :]
            if not (bool((ahead == CANARY).all()) and bool((behind == CANARY).all())):
                first = int((ahead != CANARY).sum()), int((behind != CANARY).sum())
                wrong.append(f"{what}: {first[0]} bytes before it and {first[1]} behind it were written")
            elif before is not None and bool(((room != before) & (places == 0 if places is not None else True)).any()):
                wrong.append(
                    f"{what}: {'gaps between its rows were' if places is not None else 'an operand was'} written"
                )
        count = len(self.held)
        self.held.clear()
        assert not wrong, "\n".join(wrong)
        return count
