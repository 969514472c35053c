"""The plan of expert parallelism: its averages, and that the note shows what the script prints."""

from itertools import combinations
from pathlib import Path

import pytest

from tools import expert_parallel_plan as plan

NOTE = Path(__file__).parents[2] / "docs" / "notes" / "2026_11_28_expert_parallel_plan.md"


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_ranks_of_a_token_are_the_mean_over_all_choices(ranks):
    every = [{expert // (8 // ranks) for expert in chosen} for chosen in combinations(range(8), 3)]
    mean = sum(map(len, every)) / len(every)
    assert plan.ranks_of_a_token(plan.Model(1, 1, 8, 3), ranks) == pytest.approx(mean)


def test_the_note_has_the_scripts_tables(capsys):
    plan.main(["--models", "deepseek-v3", "qwen3-next"])
    note, tables = NOTE.read_text(), [part for part in capsys.readouterr().out.split("\n\n") if part.startswith("|")]
    assert [len(table.splitlines()) for table in tables] == [2 + 3 * 6, 2 + 3 * 7]  # 256 experts are not for 512 ranks
    for table in tables:
        assert table in note


def test_no_more_travels_with_a_factor_as_ranks_grow():
    """Bytes sent are bounded by the factor over the rows of k top-k slots, whatever W."""
    model = plan.MODELS["qwen3-next"]
    sent = [float(plan.row(model, ranks, 4096, 1.25, 8)[6]) for ranks in plan.RANKS if ranks >= 16]
    assert max(sent) == min(sent)


def test_what_leaves_a_host():
    """Nothing of ranks that share one; of others the share of the ranks elsewhere."""
    assert plan.off_host(100, 8, 8) == plan.off_host(100, 2, 8) == 0
    assert plan.off_host(400, 4, 2) == 200


def test_messages_and_memory():
    """Messages of collectives, and the memory of one NVLink domain."""
    made = [dict(zip(plan.HEAD, plan.row(plan.MODELS["qwen3-next"], w, 4096, 2.0, 8), strict=True)) for w in plan.RANKS]
    assert [int(row["messages"]) for row in made] == [8 * (w - 1) for w in plan.RANKS]
    assert [row["symmetric"] == "none" for row in made] == [w > 32 for w in plan.RANKS]
