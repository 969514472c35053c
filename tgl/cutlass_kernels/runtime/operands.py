"""The arguments of a kernel, described once per op.

A table of ``Operand``, in the order of the kernel's arguments, states the dimensions, dtype and layout of each tensor.
The layout requirements, the plan key, the order of the arguments, what the compiler gets instead of them and the
warm-up call follow from it. ``None`` in a table is an argument that calls of the op never have.

Letters of dimensions: T rows of all groups together, U rows of which an index picks T, G groups, S matrices that a
table of slots numbers, K, M, N, R and I sizes of matrices, and 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .launcher import rows_class
from .requirements import ALIGNMENT, MAX_ROWS, Need

Table = Sequence["Operand | None"]


class Operand(NamedTuple):
    """An argument of a kernel.

    Attributes:
        name: its field in the call. One that is no field is made at the launch: None among the arguments till then.
        dims: a letter for each dimension; none for a number, or a tensor whose shape the launcher computes.
        element: the field of the kernel's key with the name of its dtype, or None if the call has no such tensor;
            ``"int32"``, ``"float32"`` and ``"uint8"`` are dtypes.
        need: its layout requirement. An operand without one is read element by element, with any strides.
        unit: the field of the key with the contiguous dimension; default: the last one.
        beside: the operand whose memory order its matrices share.
        indexed_by: the field with an index of its rows, which is also the last argument of kernels that gather them.
        when: the field of the key that states whether there is such a tensor; default: ``element`` does.
        output: whether it is written.
        stand_in: returns its description for the compiler, of a key; default: by the other attributes.
    """

    name: str
    dims: str = ""
    element: str = ""
    need: Need | None = None
    unit: str | None = None
    beside: str | None = None
    indexed_by: str | None = None
    when: str | None = None
    output: bool = False
    stand_in: Callable[[Any], Any] | None = None

    def described(self, key: Any) -> Any:
        """Return what the compiler gets instead of the tensor in a kernel of ``key``; None: no such tensor."""
        from .compiling import matrix, strided
        from .elements import TYPES

        if self.when is not None and not attrgetter(self.when)(key):
            return None
        if self.stand_in is not None:
            return self.stand_in(key)
        element = self.element if self.element in TYPES else attrgetter(self.element)(key)
        if element is None or self.need is None:
            return strided(element, len(self.dims))
        return matrix(element, len(self.dims), unit=-1 if self.unit is None else getattr(key, self.unit))

    def zeros(self, like: Tensor, sizes: Mapping[str, int], device: torch.device) -> Tensor:
        """Return zeros of these sizes with the dtype of ``like``, and its memory order where that may vary."""
        shape = [sizes[letter] for letter in self.dims]
        if self.unit is None or like.stride(-1) == 1:
            return like.new_zeros(shape, device=device)
        return like.new_zeros([*shape[:-2], shape[-1], shape[-2]], device=device).transpose(-1, -2)


def tensor(kind: str, *args: Any, **options: Any) -> Callable[[Any], Any]:
    """Return a ``stand_in`` that is the same for all keys: a function of ``compiling``, and its arguments."""

    def stand_in(key: Any) -> Any:
        from . import compiling

        return getattr(compiling, kind)(*args, **options)

    return stand_in


def number(kind: str) -> Callable[[Any], Any]:
    """Return a ``stand_in`` for a number of a type of CUTLASS."""

    def stand_in(key: Any) -> Any:
        import cutlass

        return getattr(cutlass, kind)(1)

    return stand_in


def operands_of(table: Table, call: type) -> list[Operand]:
    """Return the operands of a table that are fields of ``call``, in their order there."""
    fields = call._fields  # type: ignore[attr-defined]
    return sorted((o for o in table if o is not None and o.name in fields), key=lambda o: fields.index(o.name))


def indices_of(table: Table) -> tuple[str, ...]:
    """Return the fields that have an index of rows."""
    return tuple(o.indexed_by for o in table if o is not None and o.indexed_by is not None)


def picker(call: type, fields: Iterable[str]) -> Callable[[Any], tuple]:
    """Return a function of a call that returns the values of ``fields`` in a tuple, without a frame of its own."""
    places = [call._fields.index(field) for field in fields]  # type: ignore[attr-defined]
    if len(places) > 1:
        return itemgetter(*places)
    return itemgetter(slice(places[0], places[0] + 1) if places else slice(0))


def arguments_of(call: type, table: Table) -> Callable[[Any], tuple]:
    """Return the function from a call to its kernel's arguments, and indices of rows that it has."""
    fields: tuple[str, ...] = call._fields  # type: ignore[attr-defined]
    names = [None if o is None else o.name for o in table]
    # An argument that is no field of the call is a None behind the fields.
    pick = itemgetter(*(fields.index(name) if name in fields else len(fields) for name in names))
    indices, whole = [fields.index(name) for name in indices_of(table)], {*names} <= {*fields}
    if not indices:
        return pick if whole else lambda c: pick((*c, None))

    def arguments(c: Any) -> tuple:
        found: tuple = pick(c if whole else (*c, None))
        for i in indices:
            if c[i] is not None:
                found += (c[i],)
        return found

    return arguments


