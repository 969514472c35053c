"""Overlap on paper: pieces have all rows, today's forward takes what was measured, and the page shows the tables."""

from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks" / "expert_parallel.md"


@pytest.fixture(scope="module")
def plan(load):
    return load("expert_parallel_overlap_plan")


@pytest.fixture(scope="module")
def small(plan):
    """A shape, parts that are easy to add up, and a draw."""
    shape = plan.SHAPES["qwen3-30b"]._replace(tokens=512)
    return shape, plan.Measured(1000, 30, 210, 200, 220, 200), plan.Draw(shape)


@pytest.fixture(scope="module")
def machine(plan, small):
    shape, measured, draw = small
    today = plan.whole(draw)
    fc = plan.gemms(shape, measured, today, 2.8)
    return plan.Machine(fc, 2.8, 200 / today.first[0].link, 200 / today.first[0].link)


@pytest.mark.parametrize("name", ["experts, 4", "ranks", "own, others", "tiles wait", "tokens, 2"])
def test_pieces_have_all_rows(plan, small, name):
    _, _, draw = small
    (whole,), form = plan.whole(draw).first, plan.FORMS[name](draw)
    for pieces in (form.first, form.second):
        assert torch.equal(sum(piece.rows for piece in pieces), whole.rows)
        link = sum(piece.link for piece in pieces)
        assert link > whole.link if name == "experts, 4" else link == whole.link
    assert sorted(form.order) == [(which, n) for which in ("first", "second") for n in range(len(getattr(form, which)))]


def test_today_takes_what_was_measured(plan, small, machine):
    shape, measured, draw = small
    found = plan.follow(plan.whole(draw), shape, measured, machine, 0)
    assert found.us == pytest.approx(measured.layer)
    assert found.exposed == pytest.approx(30 + 210 + 220)


def test_rows_of_the_rank_itself_hide_what_they_take(plan, small, machine):
    """With multiprocessors to spare and tiles, launches and places for nothing, by hand."""
    shape, measured, draw = small
    form = plan.own_and_others(draw)
    found = plan.follow(form, shape, measured, machine, 0)
    own, others = form.first
    first = [
        fc.time(piece, plan.MULTIPROCESSORS, fc.tiles_of(piece.rows), 2.8)
        for fc in machine.fc[:1]
        for piece in (own, others)
    ]
    second = [
        machine.fc[1].time(piece, plan.MULTIPROCESSORS, machine.fc[1].tiles_of(piece.rows), 2.8)
        for piece in (others, own)
    ]
    sums = [plan.sum_time(piece, shape.hidden, 2.8) for piece in (others, own)]
    there = 30 + 10 + plan.PLACES + 200
    assert 30 + plan.PLACES + first[0] < there  # so that others are waited for
    answered = there + first[1] + plan.LAUNCH + second[0] + sums[0]
    assert found.us == pytest.approx(max(answered + 200, answered + plan.LAUNCH + second[1] + sums[1]) + 20)


def test_the_page_has_the_scripts_tables(plan, capsys):
    plan.main([])
    page, tables = PAGE.read_text(), [part for part in capsys.readouterr().out.split("\n\n") if part.startswith("|")]
    assert len(tables) == len(plan.MEASURED)
    for table in tables:
        assert len(table.splitlines()) == 2 + len(plan.FORMS)
        assert table.strip() in page
