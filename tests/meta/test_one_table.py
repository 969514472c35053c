"""Each axis is one table: code asks it for facts, and decides nothing by a name."""

import ast
import re

import pytest

from tests.one_table import AXES, ROOT, copies, decided_by_name, modules, places
from tgl.meta.formats import FORMATS
from tgl.meta.table import OnePerName

MOST = {"format": 0, "activation": 4, "architecture": 4}  # activations: four times the modifier ``.relu`` of PTX

DECIDED = """
NAME = "beta"
a = x == "alpha" or x in ("alpha", y) or "alpha" != x
b = {"alpha": 1, ("beta", 2): 3}
c = x["alpha"] + x.get("beta", 0) + (x == NAME) + x.startswith("alpha")
match x:
    case "alpha":
        pass
"""
NOT_DECIDED = """
NAME = "beta"
a = f("alpha", NAME) or x == "gamma" or x == "alphas"
b = OnePerName(AXIS, "entries", {"alpha": 1, "beta": 2})
c = {"gamma": "alpha"}
d = x["gamma"] + x.get(y, "alpha")
"""
NAMES = re.compile("alpha|beta")


def found(text, path="tgl/module.py"):
    return [(place.line, place.name) for place in places(ast.parse(text), path, NAMES)]


def test_decisions_by_name_are_found():
    second, third = [(3, "alpha")] * 3, [(4, "alpha"), (4, "beta")]
    fourth = [(5, "alpha"), (5, "beta"), (5, "beta"), (5, "alpha")]
    assert sorted(found(DECIDED)) == sorted([*second, *third, *fourth, (7, "alpha")])
    assert sorted(found(DECIDED, "benchmarks/case.py")) == sorted([*second, *fourth, (7, "alpha")])


def test_lists_of_names_are_no_decisions():
    assert found(NOT_DECIDED) == []


def test_values_of_a_checked_table_count():
    text = 'a = OnePerName(AXIS, "entries", {"alpha": x == "alpha", "beta": {"alpha": 1}})'
    assert found(text) == [(1, "alpha"), (1, "alpha")]


@pytest.mark.parametrize("axis", AXES)
def test_nothing_is_decided_by_a_name_outside_the_table(axis):
    decided = decided_by_name(axis)
    assert len(decided) <= MOST[axis], "\n".join(map(str, decided))


@pytest.mark.parametrize("axis, names", [("format", set(FORMATS))])
def test_no_test_copies_the_table(axis, names):
    found = [place for path, tree in modules(ROOT, ("tests", "compile_tests")) for place in copies(tree, path, names)]
    assert not found, "\n".join(map(str, found))


def test_copies_of_a_table_are_found():
    text = 'a = ("alpha", "beta")\nb = {"beta": 1, "alpha": 2}\nc = ["alpha"]\nd = ("alpha", "beta", 3)\n'
    text += 'e = OnePerName(AXIS, "entries", {"alpha": 1, "beta": 2})'
    assert [place.line for place in copies(ast.parse(text), "tests/test_it.py", {"alpha", "beta"})] == [1, 2]


# --- tables beside the table ------------------------------------------------------------------------------------------


def test_a_table_beside_the_table_has_every_name():
    with pytest.raises(ValueError, match=r"tgl: readers, module.py must have an entry for 'beta', but has only alpha"):
        OnePerName(("alpha", "beta"), "readers, module.py", {"alpha": 1})
    with pytest.raises(ValueError, match=r"tgl: readers must be of alpha, but there is one of 'gamma'"):
        OnePerName(("alpha",), "readers", {"alpha": 1, "gamma": 2})
    with pytest.raises(ValueError, match=r"tgl: readers must have an entry for 'gamma', but has only alpha"):
        OnePerName(("alpha",), "readers", {"alpha": 1})["gamma"]
    assert OnePerName(("alpha",), "readers", {"alpha": 1})["alpha"] == 1