def plan_key_of(call: type, table: Table) -> Callable[[Any], tuple | None]:
    """Return the function from a call to its plan key, or None for a call without one; see ``Launcher.plan_key``.

    The key has the strides and dtypes of the operands, the sizes of matrices, which optional tensors there are, every
    option, and T as the class of rows per group.

    Every warm call computes it, so that it loops over nothing that all calls have: A, B and an output, one of them
    matrices, and up to two optional factors. Launchers of more operands state their key themselves.
    """
    fields: tuple[str, ...] = call._fields  # type: ignore[attr-defined]
    at = fields.index
    operands, indices = operands_of(table, call), indices_of(table)
    placed = [o for o in operands if o.need is not None]
    required = [at(o.name) for o in placed if o.when is None]
    others = [at(o.name) for o in placed if o.when is not None]
    constant = {"", "int32", "float32", "uint8"}
    factors = [at(o.name) for o in operands if o.need is o.when is None and o.element not in constant]
    three, two = itemgetter(*required), itemgetter(*factors) if factors else None
    matrices = next(at(o.name) for o in placed if "T" not in o.dims)
    tables = [at(o.name) for o in operands if o.when is not None and o.need is None] + [at(f) for f in indices]
    known = {o.name for o in operands} | {*indices, "expected_rows"}
    options = picker(call, (field for field in fields if field not in known))
    counted, otherwise = ([*map(at, _counted(placed))] * 2)[:2]
    sources = [(at(o.indexed_by), at(o.name)) for o in operands if o.indexed_by is not None]
    slots, expected = (at(field) if field in fields else None for field in ("slots", "expected_rows"))
    rare = bool(others or tables or sources)

    def plan_key(c: Any) -> tuple | None:
        a, b, out = three(c)
        addresses, shape = a.data_ptr() | b.data_ptr() | out.data_ptr(), c[matrices].shape
        more: list[Any] = []
        if two is not None:
            bias, scale = two(c)
            more = [None if bias is None else bias.dtype, None if scale is None else scale.dtype]
        if rare:
            for i in others:
                t = c[i]
                if t is None:
                    more.append(None)
                else:
                    addresses |= t.data_ptr()
                    more.append(t.stride())
            for i in tables:
                if c[i] is not None:
                    more.append(i)
            for index, source in sources:
                if c[index] is not None and not 0 < c[source].shape[0] <= MAX_ROWS:
                    return None
        t = c[counted]
        rows = (c[otherwise] if t is None else t).shape[0]
        if addresses % ALIGNMENT or not 0 < rows <= MAX_ROWS:
            return None
        groups = shape[0] if slots is None or c[slots] is None else c[slots].shape[0]
        if expected is not None and c[expected] is not None:
            rows = c[expected]
        size = rows_class(rows, groups)
        return shape, size, options(c), a.stride(), b.stride(), out.stride(), a.dtype, b.dtype, out.dtype, *more

    return plan_key


def _counted(operands: Sequence[Operand]) -> list[str]:
    """Return the fields of which the first that a call has gives T: outputs, else an index or an operand."""
    written = [o.name for o in operands if o.output and o.dims[:1] == "T"]
    if written:
        return written
    return [field for o in operands if "T" in o.dims for field in (o.indexed_by, o.name) if field is not None]
