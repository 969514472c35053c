"""The one check of README, pages and plots against the result files, and of the commands that they name."""

import importlib
import json
import math
import re
import shlex

import pytest


@pytest.fixture(scope="module")
def pages(load):
    return load("harness.pages")


@pytest.fixture(scope="module")
def results(pages):
    return {name: pages.load(name) for name in pages.names()}


def benchmark_pages(pages):
    return [pages.ROOT / "README.md", *sorted(pages.ROOT.glob("docs/benchmarks/*.md"))]


def test_tables_are_rendered(load):
    load("render").main(["--check"])


def test_every_table_of_every_file_is_shown(pages, results):
    shown = {tuple(m["names"].split()[:2]) for p in pages.pages() for m in pages.BLOCK.finditer(p.read_text())}
    assert shown - {("summary",)} == {(name, table) for name, result in results.items() for table in result.tables}


def test_no_page_has_a_figure_that_no_file_has(pages):
    unknown = {str(page): pages.unknown_figures(page.read_text()) for page in benchmark_pages(pages)}
    assert {page: figures for page, figures in unknown.items() if figures} == {}


def test_figures_are_found(pages):
    """Figures are found in text and in tables written by hand, but not in code, links and versions."""
    page = """<!-- results: dactivation_h200 cases -->
| 9.99 |
<!-- end -->
[1.5 times](a-1.77.md) as `1.88`, 37 % and 41 us of 4,096 tokens, sm_90, Python 3.10, quack 0.6.5, torch 2.11.

| a | 7.25 |
"""
    assert pages.unknown_figures(page) == ["1.5", "37", "41", "7.25"]


def test_tables(pages):
    rows = [{"op": "a", "x": 1.5, "x_worst": 1.25, "n": 3}, {"op": "b", "x": 2.0, "x_worst": None, "n": None}]
    assert pages.table(rows, ["op", "x", "x_worst", "n"]).splitlines() == [
        "| op | x (worst) | n |",
        "| --- | --- | --- |",
        "| a | 1.5 (1.25) | 3 |",
        "| b | 2.0 | - |",
    ]
    means = pages.load("grouped_gemm_h200")
    assert pages.selected(means, "means", ["op=fprop", "columns=torch,torch_worst"]).count("\n") == 2
    with pytest.raises(ValueError, match="no row"):
        pages.selected(means, "means", ["op=none"])


def test_files_say_where_they_come_from(results):
    for result in results.values():
        assert result.title
        assert result.machine
        assert re.fullmatch(r"[0-9a-f]{12}", result.recorded_in)
        for table in result.tables.values():
            assert table["about"]
            assert {len(row) for row in table["rows"]} == {len(table["columns"])}


def test_means_are_those_of_the_cases(results):
    cases, (means,) = (results["layer_h200"].rows(table) for table in ("cases", "means"))
    for arm, mean in means.items():
        assert math.prod(row[arm] for row in cases) ** (1 / len(cases)) == pytest.approx(mean, abs=0.0011)
    gemms = results["grouped_gemm_h200"].rows("cases")
    for row in results["grouped_gemm_h200"].rows("means"):
        for column in ("torch", "loop", "dense", "quack"):
            if row[column] is not None:
                ratios = [case[column] for case in gemms if case["op"] == row["op"]]
                assert math.prod(ratios) ** (1 / len(ratios)) == pytest.approx(row[column], abs=0.0011)
                assert min(ratios) == row[f"{column}_worst"]


SOURCE = re.compile(r"<dc:source>(.*?)</dc:source>", re.DOTALL)


def test_plots_are_of_the_files_as_they_are(load, pages):
    """A plot states the digests of the files that it was drawn from."""
    pytest.importorskip("matplotlib")
    plots = load("harness.plots")
    text = "".join(page.read_text() for page in benchmark_pages(pages))
    assert {path.stem for path in plots.PLOTS.iterdir()} == set(plots.FIGURES)
    for name in plots.FIGURES:
        source = SOURCE.search((plots.PLOTS / f"{name}.svg").read_text())[1]
        read = re.findall(r"benchmarks/results/(\w+)\.json (\w+)", source)
        assert read
        assert read == [(file, plots.digest(file)) for file, _ in read], f"{name}: run `python benchmarks/render.py`"
        assert f"plots/{name}.svg)" in text


def test_plots_are_drawn(load, tmp_path):
    pytest.importorskip("matplotlib")
    plots = load("harness.plots")
    plots.draw(tmp_path, ["memory"])
    drawn, shown = ((folder / "memory.svg").read_text() for folder in (tmp_path, plots.PLOTS))
    assert SOURCE.search(drawn)[1] == SOURCE.search(shown)[1]


COMMAND = re.compile(r"(?:python|torchrun[^`\n]*?) (?:benchmarks/(\w+)\.py|-m (tools\.\w+))([^`\n|&]*)")


def commands(pages):
    texts = [*(page.read_text() for page in pages.pages()), (pages.ROOT / "Makefile").read_text()]
    found = [match for text in texts for match in COMMAND.finditer(text)]
    found += [COMMAND.match(json.loads(path.read_text())["command"]) for path in pages.RESULTS.glob("*.json")]
    return [(match[1], match[2], match[3]) for match in found]


def test_commands_exist(load, pages):
    """Commands in README, pages, result files and the Makefile name scripts and options that exist."""
    found = commands(pages)
    assert len(found) > 40
    for script, tool, options in found:
        module = load(script) if script else importlib.import_module(tool)
        if hasattr(module, "arguments") and "$(" not in options and "PATH" not in options:
            module.arguments(shlex.split(re.sub(r"\bN\b", "1", options)))


def test_readme_is_short_and_states_what_has_run_on_blackwell(pages):
    text = (pages.ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    assert "never run on a Blackwell" in text
