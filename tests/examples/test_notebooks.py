"""The notebooks run from the first cell to the last, and print what is stored in them, numbers aside."""

import json
import re
from pathlib import Path

import pytest

from tests.processes import run_script

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs/notebooks").glob("*.ipynb"))
CELL = "--- cell ---"


def shape_of(printed: str) -> str:
    """Return the text with a sign for every number, and without the length of runs of blanks."""
    return re.sub(r"\s+", " ", re.sub(r"-?\d+(\.\d+)?(e-?\d+)?", "#", printed)).strip()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_prints_what_it_shows(path, tmp_path):
    notebook = json.loads(path.read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    script = tmp_path / "notebook.py"
    script.write_text("".join("".join(cell["source"]) + f"\nprint({CELL!r}, flush=True)\n" for cell in cells))
    status, printed = run_script(script, {}, timeout=300)
    assert status == 0, printed[-3000:]
    for cell, text in zip(cells, printed.split(CELL + "\n"), strict=False):
        shown = "".join(line for output in cell["outputs"] for line in output["text"])
        assert shape_of(text) == shape_of(shown)


def test_there_are_notebooks():
    assert NOTEBOOKS
