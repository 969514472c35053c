"""Sample inputs of a grouped op, made from a one-line description of its arguments.

A ``Signature`` such as ``"a[T,K], b[G,K,N], offs[G]:ends, bias[G,N]? -> y[T,N]"`` says all that the generator needs, so
it serves any op whose rows are grouped, in any namespace. Values are small integers: sums of products of them are exact
in float32, whatever the order, so that two layouts of the same values must give the same bits.
"""

from __future__ import annotations

import functools
import itertools
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = ("row", "column", "padded", "expanded")
DIMENSIONS = {"K": 8, "M": 8, "N": 16, "I": 8}
NAN = float("nan")


class GroupSizes(NamedTuple):
    """A routing: the rows of every group, and the total number of rows (T); the difference is the tail."""

    name: str
    sizes: tuple[int, ...]
    rows: int

    def ends(self) -> Tensor:
        """int32 ``[G]`` cumulative group ends."""
        return torch.tensor(list(itertools.accumulate(self.sizes)), dtype=torch.int32, device="cpu")

    @property
    def routed(self) -> int:
        """Rows that belong to a group."""
        return sum(self.sizes)

    def segments(self) -> list[slice]:
        """The rows of every group."""
        ends = list(itertools.accumulate(self.sizes))
        return [slice(end - size, end) for end, size in zip(ends, self.sizes)]


def _routing(name: str, sizes: Sequence[int], tail: int = 0) -> GroupSizes:
    return GroupSizes(name, tuple(sizes), sum(sizes) + tail)


ROUTINGS: dict[str, GroupSizes] = {
    r.name: r
    for r in (
        _routing("ragged_tail", (3, 0, 5, 1), tail=4),
        _routing("even", (4, 4, 4, 4)),
        _routing("empty_first", (0, 0, 6, 2)),
        _routing("empty_middle", (3, 0, 0, 5), tail=1),
        _routing("empty_last", (5, 3, 0, 0), tail=2),
        _routing("all_empty", (0, 0, 0), tail=5),
        _routing("no_rows", (0, 0, 0)),
        _routing("no_groups", (), tail=3),
        _routing("one_group", (7,)),
        _routing("one_token", (0, 1, 0)),
        _routing("one_token_tail", (1,), tail=1),
        _routing("below_tile", (127, 1)),
        _routing("tile", (128, 128)),
        _routing("above_tile", (129, 0, 127), tail=3),
        _routing("groups_300", [(7 * g) % 4 for g in range(300)], tail=2),
    )
}
"""Routings by name: empty groups first, in the middle, last and everywhere, one token, sizes around a tile of 128 rows,
tails, 300 groups, no group at all."""


class Operand(NamedTuple):
    """One tensor argument: its dimensions (letters, ``2I`` is twice ``I``) and role.

    ``role`` is ``"data"``, ``"ends"`` (int32 cumulative group ends), ``"sizes"`` (integer group sizes) or ``"derived"``
    (made by ``Signature.derive``).
    """

    name: str
    dims: tuple[str, ...]
    optional: bool = False
    written: bool = False
    role: str = "data"

    @property
    def by_row(self) -> bool:
        """Whether the first dimension runs over rows, so that its tail must not matter."""
        return self.role == "data" and self.dims[0] == "T"


_OPERAND = re.compile(r"\s*(\w+)\[([\w,\s]*)\](:ends|:sizes|:derived)?(\?)?(!)?\s*")


@functools.cache
def _parse(text: str) -> tuple[Operand, ...]:
    operands, position = [], 0
    while position < len(text):
        match = _OPERAND.match(text, position)
        if match is None or (match.end() < len(text) and text[match.end()] != ","):
            raise ValueError(
                f"expected `name[DIMS]`, then `:ends`, `:sizes`, `:derived`, `?` or `!`, at {text[position:]!r}"
            )
        name, dims, role, optional, written = match.groups()
        letters = tuple(d.strip() for d in dims.split(","))
        operands.append(Operand(name, letters, bool(optional), bool(written), role[1:] if role else "data"))
        position = match.end() + 1
    return tuple(operands)


