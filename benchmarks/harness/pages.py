"""Tables of the documentation, rendered from the result files, and the figures that pages may quote.

A page has a table between two comments, of which the first names a result file and one of its tables::

    <!-- results: grouped_gemm_h200 means -->
    <!-- end -->

``columns=a,b`` behind the names selects columns, ``op=fprop`` rows. ``render`` writes the machine, the versions, the
command and the table in between. Every other figure of a page must be in a result file that the page shows.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"<!-- results: (?P<names>[^\n]+?) -->\n(?P<text>.*?)<!-- end -->", re.DOTALL)
CODE = re.compile(r"^ *```.*?^ *```|`[^`\n]+`", re.DOTALL | re.MULTILINE)
TARGET = re.compile(r"\]\([^)\n]*\)")
UNIT = r"%|ms|us|TFLOP/s|TF/s|TB/s|GB/s|MiB"
FIGURE = re.compile(rf"(?<![\w.])(?<!Python )(?:\d+\.\d+(?![\w.]*\d)|\d+(?= ?(?:{UNIT})(?!\w)))")
NUMBER = re.compile(r"\d+(?:\.\d+)?")
Row = dict[str, Any]


class Result(NamedTuple):
    """A result file.

    Attributes:
        command: prints the figures of the tables.
        recorded_in: the commit that recorded them.
    """

    name: str
    title: str
    command: str
    machine: str
    versions: dict[str, str]
    recorded_in: str
    tables: dict[str, dict[str, Any]]

    @property
    def path(self) -> Path:
        return RESULTS / f"{self.name}.json"

    def rows(self, table: str) -> list[Row]:
        found = self.tables[table]
        return [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]]

    def figures(self) -> set[float]:
        """Return every number in the file: cells, versions, and the texts around them."""
        texts = [self.title, self.command, self.machine, *self.versions.values()]
        texts += [table["about"] for table in self.tables.values()]
        cells = [cell for table in self.tables.values() for row in table["rows"] for cell in row]
        texts += [cell for cell in cells if isinstance(cell, str)]
        numbers = {float(number) for text in texts for number in NUMBER.findall(text)}
        return numbers | {float(cell) for cell in cells if isinstance(cell, int | float)}


@functools.cache
def load(name: str) -> Result:
    return Result(name, **json.loads((RESULTS / f"{name}.json").read_text()))


def names() -> list[str]:
    return sorted(path.stem for path in RESULTS.glob("*.json"))


def pages() -> list[Path]:
    """Return README and the pages of the site; dated notes quote what was found at their time."""
    found = [path for path in sorted(ROOT.glob("docs/**/*.md")) if "notes" not in path.relative_to(ROOT).parts]
    return [ROOT / "README.md", *found]


# --- tables -----------------------------------------------------------------------------------------------------------


def cell(value: Any, decimals: int) -> str:
    if value is None:
        return "-"
    return f"{value:.{decimals}f}" if isinstance(value, float) else str(value)


def table(rows: list[Row], columns: list[str]) -> str:
    """Return a Markdown table; a column ``x_worst`` stands in brackets behind ``x``."""

    def decimals(column: str) -> int:
        floats = [repr(row[column]) for row in rows if isinstance(row[column], float)]
        return max((len(text.partition(".")[2]) for text in floats), default=0)

    digits = {column: decimals(column) for column in columns}
    shown = [column for column in columns if not column.endswith("_worst")]

    def heading(column: str) -> str:
        return column.replace("_", " ") + " (worst)" * (f"{column}_worst" in columns)

    def text(row: Row, column: str) -> str:
        worst = f"{column}_worst"
        behind = f" ({cell(row[worst], digits[worst])})" if worst in columns and row[worst] is not None else ""
        return cell(row[column], digits[column]) + behind

    lines = [[heading(column) for column in shown], ["---"] * len(shown)]
    lines += [[text(row, column) for column in shown] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def selected(result: Result, name: str, options: list[str]) -> str:
    rows, columns = result.rows(name), list(result.tables[name]["columns"])
    for option in options:
        key, _, value = option.partition("=")
        if key == "columns":
            columns = value.split(",")
        else:
            rows = [row for row in rows if row[key] in value.split(",")]
            columns = [column for column in columns if column != key or "," in value]
    if not rows:
        raise ValueError(f"{result.name} {name}: no row has {options}")
    return table(rows, columns)


def versions(result: Result) -> str:
    return "".join(f", {name} {version}" for name, version in result.versions.items())


OPS = {"fprop": "forward", "dgrad": "input gradient", "wgrad": "weight gradient"}
COLUMNS = {
    "bfloat16": (None, "bf16"),
    "FP8, a scale per group": ("fp8_tensor", "fp8_current"),
    "FP8, blocks of 128": ("fp8_block", "fp8_block"),
}
"""Columns of the summary: the format of the scaled GEMMs, and the layer's arm."""


