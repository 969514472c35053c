"""Operands and outputs that a kernel cannot reach where they lie: copied on the device, without synchronising.

A tensor map describes rows that begin on 16 bytes, and along its contiguous dimension it is read from multiples of 16
bytes on. Groups begin at any row, so column-major operands with groups along their columns are out of its reach, as are
misaligned views, odd row pitches and expanded tensors. Each such operand costs a copy, and each such output one too,
besides the one launch.

``Reach`` is the table of an op: what its kernel needs of every tensor. All that has to do with copies follows from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from ...meta.slots import gather, room, scatter
from .requirements import Need


def _nothing(c: Any) -> bool:
    return False


class Reach(NamedTuple):
    """What the kernel of an op needs of the tensors of a call, a named tuple.

    Attributes:
        needs: by field of the call.
        outputs: the fields among them that are written.
        keeps: of a call: whether something of its outputs is read or must stay as it is.
        slotted: the field whose matrices a table of ``slots`` numbers, in a call that has one. Of it those alone are
            copied.
    """

    needs: Mapping[str, Need]
    outputs: tuple[str, ...] = ()
    keeps: Callable[[Any], bool] = _nothing
    slotted: str | None = None

    def reason(self, c: Any) -> str | None:
        """Why the kernel cannot reach a tensor where it lies: the first reason there is."""
        for name, need in self.needs.items():
            reason = need.reason(name, getattr(c, name))
            if reason is not None:
                return reason
        return None

    def overlaps(self, c: Any) -> bool:
        """Whether a tensor that the table names has a stride of 0, which is fine for one row and not for more."""
        return any(0 in getattr(c, name).stride() for name in self.needs)

    def copies(self, c: Any) -> dict[str, int]:
        """Bytes of what is copied for a call, by name."""
        slots, found = getattr(c, "slots", None), {}
        for name in self._beyond(c):
            t: Tensor = getattr(c, name)
            elements = t.numel() if slots is None or name != self.slotted else slots.shape[0] * t[0].numel()
            found[name] = elements * t.element_size()
        return found

    def copied(self, c: Any, run: Callable[[Any], object]) -> None:
        """``run`` a call whose tensors, where it cannot reach those of ``c``, are copies."""
        slots, slotted = getattr(c, "slots", None), self.slotted
        if slots is not None and slotted is not None and slotted in self._beyond(c):
            matrices = getattr(c, slotted)
            if slotted not in self.outputs:
                self.copied(c._replace(**{slotted: gather(matrices, slots), "slots": None}), run)
                return
            values = gather(matrices, slots) if self.keeps(c) else room(matrices, slots)
            self.copied(c._replace(**{slotted: values, "slots": None}), run)
            scatter(matrices, slots, values)
            return
        made = {name: self.needs[name].room(getattr(c, name)) for name in self._beyond(c)}
        for name, t in made.items():
            if name not in self.outputs or self.keeps(c):
                t.copy_(getattr(c, name))
        run(c._replace(**made))
        for name in self.outputs:
            if name in made:
                getattr(c, name).copy_(made[name])

    def moved(self, c: Any, prepare: Callable[[Any], object]) -> None:
        """``prepare`` for the call that ``copied`` would run; nothing is copied."""
        slots, slotted = getattr(c, "slots", None), self.slotted
        if slots is not None and slotted is not None and slotted in self._beyond(c):
            c = c._replace(**{slotted: room(getattr(c, slotted), slots), "slots": None})
        prepare(c._replace(**{name: self.needs[name].room(getattr(c, name)) for name in self._beyond(c)}))

    def _beyond(self, c: Any) -> list[str]:
        """The tensors that the kernel cannot reach."""
        return [name for name, need in self.needs.items() if need.reason(name, getattr(c, name)) is not None]