@dataclass(frozen=True)
class Signature:
    """Arguments and outputs of a grouped op.

    Attributes:
        text: ``"x[T,K], w[G,K,N], offs[G]:ends, bias[G,N]? -> y[T,N]"``. T rows, G groups, other letters from
            ``dimensions``. ``:ends`` marks cumulative group ends, ``:sizes`` group sizes, ``:derived`` what ``derive``
            makes, ``?`` an optional argument, ``!`` one that the op writes into. An op that returns nothing ends in
            ``->``.
        requires: an optional argument and the one without which it may not be given.
        wide: data arguments that may also be float32 beside a narrower operand dtype.
        options: keyword arguments and the values to try.
        dimensions: sizes of the letters.
        exact: the op only adds and multiplies, so integer inputs give exact results.
        differentiable: whether the op has an autograd formula.
        accumulates: the written argument is added to, so an empty group leaves it alone.
        derive: makes the arguments that follow from others, or that are no small integers (scales, packed data):
            ``derive(sample, made, tail)`` gets the other arguments by name and the value of the tail, and returns those
            of its own by name. A written one belongs to the op whole, its tail included.
        dtypes: operand dtypes to try.
    """

    text: str
    requires: Mapping[str, str] = field(default_factory=dict)
    wide: Sequence[str] = ()
    options: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    dimensions: Mapping[str, int] = field(default_factory=lambda: dict(DIMENSIONS))
    exact: bool = True
    differentiable: bool = True
    accumulates: bool = False
    derive: Callable[[SampleInput, Mapping[str, Tensor | None], float], Mapping[str, Tensor]] | None = None
    dtypes: Sequence[torch.dtype] = DTYPES

    @property
    def operands(self) -> tuple[Operand, ...]:
        """The arguments, in order."""
        return _parse(self.text.partition("->")[0].strip())

    @property
    def outputs(self) -> tuple[Operand, ...]:
        """The outputs of the op."""
        return _parse(self.text.partition("->")[2].strip())

    @property
    def written(self) -> tuple[Operand, ...]:
        """The arguments that the op writes into."""
        return tuple(o for o in self.operands if o.written)

    def presence(self) -> list[tuple[str, ...]]:
        """Every combination of optional arguments that may be given together, the empty one first."""
        names = [o.name for o in self.operands if o.optional]
        subsets = itertools.chain.from_iterable(itertools.combinations(names, n) for n in range(len(names) + 1))
        always = tuple(o.name for o in self.operands if not o.optional)
        return [s for s in subsets if all(self.requires.get(n, n) in (*s, *always) for n in s)]

    def shape(self, operand: Operand, routing: GroupSizes) -> tuple[int, ...]:
        """The shape of ``operand`` under ``routing``."""
        sizes = {**self.dimensions, "T": routing.rows, "G": len(routing.sizes)}
        shape = []
        for letters in operand.dims:
            digits = re.match(r"\d*", letters)[0]  # type: ignore[index]
            letter = letters[len(digits) :]
            shape.append(int(digits or 1) * (sizes[letter] if letter else 1))
        return tuple(shape)

    def samples(
        self,
        *,
        dtypes: Sequence[torch.dtype] | None = None,
        routings: Sequence[str | GroupSizes] | None = None,
        device: torch.device | str = "cpu",
        full: bool = False,
    ) -> Iterator[SampleInput]:
        """Yield sample inputs of the op.

        Args:
            dtypes: operand dtypes, default those of the signature; the first is the one that stands for all where the
                dtype does not vary.
            routings: names in ``ROUTINGS`` or ``GroupSizes`` of your own; default: all of ``ROUTINGS``.
            device: where the tensors live.
            full: the product of all axes instead of a selection.
        """
        dtypes = self.dtypes if dtypes is None else dtypes
        chosen = [ROUTINGS[r] if isinstance(r, str) else r for r in routings or ROUTINGS]
        presence = self.presence()
        options = [dict(zip(self.options, values)) for values in itertools.product(*self.options.values())]
        most = max(presence, key=len)
        wide = (False, True) if self.wide else (False,)
        axes: list[tuple] = list(itertools.product(chosen, dtypes, LAYOUTS, presence, options, wide))
        if not full:
            first = (chosen[0], dtypes[0], LAYOUTS[0], most, options[0], False)
            varied = [(0, 1), (1, 2), (3, 4), (1, 3, 5), (0, 3)]
            axes = [c for c in axes if any(all(c[i] == first[i] for i in range(6) if i not in v) for v in varied)]
        for routing, dtype, layout, given, chosen_options, widened in axes:
            if widened and dtype in (torch.float64, torch.float32):
                continue
            yield SampleInput(self, routing, dtype, layout, given, chosen_options, widened, device)