def against_torch(rows: Callable[[str, str], list[Row]]) -> dict[str, list[tuple[float, float]]]:
    """Return torch's time over tgl's by column of the summary: mean and worst case of every op, and of a layer.

    Args:
        rows: the rows of a table, by the names of its result file and its own.
    """
    gemms = {(row["op"], None): row for row in rows("grouped_gemm_h200", "means")}
    gemms |= {(row["op"], row["format"]): row for row in rows("grouped_gemm_scaled_h200", "means")}
    layer, (means,) = rows("layer_h200", "cases"), rows("layer_h200", "means")
    found = {}
    for column, (format, arm) in COLUMNS.items():
        cells = [gemms[op, format] for op in OPS]
        found[column] = [*((c["torch"], c["torch_worst"]) for c in cells), (means[arm], min(r[arm] for r in layer))]
    return found


def summary() -> str:
    """Return the README's table: torch's time over tgl's in the geometric mean, from three result files."""
    columns = against_torch(lambda name, table: load(name).rows(table))
    names = [*OPS.values(), "expert layer, forward and backward"]
    quoted = {c: [f"{mean:.3f} ({worst:.3f})" for mean, worst in cells] for c, cells in columns.items()}
    rows = [{"": name, **{c: cells[i] for c, cells in quoted.items()}} for i, name in enumerate(names)]
    return table(rows, ["", *quoted])


SUMMARY = "grouped_gemm_h200", "grouped_gemm_scaled_h200", "layer_h200"


def rendered(page: Path, names: str) -> str:
    """Return what stands between the comments of a block."""
    name, *rest = names.split()
    if name == "summary":
        return f"\n{summary()}\n\n"
    result, (table_name, *options) = load(name), rest
    link = os.path.relpath(result.path, page.parent)
    about = result.tables[table_name]["about"]
    machine = result.machine[0].upper() + result.machine[1:]
    head = f"{machine}{versions(result)}: `{result.command}` ([result file]({link})). {about}"
    return f"\n{head}\n\n{selected(result, table_name, options)}\n\n"


def render(page: Path) -> str:
    """Return the text of a page with its tables as the result files have them."""

    def block(match: re.Match[str]) -> str:
        return f"<!-- results: {match['names']} -->\n{rendered(page, match['names'])}<!-- end -->"

    return BLOCK.sub(block, page.read_text())


# --- what pages may quote ---------------------------------------------------------------------------------------------


def shown(text: str) -> Iterator[str]:
    """Yield the names of the result files that a page shows or links."""
    for match in BLOCK.finditer(text):
        name = match["names"].split()[0]
        yield from SUMMARY if name == "summary" else (name,)
    yield from re.findall(r"benchmarks/results/(\w+)\.json\)", text)


def prose(text: str) -> str:
    """Return a page without its rendered tables, code and targets of links."""
    return TARGET.sub("]", CODE.sub("", BLOCK.sub("", text)))


def unknown_figures(text: str) -> list[str]:
    """Return the figures of a page's prose that no result file has which the page shows."""
    known = {figure for name in set(shown(text)) for figure in load(name).figures()}
    return [figure for figure in FIGURE.findall(prose(text)) if float(figure) not in known]
