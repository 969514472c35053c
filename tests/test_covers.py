"""Selection of quick tests, and of the others for each slice."""

import itertools
from dataclasses import dataclass
from typing import Any

import pytest

from tests.covers import Slice, covering

CASES = [dict(zip("abc", values)) for values in itertools.product(range(2), range(3), range(4)) if sum(values) != 5]
NAMES = [f"tests/test_some.py::test_case[{i}]" for i in range(500)]


@dataclass(frozen=True)
class Callspec:
    params: dict[str, Any]


@dataclass(frozen=True)
class Item:
    """The parts of a parametrised pytest item that matter here."""

    nodeid: str
    callspec: Callspec

    def __hash__(self):
        return hash(self.nodeid)


def combinations(cases, together):
    return {frozenset(c) for case in cases for c in itertools.combinations(case.items(), together)}


@pytest.mark.parametrize("together", [1, 2, 3])
def test_a_cover_holds_every_combination_that_there_is(together):
    cover = covering(CASES, dict, together)
    assert combinations(cover, together) == combinations(CASES, together)
    assert len(cover) == len({tuple(c.values()) for c in cover}) == {1: 4, 2: 12, 3: len(CASES)}[together]


def test_combinations_beside_an_axis_are_enough():
    cover = covering(CASES, dict, beside="a")
    assert {c for c in combinations(CASES, 2) if "a" in dict(c)} <= combinations(cover, 2)
    assert len(cover) < len(covering(CASES, dict))


@pytest.mark.parametrize("first", [0, 5, 1234])
def test_slices_in_a_row_hold_every_test_once(first):
    slices = [Slice.parse(f"{first + i}/12") for i in range(12)]
    assert all(sum(s.holds(name) for s in slices) == 1 for name in NAMES)
    assert all(20 < sum(map(s.holds, NAMES)) < 65 for s in slices)


def test_later_slices_take_other_items():
    items = list(range(333))
    taken = [Slice(5 + 12 * turn, 12).some(items, at_most=60) for turn in range(6)]
    assert sorted(itertools.chain(*taken)) == items
    assert all(len(part) <= 60 for part in taken)
    assert Slice(7, 12).some(items[:50], at_most=60) == items[:50]
    assert Slice(7, 12).some([], at_most=60) == []


def test_a_slice_takes_few_cases_with_every_pair_and_every_shared_tuple():
    """Every two values of different parameters occur together, and every tuple that several cases share occurs."""
    params = [
        {"pair": pair, "letter": letter, "flag": flag}
        for pair in itertools.product(range(3), range(3))
        for letter in "abc"
        for flag in (False, True)
    ]
    items = [Item(f"test[{i}]", Callspec(values)) for i, values in enumerate(params)]

    def parts(item):
        first, second = item.callspec.params["pair"]
        return {**item.callspec.params, "pair": first, "second": second}

    few = Slice(0, 12).few(items, 2)
    assert combinations(list(map(parts, few)), 2) == combinations(list(map(parts, items)), 2)
    assert {item.callspec.params["pair"] for item in few} == {p["pair"] for p in params}
    assert len(few) < len(items) / 3
    assert Slice(11, 12).few(items, 2) == few != Slice(12, 12).few(items, 2)


@pytest.mark.parametrize("text", ["3", "3/", "/3", "3/0", "-1/3", "a/b"])
def test_no_slice(text):
    with pytest.raises(Exception, match="expected INDEX/PARTS, for example 7/12, got"):
        Slice.parse(text)
