"""Select the tests of a run.

Tests marked ``slow`` are left out of the quick run (``make test``). Of a test with the mark ``cover(n)`` those are the
cases beyond a few that together hold every value of its parameters (1) or every pair of values (2). A test of kernels
without such a mark has one quick case, which follows from its name, so that tests share out the architectures: nearly
all the time of a case is the compilation of its kernel.

``--slice 7/12`` keeps the tests whose names fall into part 7 of 12. The first number may be any: a run for a commit has
the number of commits there, so that runs for twelve in a row take everything. But of a test with the mark ``slices(n)``
they take few slow cases that together hold every combination of ``n`` values of its parameters, tuples and the like
taken apart; the next twelve runs take other such cases, and a run without ``--slice`` takes all.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from pathlib import Path

import pytest

from tests import compiler_settings
from tests.covers import Slice, covering, one_of, parameters

compiler_settings.set_up()  # before torch is imported
# Compilers make millions of objects that live on: by default, which is after every 700 of them, the collections that
# find nothing take a tenth of the time of tests that compile.
gc.set_threshold(50_000, 20, 10)

KERNEL_TESTS = Path(__file__).parent / "tests" / "cutlass_kernels"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slice", type=Slice.parse, metavar="INDEX/PARTS", help="run this part of the selected tests")


def values_together(item: pytest.Item) -> int | None:
    """Return how many values the quick cases of a test hold in every combination; None if all its cases are quick.

    It is 0 for one case, whatever its values.
    """
    if not hasattr(item, "callspec") or item.get_closest_marker("slow"):
        return None
    cover = item.get_closest_marker("cover")
    if cover is not None:
        return cover.args[0]
    return 0 if KERNEL_TESTS in item.path.parents else None


@pytest.hookimpl(tryfirst=True)  # before `-m "not slow"` is applied
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tests = defaultdict(list)
    for item in items:
        together = values_together(item)
        if together is not None:
            tests[item.nodeid.partition("[")[0], together].append(item)
    for (name, together), cases in tests.items():
        quick = covering(cases, parameters, together) if together else [one_of(cases, name)]
        for item in set(cases).difference(quick):
            item.add_marker(pytest.mark.slow)

    part: Slice | None = config.getoption("--slice")
    if part is not None:
        left_out = beyond_covers(part, items)
        kept = [item for item in items if part.holds(item.nodeid) and item not in left_out]
        config.hook.pytest_deselected(items=list(set(items).difference(kept)))
        items[:] = kept


def beyond_covers(part: Slice, items: list[pytest.Item]) -> set[pytest.Item]:
    """Return the slow cases of tests with the mark ``slices`` that this run of all parts leaves out."""
    tests = defaultdict(list)
    for item in items:
        mark = item.get_closest_marker("slices")
        if mark is not None and item.get_closest_marker("slow"):
            tests[item.nodeid.partition("[")[0], mark.args[0]].append(item)
    covers = [part.few(cases, n) for (_, n), cases in tests.items()]
    return {item for cases in tests.values() for item in cases}.difference(*covers)


def pytest_collection_finish() -> None:
    """Leave tests and modules out of garbage collections, which were an eighth of the time of a kernel."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def some_of(request: pytest.FixtureRequest):
    """Thin out the items of a test that goes over thousands: all of them, or at most 30 under ``--slice``."""
    part: Slice | None = request.config.getoption("--slice")
    return lambda items: items if part is None else part.some(items, at_most=30)
