"""The examples of the README run as they stand, its links lead somewhere, and nothing of it needs more than it says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example(number, tmp_path):
    script = tmp_path / "example.py"
    script.write_text(EXAMPLES[number])
    done = subprocess.run([sys.executable, str(script)], env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.fullmatch(r"\d+ warp instructions\n|[\d.]+ cycles; \d+ instructions of the first warp\n", done.stdout)


def test_links():
    headings = {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", h).lower()) for h in re.findall(r"^#+ (.*)$", PAGE, re.M)}
    links = re.findall(r"\]\(([^)\s]+)\)", PAGE)
    assert len(links) >= 5
    for link in links:
        assert link[1:] in headings if link.startswith("#") else (ROOT / link).exists(), link


def test_a_kernel_runs_where_tgl_cannot_be_imported(tmp_path):
    script = tmp_path / "example.py"
    script.write_text('import sys\nsys.modules["tgl"] = None  # an import of it would fail\n' + EXAMPLES[0])
    subprocess.run([sys.executable, str(script)], env=ENVIRONMENT, check=True, capture_output=True, timeout=300)
