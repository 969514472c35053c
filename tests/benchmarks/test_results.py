"""Result files, the pages that quote them, the plots drawn from them and the README's table agree."""

import json
import math
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
RESULTS = {path.stem: json.loads(path.read_text()) for path in FILES}
TABLES = [(name, table) for name, result in RESULTS.items() for table in result["tables"]]
NUMBER = re.compile(r"\d+\.\d+|\d+")


def rows(name, table):
    found = RESULTS[name]["tables"][table]
    return [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]]


def quoted(mean, worst):
    return f"{mean:.3f} ({worst:.3f})"


@pytest.fixture(scope="module")
def plots(load):
    pytest.importorskip("matplotlib")
    return load("plots")


@pytest.mark.parametrize("name", RESULTS)
def test_says_where_it_comes_from(name):
    result = RESULTS[name]
    assert {"title", "command", "machine", "versions", "recorded_in", "tables"} == set(result)
    script = re.match(r"python (benchmarks/\w+\.py)", result["command"])[1]
    assert (ROOT / script).exists()
    assert re.fullmatch(r"[0-9a-f]{12}", result["recorded_in"])


@pytest.mark.parametrize("name, table", TABLES)
def test_the_page_quotes_the_figures(name, table):
    """All figures of a row stand in one line of the page that the table names."""
    found = RESULTS[name]["tables"][table]
    lines = [[float(n) for n in NUMBER.findall(line)] for line in (ROOT / found["page"]).read_text().splitlines()]
    for row in found["rows"]:
        assert len(row) == len(found["columns"])
        figures = {float(cell) for cell in row if isinstance(cell, int | float)}
        assert any(figures <= set(line) for line in lines), row


def test_the_readme_table():
    """Its cells are figures of the result files."""
    dense = {r["op"]: r for r in rows("grouped_gemm_h200", "means")}
    scaled = {(r["op"], r["format"]): r for r in rows("grouped_gemm_scaled_h200", "means")}
    cases, (means,) = rows("layer_h200", "cases"), rows("layer_h200", "means")
    table = {}
    for op, name in (("fprop", "forward"), ("dgrad", "input gradient"), ("wgrad", "weight gradient")):
        cells = (dense[op], scaled[op, "fp8_tensor"], scaled[op, "fp8_block"])
        table[name] = [quoted(c["torch"], c["torch_worst"]) for c in cells]
    arms = ("bf16", "fp8_current", "fp8_block")
    table["expert layer, forward and backward"] = [quoted(means[a], min(r[a] for r in cases)) for a in arms]
    text = (ROOT / "README.md").read_text()
    lines = [f"| {name} | {' | '.join(cells)} |" for name, cells in table.items()]
    section = text[text.index("## Results") : text.index("## Documentation")]
    assert "\n".join(lines) in section
    figures = re.findall(r"\d\.\d+ \(\d\.\d+\)", text)
    assert len(figures) == sum(map(len, table.values())), "a figure of the README that no result file holds"
    for name in ("grouped_gemm_h200", "grouped_gemm_scaled_h200", "layer_h200"):
        assert Path(RESULTS[name]["command"].split()[1]).name in section


def test_the_readme_is_short_and_says_what_blackwell_is():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    assert "never run on a Blackwell" in text


def test_means_are_those_of_the_cases():
    cases, (means,) = rows("layer_h200", "cases"), rows("layer_h200", "means")
    for arm, mean in means.items():
        assert math.prod(r[arm] for r in cases) ** (1 / len(cases)) == pytest.approx(mean, abs=0.0011)
    gemms = rows("grouped_gemm_h200", "cases")
    for row in rows("grouped_gemm_h200", "means"):
        for column in ("torch", "loop", "dense", "copy"):
            if row[column] is not None:
                ratios = [r[column] for r in gemms if r["op"] == row["op"]]
                assert math.prod(ratios) ** (1 / len(ratios)) == pytest.approx(row[column], abs=0.0011)
                assert min(ratios) == row[f"{column}_worst"]


def test_plots_are_drawn_and_those_of_the_pages_are_new(plots, tmp_path):
    """Each picture in docs was drawn from the result files as they are, and is shown by a page."""
    plots.draw(tmp_path)
    pages = "".join(p.read_text() for p in ROOT.glob("docs/benchmarks/*.md"))
    source = re.compile(r"<dc:source>(.*?)</dc:source>", re.DOTALL)
    for name in plots.FIGURES:
        drawn, shown = (source.search((folder / f"{name}.svg").read_text())[1] for folder in (tmp_path, plots.PLOTS))
        assert "benchmarks/results/" in drawn
        assert shown == drawn, f"{name}: run `python benchmarks/plots.py`"
        assert f"(plots/{name}.svg)" in pages
    assert {p.stem for p in plots.PLOTS.iterdir()} == set(plots.FIGURES)
