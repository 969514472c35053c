"""The plan of expert parallelism: its averages, and that the page shows what the script prints."""

from itertools import combinations
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"


@pytest.fixture(scope="module")
def plan(load):
    return load("expert_parallel_plan")


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_ranks_of_a_token_are_the_mean_over_all_choices(plan, ranks):
    every = [{expert // (8 // ranks) for expert in chosen} for chosen in combinations(range(8), 3)]
    mean = sum(map(len, every)) / len(every)
    assert plan.ranks_of_a_token(plan.Model(1, 1, 8, 3), ranks) == pytest.approx(mean)


def test_the_page_has_the_scripts_table(plan, capsys):
    plan.main(["--models", "deepseek-v3"])
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(printed) > 10
    assert "\n".join(printed) in PAGE.read_text()


def test_no_more_travels_with_a_factor_as_ranks_grow(plan):
    """What is sent is bounded by the factor over the rows of k choices, whatever W."""
    model = plan.MODELS["qwen3-next"]
    sent = [float(plan.row(model, ranks, 4096, 1.25)[6]) for ranks in plan.RANKS if ranks >= 16]
    assert max(sent) == min(sent)
