"""Whole models on a CPU: every gradient against float64, and a loss that falls.

``make test`` runs a cover of all pairs of the axes' values, ``make test-full`` the whole product.
"""

from __future__ import annotations

import itertools

import pytest

from .cases import THEIRS, Case, cover, forbidden, product
from .families import Size
from .training import check

pytestmark = pytest.mark.usefixtures("fresh_compiler")

MODES = ("eager", "compiled")
# The most common way to train, of blocks of ours and of transformers, whatever else covers its pairs. What graphs of
# other families cast, ``test_autocast_graphs`` knows.
COMMON = [Case(family, "compiled", "autocast", "none", "plain") for family in ("moe", *THEIRS)]
COVER = cover(MODES, COMMON)
# Inductor compiles each of them for as long as it does all models of layers: attention and norms, for the most part.
# The quick run has their graphs as AOTAutograd leaves them.
LONG = [case for case in COVER if case.family in THEIRS and case.mode == "compiled"]
USUAL = [case for case in COVER if case not in LONG]
REST = [pytest.param(case, marks=pytest.mark.slow) for case in product(MODES) if case not in USUAL]
# Features and rows are more than the 128 of a tile of scales: their order is then other than that of the matrix. Models
# with attention are small as on a device.
SIZE, SMALL = Size(ffn=160, rows=160), Size()


@pytest.mark.parametrize("case", [*USUAL, *REST], ids=str)
def test_every_gradient_and_a_falling_loss(case: Case) -> None:
    if case.family in THEIRS:
        pytest.importorskip("transformers")
    check(case, SMALL if case.family in THEIRS else SIZE)


@pytest.mark.parametrize("case", LONG, ids=str)
def test_without_code_of_inductor(case: Case) -> None:
    pytest.importorskip("transformers")
    check(case, SMALL, backend="aot_eager")


def test_the_cover_has_every_pair_that_there_is() -> None:
    covered = {pair for case in COVER for pair in itertools.combinations(enumerate(case), 2)}
    for case in product(MODES):
        assert covered.issuperset(itertools.combinations(enumerate(case), 2))
    assert all(forbidden(case) is None for case in COVER)
