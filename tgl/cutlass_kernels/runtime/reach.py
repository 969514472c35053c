"""Copies of operands and outputs whose layout a kernel does not take, on the device, without synchronising.

A tensor map describes rows that are aligned to 16 bytes, and reads along its contiguous dimension from multiples of 16
bytes on. Groups begin at any row, so column-major operands with groups along their columns are unsupported, as are
misaligned views, odd row pitches and expanded tensors. Each such operand or output costs a copy besides the one launch.
So does an operand whose rows are read by an index that the kernel does not take: the copy has them in order.

``Reach`` is the table of an op: its kernel's layout requirements. Everything about copies follows from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from ... import backends
from ...meta.slots import gather, room, scatter
from .requirements import Need, unit_dimension


def _nothing(c: Any) -> bool:
    return False


def _none(c: Any) -> str | None:
    return None


class Reach(NamedTuple):
    """Layout requirements of an op's kernel for the tensors of a call, a named tuple.

    Attributes:
        needs: the requirement of each field of the call; missing tensors have none.
        outputs: the fields among them that are written.
        keeps: of a call: whether a part of its outputs is read or must be preserved.
        slotted: the field whose matrices a table of ``slots`` numbers, in a call that has one; only those are
            copied.
        indexed: the fields whose rows a call may read by an index, and the fields with that index.
        gathers: of a call: the field whose rows the kernel itself reads by the index, or None.
        ordered: the fields whose matrices must lie in the memory order of those of another field, and that field.
    """

    needs: Mapping[str, Need]
    outputs: tuple[str, ...] = ()
    keeps: Callable[[Any], bool] = _nothing
    slotted: str | None = None
    indexed: Mapping[str, str] = {}
    gathers: Callable[[Any], str | None] = _none
    ordered: Mapping[str, str] = {}

    def reason(self, c: Any) -> str | None:
        """Return the first reason why the kernel does not take a tensor's layout, or None."""
        for name in self.needs:
            if getattr(c, name) is not None and (reason := self._reason(c, name)) is not None:
                return reason
        return None

    def overlaps(self, c: Any) -> bool:
        """Return whether a tensor of the table has a stride of 0, which is only valid with a single row."""
        for name in self.needs:
            t = getattr(c, name)
            if t is not None and 0 in t.stride():
                return True
        return False

    def copies(self, c: Any) -> dict[str, int]:
        """Return the bytes that are copied for a call, by name."""
        slots, found = getattr(c, "slots", None), {}
        for name in self._beyond(c):
            t: Tensor = getattr(c, name)
            elements = t.numel() if slots is None or name != self.slotted else slots.shape[0] * t[0].numel()
            index = self._index(c, name)
            if index is not None:
                elements = index.shape[0] * t.shape[1]
            found[name] = elements * t.element_size()
        return found

    def copied(self, c: Any, run: Callable[[Any], object]) -> None:
        """``run`` a call in which unsupported tensors of ``c`` are replaced by copies."""
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
        made = self._rooms(c)
        for name, t in made.items():
            index = self._index(c, name)
            if index is not None:
                put_in_order(backends.run, getattr(c, name), index, t)
            elif name not in self.outputs or self.keeps(c):
                t.copy_(getattr(c, name))
        run(self._in_order(c, made))
        for name in self.outputs:
            if name in made:
                getattr(c, name).copy_(made[name])

    def moved(self, c: Any, prepare: Callable[[Any], object]) -> None:
        """``prepare`` the call that ``copied`` would run; nothing is copied."""
        slots, slotted = getattr(c, "slots", None), self.slotted
        if slots is not None and slotted is not None and slotted in self._beyond(c):
            c = c._replace(**{slotted: room(getattr(c, slotted), slots), "slots": None})
        made = self._rooms(c)
        for name, t in made.items():
            index = self._index(c, name)
            if index is not None:
                put_in_order(backends.prepare, getattr(c, name), index, t)
        prepare(self._in_order(c, made))

    def _index(self, c: Any, name: str) -> Tensor | None:
        """Return the index by which the call reads rows of the field ``name``; None: in order."""
        return getattr(c, self.indexed[name]) if name in self.indexed else None

    def _reason(self, c: Any, name: str) -> str | None:
        """Return why the kernel does not take the tensor's layout, or None."""
        if name in self.indexed and getattr(c, self.indexed[name]) is not None and name != self.gathers(c):
            return f"reads rows of `{name}` in the order of the groups, not by `{self.indexed[name]}`"
        reason = self.needs[name].reason(name, getattr(c, name))
        return self._out_of_order(c, name) if reason is None and name in self.ordered else reason

    def _out_of_order(self, c: Any, name: str) -> str | None:
        """Return why matrices with a supported layout differ in memory order from those beside them, or None."""
        other = self.ordered[name]
        if not getattr(c, name).numel() or self._unit(c, name) == self._unit(c, other):
            return None
        strides, others = getattr(c, name).stride(), getattr(c, other).stride()
        return f"needs the matrices of `{name}` in the memory order of `{other}`, got strides {strides} and {others}"

    def _unit(self, c: Any, name: str) -> int:
        """Return the dimension of matrices that is contiguous in a copy of unsupported ones."""
        t: Tensor = getattr(c, name)
        beyond = self.needs[name].reason(name, t) is not None
        return t.dim() - 1 if beyond else unit_dimension(t.stride())

    def _beyond(self, c: Any) -> list[str]:
        """Return the tensors whose layout the kernel does not take."""
        return [name for name in self.needs if getattr(c, name) is not None and self._reason(c, name) is not None]

    def _rooms(self, c: Any) -> dict[str, Tensor]:
        """Return uninitialised tensors for copies of those, by name."""
        made = {}
        for name in self._beyond(c):
            t, index = getattr(c, name), self._index(c, name)
            need = self.needs[name]
            if name in self.ordered and self._unit(c, self.ordered[name]) != t.dim() - 1:
                made[name] = need.room(t.transpose(-1, -2)).transpose(-1, -2)
            else:
                made[name] = need.room(t, None if index is None else index.shape[0])
        return made

    def _in_order(self, c: Any, made: Mapping[str, Tensor]) -> Any:
        """Return the call with the tensors of ``made``, whose rows are in order."""
        return c._replace(**made, **{self.indexed[name]: None for name in made if name in self.indexed})


def put_in_order(act: Callable[..., object], t: Tensor, index: Tensor, out: Tensor) -> None:
    """Copy row ``index[i]`` of ``t`` to row i of ``out``, zeros for an index out of range; ``act`` runs or prepares it.

    It is a combine of one slot per token: ``dispatch`` would need the slots of every token.
    """
    act("combine", out.device, t, index, None, top_k=1, out=out)