@dataclass(frozen=True)
class SampleInput:
    """The arguments of one call; ``tensors`` makes them, with equal values every time.

    Attributes:
        signature: what the op takes.
        routing: the groups.
        dtype: dtype of the data operands.
        layout: how they lie in memory: ``"row"``, ``"column"`` (the last two dimensions swapped), ``"padded"`` (rows
            further apart than they are long, not starting at the storage's beginning) or ``"expanded"`` (stride 0 along
            the last dimension). Written arguments are row-major, padded in all but ``"row"``.
        given: the optional arguments present.
        options: keyword options.
        widened: the arguments in ``Signature.wide`` are float32.
        device: where the tensors live.
    """

    signature: Signature
    routing: GroupSizes
    dtype: torch.dtype = torch.float32
    layout: str = "row"
    given: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    widened: bool = False
    device: torch.device | str = "cpu"

    @property
    def name(self) -> str:
        """For test ids and messages."""
        parts = [self.routing.name, str(self.dtype).removeprefix("torch."), self.layout, *self.given]
        parts += [f"{k}={v}" for k, v in self.options.items()] + ["wide"] * self.widened
        return "-".join(parts)

    @property
    def _integer(self) -> torch.dtype:
        """The dtype of indices and sizes: ``dtype`` if it is one, else int64."""
        return torch.int64 if self.dtype.is_floating_point else self.dtype

    def tensors(self, *, tail: float = NAN, layout: str | None = None) -> dict[str, Tensor | None]:
        """Return the arguments by name, in the order of the signature; omitted optional ones are None.

        Args:
            tail: value of the rows past the last group's end; nothing may depend on it.
            layout: instead of the sample's own.
        """
        made: dict[str, Tensor | None] = {}
        for operand in self.signature.operands:
            if operand.role == "derived" or (operand.optional and operand.name not in self.given):
                made[operand.name] = None
            elif operand.role == "ends":
                made[operand.name] = self.routing.ends().to(self.device)
            elif operand.role == "sizes":
                made[operand.name] = torch.tensor(self.routing.sizes, dtype=self._integer, device=self.device)
            else:
                made[operand.name] = self._data(operand, tail, layout or self.layout)
        if self.signature.derive is not None:
            made.update(self.signature.derive(self, made, tail))
        return made

    def call(self, op: Any, tensors: Mapping[str, Tensor | None]) -> tuple[tuple, dict[str, Any]]:
        """Return ``args, kwargs`` for a call of ``op`` (an ``OpOverload``)."""
        positional = {a.name: place for place, a in enumerate(op._schema.arguments) if not a.kwarg_only}
        by_name = {a.name for a in op._schema.arguments if a.kwarg_only}
        by_name |= {name for place, name in enumerate(tensors) if positional.get(name, place) != place}
        args = tuple(t for name, t in tensors.items() if name not in by_name)
        return args, {**{n: t for n, t in tensors.items() if n in by_name}, **self.options}

    def cotangent(self, output: Tensor, operand: Operand, *, tail: float = NAN) -> Tensor:
        """Return a gradient of small integers for ``output``; by-row outputs get ``tail`` in the tail."""
        grad = self._integers("grad " + operand.name, tuple(output.shape)).to(output.dtype).to(self.device)
        if operand.by_row:
            grad[self.routing.routed :] = tail
        return grad

    def _integers(self, name: str, shape: tuple[int, ...]) -> Tensor:
        seed = zlib.crc32(f"{name} {shape} {self.routing.name}".encode())
        return torch.randint(-2, 3, shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")

    def _data(self, operand: Operand, tail: float, layout: str) -> Tensor:
        shape = self.signature.shape(operand, self.routing)
        dtype = torch.float32 if self.widened and operand.name in self.signature.wide else self.dtype
        values = self._integers(operand.name, shape).to(dtype)
        if self.layout == "expanded" and not operand.written:
            values = values[..., :1].expand(shape).clone() if len(shape) > 1 else values
        if operand.by_row and not operand.written:
            values[self.routing.routed :] = tail
        return lay_out(values.to(self.device), "padded" if operand.written and layout != "row" else layout)


def choices(sample: SampleInput, made: Mapping[str, Tensor | None], tail: float) -> dict[str, Tensor]:
    """Return integers ``top_k_index [S, 2]``: the groups of rows in no order, twice; none in the tail."""
    sizes, rows = torch.tensor(sample.routing.sizes, dtype=torch.int64, device="cpu"), sample.routing.rows
    groups = torch.arange(len(sizes), device="cpu").repeat_interleave(sizes)
    none = torch.tensor([-1, min(1 << 40, torch.iinfo(sample._integer).max)], dtype=torch.int64, device="cpu").repeat(
        rows
    )[: rows - len(groups)]
    order = torch.randperm(rows, generator=torch.Generator("cpu").manual_seed(rows), device="cpu")
    shuffled = torch.cat([groups, none])[order]
    index = torch.stack([shuffled, shuffled.flip(0)], 1).to(sample._integer).to(sample.device)
    return {"top_k_index": lay_out(index, sample.layout)}


def named_rows(sample: SampleInput, made: Mapping[str, Tensor | None], tail: float) -> dict[str, Tensor]:
    """Return int32 ``[T]`` for every derived index: a row of S, some often, the last one never.

    In the tail the index is out of range or, where ``tail`` is a number, in range.
    """
    sizes = sample.signature.dimensions
    found = {}
    for operand in sample.signature.operands:
        if operand.role != "derived":
            continue
        seed = zlib.crc32(f"{operand.name} {sample.routing.name}".encode())
        shape, generator = (sample.routing.rows,), torch.Generator("cpu").manual_seed(seed)
        index = torch.randint(0, sizes["S"] - 1, shape, generator=generator, dtype=torch.int32, device="cpu")
        if tail != tail:
            index[sample.routing.routed :] = -1
        found[operand.name] = index.to(sample.device)
    return found


def places(sample: SampleInput, made: Mapping[str, Tensor | None], tail: float) -> dict[str, Tensor]:
    """Return int32 ``source [T]``, ``position [2 T]`` and ``token [T]`` of T tokens with two slots.

    The rows of the groups are, in no order, the slots of the first tokens; other tokens have no row.
    """
    rows, routed = sample.routing.rows, sample.routing.routed
    source, position = (torch.full((size,), -1, dtype=torch.int32, device="cpu") for size in (rows, 2 * rows))
    order = torch.randperm(routed, generator=torch.Generator("cpu").manual_seed(rows), device="cpu")
    source[:routed] = order
    position[order] = torch.arange(routed, dtype=torch.int32, device="cpu")
    token = source.div(2, rounding_mode="floor")
    found = {"source": source, "position": position, "token": token}
    return {name: t.to(sample.device) for name, t in found.items() if name in made}


def lay_out(values: Tensor, layout: str) -> Tensor:
    """Return ``values`` in memory order ``layout`` (see ``SampleInput``); a vector is strided for ``"padded"`` only."""
    if layout == "row":
        return values.contiguous()
    if layout == "padded":
        skip = max(16 // values.element_size(), 1)  # keeps the start aligned to 16 bytes, which written arguments need
        if values.dim() == 1:
            room = values.new_full((values.shape[0], 2), -99)
            room[:, 1] = values
            return room[:, 1]
        room = values.new_full((*values.shape[:-1], values.shape[-1] + 2 * skip), -99)
        room[..., skip:-skip] = values
        return room[..., skip:-skip]
    if values.dim() == 1:
        return values.contiguous()
    if layout == "column":
        return values.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "expanded":
        return values[..., :1].contiguous().expand(values.shape)
    raise ValueError(f"`layout` must be one of {', '.join(LAYOUTS)}, but got {layout!r}")
