"""Covers of test cases, which hold every value or pair of values in few cases, and slices of all tests."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from tgl.testing.samples import SampleInput

T = TypeVar("T")


def covering(
    cases: Sequence[T], axes: Callable[[T], Mapping[str, Any]], together: int = 2, beside: str | None = None
) -> list[T]:
    """Return few of ``cases`` that hold every combination of values that any of them holds.

    Args:
        cases: any objects.
        axes: returns a case's values by the names of their axes.
        together: how many values a combination has: 1 for every value, 2 for every pair.
        beside: an axis; combinations without a value of it do not count.
    """
    held = [_combinations(axes(case), together, beside) for case in cases]
    holders: dict[Any, list[int]] = {}
    for number, combinations in enumerate(held):
        for combination in combinations:
            holders.setdefault(combination, []).append(number)
    missing, gains, cover = set(holders), [len(combinations) for combinations in held], []
    while missing:
        best = max(range(len(cases)), key=gains.__getitem__)
        cover.append(cases[best])
        for combination in held[best] & missing:
            missing.remove(combination)
            for number in holders[combination]:
                gains[number] -= 1
    return cover


def _combinations(values: Mapping[str, Any], together: int, beside: str | None) -> frozenset:
    named = sorted(_named(values))
    combinations = itertools.combinations(named, min(together, len(named)))
    return frozenset(c for c in combinations if beside is None or beside in dict(c))


def _named(values: Mapping[str, Any]) -> set[tuple[str, str]]:
    return {(name, str(value)) for name, value in values.items()}


def one_of(cases: Sequence[T], name: str) -> T:
    """Return one of ``cases``, always the same one for a name."""
    return cases[zlib.crc32(name.encode()) % len(cases)]


def form(sample: SampleInput) -> dict[str, Any]:
    """Return the axes of a sample call but for its dtype and its numbers of rows."""
    return {"signature": sample.signature.text, "given": sample.given, "layout": sample.layout, **sample.options}


def graph_form(sample: SampleInput) -> dict[str, Any]:
    """Return the axes that tell a sample's graphs apart: neither memory orders nor activations, which are one op."""
    return {axis: value for axis, value in form(sample).items() if axis not in ("layout", "kind")}


def parameters(item: Any) -> dict[str, Any]:
    """Return the values of a parametrised pytest item; a named tuple, dataclass or dict counts as its fields."""
    values: dict[str, Any] = {}
    for name, value in item.callspec.params.items():
        values.update({f"{name}.{field}": part for field, part in _fields(value).items()} or {name: value})
    return values


def _fields(value: Any) -> Mapping[str, Any]:
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return value._asdict()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return value if isinstance(value, dict) else {}


def factors(item: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values of a parametrised pytest item without parts, and those that are tuples, dataclasses or dicts.

    The parts of these count, at any depth.
    """
    leaves: dict[str, Any] = {}
    wholes: dict[str, Any] = {}
    left = list(item.callspec.params.items())
    while left:
        name, value = left.pop()
        parts = dict(enumerate(value)) if type(value) is tuple else _fields(value)
        (wholes if parts else leaves)[name] = value
        left += [(f"{name}.{field}", part) for field, part in parts.items()]
    return leaves, wholes


class Slice(NamedTuple):
    """Part ``index`` of ``parts``."""

    index: int
    parts: int

    @classmethod
    def parse(cls, text: str) -> Slice:
        index, separator, parts = text.partition("/")
        if not (separator and index.isdigit() and parts.isdigit() and int(parts)):
            raise argparse.ArgumentTypeError(f"expected INDEX/PARTS, for example 7/12, got {text!r}")
        return cls(int(index), int(parts))

    def holds(self, name: str) -> bool:
        return zlib.crc32(name.encode()) % self.parts == self.index % self.parts

    def few(self, items: Sequence[Any], n: int) -> list[Any]:
        """Return few cases of a test, as pytest items; other ones for the next runs of the part.

        They hold every combination of ``n`` values, and every tuple, dataclass or dict that several cases have.
        """
        turn = self.index // self.parts
        items = sorted(items, key=lambda item: zlib.crc32(f"{turn} {item.nodeid}".encode()))
        found = {item: factors(item) for item in items}
        times = Counter((name, str(value)) for _, wholes in found.values() for name, value in wholes.items())
        shared = {pair for pair, count in times.items() if count > 1}
        few = covering(items, lambda item: found[item][0], n)
        left = shared.difference(*(_named(found[item][1]) for item in few))
        rest = [item for item in items if not left.isdisjoint(_named(found[item][1]))]
        return few + covering(rest, lambda item: dict(left.intersection(_named(found[item][1]))), 1)

    def some(self, items: Sequence[Any], at_most: int) -> Sequence[Any]:
        """Return every n-th of ``items``, so that few enough are left; other ones for the next runs of the part."""
        step = -(-len(items) // at_most)
        return items[self.index // self.parts % step :: step] if items else items
